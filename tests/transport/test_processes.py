"""The programs of the simulated ranks on real processes over shared memory and over gloo."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest
import torch

import workbench as wb
from tests.processes import run_processes
from tests.training.programs import boxing_forward_and_backward, training_equals_one_device
from workbench.errors import CollectiveAborted
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.tensors.world import current
from workbench.transport.messaging.control_page import NUM_SLOTS

pytestmark = pytest.mark.procs


def over(transport: str) -> dict[str, str]:
    return {"WORKBENCH_TRANSPORT": transport}


def boxing(count):
    return boxing_forward_and_backward(wb.world_size(), count), current().transport_name


@pytest.mark.parametrize(
    ("transport", "count"),
    [
        ("shared", 20),
        pytest.param("shared", 60, marks=pytest.mark.slow),
        pytest.param("gloo", 60, marks=pytest.mark.slow),
    ],
)
def test_boxing_between_sampled_layouts(transport, count):
    assert run_processes(boxing, 4, count, environment=over(transport)) == [(count, transport)] * 4


def extrema_with_nan():
    values = torch.tensor([[1.0, torch.nan, 2.0], [3.0, 4.0, torch.nan]])
    x = wb.tensor(values, placement=wb.placement.all(), sbp="S(0)")
    found = torch.stack([x.amax(0).full_tensor(), x.amin(0).full_tensor()])
    return found.isnan().tolist(), current().transport_name


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_extrema_over_a_split_dim_show_a_nan(transport):
    assert (
        run_processes(extrema_with_nan, 2, environment=over(transport)) == [([[False, True, True]] * 2, transport)] * 2
    )


def training(kind, strategies):
    warnings.simplefilter("ignore", FallbackWarning)
    for strategy in strategies:
        losses, weights = training_equals_one_device(kind, strategy, wb.world_size())
        assert losses < 1e-5 and weights < 1e-5, (strategy, losses, weights)
    return current().transport_name


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_training_equals_one_device_under_every_preset(transport):
    presets = ["data", "model", "pipeline", "hybrid"]
    assert run_processes(training, 2, "mlp", presets, environment=over(transport)) == [transport] * 2


@pytest.mark.slow
def test_a_convolutional_net_on_four_processes():
    strategies = ["*: data | 1x2x2", "conv1: data; fc1: model@1 | 2x1x2 mb=3 1f1b"]
    assert run_processes(training, 4, "cnn", strategies) == ["shared"] * 4


def boxing_with_a_killed_rank():
    if wb.rank() == 1:
        time.sleep(0.5)
        os._exit(0)
    try:
        wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)").to_global(sbp="B")
    except CollectiveAborted as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_killed_rank_ends_the_waits_of_its_peers_with_the_cause(transport):
    message, nothing = run_processes(boxing_with_a_killed_rank, 2, environment=over(transport))
    assert "lost" in message and nothing is None


def awaiting(late):
    """What each rank waits for, while rank ``late`` does not come to a boxing of all ranks."""
    transport, found, ends = current().transport, [], threading.Event()
    everywhere = wb.placement.all("cpu")

    def look():
        while not ends.wait(0.02):
            found.append(transport.awaited_call())

    looks = threading.Thread(target=look)
    looks.start()
    try:
        if wb.rank() == late:
            time.sleep(0.5)
        wb.ones(8, placement=everywhere, sbp="S(0)").to_global(sbp="B")
    finally:
        ends.set()
        looks.join()
    return {call for call in found if call is not None}, transport.awaited_call(), transport.name


@pytest.mark.sampled(3, start=2)
@pytest.mark.parametrize("transport", ["shared", "gloo", "mixed"])
def test_a_wait_names_the_peer_and_the_call(transport):
    hosts = [{"WORKBENCH_TRANSPORT": transport} for _ in range(3)]
    if transport == "mixed":
        hosts = [{"WORKBENCH_HOST": host} for host in ("one", "one", "two")]
    for late in (1, 2):
        ranks = run_processes(awaiting, 3, late, environment=hosts)
        assert [(call, name) for _, call, name in ranks] == [(None, transport)] * 3
        for calls in (ranks[rank][0] for rank in range(3) if rank != late):
            (peer, call) = max(calls, key=lambda call: call[0] == late)
            assert peer == late and call.startswith("boxing S(0)") and "test_processes.py" in call


def sending_one_way(num_messages):
    first, second = (wb.placement("cpu", ranks=[rank]) for rank in (0, 1))
    x = wb.full((4,), 3.0, placement=first, sbp="B")
    if wb.rank() == 1:
        time.sleep(0.5)
    for _ in range(num_messages):
        y = x.to_global(placement=second, sbp="B")
    return None if wb.rank() == 0 else y.to_local().tolist()


@pytest.mark.parametrize("transport", ["shared", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_rank_that_ends_leaves_its_last_messages(transport):
    """More than a ring holds, so some of them wait in its own memory for a reader that is late."""
    ranks = run_processes(sending_one_way, 2, 3 * NUM_SLOTS, environment=over(transport))
    assert ranks == [None, [3.0] * 4]


def traced():
    """A trace counts the bytes that the transport has sent, and the plan's, also of an optimizer's step."""
    p, traffic = wb.placement("cpu", ranks=[0, 1]), current().traffic
    x = wb.randn(5, 7, placement=p, sbp="S(0)", requires_grad=True)
    model = wb.parallelize(torch.nn.Linear(7, 3), "*: data")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = traffic.sent_bytes
    with wb.debug.trace() as trace:
        (x.to_global(sbp="B") * 2).sum().backward()
        model(x).sum().backward()
        optimizer.step()
    assert trace.sent_bytes == traffic.sent_bytes - before
    written = next(record for record in trace.records if record.function == "to_global")
    assert written.wire_bytes == x.boxing_plan(sbp="B").wire_bytes and written.site.line.startswith("test_processes.py")
    return trace.wire_bytes


def test_a_trace_counts_the_bytes_that_the_transport_sends():
    first, second = run_processes(traced, 2)
    assert first == second > 0


def example():
    p = wb.placement("cpu", ranks=[0, 1])
    x = wb.randn(4, 5, placement=p, sbp=wb.sbp.split(0))
    w = wb.randn(5, 8, placement=p, sbp=wb.sbp.broadcast)
    torch.testing.assert_close((x @ w).full_tensor(), x.full_tensor() @ w.full_tensor())
    return tuple((x @ w).shape)


def test_the_example_of_the_readme():
    assert run_processes(example, 2) == [(4, 8)] * 2
