"""The check of a run against one device, without engines: nobody has to wait for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from tests.timeouts import wait_until
from workbench.core.metrics import Segment
from workbench.core.strategy import Strategy
from workbench.core.verdict import TensorChange
from workbench.errors import SessionError
from workbench.session.comparison.checker import CheckedRun, Checker, RunObserver
from workbench.session.comparison.training_on_engine import OneDevice
from workbench.session.remote_call import RemoteCall
from workbench.training.runs.job import RankResult

DATA = Strategy("*: data")


class EndlessCall:
    """A one-device run that takes for ever, until it is cancelled."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def done(self) -> bool:
        return False

    def messages(self) -> list[Any]:
        return []

    def send_command(self, kind: str) -> None:
        self.commands.append(kind)

    def cancel(self) -> None:
        self.commands.append("cancel")

    def result(self, timeout: float | None = None) -> list[Any]:
        raise KeyboardInterrupt

    def end(self) -> None:
        self.commands.append("end")


class FakeSession:
    def __init__(self) -> None:
        self.calls: list[EndlessCall] = []

    def submit(self, *args: Any, **kwargs: Any) -> EndlessCall:
        self.calls.append(EndlessCall())
        return self.calls[-1]


def report(*losses: float) -> RankResult:
    return RankResult(list(losses), [0.1] * len(losses), {"peak": 0}, 0)


def test_losses_that_are_nan_from_the_first_step_on_ask_for_no_evidence():
    session: Any = FakeSession()
    checker = Checker(session, "key")
    checker._reports[OneDevice()] = report(math.nan, math.nan)
    apart = replace(report(math.nan, math.nan), tensors=(TensorChange("w", math.inf, 1.0, 2.0, 0.0),))
    verdict = checker.verdict(CheckedRun(DATA, [apart], 2))
    assert (verdict.equal, verdict.note, session.calls) == (None, "both nan", [])
    assert verdict.text == "there was nothing to compare; the loss is nan from step 1 on, on one device too"


@pytest.mark.parametrize("evidence", ["noise", "float64"])
def test_a_check_that_nobody_waits_for_is_no_verdict(evidence: str):
    session: Any = FakeSession()
    checker = Checker(session, "key")
    checker._reports[OneDevice()] = report(2.0, 1.0)
    if evidence == "float64":  # noise is known, and explains nothing
        checker._reports[OneDevice(variant="perturbed")] = report(2.0, 1.00001)
    observer = RunObserver(lambda block: None, lambda: True, lambda: True)
    verdict = checker.verdict(CheckedRun(DATA, [report(2.0, 1.0005, math.nan)], 2, observer=observer))
    assert verdict.equal is None and "stopped" in verdict.text and verdict.note == "then nan"
    assert [call.commands for call in session.calls] == [["stop", "cancel"]]


def test_a_check_that_fails_is_no_verdict():
    """The run that it was of counted as failed, and its figures were lost."""
    died = SessionError("the call failed\nrank 0 died")
    checker = Checker(Mock(submit=Mock(return_value=Mock(result=Mock(side_effect=died)))), "key")
    checker._reports[OneDevice()] = report(2.0, 1.0)
    verdict = checker.verdict(CheckedRun(DATA, [report(2.0, 1.0005)], 2))
    assert verdict.equal is None
    assert verdict.text == "not judged: one device failed in the check: rank 0 died"


@pytest.mark.parametrize("steps", [1, 4])
def test_a_strategy_that_is_equal_in_fp32_for_fewer_steps_does_not_excuse_one_in_16_bits(steps: int):
    """A run in fp32 that was stopped after one step made any later mistake in bf16 a tick."""
    session: Any = FakeSession()
    checker = Checker(session, "key")
    truth = report(2.0, 1.0, 0.5, 0.25)
    checker._reports[OneDevice()] = truth
    for variant in ("plain", "perturbed"):
        checker._reports[OneDevice(1, "bf16", variant)] = replace(truth, precision="bf16")  # type: ignore[arg-type]
    assert checker.verdict(CheckedRun(DATA, [report(*truth.losses[:steps])], 4)).equal
    observer = RunObserver(lambda block: None, lambda: True, lambda: True)
    run = CheckedRun(Strategy("*: data | bf16"), [report(2.0, 1.0, 0.8, 0.25)], 4, observer=observer)
    verdict = checker.verdict(run)
    assert verdict.equal is (True if steps == 4 else None) and len(session.calls) == (steps < 4)


def interrupt() -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("observer", [None, RunObserver(lambda block: None, interrupt)])
@pytest.mark.parametrize("evidence", ["one device", "float64"])
def test_an_interrupt_ends_the_run_that_a_check_waits_for(evidence: str, observer: RunObserver | None):
    session: Any = FakeSession()
    checker = Checker(session, "key")
    wait: Callable[[], object] = partial(checker.one_device, OneDevice(), 2, observer)
    if evidence == "float64":
        checker._reports = {OneDevice(variant=name): report(2.0, 1.0) for name in ("plain", "perturbed", "float64")}  # type: ignore[arg-type]
        wait = partial(checker.verdict, CheckedRun(DATA, [report(2.0, 1.1)], 2, observer=observer))
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert [call.commands for call in session.calls] == [["end"]]


def test_the_end_of_a_call_lasts_through_further_interrupts():
    run, is_stopped, stops = Mock(), threading.Event(), list[int]()

    def stop() -> None:
        stops.append(len(stops))
        if len(stops) < 3:
            raise KeyboardInterrupt
        is_stopped.set()

    run.stop.side_effect, run.wait.side_effect = stop, is_stopped.wait
    call = RemoteCall("train", Mock(), lambda call: call.follow(run), Mock())
    wait_until(lambda: run.wait.called)
    call.end()
    assert call.done() and len(stops) == 3


FAR = TensorChange("w", 0.5, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("to", ["*: data | mb=4", "*: data | bf16"])
def test_a_change_of_what_one_device_would_compute_ends_the_comparison(step: int, to: str):
    session: Any = FakeSession()
    checker = Checker(session, "key")
    checker._reports[OneDevice()] = report(2.0, 1.0, 0.5, 0.25)
    losses = [2.0, 1.0, 0.5, 0.25][:step] + [9.0] * (4 - step)
    own = replace(report(*losses), changes=[(step, to)], tensors=(FAR,) if step < 2 else ())
    verdict = checker.verdict(CheckedRun(DATA, [own], 4))
    assert (verdict.equal, verdict.note) == {0: (None, ""), 1: (True, "1 step"), 3: (True, "3 steps")}[step]
    assert verdict.text.endswith(f"until the change before step {step + 1}: one device had mb=1, fp32")
    assert verdict.num_steps == step and not session.calls


@pytest.mark.parametrize("then", [(), ((3, "*: data | mb=4"),)])
def test_a_mistake_after_a_change_that_one_device_does_not_see_is_found(then: tuple[tuple[int, str], ...]):
    session: Any = FakeSession()
    checker = Checker(session, "key")
    checker._reports[OneDevice()] = report(2.0, 1.0, 0.5, 0.25)
    checker._reports[OneDevice(variant="perturbed")] = report(2.0, 1.0, 0.5, 0.25)
    own = replace(report(2.0, 1.0, 0.6, 0.25), changes=[(2, "*: model"), *then])
    verdict = checker.verdict(CheckedRun(DATA, [own], 4))
    assert verdict.equal is False and "the loss of step 3 differs" in verdict.text
    assert "; float64 was not tried: the strategy changed after step 2" in verdict.text and not session.calls


def test_weights_after_the_compared_steps_say_nothing():
    session: Any = FakeSession()
    checker = Checker(session, "key")
    checker._reports[OneDevice()] = report(2.0)
    verdict = checker.verdict(CheckedRun(DATA, [replace(report(2.0, 1.0), tensors=(FAR,))], 1))
    assert verdict.equal and verdict.text == "every loss lies within the tolerance" and not session.calls


def test_of_a_run_that_is_wrong_from_a_change_on_the_strategies_before_it_are_equal():
    session: Any = FakeSession()
    checker = Checker(session, "key")
    checker._reports[OneDevice()] = report(2.0, 1.0, 0.5, 0.25, 0.1, 0.1)
    checker._reports[OneDevice(variant="perturbed")] = checker._reports[OneDevice()]
    own = replace(
        report(2.0, 1.0, 0.5, 0.6, math.nan, 0.1),
        changes=[(1, "*: model"), (3, "*: data | zero=1"), (5, "*: data")],
    )
    segments = [Segment(step, "", "", 1.0) for step in (0, 1, 3, 5)]
    verdict = checker.verdict(CheckedRun(DATA, [own], 6))
    found = [segment.verdict for segment in checker.judged(segments, CheckedRun(DATA, [own], 6))]
    assert not verdict.equal and [each and each.equal for each in found] == [True, True, False, None]
    assert [each and each.num_steps for each in found] == [1, 3, 5, None] and not (found[1] and found[1].note)
    own = replace(own, losses=[2.0, 1.0, 0.5, 0.25, 0.1, 0.9], tensors=(FAR,))
    found = [segment.verdict for segment in checker.judged(segments, CheckedRun(DATA, [own], 6))]
    assert [each and each.equal for each in found] == [True, False, None, None], "weights are of the second step"
