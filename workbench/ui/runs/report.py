"""One self-contained HTML page about a comparison: the runs, whether they equal one device, table and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from workbench.core.metrics import RunRecord
from workbench.core.seeds import groups, over_seeds
from workbench.core.segments import by_strategy
from workbench.session.comparison.compare import CompareResult
from workbench.session.comparison.machine import versions_text
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.number_text import NOT_CHECKED, from_to, short_difference
from workbench.ui.runs.comparable import task_of
from workbench.ui.runs.render_table import runs_html
from workbench.units import format_count


def report_html(result: CompareResult, title: str = "Comparison of strategies") -> str:
    """The whole page. It has no scripts and fetches nothing, so it can be mailed or put on any web server."""
    state, sentence = verdict(result.runs)
    body = element(
        "main",
        element("h1", text=title),
        element("p", text=sentence, css=f"verdict {state}"),
        _facts(result),
        element("div", runs_html(by_strategy(result.runs), result.baselines), css="frame"),
        element("footer", text="1 MB = 1 000 000 bytes. Peak: memory of a rank beyond that before the model."),
    )
    style = f"<style>{style_sheet('body')}{asset('report.css')}</style>"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = meta + element("title", text=title) + style
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n</body></html>\n'


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
    worst = max(runs, key=lambda run: (run.loss_difference or 0.0) / run.verdict.tolerance)
    largest, tolerance = map(short_difference, (worst.loss_difference or 0.0, worst.verdict.tolerance))
    sentence = (
        f"rounding grows in {', '.join(grown)}: see the table"
        if grown
        else f"largest loss difference {largest}, tolerance {tolerance}"
    )
    num_strategies = len(groups(runs))
    count = f" in {len(runs)} runs" if len(runs) > num_strategies else ""
    sentence = f"All {num_strategies} strategies equal one device{count} ({sentence})"
    notes = "; ".join(f"{run.name}: {run.verdict.note}" for run in runs if run.verdict.note)
    return ("warning", f"{sentence}, but {notes}") if notes else ("equal", sentence)


def _facts(result: CompareResult) -> str:
    """What the runs have in common, and where they differ, what each has. It is read from their records."""
    runs = result.runs or result.baselines
    every = [run.settings for run in runs if run.settings] or [result.settings]
    tables = over_seeds(runs)
    seeds = sorted({seed for each in every if (seed := each.get("seed")) is not None})
    means = "; numbers are means \u00b1 standard deviations" if len(tables) < len(runs) else ""
    facts = {
        "Model": _listed(map(_model_text, every)),
        "What": _what(runs, tables) if runs else "no runs",
        "Optimizer": _listed(each.get("optimizer", "") for each in every),
        "Seeds": f"{', '.join(map(str, seeds))}{means}" if len(seeds) > 1 else "",
        "Ranks": ", ".join(map(str, sorted({run.num_ranks for run in result.runs}))) or "none",
        "Machine": _listed(each.get("machine", "") for each in every),
        "Versions": _listed(map(versions_text, every)),
        "Date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }
    known = {name: value for name, value in facts.items() if value}
    return element("dl", *(element("dt", text=name) + element("dd", text=value) for name, value in known.items()))


def _what(runs: Sequence[RunRecord], tables: Sequence[RunRecord]) -> str:
    """How many strategies, steps and samples, and whether all began alike; ``tables`` has one record per strategy."""
    begun = [run for run in tables if run.losses]
    seeds = {tuple(sorted(run.settings.get("seeds") or [run.settings.get("seed")])) for run in begun}
    steps = from_to(sorted(len(run.losses) for run in begun))
    parts = [
        f"{len(tables)} {'strategy' if len(tables) == 1 else 'strategies'}",
        f"{steps} {'step' if steps == '1' else 'steps'} each" if begun else "",
        f"batch {from_to(sorted(run.batch_size for run in runs))}",
        "from the same weights in the same data order" if len(seeds) == len(set(map(task_of, begun))) == 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _listed(texts: Iterable[str]) -> str:
    """The different texts, in their order."""
    return "; ".join(filter(None, dict.fromkeys(texts)))


def _model_text(settings: Mapping[str, Any]) -> str:
    if "model" not in settings:
        return ""
    return f"{settings['model']}, {format_count(settings.get('num_parameters', 0))} parameters"
