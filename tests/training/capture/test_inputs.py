"""Inputs of a captured step: how they lie in memory, and how many kinds of them there are."""

import ctypes
import warnings

import pytest
import torch

import workbench as wb
from workbench.errors import CaptureError, CaptureWarning
from workbench.testing import run_ranks


def layouts_of(x):
    """The same values as they may lie in memory, by name."""
    gaps = torch.zeros(*x.shape, 2)
    gaps[..., 0] = x
    return {
        "contiguous": x.contiguous(),
        "transposed": x.t().contiguous().t(),
        "with gaps": gaps[..., 0],
    }


@pytest.mark.parametrize("recorded", ["contiguous", "transposed", "with gaps", "expanded"])
@pytest.mark.parametrize("is_global", [True, False])
def test_inputs_may_lie_otherwise_in_memory(recorded, is_global):
    """A recorded view of a contiguous input cannot be taken of a transposed one."""

    def program():
        captured = wb.capture(lambda x: x.reshape(2, -1) * 2 + x.mean())
        given = {**layouts_of(torch.arange(24.0).reshape(4, 6)), "expanded": torch.arange(6.0).expand(4, 6)}
        for name in (recorded, recorded, *given):
            x = given[name]
            x = wb.to_global(x, placement=wb.placement("cpu", ranks=[0]), sbp="B") if is_global else x
            made, wanted = captured(x), x.reshape(2, -1) * 2 + x.mean()
            assert torch.equal(*(t.full_tensor() if is_global else t for t in (made, wanted)))
        assert (captured.num_recordings, captured.num_replays) == (1, len(given))

    run_ranks(program, 1)


def test_inputs_that_the_step_writes_to_are_written():
    def program():
        captured = wb.capture(lambda x: x.mul_(2))
        for name, x in layouts_of(torch.ones(4, 6)).items():
            captured(x)
            assert torch.equal(x, torch.full((4, 6), 2.0)), name

    run_ranks(program, 1)


@pytest.mark.parametrize("is_global", [True, False])
def test_an_input_that_the_step_also_reads_from_outside_is_refused(is_global):
    """Replays took the new input for both."""

    def program():
        x = torch.arange(4.0)
        x = wb.to_global(x, wb.placement(ranks=[0, 1]), wb.sbp.split(0)) if is_global else x
        captured = wb.capture(lambda given: given + x * 10)
        captured(x)
        with pytest.raises(CaptureError, match=r"its input of shape .* also from outside.*x.clone\(\)"):
            captured(x)
        for number in range(3):
            assert torch.equal(*(each + 0 for each in (captured(x * number), x * number + x * 10)))
        assert captured.num_replays == 2

    run_ranks(program, 2)


@pytest.mark.parametrize("use", [lambda out: out, lambda out: out[1:] + 1])
def test_what_a_kernel_writes_that_is_no_operator_is_refused(use):
    """A replay would not run it, and would return memory that nobody has written."""

    def program():
        @wb.capture
        def captured(x):
            empty = torch.empty_like(x)
            zeros = torch.zeros_like(torch.empty(3, 2)) + torch.empty(3, 2).fill_(1)
            ctypes.memset(empty.data_ptr(), 0, empty.nbytes)
            return use(empty), zeros

        captured(torch.ones(3))
        with pytest.raises(CaptureError, match=r"that torch.empty or its like has made.*torch.library.triton_op"):
            captured(torch.ones(3))

    run_ranks(program, 1)


def test_values_that_never_come_twice_are_no_reason_to_hold_memory():
    """The number of the step as an argument, for example: no call is ever a replay."""

    def program():
        captured = wb.capture(lambda x, number: x * number)
        for number in range(32):
            assert captured(torch.ones(2), number)[0] == number
        for number in range(32, 100):
            with pytest.warns(CaptureWarning, match="none has come twice.*hand numbers in as tensors"):
                captured(torch.ones(2), number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                captured(torch.ones(2), 99)
        return len(captured._kinds), captured.num_replays

    assert run_ranks(program, 1) == [(32, 2)]


def test_parameters_that_only_lists_hold():
    """Gradients are added to those that are there, and begin anew where the caller has dropped them."""

    def program():
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        captured = wb.capture(lambda x: (torch.cat(tensors=parameters) * x).sum().backward())
        sums = []
        for number in range(9):
            if number % 3 == 0:
                for parameter in parameters:
                    parameter.grad = None
            captured(torch.ones(4))
            sums.append(parameters[1].grad.tolist())
        return sums

    assert run_ranks(program, 1) == [[[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]] * 3]


def test_a_parameter_that_only_a_list_holds_is_frozen_and_trained_again():
    def program():
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        captured, found = wb.capture(lambda x: (torch.cat(tensors=parameters) * x).sum().backward()), []
        for number in range(6):
            parameters[1].requires_grad_(number not in (3, 4))
            for parameter in parameters:
                parameter.grad = None
            captured(torch.ones(4))
            found.append([parameter.grad is not None for parameter in parameters])
        assert (captured.num_recordings, captured.num_replays) == (2, 3)
        return found

    assert run_ranks(program, 1) == [[[True, True]] * 3 + [[True, False]] * 2 + [[True, True]]]
