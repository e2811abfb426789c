"""Boxings on one GPU are timed without one, over the substitute for the device; no time is judged here."""

import os

import pytest

from benchmarks.gpu import exchanges
from benchmarks.gpu.place import Place
from tests.processes import run_processes
from tests.transport import late_device
from workbench.tensors.world import current


def measured():
    gloo = exchanges.gloo_world(os.environ["WORKBENCH_TEST_RENDEZVOUS"])
    rows = [(2**16, *pair, exchanges.measure(2**16, *pair, gloo, rounds=1)) for pair in exchanges.PAIRS[:2]]
    return current().transport_name, rows


@pytest.mark.procs
@pytest.mark.slow  # as what measures steps, in test_parts
def test_every_candidate_is_timed_and_the_ratio_judged(monkeypatch):
    environment = {"WORKBENCH_TRANSPORT": "ipc", late_device.VARIABLE: "1"}
    (name, rows), _ = run_processes(measured, 2, environment=environment)
    assert name == "ipc" and all(set(times_s) == {"ours", "gloo", "copy"} for *_, times_s in rows)
    rows.append((*exchanges.JUDGED, {"ours": 1.0, "gloo": 12.0, "copy": 0.5}))
    monkeypatch.setattr(exchanges, "launch_often", lambda *_: [(name, rows)])
    transport, first, *_, last, judged = exchanges.between_processes(Place("cpu"))
    assert transport.seen == "ipc, 2 processes on the CPU"
    assert first.what == "65.5 kB S(0) -> S(1)" and last.seen == "ours 1.00 s, gloo 12.0 s, copy 500 ms"
    assert judged.value == 12 and judged.theirs == "gloo 12.0 s" and judged.is_met
    rows[-1][-1]["ours"] = 2.0
    assert not list(exchanges.between_processes(Place("cpu")))[-1].is_met
