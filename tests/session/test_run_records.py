"""What a run's record has of the reports of its ranks: its rate, and the bubble of each of its strategies."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from workbench.core.metrics import ActionSpan, RunEvent, RunRecord, Segment, StepSpans
from workbench.core.strategy import Strategy
from workbench.session.comparison.run_records import measured_record, samples_per_s
from workbench.session.comparison.training_run import TrainingRun
from workbench.training.runs.job import RankResult


def test_a_rate_counts_the_samples_of_short_batches():
    """An epoch of 100 samples in batches of 64: a step of 1 ms for each sample was said to do 1280 in a second."""
    samples = [64, 36] * 10
    times_s = [count / 1000 for count in samples]
    report = RankResult([0.0] * 20, times_s, {"peak": 0}, 0, samples=samples)
    record = measured_record("data", "*: data", [report], 1, 64, report, {})
    assert (record.samples_per_s, record.speedup) == (pytest.approx(1000), 1.0)
    assert samples_per_s([0.5], (), 64) == 128, "an older report has no numbers of samples"


def spans(rank: int, step: int, busy_s: float) -> StepSpans:
    """A step of two stages that lasts 1 s, one second after the step before."""
    start_s = 2.0 * step
    last = ActionSpan("O", rank, 0, start_s + 1, start_s + 1)
    return StepSpans(rank, step, (ActionSpan("F", rank, 0, start_s, start_s + busy_s), last))


def test_a_bubble_is_that_of_a_step_of_all_ranks():
    """At a change of the strategy one rank's last step was not there yet: the bubble of steps 0 and 5 was 95 %."""
    call: Any = Mock()
    planned = RunRecord("data", "*: data", 2, 8)
    segments = tuple(Segment(step, "data", "*: data", 1.0) for step in (0, 6))
    comparison: Any = Mock(record=Mock(return_value=RunRecord("data", "*: data", 2, 8, segments=segments)))
    run = TrainingRun(comparison, planned, Strategy("*: data"), call, None, Mock())
    first = [spans(0, 0, 0.75), spans(1, 0, 0.75), spans(0, 5, 0.5), RunEvent("strategy", 6, "*: model")]
    for message in [*first, spans(1, 5, 0.5), spans(0, 9, 0.25), spans(1, 9, 0.25), spans(0, 10, 1.0)]:
        call.messages.return_value = [(0, message)]
        run.poll()
    record = run._compared([])
    assert [segment.bubble for segment in record.segments] == [0.5, 0.75] and record.bubble == 0.75
