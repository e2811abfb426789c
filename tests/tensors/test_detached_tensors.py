"""A detached tensor keeps no graph alive, on any rank, and shares the count of writes with what it was detached of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.tensors.tensor_state import version_of
from workbench.testing import run_ranks


def mark(tensor: torch.Tensor) -> weakref.ref[Any]:
    """Ends with the graph of a tensor."""

    def hook(*_: Any) -> None: ...

    assert tensor.grad_fn is not None
    tensor.grad_fn.register_hook(hook)
    return weakref.ref(hook)


@pytest.mark.parametrize(
    "alias",
    [
        lambda x: x.detach(),
        lambda x: x.view(6).detach(),
        lambda x: x.view(6).data,
        lambda x: x.detach().view(6),
        lambda x: x.view(6).detach().view(2, 3).detach(),
    ],
)
@pytest.mark.parametrize(("ranks", "sbp"), [([0], "B"), ([0, 1], "S(1)")])  # a placeholder; a view that is boxed
def test_an_alias_without_history_keeps_no_graph(alias: Callable[[Any], Any], ranks: list[int], sbp: str) -> None:
    def program() -> None:
        leaf = wb.ones(3, 2, placement=wb.placement("cpu", ranks=ranks), sbp=sbp).requires_grad_()
        computed = leaf * 2.0
        graph, kept = mark(computed), alias(computed)
        del computed
        gc.collect()
        assert graph() is None
        assert kept.sum().item() == 12.0

    run_ranks(program, 2)


def test_a_detached_placeholder_its_source_and_their_views_count_the_same_writes() -> None:
    def program() -> None:
        leaf = wb.ones(4, placement=wb.placement("cpu", ranks=[0]), sbp="B").requires_grad_()
        computed = leaf * 2.0
        early, detached = computed.view(2, 2), computed.detach()
        late = detached.view(2, 2)
        tensors = [computed, early, detached, late]
        known = 0
        for written in (*tensors, detached.data, computed.data):
            with torch.no_grad():
                written.add_(1.0)
            (now,) = {version_of(tensor) for tensor in tensors}
            assert now > known
            known = now

    run_ranks(program, 2)
