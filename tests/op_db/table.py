"""The coverage table ``docs/functions.md``, written from the results of a sweep."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tests.op_db.samples import EXEMPT

KINDS = (
    ("Networks: `torch.nn.functional`", "nn.functional."),
    ("Linear algebra: `torch.linalg`", "linalg."),
    ("Fourier transforms: `torch.fft`", "fft."),
    ("Special functions: `torch.special`", "special."),
    ("Masked reductions: `torch.masked`", "masked."),
    ("Signal windows: `torch.signal`", "signal."),
    ("Everything else in `torch` and `Tensor`", ""),
)
INTRODUCTION = """\
# Torch functions on global tensors

Every entry of torch's own operator database (op_db) runs on random layouts, with its gradient if it has one, and is
compared with one device. `python -m tests.op_db.sweep --table` writes this page.

* **By rule**: most calls on split or partial operands ran on the shards. A rule boxes an operand that needs another
  layout. If its only split dim has to be whole, that is an all-gather.
* **Falls back**: most calls gathered their operands, ran on whole tensors and returned a broadcast result, with a
  `FallbackWarning` that names the function. The numbers are right; memory and traffic are those of whole tensors.

A torch function that is written in Python is decomposed: the functions inside it have the rules. A suffix such as
`.reflect` is op_db's name for a variant. Rules lie in `workbench/tensors/rules/`, by family.
"""


def write(results: Sequence[Any]) -> str:
    """The page for these results."""
    counts = {by: sum(result.by == by for result in results) for by in ("rule", "fallback", "no tensors", "exempt")}
    total = len(results)
    share = f"{counts['fallback'] / total:.0%}"
    summary = (
        f"Of {total} entries, {counts['rule']} run by rule and {counts['fallback']} ({share}) fall back; "
        f"{counts['no tensors']} take no tensor to split, and {counts['exempt']} are exempt."
    )
    lines = [INTRODUCTION, summary, ""]
    taken: set[str] = set()
    for title, prefix in KINDS:
        of_kind = [r for r in results if r.name.startswith(prefix) and r.name not in taken]
        taken |= {result.name for result in of_kind}
        lines += [f"## {title}", ""]
        for by, heading in (
            ("rule", "By rule"),
            ("fallback", "Falls back"),
            ("no tensors", "Takes no tensor to split"),
        ):
            names = sorted(r.name.removeprefix(prefix) for r in of_kind if r.by == by)
            if names:
                lines += [_paragraph(f"**{heading} ({len(names)}):** ", names), ""]
    lines += ["## Exempt", ""]
    by_reason: dict[str, list[str]] = {}
    for name, reason in EXEMPT.items():
        by_reason.setdefault(reason, []).append(name)
    lines += [_paragraph("* ", names, f": {reason}.") for reason, names in by_reason.items()]
    return "\n".join(lines) + "\n"


def _paragraph(start: str, names: Sequence[str], end: str = "") -> str:
    text = start + ", ".join(f"`{name}`" for name in names) + end
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
