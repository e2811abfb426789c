"""The notebooks of the older documents: together in one kernel on one cluster, each by itself among the slow tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.cells import SEEDS, execute, joined, read, stored_size, texts_of

NOTEBOOKS = sorted(SEEDS.glob("*.ipynb"))

_SHORTER = [
    (r"for (\w+) in range\(\d+\):", r"for \1 in range(1):"),
    (r"zip\(train_images, train_labels\)", "zip(train_images[:3], train_labels[:3])"),
    (r"rounds=7", "rounds=1"),
    (r"measured = \[", "SHAPES = {name: tuple(n // 8 for n in shape) for name, shape in SHAPES.items()}\nmeasured = ["),
]
"""What is replaced for the quick run: fewer epochs and batches, smaller layers. The programs stay as they are."""


def pictures(notebook: Any) -> list[str]:
    """The text of every picture."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.data["text/plain"] for output in outputs if "image/svg+xml" in output.get("data", {})]


def assert_right(notebook: Any, names: list[str]) -> None:
    """What the named notebooks show is what the documents say."""
    drawn = "\n".join(pictures(notebook))
    if "1-parallel-features" in names:
        assert "all-gather S(1) -> B, 128 B" in drawn and "gradient of w0: all-reduce P -> B, 320 B" in drawn
        assert "gradient of output: stays S(0), 0 B" in drawn, "the job's last layer is split by columns"
        assert "send B@0 -> B@1, 205 kB" in drawn, "the job's layers live on devices of their own"
    if "2-consistent-and-mirrored" in names:
        (table,) = texts_of(notebook, "step  mirrored")
        mirrored, consistent = map(float, table.splitlines()[1].split()[1:])
        assert mirrored == pytest.approx(consistent, rel=1e-3), "the same weights and the same dropout"
        assert "'images'" in texts_of(notebook, "except ValueError")[0]
    if "3-hybrid-parallelism" in names:
        (table,) = texts_of(notebook, "pd.DataFrame")
        assert "convolution, 3 to 32 channels" in table and "faster" in table
        assert "gradient of dense2: stays S(0), 0 B" in drawn
    if "4-parallel-strategies" in names:
        assert texts_of(notebook, "split(dim=0))")[0].count("[4, 8]") >= 1
        assert "data parallel on 2 ranks" in drawn and "rank 1: all of x @ w[:, 4:8] = out[:, 4:8]" in drawn
        assert "64 stages x 6 x 8 = 3072 ranks" in drawn and "2 stages x 2 x 2 = 8 ranks" in drawn
        assert "64 micro-batches: ranks wait 50% of the time" in texts_of(notebook, "make_table")[0]
    if "5-pipeline" in names:
        assert "tensor(2." in texts_of(notebook, "print(loss.to_local())")[0]
        assert "send B@0 -> B@1, 32.8 kB" in drawn and "2 ranks, 8 actions" in drawn


def test_there_is_a_notebook_for_every_document() -> None:
    assert [path.stem[0] for path in NOTEBOOKS] == list("12345")


@pytest.mark.engines
@pytest.mark.slow
def test_all_run_in_one_kernel() -> None:
    notebook = execute(joined(NOTEBOOKS, _SHORTER), SEEDS)
    assert_right(notebook, [path.stem for path in NOTEBOOKS])
    assert stored_size(notebook) < 1_000_000


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_each_runs_by_itself(path: Path) -> None:
    assert_right(execute(read(path), SEEDS), [path.stem])
