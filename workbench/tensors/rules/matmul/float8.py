"""Linear layers in 8 bits on shards. Scales are of logical tensors, so the 8 bits do not depend on the layout.

The largest values of an input and a weight are one exchange of two numbers over the axes that split them; that of a
gradient is one number in backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from workbench.core.rules import Signature
from workbench.core.sbp import Sbp, Split, broadcast, partial_max
from workbench.kernels.float8 import float8_linear, largest
from workbench.tensors.autocast import cast_for_product
from workbench.tensors.boxing.box import box_gradient, box_implicitly
from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.local_call import sum_terms
from workbench.tensors.dispatch.registry import Call, Resolution, rule
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, spec_of

_NAME = "float8_linear"


def linear_in_8_bits(x: Any, weight: Any, bias: Any = None) -> Any:
    """``F.linear`` of plain or global tensors, whose three products have operands of 8 bits.

    Under autocast the input has autocast's dtype, and so has the result. The weight is rounded from its own.
    """
    (x,) = cast_for_product([x], "cpu" if x.device.type == "meta" else x.device.type)
    if isinstance(x, GlobalTensor) and isinstance(weight, GlobalTensor):
        x = sum_terms(x)
        with torch.no_grad():
            found = call_by_plan(_largest_of_both, (x.detach(), weight.detach()))
            amaxes = box_implicitly(found, found._spec.layout.broadcast(), _NAME)
        product = call_by_plan(float8_linear, (x, weight, amaxes))
    else:
        product = float8_linear(x, weight, _largest_of_both(x.detach(), weight.detach()))
    return product if bias is None else product + bias.to(product.dtype)


def _largest_of_both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([largest(x), largest(weight)])


@rule("_largest_of_both")
def _largest(call: Call) -> Resolution:
    """Shards give terms of a maximum."""
    entries: list[list[Sbp]] = [[*map(Split, range(len(shape))), broadcast] for shape in call.shapes]
    found = [
        Signature(pair, (broadcast if all(entry == broadcast for entry in pair) else partial_max,))
        for pair in itertools.product(*entries)
    ]
    return Resolution(found)


@rule(_NAME)
def _float8_linear(call: Call) -> Resolution:
    return Resolution("...k, nk, Z -> ...n", lambda call, inputs, outputs, letters: _OnShards(outputs[0]))


@dataclass(frozen=True)
class _OnShards:
    """The local function: its gradient is made whole, and its scale is that of the logical gradient.

    Attributes:
        out: of the result.
        num_tags: backward sums terms of a gradient, and takes the maximum over shards.
    """

    out: Spec
    num_tags: int = 2

    @cached_property
    def _specs(self) -> tuple[Spec, Spec, Spec]:
        """Of the whole gradient, of the terms of its largest value, and of that value."""
        whole, world = self.out.layout.dual().without_terms(), self.out.world
        terms = whole.with_sbp(tuple(partial_max if isinstance(entry, Split) else broadcast for entry in whole.sbp))
        return spec_of(world, whole, self.out.shape), spec_of(world, terms, ()), spec_of(world, terms.broadcast(), ())

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, amaxes: torch.Tensor) -> torch.Tensor:
        """This rank's part of the result."""
        context = self.out.world.context
        tags = context.next_tag() | 1, context.next_tag() | 1
        site = None if context.tracer is None else context.tracer.site(_NAME)

        def make_whole(
            grad: torch.Tensor, find: Callable[[torch.Tensor], torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor, int]:
            whole, terms, value = self._specs
            with local_torch():
                if whole is not self.out.dual:
                    grad = box_gradient(grad, self.out.dual, whole, tags[0], site)
                amax = find(grad)
                if terms is not value:
                    amax = box_gradient(amax, terms, value, tags[1], site)
            return grad, amax, self.out.layout.num_replicas

        return float8_linear(x, weight, amaxes, make_whole)
