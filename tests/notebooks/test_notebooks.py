"""Every notebook is stored without outputs and runs from top to bottom without a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def executed() -> Any:
    """The first notebook after it has run."""
    notebook = read(FOLDER / "01-compare-strategies.ipynb")
    client = NotebookClient(
        notebook, timeout=150, store_widget_state=False, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    return notebook


def outputs(notebook: Any, source: str) -> list[Any]:
    """Outputs of the one code cell that contains ``source``."""
    found = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    assert len(found) == 1, f"{source!r} is in {len(found)} cells"
    return found[0].outputs


def text_of(notebook: Any, source: str) -> str:
    """All text that a cell printed or displayed."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook, source)]
    return "\n".join(parts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_without_outputs_and_with_a_kernel(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.engines
@pytest.mark.timeout(240)
class TestFirstNotebook:
    def test_nothing_failed(self, executed: Any) -> None:
        assert not [
            output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"
        ]

    def test_data_parallel_product_is_cut_like_the_batch(self, executed: Any) -> None:
        text = text_of(executed, "sbp=wb.sbp.split(0)")
        assert "[all] torch.Size([4, 8])" in text and "here: torch.Size([2, 8])" in text

    def test_model_parallel_product_is_cut_along_its_columns(self, executed: Any) -> None:
        text = text_of(executed, "sbp=wb.sbp.split(1)")
        assert "here: torch.Size([4, 4])" in text
        assert "float32[4, 8]" in text and "S(1)" in text

    def test_the_panel_leaves_a_copy_without_widgets(self, executed: Any) -> None:
        widget, page, figure = outputs(executed, "wb.Panel(")
        assert "application/vnd.jupyter.widget-view+json" in widget.data
        assert "wb-static" in page.data["text/html"] and "hybrid" in page.data["text/plain"]
        curve = next(t for t in figure.data["application/vnd.plotly.v1+json"]["data"] if t["name"] == "this run")
        assert curve["x"], "the curves of the finished run are in the static figure"

    def test_the_run_of_the_panel_equals_one_device(self, executed: Any) -> None:
        assert text_of(executed, "panel.wait()") == "True"

    def test_the_comparison_has_all_strategies(self, executed: Any) -> None:
        table = text_of(executed, "result.table")
        assert all(name in table for name in ("data", "model", "pipeline", "hybrid"))

    def test_widget_state_is_not_stored(self, executed: Any) -> None:
        assert "widgets" not in executed.metadata
        assert len(nbformat.writes(executed)) < 500_000
