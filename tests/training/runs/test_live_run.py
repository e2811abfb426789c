"""Training that reports and follows commands: what is collected, pause, another strategy, stop, on simulated ranks."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.core.metrics import RunEvent, StepBlock, StepSpans
from workbench.core.run_commands import RunCommand
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.runs import live_run, step_metrics
from workbench.training.runs import train as train_module
from workbench.training.runs.job import Job
from workbench.training.runs.step_metrics import MeasuredStep, StepCollector
from workbench.training.runs.train import counted_flops, largest_difference, run_one_device, run_strategy
from workbench.transport.traffic import Moment

STEPS = 12
MOMENT = Moment(0.0, 0.0, 0, 0)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def make_job(num_steps: int = STEPS) -> Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator))
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731 - state that has to move
    return Job(make_model, data, F.cross_entropy, adam, batch_size=8, num_steps=num_steps)


def train(strategy: str, commands=lambda messages: [], num_ranks: int = 2, num_steps: int = STEPS):
    """Results by rank and all messages; ``commands`` gets the messages so far and gives the commands so far."""
    messages: list[object] = []
    results = run_ranks(
        lambda: run_strategy(
            make_job(num_steps),
            strategy,
            listen=messages.append,
            commands=lambda: commands(messages),
            keeps_weights=True,
        ),
        num_ranks,
    )
    return results, messages


def blocks_of(messages) -> list[StepBlock]:
    return [message for message in messages if isinstance(message, StepBlock)]


def events_of(messages) -> list[RunEvent]:
    return [message for message in messages if isinstance(message, RunEvent)]


def assert_like_one_device(result, num_steps: int = STEPS) -> None:
    truth = run_one_device(make_job(num_steps))
    assert result.losses == pytest.approx(truth.losses, abs=1e-5)
    assert largest_difference(result.weights, truth.weights) < 1e-5


def test_the_last_batch_of_an_epoch_has_as_many_samples_as_it_has():
    alone: list[StepBlock] = []
    job = replace(make_job(4), batch_size=24)
    sizes = [24, 16, 24, 16]
    assert run_one_device(job, listen=alone.append).samples == sizes
    assert [count for block in alone for count in block.samples] == sizes
    assert run_ranks(lambda: run_strategy(job, "*: data"), 2)[0].samples == sizes


def test_every_step_of_every_rank_is_reported_once():
    results, messages = train("*: data")
    blocks = blocks_of(messages)
    assert [step for block in blocks for step in range(block.first_step, block.stop_step)] == list(range(STEPS))
    assert all(block.num_ranks == 2 and block.num_steps == STEPS for block in blocks)
    assert [loss for block in blocks for loss in block.losses] == pytest.approx(results[0].losses)
    for rank in (0, 1):
        times = [time for block in blocks for time in block.time_s[rank]]
        assert times == pytest.approx(results[rank].step_times_s)
        assert results[rank].samples == [count for block in blocks for count in block.samples]
        assert all(sent > 0 for block in blocks for sent in block.boxed_bytes[rank])
    assert blocks[-1].memory_bytes[1]["parameters"] == sum(p.numel() for p in make_model().parameters()) * 4
    assert set(blocks[-1].memory_bytes[0]) == {"parameters", "gradients", "optimizer", "activations", "buffers", "peak"}


def test_spans_of_one_step_come_from_every_rank_with_the_optimizer_last():
    _, messages = train("0: data; 2: data@1; 4: data@1 | 2x1x1 mb=2 1f1b")
    spans = [message for message in messages if isinstance(message, StepSpans)]
    first = {message.rank: message for message in spans if message.step == 0}
    assert set(first) == {0, 1}
    assert [f"{s.kind}{s.micro_batch}" for s in first[0].spans] == ["F0", "F1", "B0", "B1", "O0"]
    assert {s.stage for s in first[1].spans} == {1}
    for rank in first.values():
        assert all(s.start_s <= s.stop_s and 0 <= s.boxing_s <= s.stop_s - s.start_s + 1e-6 for s in rank.spans)
    forward = first[0].spans[0]
    assert forward.num_exchanges >= 1 and forward.sent_bytes == 4 * 16 * 4, "4 samples of 16 floats to the next stage"


@pytest.mark.usefixtures("exchanges_every_step")
@pytest.mark.parametrize("stops", [False, True])
def test_the_last_step_has_its_timeline_however_short_the_run_is(stops: bool):
    def commands(messages):
        return [RunCommand("stop")] if stops and len(blocks_of(messages)) > 2 else []

    results, messages = train("*: data", commands)
    last = [message for message in messages if isinstance(message, StepSpans)][-2:]
    assert {message.step for message in last} == {len(results[0].losses) - 1} and {m.rank for m in last} == {0, 1}
    assert len(results[0].losses) < STEPS or not stops


def test_without_anybody_listening_nothing_is_exchanged_for_it():
    results = run_ranks(lambda: run_strategy(make_job(), "*: data"))
    assert results[0].losses == pytest.approx(run_one_device(make_job()).losses, abs=1e-5)


@pytest.mark.parametrize(("drops_out", "at", "tried"), [(False, 4, 0), (True, 2, 1)], ids=["plain", "drops-out"])
def test_one_device_stops_after_the_step_in_which_it_is_told(drops_out: bool, at: int, tried: int):
    """``tried``: steps in plain torch before it is known that the model draws random numbers."""
    taken, messages = [], []

    def loss(output, target):
        taken.append(1)
        return F.cross_entropy(output, target)

    model = lambda: nn.Sequential(make_model(), nn.Dropout(0.5)) if drops_out else make_model()  # noqa: E731
    job = replace(make_job(), model_fn=model, loss_fn=loss)
    result = run_one_device(job, 1, messages.append, lambda: [RunCommand("stop")] if len(taken) == at else [])
    assert len(result.losses) + tried == len(taken) == at < STEPS
    assert blocks_of(messages)[-1].stop_step == len(result.losses), "the last steps are reported, too"


@pytest.fixture
def exchanges_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are read after the step in which they come, however fast steps are."""
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 0.0)


@pytest.mark.usefixtures("exchanges_every_step")
def test_a_strategy_changes_on_the_way_and_the_numbers_stay():
    def commands(messages):
        return [RunCommand("strategy", "*: model")] if blocks_of(messages) else []

    results, messages = train("*: data", commands)
    ((step, text),) = results[0].changes
    assert text == "*: model" and 1 <= step < STEPS
    (event,) = events_of(messages)
    assert (event.kind, event.step, event.text) == ("strategy", step, "*: model") and event.time_s > 0
    assert_like_one_device(results[0])
    after = blocks_of(messages)[-1]
    whole = sum(p.numel() for p in make_model().parameters()) * 4
    assert after.memory_bytes[0]["parameters"] < whole
    data, model = results[0].segments
    assert data.memory_bytes["parameters"] == whole > model.memory_bytes["parameters"]
    assert data.boxed_bytes == whole != model.boxed_bytes, "half of a sum, twice, is what a rank sends of gradients"
    assert results[0].memory_bytes["peak"] == max(part.memory_bytes["peak"] for part in results[0].segments)


@pytest.mark.usefixtures("exchanges_every_step")
def test_to_stages_and_back_again_on_three_commands():
    texts = ["0: data; 2: data@1; 4: data@1 | 2x1x1 mb=2", "*: model", "*: data"]

    def commands(messages):
        return [RunCommand("strategy", text) for text in texts[: len(blocks_of(messages))]]

    results, _ = train("*: data", commands)
    steps, changed_to = zip(*results[0].changes, strict=True)
    assert list(changed_to) == texts and len(set(steps)) == 3
    assert_like_one_device(results[0])


def test_the_first_step_after_a_change_is_reported_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 1000.0)
    monkeypatch.setattr(step_metrics, "_MOST_STEPS", 3)  # all steps are so fast

    def commands(messages):
        return [RunCommand("strategy", "*: model")] if blocks_of(messages) else []

    results, messages = train("*: data", commands)
    assert results[0].changes == [(4, "*: model")]
    assert [block.first_step for block in blocks_of(messages)] == [0, 1, 4, 5, 8, 11]


def test_a_strategy_that_does_not_fit_is_refused_and_the_run_goes_on():
    def commands(messages):
        return [RunCommand("strategy", "nothing: model")] if blocks_of(messages) else []

    results, messages = train("*: data", commands)
    (event,) = events_of(messages)
    assert event.kind == "refused" and "no layer matches" in event.text and results[0].segments == []
    assert results[0].changes == [] and len(results[0].losses) == STEPS
    assert_like_one_device(results[0])


@pytest.mark.usefixtures("exchanges_every_step")
def test_a_refused_strategy_is_not_in_force(monkeypatch: pytest.MonkeyPatch):
    """Not even its micro-batches."""
    monkeypatch.setattr(psutil, "disk_usage", lambda folder: SimpleNamespace(free=10))

    def commands(messages):
        return [RunCommand("strategy", "*: data | mb=4 offload=optimizer")] if blocks_of(messages) else []

    results, messages = train("*: data", commands)
    (event,) = events_of(messages)
    assert event.kind == "refused" and "10 B are free" in event.text and event.step < STEPS
    last = [message for message in messages if isinstance(message, StepSpans)][-1]
    assert [f"{s.kind}{s.micro_batch}" for s in last.spans] == ["F0", "B0", "O0"]
    assert_like_one_device(results[0])


def test_a_paused_run_waits_until_it_is_told_to_go_on():
    given = [RunCommand("pause")]
    paused = threading.Event()

    def commands(messages):
        if any(event.kind == "paused" for event in events_of(messages)) and not paused.is_set():
            paused.set()
            threading.Timer(0.3, lambda: given.append(RunCommand("resume"))).start()
        return list(given)

    results, messages = train("*: data", commands)
    assert [event.kind for event in events_of(messages)] == ["paused", "running"]
    assert len({event.step for event in events_of(messages)}) == 1, "no step was taken in between"
    assert_like_one_device(results[0])


def test_a_paused_run_can_be_stopped():
    results, messages = train("*: data", lambda messages: [RunCommand("pause"), RunCommand("stop")])
    assert len(results[0].losses) == 1 and [event.kind for event in events_of(messages)] == ["paused"]


@pytest.mark.usefixtures("exchanges_every_step")
def test_an_order_counts_once_every_rank_has_heard_of_it():
    received: list[int] = [0, 0]

    def program(rank):
        def commands():
            received[rank] += 1
            late = rank == 1 and received[1] < 4
            return [] if late else [RunCommand("stop")]

        return run_strategy(make_job(), "*: data", listen=lambda message: None, commands=commands)

    results = run_ranks(program)
    assert len(results[0].losses) == len(results[1].losses) == 4


@pytest.mark.parametrize(
    ("ours", "truth", "expected"),
    [((0.5, 0.25), (0.5, 0.5), 0.25), ((400.0, 5.0), (400.0, 1.0), 0.01), ((float("nan"),), (1.0,), math.inf)],
)
def test_weights_differ_relative_to_the_largest_of_their_tensor(
    ours: tuple[float, ...], truth: tuple[float, ...], expected: float
):
    states = [{"w": torch.tensor(values), "none": torch.empty(0)} for values in (ours, truth)]
    assert largest_difference(*states) == pytest.approx(expected)
    assert largest_difference(states[0], {}) == math.inf


def test_commands_are_of_known_kinds():
    with pytest.raises(ValueError, match=r"no such command.*pause"):
        RunCommand("jump")


@pytest.mark.parametrize(("time_s", "interval"), [(0.001, 300), (0.05, 6), (5.0, 1), (1e-7, 1000)])
def test_steps_are_exchanged_about_three_times_a_second(time_s: float, interval: int):
    def program():
        collector = StepCollector(current())
        collector.add(MeasuredStep(8, MOMENT, MOMENT._replace(time=time_s)), 1.5)
        assert collector.is_due
        block, numbers = collector.collect(number=7.0)
        assert (block.losses, block.samples, block.num_steps, numbers) == ((1.5,), (8,), 0, [7.0, 7.0])
        return collector.interval

    assert run_ranks(program) == [interval, interval]


def test_losses_are_numbers_tensors_or_missing():
    def program():
        collector = StepCollector(current())
        for loss in (2.0, None, torch.tensor(3.0, requires_grad=True)):
            collector.add(MeasuredStep(1, MOMENT, MOMENT), loss)
        return collector.collect()[0].losses

    assert run_ranks(program, 1) == [(2.0, None, 3.0)]


def test_evidence_for_a_verdict_collects_no_garbage_and_does_not_count_activations(monkeypatch: pytest.MonkeyPatch):
    collected = []
    monkeypatch.setattr("workbench.training.diagnostics.memory.gc.collect", lambda: collected.append(1))
    for measures, times in ((True, 1), (False, 0)):
        collected.clear()
        result = run_one_device(replace(make_job(), measures_memory=measures))
        assert len(collected) == times and result.memory_bytes["peak"] >= 0
        strategies = run_ranks(lambda m=measures: run_strategy(replace(make_job(), measures_memory=m), "*: data"), 1)
        assert (strategies[0].memory_bytes["activations"] > 0) is measures
        assert strategies[0].losses == pytest.approx(result.losses, abs=1e-5)


def test_a_model_that_is_known_to_draw_runs_once_with_the_same_numbers_and_the_same_plans():
    taken = []

    def loss(output, target):
        taken.append(type(output).__name__)
        return F.cross_entropy(output, target)

    job = replace(make_job(), model_fn=lambda: nn.Sequential(make_model(), nn.Dropout(0.5)), loss_fn=loss, num_steps=3)
    unknown = run_one_device(job)
    assert unknown.draws and taken.count("Tensor") == 1
    alone = train_module._worlds_of_one[current()]
    num_plans = len(alone.plans)
    taken.clear()
    known = run_one_device(replace(job, draws=True))
    assert known.losses == unknown.losses and taken == ["GlobalTensor"] * 3
    assert all(torch.equal(known.course.end[name], value) for name, value in unknown.course.end.items())
    assert all(torch.equal(known.course.start[name], value) for name, value in unknown.course.start.items())
    assert train_module._worlds_of_one[current()] is alone and len(alone.plans) == num_plans > 0


def test_a_world_of_one_that_has_failed_is_not_used_again():
    def broken(output, target):
        raise ZeroDivisionError

    job = replace(make_job(), draws=True, num_steps=2)
    run_one_device(job)
    alone = train_module._worlds_of_one[current()]
    with pytest.raises(ZeroDivisionError):
        run_one_device(replace(job, loss_fn=broken))
    run_one_device(job)
    assert train_module._worlds_of_one[current()] is not alone


def test_tokens_and_the_share_of_the_peak(monkeypatch):
    """Two ranks share a GPU of 1e9 operations per second."""
    monkeypatch.setattr(live_run.DeviceMeter, "read", lambda meter, precision: {"gpu": 7.0, "peak_flops_per_s": 1e9})
    words = torch.randint(0, 5, (16, 3))
    model_fn = lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))  # noqa: E731
    job = Job(model_fn, (words, torch.zeros(16, 2)), F.mse_loss, None, batch_size=8, num_steps=2)
    flops = counted_flops(job)
    assert flops == 2 * 12 * 2 + 2 * 2 * 12 * 2, "forward, and backward to weights and inputs"
    messages: list[object] = []
    run_ranks(lambda: run_strategy(replace(job, flops_per_sample=flops), "*: data", listen=messages.append))
    for block in blocks_of(messages):
        [(step, rate), *_], [(_, share), *_] = block.values["tokens_per_s"], block.values["mfu"]
        assert step == block.first_step and rate == pytest.approx(24 / block.step_times_s[0])
        assert share == pytest.approx(8 * flops / block.step_times_s[0] / 1e9)
