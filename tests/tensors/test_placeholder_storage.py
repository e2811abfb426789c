"""Placeholders share one zero per shape: nothing that is done to one of them may show in another, or in a sum."""

from __future__ import annotations

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
