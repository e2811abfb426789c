"""Losses that are no numbers, and runs that were stopped early: what stands beside the mark."""

from __future__ import annotations

import math

import pytest

from workbench.core.not_finite import LossPair
from workbench.core.verdict import UNKNOWN, Verdict

NAN, INF = math.nan, math.inf
EQUAL = Verdict(True, "tolerance", text="every loss lies within the tolerance")


def test_numbers_leave_a_verdict_as_it_is():
    assert LossPair([0.5, 0.4, 0.3], [0.5, 0.4], 2).described(EQUAL) == EQUAL
    assert LossPair([0.5], (), 0).described(UNKNOWN) == UNKNOWN


@pytest.mark.parametrize(
    ("own", "one_device", "note", "text"),
    [
        ([0.5, NAN, NAN], [0.5, 0.4, 0.3], "nan", "the loss of step 2 is nan, on one device 0.4"),
        ([0.5, INF, NAN], [0.5, 0.4, 0.3], "inf", "the loss of step 2 is inf, on one device 0.4"),
        ([0.5, 0.4, 0.3], [0.5, 0.4, NAN], "1 device nan", "the loss of step 3 is 0.3, on one device nan"),
    ],
)
def test_a_number_on_one_side_only_is_never_equal(own: list[float], one_device: list[float], note: str, text: str):
    """Also where noise had explained what came before."""
    found = LossPair(own, one_device, 3).described(Verdict(True, "noise", grown=True))
    assert (found.equal, found.grown, found.note, found.text) == (False, False, note, text)


def test_losses_that_are_nan_on_both_are_compared_up_to_there():
    pair = LossPair([0.5, 0.4, NAN, NAN], [0.5, 0.4, NAN, NAN], 4)
    found = pair.described(EQUAL)
    assert pair.num_compared == 2 and not pair.is_unlike
    assert found.equal and found.note == "both nan"
    assert found.text.endswith("; the loss is nan from step 3 on, on one device too")


def test_nan_from_the_first_step_on_is_no_evidence():
    found = LossPair([NAN], [NAN], 1).described(EQUAL)
    assert found.equal is None and found.note == "both nan"


@pytest.mark.parametrize("loss", [NAN, INF])
def test_a_loss_that_breaks_after_the_check_is_said_beside_the_tick(loss: float):
    found = LossPair([0.5, 0.4, 0.3, loss], [0.5, 0.4], 2).described(EQUAL)
    assert found.equal and found.note == f"then {loss}"
    assert found.text.endswith(f"the loss is {loss} from step 4 on, after the compared steps")


def test_a_run_that_is_not_checked_says_it_too():
    found = LossPair([0.5, NAN], (), 0).described(UNKNOWN)
    assert (found.equal, found.note, found.text) == (None, "nan", "the loss is nan from step 2 on")


def test_a_run_that_was_stopped_says_how_many_steps_were_compared():
    found = LossPair([0.5, 0.4], [0.5, 0.4, 0.3, 0.2], 4).described(EQUAL)
    assert found.equal and found.note == "2 steps" and "stopped: 2 of 4 steps were compared" in found.text
    assert LossPair([0.5], [0.5, 0.4], 2).described(EQUAL).note == "1 step"
