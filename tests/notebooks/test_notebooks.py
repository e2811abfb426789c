"""Every notebook is stored without outputs and runs from top to bottom without a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.cells import FOLDER, execute, outputs, read, stored_size, text_of

NOTEBOOKS = sorted(FOLDER.rglob("*.ipynb"))


@pytest.fixture(scope="module")
def executed() -> Any:
    """The first notebook after it has run, with fewer and smaller steps, and a machine measured at a small size."""
    notebook = read(FOLDER / "01-compare-strategies.ipynb")
    for pattern, replacement in SHORTER.items():
        (cell,) = [cell for cell in notebook.cells if re.search(pattern, cell.source)]
        cell.source = re.sub(pattern, replacement, cell.source)
    return execute(notebook)


MEASURE_LITTLE = """session.run('''
from workbench.training.costs import machine_times
machine_times.PRODUCTS, machine_times.ROWS["cpu"] = machine_times.PRODUCTS[:2], 64
machine_times.WEIGHT_BYTES = machine_times.COPY_BYTES = machine_times.FUNCTION_BYTES = 2**18
''')"""
"""To calibrate takes 12 CPU seconds per rank; tests/session/test_calibration.py measures at the full size."""
SHORTER = {
    r"batch_size=128, steps=300\b": "batch_size=16, steps=12",
    r"batch_size=128, steps=20\b": "batch_size=16, steps=4",
    r"range\(40\)": "range(8)",
    r"(?m)^machine = ": f"{MEASURE_LITTLE}\nmachine = ",
}


SMALL = {"width": 16, "blocks": 4, "context": 16, "batch": 8, "stop_at": 11, "save_every": 4, "steps": 16, "letters": 8}


@pytest.fixture(scope="module")
def trained() -> Any:
    """The second notebook after it has run, at a small size."""
    notebook = read(FOLDER / "02-train-gpt.ipynb")
    (cell,) = [cell for cell in notebook.cells if cell.source.startswith("import tempfile")]
    cell.source, count = re.subn(r"sizes = {.*}", f"sizes = {SMALL}", cell.source)
    assert count == 1
    return execute(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_without_outputs_and_with_a_kernel(path: Path) -> None:
    import nbformat

    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.engines
class TestFirstNotebook:
    def test_nothing_failed(self, executed: Any) -> None:
        assert not [
            output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"
        ]

    def test_data_parallel_product_is_cut_like_the_batch(self, executed: Any) -> None:
        text = text_of(executed, "sbp=wb.sbp.split(0)")
        assert "torch.Size([4, 8])" in text and "here: torch.Size([2, 8])" in text

    def test_model_parallel_product_is_cut_along_its_columns(self, executed: Any) -> None:
        text = text_of(executed, "sbp=wb.sbp.split(1)")
        assert "here: torch.Size([4, 4])" in text
        assert "float32[4, 8]" in text and "S(1)" in text

    def test_the_panel_leaves_a_copy_without_widgets(self, executed: Any) -> None:
        widget, page = outputs(executed, "wb.Panel(")
        assert "application/vnd.jupyter.widget-view+json" in widget.data
        assert "wb-static" in page.data["text/html"] and "hybrid" in page.data["text/plain"]
        assert "wb-live-picture" in page.data["text/html"] and "<polyline" in page.data["text/html"]
        assert "wb-scatter" in page.data["text/html"] and "<script" not in page.data["text/html"]

    def test_an_exported_page_shows_the_last_state(self, executed: Any) -> None:
        import nbconvert

        page, _ = nbconvert.HTMLExporter().from_notebook_node(executed)
        assert "wb-live-picture" in page and "memory against throughput" in page.lower() and "Timeline, step" in page

    def test_the_loop_of_ones_own_was_followed(self, executed: Any) -> None:
        assert not outputs(executed, "assert view.live.history.last_step > 0")

    def test_the_run_of_the_panel_equals_one_device(self, executed: Any) -> None:
        assert text_of(executed, "panel.wait()") == "True"

    def test_the_comparison_has_all_strategies(self, executed: Any) -> None:
        table = text_of(executed, "result.table")
        assert all(name in table for name in ("data", "model", "pipeline", "hybrid"))

    def test_widget_state_is_not_stored(self, executed: Any) -> None:
        assert "widgets" not in executed.metadata
        assert stored_size(executed) < 500_000


@pytest.mark.engines
@pytest.mark.slow
class TestTrainGpt:
    def test_it_goes_on_from_the_newest_checkpoint_with_the_same_losses(self, trained: Any) -> None:
        assert "going on after step 8" in text_of(trained, "going on after step")
        text = text_of(trained, "the first differs by")
        assert "steps 9 to 11" in text and float(text.split("differs by ")[1]) < 1e-4

    def test_both_stages_and_all_ranks_are_in_the_report(self, trained: Any) -> None:
        rows = [line.split() for line in text_of(trained, "wb.debug.memory_report").splitlines()]
        assert {"parameters", "gradients", "optimizer", "transport"} <= {word for row in rows for word in row}
        assert {"0", "1", "2", "3"} <= {row[0] for row in rows if row}

    def test_the_curve_has_both_runs(self, trained: Any) -> None:
        (figure,) = outputs(trained, "import plotly.graph_objects")
        first, second = figure.data["application/vnd.plotly.v1+json"]["data"]
        assert "2x1x2" in first["name"] and "1x4x1" in second["name"]

    def test_text_is_written_and_weights_are_exported(self, trained: Any) -> None:
        assert text_of(trained, "continue_text(prompt")
        assert "model.safetensors" in text_of(trained, "wb.checkpoint.export_safetensors")

    def test_plain_torch_sees_the_slices(self, trained: Any) -> None:
        assert "(64, 16) in slices [(32, 16), (32, 16)]" in text_of(trained, "FileSystemReader")

    def test_it_is_small_to_store(self, trained: Any) -> None:
        assert stored_size(trained) < 200_000


@pytest.fixture(scope="module")
def broken() -> Any:
    """The third notebook after it has run; cells that are to fail are marked in it."""
    return execute(read(FOLDER / "03-when-things-go-wrong.ipynb"))


@pytest.mark.engines
@pytest.mark.slow
class TestWhenThingsGoWrong:
    def test_what_was_to_fail_has_failed_and_nothing_else(self, broken: Any) -> None:
        failed = [
            any(output.output_type == "error" for output in cell.outputs)
            for cell in broken.cells
            if cell.cell_type == "code"
        ]
        marked = ["tags" in cell.metadata for cell in broken.cells if cell.cell_type == "code"]
        assert failed == marked

    @pytest.mark.parametrize(
        ("cell", "words"),
        [
            ("rows[7] = 0", ["IndexError on rank 1", "rank 0 was running at cell line 5"]),
            ("targets.to_global(", ["ranks diverged"]),
            ("dist.barrier()", ["Timeout: the cell may take 2.00 s"]),
            ("os.kill(os.getpid(), 9)", ["rank 1 died while running this cell (killed by SIGKILL)"]),
            ("wb.debug.find_nonfinite(net)", ["on rank 1: the result of 0: 4 inf among 8 values"]),
        ],
    )
    def test_each_failure_names_its_cause(self, broken: Any, cell: str, words: list[str]) -> None:
        (error,) = [output for output in outputs(broken, cell) if output.output_type == "error"]
        text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
        assert all(word in text for word in words), text

    def test_training_goes_on_with_the_weights_of_the_other_rank(self, broken: Any) -> None:
        table = text_of(broken, "%workbench recover")
        assert "recovered rank 1; 1 set-up cell ran again" in table and "model" in table and "lost" not in table
        assert float(text_of(broken, "going on").rpartition(":")[2]) < 0.1  # of new weights it is above 1
        assert "0 is back" in text_of(broken, "is back")

    def test_the_whole_output_is_on_disk(self, broken: Any) -> None:
        assert "5.00 k lines, all of them in" in text_of(broken, "%workbench log")
