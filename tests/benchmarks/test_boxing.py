"""The benchmark of boxings runs on a pair of processes and says what it measured; no time is judged here."""

from __future__ import annotations

import json
import os

import pytest
import torch

from benchmarks import boxing, harness
from benchmarks.reporting import Comparison
from tests.processes import run_processes
from workbench.tensors.world import current


def measure_a_little() -> list[tuple[str, float]]:
    """One pair of each kind at 4 KB and one large one, as the benchmark does."""
    boxing.LIMIT_SIZE, boxing.shares_cores = 2**20, lambda: False
    gloo = boxing.gloo_world(os.environ["WORKBENCH_TEST_RENDEZVOUS"])
    cases = [boxing.Case(4096, *pair) for pair in boxing.PAIRS] + [boxing.Case(2**20, "S(0)", "S(1)")]
    boxing.SIZES = dict.fromkeys(boxing.SIZES, 2)
    first, second = (json.loads(json.dumps(boxing.measure_all(cases, gloo, rounds=1))) for _ in range(2))
    in_segment = boxing.Boxings(cases[-1], gloo).box("in segment")
    transport = current().transport
    assert transport.name == "shared"
    with torch._C.DisableTorchFunctionSubclass():
        assert transport._segment.locate(in_segment, in_segment.nbytes) is not None  # type: ignore[attr-defined]
    published: list[tuple[str, str, str, list[Comparison]]] = []
    original, boxing.publish = boxing.publish, lambda *result: published.append(result)
    boxing.report([first, second], 2, 1)
    boxing.report([first, second | {"shares_cores": True}], 2, 1)
    boxing.publish = original
    (_, _, body, comparisons), (_, _, shared, fewer) = published
    assert "2 launches" in body and "S(0) -> S(1)" in body and "is therefore shown and not judged" in shared
    assert [row for row in comparisons if "one copies" not in row.what] == fewer
    assert boxing.on_the_slowest_rank({"a": [current().rank, 7], "b": [3, -current().rank]}) == {
        "a": [1, 7],
        "b": [3, 0],
    }
    return [(row.what, row.value) for row in comparisons]


@pytest.mark.procs
@pytest.mark.slow
def test_the_benchmark_of_boxings_compares_equal_results() -> None:
    for judged in run_processes(measure_a_little, 2):
        names = [what for what, _ in judged]
        assert names[:2] == ["4.10 kB in segment", "4.10 kB outside"]
        limits = [(where, limit) for limit in ("all copy", "one copies") for where in boxing.LIMITS]
        assert names[2:6] == [f"1.05 MB S(0) -> S(1), {where} / {limit}" for where, limit in limits]
        assert [name.partition(",")[0] for name in names[6:]] == ["planning"] * 3 + ["CPU to issue"]
        assert all(value > 0 for _, value in judged)


def test_what_comes_before_a_turn_is_not_timed() -> None:
    prepared: list[object] = []
    action = lambda: None  # noqa: E731
    times = harness.interleave({"a": action}, rounds=2, calls=3, before=prepared.append)
    assert prepared == [action] * 3 and len(times["a"]) == 2
