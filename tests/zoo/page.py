"""The page of models, made from the lines of a sweep."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.zoo.judge import STRATEGIES
from tests.zoo.of_transformers import MOST_USED

MARKS = {"equal": "✓", "refused": "refused", "unclear": "error", "wrong": "**wrong**", "not run": "–"}

HEAD = """\
# Models that were tried

These models were not prepared for the workbench: each is its library's own code, with random weights and a small
configuration. Each trains three steps in 64 bits, on one device in plain torch and on ranks under five strategies. ✓
means that the losses, all gradients and all weights are equal to those of one device, within {tolerance} of the largest
value (a model that mixes precisions trains in 32 bits). A pipeline is compared with one device that takes the same
micro-batches.

{counts}

`make zoo` makes this page again. It installs the libraries that it needs. Made on {date}. Versions: {versions}.

| strategy | what `wb.parallelize` was given | ranks | equal | refused | error | wrong |
| --- | --- | --- | --- | --- | --- | --- |
{strategies}

– means that nothing was compared: the model's own rounding grows too far in these steps, or the sweep ended before it.
"gathered" names functions without a rule that gathered their operands: the numbers are right, the step is slower.
{most_used}
"""


def write_page(rows: Iterable[dict[str, Any]], page: Path, versions: str, tolerance: float) -> None:
    """Write the page; of several rows of one model the last counts, for each strategy."""
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["library"], row["name"])
        before = latest.get(key, {})
        latest[key] = {**({} if "plain" in before else before), **row}
    ran = [row for row in latest.values() if "plain" not in row]
    by_strategy = {name: Counter(row[name]["kind"] for row in ran if name in row) for name in STRATEGIES}
    total = sum(by_strategy.values(), Counter())
    num_cases = sum(total.values()) - total["not run"]
    types = {_type_of(row) for row in ran if row["library"] == "transformers"}
    counts = (
        f"**{total['equal']} of {num_cases} cases are equal ({total['equal'] / max(num_cases, 1):.1%}), "
        f"{total['wrong']} wrong.** "
        f"{total['refused']} are refused with an error that says why, {total['unclear']} end in another error. "
        f"They are {len(ran)} models, {len(types)} types of transformers among them."
    )
    lines = [
        f"| {name} | `{_in_cell(given)}` | {ranks} | {c['equal']} | {c['refused']} | {c['unclear']} | {c['wrong']} |"
        for name, (given, ranks, _) in STRATEGIES.items()
        for c in [by_strategy[name]]
    ]
    parts = [
        HEAD.format(
            tolerance=f"{tolerance:g}",
            counts=counts,
            date=datetime.now(UTC).date(),
            versions=versions,
            strategies="\n".join(lines),
            most_used=_of_most_used(ran),
        )
    ]
    parts += [_of_library(library, ran) for library in sorted({row["library"] for row in ran})]
    parts += [_others([row for row in latest.values() if "plain" in row])]
    page.write_text("\n".join(parts))


def _of_most_used(rows: list[dict[str, Any]]) -> str:
    """Which of the most used types gather."""
    own = [row for row in rows if row["library"] == "transformers" and _type_of(row) in MOST_USED]
    gather = sorted({_type_of(row) for row in own if any(row[name]["gathered"] for name in STRATEGIES if name in row)})
    told = f"{', '.join(gather)} of them gather" if gather else "none of them gathers"
    return f"Of the {len(MOST_USED)} types that people use most, {told}: {', '.join(MOST_USED)}."


def _type_of(row: dict[str, Any]) -> str:
    return row["name"].partition(":")[0]


def _of_library(library: str, rows: list[dict[str, Any]]) -> str:
    own = sorted((row for row in rows if row["library"] == library), key=lambda row: row["name"])
    lines = [
        f"## {library}",
        "",
        f"| model | {' | '.join(STRATEGIES)} | gathered |",
        "| --- " * (len(STRATEGIES) + 2) + "|",
    ]
    notes = []
    for row in own:
        cells = [MARKS[row[name]["kind"]] if name in row else "–" for name in STRATEGIES]
        gathered = sorted({f for name in STRATEGIES if name in row for f in row[name]["gathered"]})
        lines.append(
            f"| {row['name'].replace(':', ': ')} | {' | '.join(cells)} | {', '.join(f'`{f}`' for f in gathered)} |"
        )
        notes += [
            _note(row, name) for name in STRATEGIES if row.get(name, {}).get("kind") in ("refused", "unclear", "wrong")
        ]
    if notes:
        lines += ["", f"What was refused or failed in {library}:", "", *notes]
    return "\n".join([*lines, ""])


def _note(row: dict[str, Any], name: str) -> str:
    text = re.sub(r"[`|<>*_]", " ", row[name]["text"])[:300]
    return f"* {row['name'].replace(':', ': ')}, {name}: {text}"


def _others(rows: list[dict[str, Any]]) -> str:
    names = ", ".join(sorted(map(_type_of, rows)))
    return (
        "## Not tried\n\nOf these types no small configuration or batch was made that trains on one device, or a "
        f"library is missing that they need ({len(rows)}): {names}.\n"
    )


def _in_cell(text: str) -> str:
    """A bar would end the cell."""
    return text.replace("|", "\\|")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
