"""Convolutions, transposed convolutions, and their patches. Space stays whole, because a kernel slides over it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.layout import Layout
from workbench.core.rules import Signature, signatures
from workbench.core.sbp import NdSbp, Split, broadcast, partial_sum
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, equations, rule
from workbench.tensors.global_tensor import Spec
from workbench.tensors.rules.reduction.empty_shards import as_if_filled, filled, zeros_where_empty
from workbench.tensors.rules.views.view import windows

GROUPS_AT = 6
"""Position of ``groups``, in convolutions and in transposed ones."""
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of a call: their number, and the sizes of one among the input's and the result's channels."""

    call: Call
    channel: int
    is_transposed: bool

    @property
    def number(self) -> int:
        """How many groups the logical convolution has."""
        return int(self.call.arg(GROUPS_AT, "groups", 1))

    @property
    def sizes(self) -> tuple[int, int]:
        """Input channels and output channels of one group."""
        num_in, num_out = self.call.shapes[0][self.channel], self.call.outputs[0][0][self.channel]
        return num_in // self.number, num_out // self.number

    def accepts(self, inputs: tuple[NdSbp, ...], outputs: tuple[NdSbp, ...]) -> bool:
        """Whether every rank has a channel, and the input channels that its weight needs."""
        placement, (num_in, num_out) = self.call.operands[0]._spec.layout.placement, self.sizes
        given, made = Layout(placement, inputs[0]), Layout(placement, outputs[0])
        for rank in placement:
            start, stop = given.region(self.call.shapes[0], rank)[self.channel]
            first, last = made.region(self.call.outputs[0][0], rank)[self.channel]
            if self.is_transposed:  # a result's channel is a sum over all input channels of its group
                fits = start % num_in == stop % num_in == 0
                fits = fits and first < last and (start // num_in * num_out, stop // num_in * num_out) == (first, last)
            else:
                needed = (first // num_out * num_in, -(-last // num_out) * num_in)
                fits = first < last and start <= needed[0] and needed[1] <= stop
            if not fits:
                return False
        return True

    def localize(
        self, call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]
    ) -> LocalFunction | None:
        """Convolve the rank's channels."""
        if outputs[0].is_placeholder:
            return None
        function = self._of_rank(call, inputs, outputs) if "g" in letters else call.func
        return filled(function, inputs, outputs) or function

    def _of_rank(self, call: Call, inputs: list[Spec], outputs: list[Spec]) -> LocalFunction:
        num_in, _ = self.sizes
        given, made = (s.layout.region(s.shape, s.world.rank)[self.channel] for s in (inputs[0], outputs[0]))
        if self.is_transposed:
            return _with_groups(call.func, (given[1] - given[0]) // num_in)
        return self._by_parts(call.func, given[0], *made)

    def _by_parts(self, function: Any, start: int, first: int, last: int) -> LocalFunction:
        """Output channels ``first`` to ``last``, from input channels that begin at ``start``."""
        num_in, num_out = self.sizes
        whole = (min(-(-first // num_out) * num_out, last), max(last // num_out * num_out, first))
        cuts = sorted({first, last, *whole})

        def convolve(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = dict(zip(_NAMES, args, strict=False)) | kwargs
            tensor, weight, bias, parts = given["input"], given["weight"], given.get("bias"), []
            for low, high in pairwise(cuts):
                groups = max((high - low) // num_out, 1)
                rows = slice(low - first, high - first)
                part = tensor.narrow(self.channel, low // num_out * num_in - start, groups * num_in)
                own = {"input": part, "weight": weight[rows], "bias": None if bias is None else bias[rows]}
                parts.append(function(**{**given, **own, "groups": groups}))
            return parts[0] if len(parts) == 1 else torch.cat(parts, self.channel)

        return convolve


def grouped(call: Call, text: str, channel: int, is_transposed: bool) -> Resolution:
    """The resolution of a convolution with groups; ``text`` is the equation for what else may be split."""
    bias = (Split(0),) * (len(call.operands) - 2)
    found = [Signature((Split(channel), Split(0), *bias), (Split(channel),), "g")]
    if not is_transposed:  # where slices cut groups, ranks share the input channels of a group
        found.append(Signature((broadcast, Split(0), *bias), (Split(channel),), "g"))
    groups = _Groups(call, channel, is_transposed)
    found += signatures(text, call.shapes, [len(call.outputs[0][0])])
    return Resolution(found, groups.localize, accepts=groups.accepts)


def _with_groups(function: Any, groups: int) -> LocalFunction:
    def convolve(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) > GROUPS_AT:
            return function(*args[:GROUPS_AT], groups, *args[GROUPS_AT + 1 :], **kwargs)
        return function(*args, **{**kwargs, "groups": groups})

    return convolve


_SPATIAL = "XYZ"
_KERNEL = "KLM"


equations("conv_tbc", "Xnc, Kco, +o -> Xno")


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _over_space(call: Call) -> Resolution:
    """Batch, output channels and input channels may be split (the result is a sum over input channels)."""
    is_transposed = "transpose" in call.name
    num_spatial = len(call.shapes[1]) - 2
    space, kernel = _SPATIAL[:num_spatial], _KERNEL[:num_spatial]
    batch = "n" if len(call.shapes[0]) == num_spatial + 2 else ""
    if call.arg(GROUPS_AT, "groups", 1) != 1:
        weight = "CD" if is_transposed else "OD"
        text = f"{batch}C{space}, {weight}{kernel}, O -> {batch}O{space}"
        return grouped(call, text, len(batch), is_transposed)
    weight = "co" if is_transposed else "oc"
    return Resolution(f"{batch}c{space}, {weight}{kernel}, +o -> {batch}o{space}", as_if_filled)


@rule("unfold", "im2col", "fold", "col2im")
def _patches(call: Call) -> Resolution:
    """Image to columns, and back: linear. Batch may be split, and channels if slices of them are slices of columns."""
    if call.name == "unfold" and call.func is not F.unfold:
        return windows(call)
    is_back = call.name in ("fold", "col2im")
    source, target = call.shapes[0], call.outputs[0][0]
    before, after = len(source) - (2 if is_back else 3), len(target) - (3 if is_back else 2)
    found = [Signature((partial_sum,), (partial_sum,)), Signature((broadcast,), (broadcast,))]
    num_ranks = call.operands[0]._spec.layout.placement.num_ranks
    if source[before] % num_ranks == target[after] % num_ranks == 0:
        found.insert(0, Signature((Split(before),), (Split(after),), "c"))
    if before == 1:
        found.insert(0, Signature((Split(0),), (Split(0),), "n"))
    return Resolution(found, zeros_where_empty)
