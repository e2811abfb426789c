"""Placeholders share one zero per shape: nothing that is done to one of them may show in another, or in a sum."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.tensors.tensor_state import new_placeholder
from workbench.testing import run_ranks

CPU = torch.device("cpu")


def zero() -> float:
    return new_placeholder((), torch.float32, CPU).item()


def test_writes_to_a_placeholder_are_counted_for_it_alone() -> None:
    def program() -> None:
        there = wb.placement("cpu", ranks=[1])
        x, y = (wb.ones(2, placement=there, sbp="B") for _ in range(2))
        before = y._version
        x.add_(1.0)
        assert (x._version > 0, y._version) == (True, before)
        assert (x.sum().item(), y.sum().item()) == (4.0, 2.0)

    run_ranks(program, 2)


def test_a_scalar_that_a_rank_has_no_gradient_of_adds_nothing_to_sums() -> None:
    def program() -> None:
        both, last = wb.placement("cpu", ranks=[0, 1]), wb.placement("cpu", ranks=[1])
        weight = wb.ones((), placement=both, sbp="B").requires_grad_()
        for _ in range(3):
            there = weight.to_global(placement=last, sbp="B")
            (there * 2.0).backward()
        assert weight.grad is not None
        assert weight.grad.full_tensor().item() == 6.0
        assert zero() == 0.0

    run_ranks(program, 2)


def test_a_placeholder_of_inference_mode_is_one_as_its_owner_is() -> None:
    new_placeholder((3,), torch.float32, CPU)  # known from outside of the mode
    with torch.inference_mode():
        assert new_placeholder((3,), torch.float32, CPU).is_inference()
    assert not new_placeholder((3,), torch.float32, CPU).is_inference()


def test_in_place_training_of_scalars_on_other_stages_leaves_the_shared_zero() -> None:
    def program() -> None:
        stages = [wb.placement("cpu", ranks=[rank]) for rank in range(2)]
        scales = [wb.ones((), placement=stage, sbp="B").requires_grad_() for stage in stages]
        optimizer = torch.optim.SGD(scales, lr=0.5, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            sum(scale.to_global(placement=stages[1], sbp="B") * 2.0 for scale in scales).backward()
            optimizer.step()
        plain = [torch.ones(()).requires_grad_() for _ in range(2)]
        alone = torch.optim.SGD(plain, lr=0.5, momentum=0.9)
        for _ in range(2):
            alone.zero_grad(set_to_none=False)
            sum(scale * 2.0 for scale in plain).backward()
            alone.step()
        assert [scale.item() for scale in scales] == [scale.item() for scale in plain]
        assert zero() == 0.0

    run_ranks(program, 2)


@pytest.mark.parametrize("write", [lambda base, x: base.add_(x), lambda base, x: base[1:].add_(x[1:])])
def test_a_view_has_what_is_written_to_its_base_later_in_its_history(write: Callable[[Any, Any], Any]) -> None:
    """Backward from the view failed on the ranks outside, and the others waited for them."""

    def program() -> tuple[list[float], list[float]]:
        on_one, on_both = wb.placement(ranks=[0]), wb.placement(ranks=[0, 1])
        w = wb.ones(4, placement=on_both, sbp=wb.sbp.split(0)).requires_grad_()
        base = wb.zeros(4, placement=on_one, sbp=wb.sbp.broadcast)
        view = base[:2]
        early = view[1:]
        write(base, (w * w).to_global(on_one, wb.sbp.broadcast))
        assert view.requires_grad and early.requires_grad
        (first,) = torch.autograd.grad((view * view).sum() + early.sum(), w, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), w)
        return first.full_tensor().tolist()[1:], second.full_tensor().tolist()[1:]

    assert run_ranks(program, 3) == [([6.0, 0.0, 0.0], [14.0, 0.0, 0.0])] * 3


def test_a_tensor_may_occur_twice_in_what_is_differentiated_twice() -> None:
    def program() -> list[float]:
        x = wb.ones(2, placement=wb.placement(ranks=[0]), sbp=wb.sbp.broadcast).requires_grad_()
        (first,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0].full_tensor().tolist()

    assert run_ranks(program) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("write", [lambda y, w: y.add_(y.tanh()), lambda y, w: y[:1].add_(w[:1])])
def test_a_backward_frees_what_was_written_after_its_use(write: Callable[[Any, Any], Any]) -> None:
    """Ranks outside kept the graph of every step."""

    def step(w: Any) -> Any:
        y = w * 2
        write(y, w)
        y.sum().backward()
        return weakref.ref(y)

    def program() -> None:
        left = step(wb.ones(2, placement=wb.placement(ranks=[0]), sbp=wb.sbp.broadcast).requires_grad_())
        gc.collect()
        assert left() is None

    run_ranks(program, 2)
