"""One self-contained HTML page about a comparison: the runs, whether they equal one device, table and pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from workbench.core.metrics import TOLERANCE, RunRecord
from workbench.core.seeds import groups, over_seeds, without_seed
from workbench.core.segments import by_strategy
from workbench.session.comparison.compare import CompareResult
from workbench.session.comparison.machine import machine_text, versions_text
from workbench.theme import DARK, LIGHT, Palette, style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.number_text import NOT_CHECKED, short_difference
from workbench.ui.run_figures import (
    comparison_figure,
    loss_difference_figure,
    loss_figure,
    memory_figure,
    throughput_figure,
)
from workbench.ui.runs.render_table import comparison_table_html, scatter_html
from workbench.ui.runs.table_rows import key_of, run_rows, with_own_keys
from workbench.ui.short_names import short_names
from workbench.units import format_count


def write_report(
    result: CompareResult, path: str | os.PathLike[str], *, title: str = "Comparison of strategies"
) -> Path:
    """Write the page for ``result`` to ``path`` (folders are made) and return the path.

    The page holds all it needs (plotly.js included, some 5 MB), so it can be mailed or put on any web server.

    >>> write_report(wb.compare(...), "out/report.html")            # doctest: +SKIP
    PosixPath('out/report.html')
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report_html(result, title), encoding="utf-8")
    return target


def report_html(result: CompareResult, title: str = "Comparison of strategies") -> str:
    """The whole page as a string."""
    state, sentence = verdict(result.runs)
    figures = _figures(result)
    boxes = [element("div", element("div", id=name), css="frame") for name in figures]
    truths = over_seeds(result.baselines)
    parts = with_own_keys(over_seeds(by_strategy(result.runs)), map(key_of, truths))
    rows = run_rows([*parts, *truths], truth=[key_of(truth) for truth in truths])
    boxes.insert(1, element("div", scatter_html(rows), css="frame wb-comparison"))
    body = element(
        "main",
        element("h1", text=title),
        element("p", text=sentence, css=f"verdict {state}"),
        _facts(result),
        element(
            "section",
            element("h2", text="Runs"),
            comparison_table_html(parts, next(iter(truths), None)),
            css="frame",
        ),
        element("section", *boxes, css="figures"),
        element("footer", text="Bytes are decimal: 1 MB = 1 000 000 bytes. Peak: resident size above the warm engine."),
    )
    style = f"<style>{style_sheet('body')}{asset('report.css')}</style>"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = meta + element("title", text=title) + style
    scripts = f"<script>{get_plotlyjs()}</script>{_figures_as_json(figures)}<script>{asset('report.js')}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n{scripts}</body></html>\n'


def runs_report_html(
    runs: Sequence[RunRecord], truths: Sequence[RunRecord] = (), title: str = "Comparison of strategies"
) -> str:
    """The page for runs that need not be of one comparison, with the one-device runs if there are some."""
    settings = next((run.settings for run in runs if run.settings), {})
    return report_html(CompareResult(next(iter(truths), None), list(runs), settings, list(truths[1:])), title)


def verdict(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """``("equal" | "warning" | "unequal" | "unknown", sentence)``: whether all runs equal one device."""
    failed = [run.name for run in runs if run.error is not None]
    unequal = [
        f"{run.name} ({run.verdict.text})" if run.verdict.text else run.name
        for run in runs
        if run.error is None and run.equal is False
    ]
    if unequal:
        return "unequal", f"Not equal to one device: {'; '.join(unequal)}"
    if failed or not runs:
        return "unknown", f"Not run: {', '.join(failed)}" if failed else "No runs"
    if unknown := [f"{run.name} ({run.verdict.text or NOT_CHECKED})" for run in runs if run.equal is None]:
        return "unknown", f"No verdict: {'; '.join(unknown)}"
    grown = [run.name for run in runs if run.verdict.grown]
    largest = max((run.loss_difference or 0.0 for run in runs), default=0.0)
    sentence = (
        f"rounding grows in {', '.join(grown)}: see the table"
        if grown
        else f"largest loss difference {short_difference(largest)}, limit {short_difference(TOLERANCE)}"
    )
    num_strategies = len(groups(runs))
    count = f" in {len(runs)} runs" if len(runs) > num_strategies else ""
    sentence = f"All {num_strategies} strategies equal one device{count} ({sentence})"
    notes = "; ".join(f"{run.name}: {run.verdict.note}" for run in runs if run.verdict.note)
    return ("warning", f"{sentence}, but {notes}") if notes else ("equal", sentence)


def _figures(result: CompareResult) -> dict[str, Callable[[Palette], go.Figure]]:
    runs, parts = _named_by_group(result.runs), _shortly_named(over_seeds(by_strategy(result.runs)))
    truths, truth = result.baselines, next(iter(over_seeds(result.baselines)), None)
    difference = (lambda colours: loss_difference_figure(runs, truths, colours=colours)) if truths else None
    return {
        "throughput": lambda colours: comparison_figure(parts, truth, colours),
        "loss": lambda colours: loss_figure(runs, truths, colours),
        **({"difference": difference} if difference is not None else {}),
        "throughput-by-step": lambda colours: throughput_figure(runs, colours),
        "memory": lambda colours: memory_figure(parts, colours),
    }


def _shortly_named(runs: Sequence[RunRecord]) -> list[RunRecord]:
    names = short_names([run.name for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _named_by_group(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs; those that differ in their seed only have one short name."""
    found = groups(runs)
    names = short_names([without_seed(group[0]) if len(group) > 1 else group[0].name for group in found])
    return [replace(run, name=name) for name, group in zip(names, found, strict=True) for run in group]


def _figures_as_json(figures: dict[str, Callable[[Palette], go.Figure]]) -> str:
    """Both themes of every figure as a JSON block that the page's script draws from."""
    themes = (
        f'"{name}": {{"light": {draw(LIGHT).to_json()}, "dark": {draw(DARK).to_json()}}}'
        for name, draw in figures.items()
    )
    text = ("{" + ", ".join(themes) + "}").replace("</", "<\\/")
    return f'<script type="application/json" id="figures">{text}</script>'


def _facts(result: CompareResult) -> str:
    first = next(iter((*result.runs, *result.baselines)), None)
    num_ranks = sorted({run.num_ranks for run in result.runs})
    seeds = sorted({run.settings["seed"] for run in result.runs if "seed" in run.settings})
    settings = result.settings
    facts = {
        "Model": _model_text(settings),
        "What": f"{len(over_seeds(result.runs))} strategies, {len(first.losses)} steps each, batch {first.batch_size}, "
        "from the same weights in the same data order"
        if first is not None
        else "no runs",
        "Optimizer": settings.get("optimizer", ""),
        "Seeds": f"{', '.join(map(str, seeds))}; numbers are means \u00b1 standard deviations"
        if len(seeds) > 1
        else "",
        "Ranks": ", ".join(map(str, num_ranks)) or "none",
        "Machine": machine_text(),
        "Versions": versions_text(),
        "Date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }
    known = {name: value for name, value in facts.items() if value}
    return element("dl", *(element("dt", text=name) + element("dd", text=value) for name, value in known.items()))


def _model_text(settings: dict[str, Any]) -> str:
    if "model" not in settings:
        return ""
    return f"{settings['model']}, {format_count(settings.get('num_parameters', 0))} parameters"
