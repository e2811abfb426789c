"""The hybrid of the document's last picture at small size: 2 stages x 2 data x 2 model on 8 ranks, for real."""

from __future__ import annotations

import pytest

from tests.flow.running import run, source_of
from workbench.testing import run_ranks


def losses(num_ranks, **changed):
    """What the program prints the ends of, on every rank, and the graph of rank 0."""
    found = run_ranks(lambda: run(source_of("gpt", **changed)), num_ranks)
    assert all(names["losses"] == found[0]["losses"] for names in found)
    return found[0]["losses"], found[0]["graph_gpt"]


@pytest.mark.parametrize("num_steps", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_the_hybrid_trains_as_one_device(num_steps):
    hybrid, graph = losses(8, BATCH__MICRO_BATCHES__STEPS=f"8, 2, {num_steps}")
    assert repr(graph) == "GptGraph(2 micro-batches, stage 0 on [[0, 1], [2, 3]], stage 1 on [[4, 5], [6, 7]])"
    alone, graph = losses(1, STAGES__DATA__MODEL="1, 1, 1", BATCH__MICRO_BATCHES__STEPS=f"8, 2, {num_steps}")
    assert repr(graph) == "GptGraph(2 micro-batches)"
    assert hybrid == pytest.approx(alone, abs=1e-5)
    assert hybrid[-1] < hybrid[0] - 0.1
    assert hybrid != pytest.approx([loss * 1.0001 for loss in alone], abs=1e-5)  # the comparison can fail
