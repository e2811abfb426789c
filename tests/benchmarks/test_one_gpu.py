"""The benchmark of boxings on one GPU runs without one, over the substitute for the device; no time is judged here."""

import os

import pytest

from benchmarks import one_gpu
from tests.processes import run_processes
from tests.transport import late_device
from workbench.tensors.world import current


def measured():
    gloo = one_gpu.gloo_world(os.environ["WORKBENCH_TEST_RENDEZVOUS"])
    times = {(2**16, *pair): one_gpu.measure(2**16, *pair, gloo, rounds=1) for pair in one_gpu.PAIRS[:2]}
    times[one_gpu.JUDGED] = {"ours": 1.0, "gloo": 12.0, "copy": 0.5}
    return current().transport_name, times


@pytest.mark.procs
def test_every_candidate_is_timed_and_the_ratio_judged():
    environment = {"WORKBENCH_TRANSPORT": "ipc", late_device.VARIABLE: "1"}
    (name, times), _ = run_processes(measured, 2, environment=environment)
    assert name == "ipc" and all(set(found) == {"ours", "gloo", "copy"} for found in times.values())
    assert "| 0 MiB S(0) -> S(1) " in one_gpu.describe(times, name, "2 processes")
    (judged,) = one_gpu.judged(times)
    assert judged.value == 12 and judged.theirs == "gloo 12.0 s" and judged.is_met
    times[one_gpu.JUDGED]["ours"] = 2.0
    assert not one_gpu.judged(times)[0].is_met
    assert one_gpu.judged({}) == []
