"""Times are the device's, on which a launch takes a millisecond and the host never waits for it before a report."""

import copy

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.checked_device import DEVICE, counted
from tests.checked_device.clock import LAUNCH_S
from tests.checked_device.test_training import X, Y, mlp, scheduled_step
from workbench.core.metrics import LastSteps, StepBlock, StepSpans
from workbench.errors import CaptureError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.diagnostics.device_use import DeviceMeter
from workbench.training.runs import step_metrics, train, user_loops
from workbench.training.runs.job import Job
from workbench.training.runs.train import run_one_device, run_strategy
from workbench.transport import traffic
from workbench.transport.traffic import DeviceClock, Traffic, seconds


@pytest.fixture(autouse=True)
def one_pair_of_times(monkeypatch):
    """This device does not keep step with the host, so the two are compared once."""
    monkeypatch.setattr(traffic, "_KNOWN_FOR_S", float("inf"))


def test_a_time_is_read_when_the_device_has_come_to_it():
    now = DeviceClock(DEVICE).now
    with counted() as counts:
        started = now()
        torch.ones(3, device=DEVICE).add(1).mul(2)
        stopped = now()
        assert not stopped.has_passed and not counts.waits
        assert seconds(stopped) - seconds(started) == pytest.approx(counts.launches.total() * LAUNCH_S)
    assert counts.waits == {"event": 1} and stopped.has_passed


def test_an_exchange_in_a_graph_that_torch_records_is_an_error_with_the_fix(monkeypatch):
    module = torch.get_device_module(DEVICE)
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)

    def program():
        terms = wb.ones(4, placement=wb.placement(ranks=[0, 1]), sbp="P")
        with pytest.raises(CaptureError, match=r'wb.capture\(step, backend="cudagraphs"\)'):
            terms.to_global(sbp="B")

    run_ranks(program, 2, device=DEVICE)


def test_exchanges_that_the_device_has_done_are_not_kept():
    traffic = Traffic(DEVICE)
    value = torch.ones(3, device=DEVICE)

    def exchange():
        started = traffic.now()
        value.add_(1)
        traffic.end_exchange(started)

    start = traffic.moment()
    for _ in range(3):
        exchange()
    inside = traffic.moment()
    value.sum()
    exchange()
    assert len(traffic._queued) == 4
    value.sum().item()
    exchange()
    assert len(traffic._queued) == 1
    stop = traffic.moment()
    found = traffic.between(start, stop), traffic.between(start, inside), traffic.between(inside, stop)
    assert [interval.exchange_s / LAUNCH_S for interval in found] == pytest.approx([5, 3, 2])
    assert found[2].time_s / LAUNCH_S == pytest.approx(5)


def launches_of(time_s):
    """A time in launches, of which there is a whole number."""
    assert time_s / LAUNCH_S == pytest.approx(round(time_s / LAUNCH_S), abs=1e-3), time_s
    return round(time_s / LAUNCH_S)


def run(strategy, num_steps):
    """By rank: messages, result and counts of a run whose steps but the first are reported together."""
    job, received = Job(mlp, (X, Y), F.cross_entropy, None, 8, num_steps), {}

    def program():
        own = received.setdefault(current().rank, [])
        with counted() as counts:
            result = run_strategy(job, strategy, listen=own.append) if strategy else run_one_device(job)
        return own, result, counts

    return run_ranks(program, 2 if strategy else 1, device=DEVICE)


@pytest.mark.sampled(3, start=1)
@pytest.mark.parametrize("strategy", ["*: data | zero=3", "pipeline | mb=2", ""])
def test_steps_of_a_run_take_their_launches_and_wait_for_nothing(monkeypatch, strategy):
    """Also on one device."""
    for module in (step_metrics, train):
        monkeypatch.setattr(module, "INTERVAL_S", 1e9)
    run(strategy, 1)  # what later runs find in caches
    for (_, fewer, before), (_, more, after) in zip(run(strategy, 6), run(strategy, 10), strict=True):
        times = [launches_of(time_s) for time_s in more.step_times_s]
        assert times[5:] == times[5:6] * 5 and len(fewer.step_times_s) == 6
        assert 4 * times[-1] == after.launches.total() - before.launches.total()
        assert after.waits == before.waits


def test_actions_exchanges_and_layers_of_a_run_take_their_launches(monkeypatch):
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 1e9)
    for rank, (received, result, _) in enumerate(run("pipeline | mb=2", 8)):
        *_, last = (message for message in received if isinstance(message, StepSpans))
        assert "".join(span.kind for span in last.spans) == ("FFBBO", "FBFBO")[rank]
        assert last.spans[0].stop_s <= last.spans[1].start_s
        busy = [launches_of(span.stop_s - span.start_s) for span in last.spans]
        boxing = [launches_of(span.boxing_s) for span in last.spans]
        assert all(0 < inside < whole for inside, whole in zip(boxing[:4], busy[:4], strict=True))
        assert sum(busy) <= launches_of(result.step_times_s[-1])
        for times in (result.layer_forward_s, result.layer_backward_s):
            own = {name for name, time_s in times.items() if launches_of(time_s)}
            assert own == ({"0"}, {"2", "4", "5"})[rank], "layers of the other stage launch nothing here"
        for block in (message for message in received if isinstance(message, StepBlock)):
            assert block.devices == (DEVICES,) * 2
            assert launches_of(block.boxing_s[rank][-1]) >= sum(boxing)


DEVICES = {"busy": 0.9, "used": 30e9, "total": 80e9, "pool": 20e9, "peak_flops_per_s": 67e12, "gpu": 2156016205.0}


def test_the_timeline_and_a_loop_of_ones_own_have_the_devices_times(monkeypatch):
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 1e9)
    built, messages = mlp(), []
    user_loops.listen(messages.append)

    def program():
        model = wb.parallelize(copy.deepcopy(built), "pipeline | mb=2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            with counted() as counts:
                loss = scheduled_step(model)
                optimizer.step()
                optimizer.zero_grad()
                wb.log(loss=loss, samples=16, model=model, optimizer=optimizer)
        timeline = wb.debug.timeline(model)
        user_loops.report_remaining_steps()
        return counts, timeline

    try:
        found = run_ranks(program, device=DEVICE)
    finally:
        user_loops.listen(None)
    last = [message for message in messages if isinstance(message, LastSteps)]
    for rank, (counts, timeline) in enumerate(found):
        assert not counts.waits
        busy = sum(launches_of(span.stop_s - span.start_s) for span in timeline.spans[rank])
        (step,) = (launches_of(steps.time_s[-1]) for steps in last if steps.rank == rank)
        assert busy < step == counts.launches.total()


def test_what_a_machine_does_not_tell_of_its_device_is_left_out(monkeypatch):
    """Without NVML's package torch raises this error."""
    asked = []

    def missing(device):
        asked.append(device)
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.get_device_module(DEVICE), "utilization", missing)
    meter = DeviceMeter(DEVICE)
    known = {**DEVICES, "peak_flops_per_s": 989e12}
    known.pop("busy")
    assert [meter.read("bf16"), meter.read("bf16")] == [known, known] and len(asked) == 1


def test_a_captured_step_has_its_exchanges(monkeypatch):
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 1e9)
    built = mlp()

    def last_step(capture):
        messages = []

        def program():
            model = wb.parallelize(copy.deepcopy(built), "*: model")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x, y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                return loss.detach()

            step, x, y = capture(step), X.to(DEVICE), Y.to(DEVICE)
            for _ in range(5):
                wb.log(loss=step(x, y), samples=16)
            wb.barrier()
            user_loops.report_remaining_steps()

        user_loops.listen(messages.append)
        try:
            run_ranks(program, device=DEVICE)
        finally:
            user_loops.listen(None)
        return {m.rank: launches_of(m.boxing_s[-1]) for m in messages if isinstance(m, LastSteps)}

    captured, plain = last_step(wb.capture), last_step(lambda step: step)
    assert sorted(captured) == sorted(plain) == [0, 1]
    for rank in captured:  # what stands around the transport's calls is recorded as a step's other work
        assert 0 < captured[rank] <= plain[rank]
