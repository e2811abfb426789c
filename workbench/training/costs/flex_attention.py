"""torch's ``flex_attention`` as costs count it: one function of attention, over the blocks that its mask leaves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.training.costs.work_counter import WorkCounter

_aten = torch.ops.aten
_one_at_a_time = threading.RLock()
"""Of two counts in threads, the one that ends last would put back what the first had put there."""


@contextmanager
def with_flex_attention(counter: WorkCounter) -> Iterator[None]:
    """A context in which ``flex_attention`` runs on fake tensors of a CPU, where torch has no gradients of it. Its
    functions of scores and masks are not called, and nothing is compiled.
    """
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")  # loads torch's compiler; those who call it have
    if module is None:
        yield
        return

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> Any:
        if not isinstance(query, FakeTensor):  # in another thread
            return before["flex_attention_hop"](query, key, value, *others)
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
        counter.computed_share = _computed_share(others[1])
        if query.shape[-1] == value.shape[-1]:
            result, sums = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        else:  # the kernel of CPUs has no other width
            result, sums, *_ = _aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
        counter.computed_share = 1.0
        return result, sums, sums

    replaced = {
        "flex_attention_hop": attend,
        "_validate_device": lambda *_: None,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    with _one_at_a_time:
        before = {name: getattr(module, name) for name in replaced}
        vars(module).update(replaced)
        try:
            yield
        finally:
            vars(module).update(before)


def _computed_share(mask: tuple[Any, ...]) -> float:
    """The part of the blocks that is computed: all, where a forward makes the mask, which then has no values.

    Args:
        mask: two lengths; by block of queries the numbers and indices of the blocks that it cuts, and of whole ones.
    """
    partial, indices, whole = mask[2:5]
    if isinstance(partial, FakeTensor):
        return 1.0
    with _disable_current_modes():
        return sum(int(counts.sum()) for counts in (partial, whole) if counts is not None) / indices.numel()
