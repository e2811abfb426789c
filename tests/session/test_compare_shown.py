"""What a cell shows that ends with the result of ``wb.compare``: numbers as people read them, and every verdict."""

from __future__ import annotations

from workbench.core.metrics import RunRecord
from workbench.core.verdict import Verdict
from workbench.session.comparison.compare import CompareResult

LONG = "; ".join(f"layers.{number}: data@{number % 2}" for number in range(20))


def test_a_result_is_shown_with_units_and_verdicts_and_without_texts_of_strategies():
    def run(name: str, **values: object) -> RunRecord:
        return RunRecord(name, LONG, 2, 16, samples_per_s=1234.5, peak_memory_bytes=(9_100_000,), **values)

    runs = [
        run("data", speedup=1.25, equal=True, verdict=Verdict(True, note="then nan"), boxed_bytes_per_step=1_730_000),
        run("model", equal=False, verdict=Verdict(False)),
        run("both", verdict=Verdict(None, note="both nan")),
        RunRecord("pipeline", LONG, 2, 16, error=f"CellError: no <room> {'in memory ' * 10}left\nmore"),
    ]
    page = CompareResult(run("one device"), runs)._repr_html_()
    for words in (
        "1,234", "1.25\u00d7", "9.10 MB", "1.73 MB", "equal to one device, then nan", "NOT equal to one device",
        "reference", "failed: CellError: no &lt;room&gt;", "in memory left",
        "<td>no verdict: both nan</td>", "wb.draw.runs(result)",
    ):  # fmt: skip
        assert words in page, words
    assert "layers.0" not in page
