"""The comparison table of runs: as HTML for pages and notebooks, as text of 80 columns for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from workbench.core.metrics import RunRecord
from workbench.core.seeds import groups, over_seeds
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.number_text import DASH, TIMES, percent
from workbench.ui.runs.comparable import timed_beside
from workbench.ui.runs.curve_pictures import curve_pictures
from workbench.ui.runs.detail_pictures import layers_picture, memory_picture, prediction_picture
from workbench.ui.runs.scatter_picture import scatter_picture
from workbench.ui.runs.table_rows import (
    COLUMNS,
    CROSS,
    TICK,
    Column,
    Row,
    equal_text,
    key_of,
    one_line,
    prediction_errors,
    run_rows,
    sorted_rows,
    with_own_keys,
)
from workbench.units import format_bytes, format_number

WIDTHS = (152, 66, 72, 68, 54, 60, 70, 54, 80, 70, 98)
"""Pixels of the columns behind the first, which has the names and all the width that is left."""
_BAR_WIDTH = 92
_NAME_CHARS, _EQUAL_CHARS = 18, 19
"""Of the first and the last column in a terminal."""


def by_throughput(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Fastest first; runs without measurements last, in their order."""
    return sorted(runs, key=lambda run: (run.error is not None, -run.samples_per_s))


def runs_html(runs: Sequence[RunRecord], truths: Sequence[RunRecord] = ()) -> str:
    """Table and pictures as one HTML fragment that brings its own style and reads in both themes, fastest run first.

    The one-device runs ``truths`` are the last row; a run that failed keeps its row and says why. Runs of several seeds
    are one row with error bars.
    """
    found, references = groups(with_own_keys(runs, map(key_of, truths))), groups(truths)
    means = [over_seeds(group)[0] for group in (*found, *references)]
    rows = run_rows(means, truths=[key_of(group[0]) for group in references])
    listed = [*sorted_rows([row for row in rows if not row.is_truth]), *(row for row in rows if row.is_truth)]
    below = below_html(listed, means, members={key_of(group[0]): group for group in (*found, *references)})
    return element("div", table_style(), comparison_html(listed, below=below), css="wb-comparison")


def comparison_html(
    rows: Sequence[Row],
    sort: str = "samples_per_s",
    ascending: bool = False,
    selected: str = "",
    limit_bytes: float | None = None,
    below: str = "",
) -> str:
    """Table and scatter side by side, ``below`` under them. ``sort`` and ``ascending`` say how the rows are sorted."""
    table = element("div", rows_table_html(rows, sort, ascending, selected), css="wb-table-box")
    both = element("div", table, scatter_html(rows, selected, limit_bytes), css="wb-comparison-grid")
    return element("div", both, below, _footnote(rows), css="wb-comparison-page")


def below_html(
    rows: Sequence[Row],
    runs: Sequence[RunRecord],
    selected: str = "",
    members: Mapping[str, Sequence[RunRecord]] = MappingProxyType({}),
) -> str:
    """Curves by step, memory per rank, predictions against measurements, and time by layer, of the rows' runs.

    Args:
        members: by the key of a row, its runs with their steps.
    """
    by_key = {key_of(run): run for run in runs}
    shown = [by_key[row.key] for row in rows if row.key in by_key]
    names = {row.key: row.name for row in rows}
    of_runs = (picture(shown, names, selected) for picture in (memory_picture, layers_picture))
    parts = *curve_pictures(rows, members, selected), prediction_picture(rows, selected), *of_runs
    return element("div", *parts, css="wb-comparison-below") if any(parts) else ""


def table_style() -> str:
    """The table's ``<style>`` element."""
    return f"<style>{style_sheet('.wb-comparison')}{asset('table.css')}</style>"


def rows_table_html(
    rows: Sequence[Row], sort: str = "samples_per_s", ascending: bool = False, selected: str = ""
) -> str:
    """The table alone, rows in their order; headers carry ``data-sort``, rows ``data-key``."""
    rates = [row.values[key] or 0.0 for row in rows for key in ("samples_per_s", "predicted_samples_per_s")]
    highest = [(row.values["samples_per_s"] or 0.0) + row.spread.get("samples_per_s", 0.0) for row in rows]
    fastest = max([*rates, *highest], default=0.0) or 1.0
    columns = element("colgroup", element("col"), *(element("col", style=f"width:{width}px") for width in WIDTHS))
    is_predicted = any(row.values["predicted_samples_per_s"] for row in rows)
    head = element("thead", element("tr", *(_header(column, sort, ascending, is_predicted) for column in COLUMNS)))
    body = element("tbody", *(_row(row, fastest, row.key == selected) for row in rows))
    return element("table", columns.replace("></col>", "/>"), head, body, css="wb-table", role="grid")


def comparison_table_text(runs: Sequence[RunRecord], baseline: RunRecord | None = None) -> str:
    """The table in at most 80 columns of plain text. A name or a note that is too long has a line of its own."""
    lines = [
        f"{'strategy':<{_NAME_CHARS}}{'samples/s':>10}{'speed-up':>10}{'peak/rank':>11}{'boxed/step':>12}{'equal':>{_EQUAL_CHARS}}"
    ]
    for run in [*by_throughput(runs), *([baseline] if baseline else [])]:
        if run.error is not None:
            lines.append(f"{_named(run)}{one_line(run.error, 80 - _NAME_CHARS)}")
            continue
        ratio = run.speedup_over(timed_beside(run, [baseline] if baseline else []))
        speedup = f"{ratio:.2f}x" if ratio is not None else "-"
        difference, note = "baseline" if run is baseline else equal_text(run).replace(DASH, "-"), ""
        if len(difference) > _EQUAL_CHARS - 1:
            difference, _, note = difference.partition(", ")
        lines.append(
            f"{_named(run)}{format_number(run.samples_per_s):>10}{speedup:>10}{_peak(run):>11}"
            f"{format_bytes(run.boxed_bytes_per_step):>12}{difference:>{_EQUAL_CHARS}}"
        )
        lines += [f"{note:>80}"] if note else []
        lines += [_spread_line(run, baseline)] if run.spread else []
    return "\n".join(lines)


def _spread_line(run: RunRecord, baseline: RunRecord | None) -> str:
    """The standard deviations below the means, and how the loss ended."""
    truths = [baseline] if baseline is not None else []
    row, *_ = run_rows([run, *truths], truths=list(map(key_of, truths)))
    rate, speedup = (row.spread_text(key).replace(TIMES, "x") for key in ("samples_per_s", "speedup"))
    loss = f"loss {row.texts['final_loss']} {row.spread_text('final_loss')}, " if "final_loss" in row.spread else ""
    return f"{'':{_NAME_CHARS}}{rate:>10}{speedup:>10}{f'{loss}{len(row.seeds)} seeds':>42}"


def _named(run: RunRecord) -> str:
    return f"{run.name:<{_NAME_CHARS}}" if len(run.name) < _NAME_CHARS else f"{run.name}\n{'':{_NAME_CHARS}}"


def _header(column: Column, sort: str, ascending: bool, is_predicted: bool) -> str:
    on = column.key == sort
    arrow = (" \u25b2" if ascending else " \u25bc") if on else ""
    css = " ".join(
        name
        for name, wanted in (("name", column.key == "name"), ("rate", column.key == "samples_per_s"), ("sorted", on))
        if wanted
    )
    order = {"aria-sort": "ascending" if ascending else "descending"} if on else {}
    button = element("button", text=f"{column.title}{arrow}", type="button", title=f"sort by {column.title}")
    detail = column.detail if is_predicted or column.key != "samples_per_s" else ""  # there is no tick to explain
    return element("th", button, element("small", text=detail), css=css, scope="col", data_sort=column.key, **order)


def _row(row: Row, fastest: float, selected: bool) -> str:
    states = (("baseline", row.is_baseline or row.is_truth), ("selected", selected), ("not-run", bool(row.failure)))
    css = " ".join(name for name, on in states if on)
    cells = [_number_cell(row, column.key) for column in COLUMNS[2:-1]]
    return element(
        "tr",
        _name_cell(row),
        _rate_cell(row, fastest),
        *cells,
        _equal_cell(row),
        css=css,
        data_key=row.key,
        tabindex="0",
        aria_selected="true" if selected else "false",
    )


def _number_cell(row: Row, key: str) -> str:
    """The number, and below it its spread, and the relative difference to the chosen baseline's."""
    steps = row.steps if key == "rank_seconds" else ""  # of few steps it is no number to compare
    below = filter(None, (row.spread_text(key), row.changes.get(key), steps))
    return element("td", element("span", text=row.texts[key]), *(element("small", text=t) for t in below), css="number")


def _name_cell(row: Row) -> str:
    dot = element("i", css="front", title="no comparable run is faster with less memory") if row.on_front else ""
    chip = element("span", text="baseline", css="chip") if row.is_baseline else ""
    if row.seeds:
        seeds = f"mean \u00b1 standard deviation over the seeds {', '.join(map(str, row.seeds))}"
        chip += element("span", text=f"{len(row.seeds)} seeds", css="chip", title=seeds)
    detail, css = (f"not run: {row.failure}", "failed") if row.failure else (row.detail, "")
    tip = f"{detail}{f', {row.started}' if row.started else ''}"
    if detail and detail in row.name:  # the name of a strategy may be its text, which then takes both lines
        return element("td", dot, element("b", text=row.name, title=tip, css="text"), chip, css="name")
    return element(
        "td", dot, element("b", text=row.name), chip, element("small", text=detail, title=tip, css=css), css="name"
    )


def _rate_cell(row: Row, fastest: float) -> str:
    rate, predicted = row.values["samples_per_s"], row.values["predicted_samples_per_s"]
    parts = [element("span", text=row.texts["samples_per_s"], css="value")]
    if rate:
        width = max(round(_BAR_WIDTH * rate / fastest), 1)
        css = "bar plain" if row.is_truth or row.is_baseline else "bar"
        parts.append(element("i", _error_bar(row, fastest), css=css, style=f"width:{width}px"))
    if predicted:
        at = round(_BAR_WIDTH * predicted / fastest)
        parts.append(element("em", style=f"left:{58 + at}px", title=f"predicted: {predicted:.4g} samples/s"))
    if row.spread:
        parts.append(element("small", text=row.spread_text("samples_per_s")))
    return element("td", *parts, css="rate")


def _error_bar(row: Row, fastest: float) -> str:
    """From a standard deviation below the mean throughput to one above it."""
    rate, spread = row.values["samples_per_s"] or 0.0, row.spread.get("samples_per_s")
    if spread is None:
        return ""
    start, end = (_BAR_WIDTH * max(rate + side, 0.0) / fastest for side in (-spread, spread))
    return element("u", style=f"left:{start:.1f}px;width:{max(end - start, 1):.1f}px")


def _equal_cell(row: Row) -> str:
    marks = {True: "equal", False: "unequal", None: "muted"}
    css = "muted" if row.is_truth else "noted" if row.note and row.equal is not False else marks[row.equal]
    note = element("small", text=row.note) if row.note else ""
    parts = {"data_part": row.key} if row.equal is False else {}  # a click finds where
    mark = element("span", text=row.texts["loss_difference"], **parts)
    return element("td", mark, note, css=f"number {css}", title=row.verdict)


def _peak(run: RunRecord) -> str:
    return format_bytes(max(run.peak_memory_bytes)) if run.peak_memory_bytes else DASH


def _footnote(rows: Sequence[Row]) -> str:
    """The meaning of dot, tick and cross, and the errors of predictions."""
    errors = prediction_errors(rows)
    description = f"predictions: median error {percent(errors[0])}, largest {percent(errors[1])}" if errors else ""
    return element(
        "p",
        element("i", css="front"),
        element("span", text="on the Pareto line: no comparable run is faster with less memory"),
        element("span", text=f"{TICK} trains as one device does but for rounding, {CROSS} does not (first steps)"),
        element("span", text=description, css="right"),
        css="note",
    )


def scatter_html(rows: Sequence[Row], selected: str = "", limit_bytes: float | None = None) -> str:
    """Memory against throughput: title, picture and legend."""
    keys = (("full", "Pareto"), ("hollow", "others"), ("square", "baseline"))
    spans = [element("span", element("i", css=css), element("span", text=name)) for css, name in keys]
    return element(
        "div",
        element("div", text="Memory against throughput", css="wb-scatter-title"),
        scatter_picture(rows, selected, limit_bytes),
        element("div", *spans, css="wb-scatter-legend"),
        css="wb-scatter-box",
    )
