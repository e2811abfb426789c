"""The comparison table of finished runs: as HTML for pages and notebooks, as text of 80 columns for terminals."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.metrics import RunRecord
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.numbers import DASH, grouped, short_difference, speedup_text
from workbench.ui.scatter import pareto_front
from workbench.units import format_bytes

_TICK, _CROSS = "\u2713", "\u2717"
_BAR_WIDTH = 110
_HEADERS = (
    ("strategy", "", "name"),
    ("samples/s", "median, more is better", "rate"),
    ("speed-up", "over 1 engine", "number"),
    ("peak memory", "largest rank", "number"),
    ("boxed", "per step, all ranks", "number"),
    ("equal to 1 device", "largest loss difference", "number"),
)


def by_throughput(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Fastest first; runs without figures last, in their order."""
    return sorted(runs, key=lambda run: (run.error is not None, -run.samples_per_s))


def comparison_table_html(
    runs: Sequence[RunRecord], baseline: RunRecord | None = None, selected: str | None = None
) -> str:
    """The table as one HTML fragment that brings its own style and reads in both themes.

    The ``baseline`` (one device) is the last row; a run that failed keeps its row and says why.
    """
    rows = by_throughput(runs)
    fastest = max([run.samples_per_s for run in [*rows, *([baseline] if baseline else [])]], default=0.0) or 1.0
    front = _names_on_front(rows)
    body = [_row(run, fastest, run.name in front, run.name == selected) for run in rows]
    if baseline is not None:
        body.append(_row(baseline, fastest, False, False, is_baseline=True))
    head = element("thead", element("tr", *(_header(*header) for header in _HEADERS)))
    table = element("table", head, element("tbody", *body), css="wb-table")
    return element("div", table_style(), table, _footnote(), css="wb-comparison")


def table_style() -> str:
    """The table's ``<style>`` element."""
    return f"<style>{style_sheet('.wb-comparison')}{asset('table.css')}</style>"


def equal_text(run: RunRecord) -> str:
    """Whether the run equals one device, with its largest loss difference: ``'\u2713 2e-7'``."""
    if run.equal is None:
        return DASH
    mark = _TICK if run.equal else _CROSS
    return f"{mark} {short_difference(run.loss_difference)}"


def comparison_table_text(runs: Sequence[RunRecord], baseline: RunRecord | None = None) -> str:
    """The table in at most 80 columns of plain text."""
    lines = [f"{'strategy':<18}{'samples/s':>10}{'speed-up':>10}{'peak/rank':>11}{'boxed/step':>12}{'equal':>9}"]
    for run in [*by_throughput(runs), *([baseline] if baseline else [])]:
        if run.error is not None:
            lines.append(f"{run.name[:17]:<18}{_one_line(run.error, 62)}")
            continue
        speedup = f"{run.speedup:.2f}x" if run.speedup is not None else "-"
        difference = "baseline" if run is baseline else equal_text(run).replace(DASH, "-")
        lines.append(
            f"{run.name[:17]:<18}{run.samples_per_s:>10.0f}{speedup:>10}{_peak(run):>11}"
            f"{format_bytes(run.boxed_bytes_per_step):>12}{difference:>9}"
        )
    return "\n".join(lines)


def _names_on_front(rows: Sequence[RunRecord]) -> set[str]:
    measured = [run for run in rows if run.error is None and run.peak_memory_bytes]
    front = pareto_front([max(run.peak_memory_bytes) for run in measured], [run.samples_per_s for run in measured])
    return {measured[index].name for index in front}


def _header(title: str, detail: str, css: str) -> str:
    return element("th", element("span", text=title), element("small", text=detail), css=css, scope="col")


def _row(run: RunRecord, fastest: float, on_front: bool, selected: bool, is_baseline: bool = False) -> str:
    css = " ".join(name for name, on in (("baseline", is_baseline), ("selected", selected)) if on)
    name = _name_cell(run, on_front, is_baseline)
    if run.error is not None:
        reason = element("td", text=f"not run: {_one_line(run.error, 110)}", css="failed", colspan="5", title=run.error)
        return element("tr", name, reason, css=css)
    cells = [
        _rate_cell(run, fastest, is_baseline),
        element("td", text=speedup_text(run.speedup), css="number"),
        element("td", text=_peak(run), css="number"),
        element("td", text=format_bytes(run.boxed_bytes_per_step), css="number"),
        _equal_cell(run, is_baseline),
    ]
    return element("tr", name, *cells, css=css)


def _name_cell(run: RunRecord, on_front: bool, is_baseline: bool) -> str:
    dot = element("i", css="front", title="no other run is faster with less memory") if on_front else ""
    chip = element("span", text="baseline", css="chip") if is_baseline else ""
    detail = "no parallelism" if is_baseline else run.strategy
    return element(
        "td", dot, element("b", text=run.name), chip, element("small", text=detail, title=detail), css="name"
    )


def _rate_cell(run: RunRecord, fastest: float, is_baseline: bool) -> str:
    width = max(round(_BAR_WIDTH * run.samples_per_s / fastest), 1)
    bar = element("i", css="bar plain" if is_baseline else "bar", style=f"width:{width}px")
    return element("td", element("span", text=grouped(run.samples_per_s), css="value"), bar, css="rate")


def _equal_cell(run: RunRecord, is_baseline: bool) -> str:
    if is_baseline:
        return element("td", text="baseline", css="number muted")
    css = {True: "equal", False: "unequal", None: "muted"}[run.equal]
    return element("td", text=equal_text(run), css=f"number {css}")


def _peak(run: RunRecord) -> str:
    return format_bytes(max(run.peak_memory_bytes)) if run.peak_memory_bytes else DASH


def _footnote() -> str:
    return element(
        "p",
        element("i", css="front"),
        element("span", text="no other run is faster with less memory"),
        element("span", text=f"{_TICK} losses as on one device, {_CROSS} not", css="right"),
        css="note",
    )


def _one_line(text: str, width: int) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= width else line[: width - 1] + "\u2026"
