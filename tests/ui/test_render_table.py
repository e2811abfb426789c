"""The comparison table says what the runs say, in HTML and in 80 columns."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord
from workbench.core.verdict import Verdict
from workbench.ui.assets import element
from workbench.ui.number_text import grouped, short_difference, speedup_text
from workbench.ui.pictures.svg import text_width
from workbench.ui.runs.render_table import WIDTHS, by_throughput, comparison_table_text, runs_html
from workbench.ui.runs.table_rows import COLUMNS, equal_text, run_rows


class Rows(HTMLParser):
    """Text of every table row, and a check that tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "tr" in self.open:
            self.rows[-1] += f"{data}|"


def rows_of(html: str) -> list[str]:
    parser = Rows()
    parser.feed(html)
    assert parser.open == []
    return parser.rows


def test_rows_are_sorted_with_failures_and_one_device_last(runs: list[RunRecord], baseline: RunRecord):
    rows = rows_of(runs_html(runs[::-1], [baseline]))
    assert [row.split("|")[0] for row in rows] == ["strategy", "data", "model", "pipeline", "1 device"]
    dashes = "|".join("\u2013" * 2)
    assert (
        rows[1] == f"data|*: data|5\u202f000|1.25\u00d7|8.00 MB|1.23 MB|{dashes}|20.0 ms|\u2013|0.11|1.00|\u2713 2e-7|"
    )
    assert "not run: stage 9 of 2 stages" in rows[3]
    assert rows[4].endswith("|reference|")


def test_a_tick_is_explained_where_there_is_one(runs: list[RunRecord]):
    assert "tick: predicted" not in runs_html([replace(runs[0], predicted={})])
    assert "tick: predicted" in runs_html([replace(runs[0], predicted={"samples_per_s": 10.0})])


def test_names_from_users_are_escaped(runs: list[RunRecord]):
    html = runs_html([replace(runs[0], name="<script>alert(1)</script>")])
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_attributes_are_escaped():
    assert element("td", text="a", title='"><b') == '<td title="&quot;&gt;&lt;b">a</td>'


@pytest.mark.parametrize(
    ("equal", "difference", "text"),
    [(True, 2.4e-7, "\u2713 2e-7"), (False, 0.03, "\u2717 3e-2"), (True, 0.0, "\u2713 0"), (None, None, "\u2013")],
)
def test_equal_to_one_device(runs: list[RunRecord], equal: bool | None, difference: float | None, text: str):
    assert equal_text(replace(runs[0], equal=equal, loss_difference=difference)) == text


def test_rounding_that_grew_is_called_noise(runs: list[RunRecord]):
    verdict = Verdict(True, "noise", largest=0.2, text="rounding: the loss differs", grown=True)
    run = replace(runs[0], equal=True, loss_difference=0.2, verdict=verdict)
    assert equal_text(run) == "\u2713 2e-1 noise"
    assert 'title="rounding: the loss differs"' in runs_html([run])


def test_numbers():
    assert short_difference(1e-5) == "1e-5" and short_difference(None) == "\u2013"
    assert grouped(1234567.8) == "1\u202f234\u202f568"
    assert speedup_text(0.954) == "0.95\u00d7"


def test_text_fits_a_terminal(runs: list[RunRecord], baseline: RunRecord):
    long = replace(runs[0], name="fc1: data@0; fc2: data@1 | mb=4 1f1b", samples_per_s=1e6)
    text = comparison_table_text([long, *runs], baseline)
    assert max(map(len, text.splitlines())) <= 80
    named, figures = text.splitlines()[1:3]
    assert named == long.name and figures.split()[0] == "1000000", "in full, on a line of its own"
    assert "8.00 MB" in text and "1.25x" in text and "baseline" in text and "stage 9" in text


def test_less_than_one_sample_per_second_is_not_written_as_none():
    assert " 0.4 " in comparison_table_text([make_record("data", samples_per_s=0.4)])


def test_a_long_note_has_a_line_of_its_own(runs: list[RunRecord]):
    grown = replace(runs[0], loss_difference=2e-2, verdict=Verdict(True, grown=True, note="then nan"))
    _, figures, note, other = comparison_table_text([grown, runs[1]]).splitlines()
    assert figures.endswith(" \u2713 2e-2 noise") and len(figures) == 80
    assert note == f"{'then nan':>80}" and "model" in other


def test_a_strategy_that_is_its_own_name_is_written_once(runs: list[RunRecord]):
    text = "fc1: data; fc2: data@1 | mb=4 1f1b"
    once = runs_html([replace(runs[0], name=text, strategy=text)])
    assert once.partition("</table>")[0].count(f">{text}<") == 1 and f">{text}</b>" in once
    twice = runs_html([replace(runs[0], name="mine", strategy=text)])
    assert ">mine</b>" in twice and f">{text}</small>" in twice


def test_sorting_keeps_all_runs(runs: list[RunRecord]):
    assert sorted(run.name for run in by_throughput(runs)) == ["data", "model", "pipeline"]


def test_what_a_tick_hides_stands_below_it(runs: list[RunRecord]):
    later = replace(runs[0], verdict=Verdict(True, note="then nan"))
    (row,) = rows_of(runs_html([later]))[1:]
    assert row.endswith("\u2713 2e-7|then nan|")
    assert "\u2713 2e-7, then nan" in comparison_table_text([later])
    assert "noted" in runs_html([later]) and 'class="number noted"' not in runs_html([runs[0]])
    both = replace(runs[0], equal=None, loss_difference=None, verdict=Verdict(None, note="both nan"))
    assert 'class="number noted"' in runs_html([both])
    wrong = replace(runs[0], equal=False, loss_difference=float("inf"), verdict=Verdict(False, note="nan"))
    assert rows_of(runs_html([wrong]))[1].endswith("\u2717 nan|")


def test_text_has_the_spread_below_the_means(runs: list[RunRecord]):
    spread = {"samples_per_s": 12.5, "speedup": 0.02, "final_loss": 0.003}
    mean = replace(runs[0], spread=spread, settings={"seeds": [0, 1, 2]})
    _, figures, below = comparison_table_text([mean]).splitlines()
    assert len(below) == 80 and below.endswith("loss 1.00 \u00b1 0.003, 3 seeds")
    assert (
        below[:38].split() == ["\u00b1", "12.5", "\u00b1", "0.02x"]
        and below.index("12.5") + 4 == figures.index("5000") + 4
    )


def test_small_losses_and_the_steps_of_a_stopped_run_fit_into_their_columns():
    """Each cell has 12 pixels without text, see ``td.number`` of table.css."""
    small = make_record("small", losses=(2.0, 0.000162))
    stopped = make_record("stopped", step_times_s=(0.1,) * 9570, settings={"steps": 10_000})
    widths = dict(zip([column.key for column in COLUMNS[1:]], WIDTHS, strict=True))
    for row in run_rows([small, stopped]):
        for key in (column.key for column in COLUMNS[2:-1]):
            for text in (row.texts[key], row.steps if key == "rank_seconds" else ""):
                assert text_width(text, 12) + 12 <= widths[key], (key, text)
    assert run_rows([stopped])[0].steps == "9570 steps"
