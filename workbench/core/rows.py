"""The rows of a strategy, their text, and the layers that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from workbench.core.options import PRESETS
from workbench.core.suggest import suggest


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters: its path, class name, the parameters' shapes by short name, and their number.

    Attributes:
        tied_to: the first layer that has the same tensor as its weight, if there is one.
        calls: the positions in a forward of its first call and of its last one on what other layers have made; None
            where no forward was seen.
        groups: of a convolution in groups, how many.
        itemsize: bytes of an element of its parameters.
        experts: number of experts, if its parameters have one row for each, as dim 0, or if it is in one of a list of
            experts; else 0.
        expert: the number of its expert in such a list; None for all experts in one.
        chosen: number of experts that a token chooses; 0 if unknown.
    """

    name: str
    kind: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_parameters: int = 0
    tied_to: str | None = None
    calls: tuple[int, int] | None = None
    groups: int = 1
    itemsize: int = 4
    experts: int = 0
    expert: int | None = None
    chosen: int = 0


def in_order_of_calls(layers: Sequence[Layer]) -> list[Layer]:
    """Layers as a forward calls them; as the model lists them, where no forward was seen.

    >>> head, body = Layer("head", "Linear", calls=(2, 2)), Layer("body", "Linear", calls=(1, 1))
    >>> [layer.name for layer in in_order_of_calls([head, body])]
    ['body', 'head']
    """
    if any(layer.calls is None for layer in layers):
        return list(layers)
    return sorted(layers, key=lambda layer: layer.calls or (0, 0))


@dataclass(frozen=True, slots=True)
class Row:
    """One row: which layers, their choice, how a model-parallel weight is split, and on which stage.

    ``ranks`` are those over which a row ``expert`` splits experts; None: the model axis, or else the data axis.
    """

    pattern: str
    parallel: str = "data"
    split: str | None = None
    stage: int | None = None
    ranks: int | None = None

    def __str__(self) -> str:
        how = self.split if self.ranks is None else self.ranks
        choice = self.parallel + (f":{how}" if how is not None else "")
        return f"{self.pattern}: {choice}" + ("" if self.stage is None else f"@{self.stage}")

    def matches(self, name: str) -> bool:
        """Whether the pattern covers the layer ``name`` or a module above it."""
        return _pattern(self.pattern).fullmatch(name) is not None


@lru_cache(maxsize=1024)
def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"(\*|\[\d+-\d+\])", text)
    regex = ""
    for part in parts:
        bounds = re.fullmatch(r"\[(\d+)-(\d+)\]", part)
        if bounds:
            regex += "(?:" + "|".join(map(str, range(int(bounds[1]), int(bounds[2]) + 1))) + ")"
        else:
            regex += "[^.]*" if part == "*" else re.escape(part)
    return re.compile(regex + r"(?:\..*)?")


_CHOICE = re.compile(r"(data|model(?::column|:row)?|expert(?::\d+)?)(?:@(\d+))?")
_FORMS = "data | model | model:column | model:row | expert | expert:N"


def parse_rows(clauses: Iterable[str], mistakes: list[str], options: str) -> tuple[Row, ...]:
    """The rows of a strategy; ``mistakes`` gets one text for each clause that is no row.

    Args:
        clauses: ``pattern: choice``, or a choice alone, which is for all layers.
        mistakes: a list to add to.
        options: the text behind the rows, for suggestions.

    >>> parse_rows(["*: data", "blocks.*.experts: expert:4@1"], [], "")[1].ranks
    4
    """
    rows = []
    written = [clause for part in clauses if (clause := part.strip())]
    for clause in written:
        pattern, colon, choice = (part.strip() for part in clause.partition(":"))
        if _CHOICE.fullmatch(clause) and "@" not in clause:
            pattern, colon, choice = "*", ":", clause
        match = _CHOICE.fullmatch(choice.replace(" ", ""))
        if not colon or not pattern or match is None:
            hint = _hint(clause, options if len(written) == 1 else None)
            mistakes.append(f"row {clause!r} is not 'pattern: {_FORMS} [@stage]'{hint}")
            continue
        parallel, _, how = match[1].partition(":")
        stage = None if match[2] is None else int(match[2])
        if parallel == "expert":
            rows.append(Row(pattern, parallel, None, stage, int(how) if how else None))
        else:
            rows.append(Row(pattern, parallel, how or None, stage))
    if not rows and not mistakes:
        mistakes.append("no row; write e.g. '*: data'")
    return tuple(rows)


def _hint(clause: str, options: str | None) -> str:
    """A suggestion for a wrong row. ``options`` are those of a single row, else None."""
    pattern, colon, choice = (part.strip() for part in clause.partition(":"))
    behind = f" | {options}" if options and not colon else ""
    if not colon and clause in PRESETS:
        if options is None:
            return f"; {clause!r} is a preset, which is a whole strategy: no other row stands beside it"
        return f"; {clause!r} is a preset, which is made for a model: wb.parallelize(model, {clause + behind!r})"
    kind, rest = re.fullmatch(r"(\w*)(.*)", choice if colon else clause, re.DOTALL).groups()  # type: ignore[union-attr]
    meant = suggest(kind, PRESETS if not colon and options is not None else ("data", "model", "expert"))
    if not meant and not colon and options is not None:
        return f"; presets are {', '.join(PRESETS)}"
    if not meant or kind in meant:
        return ""
    row = f"{pattern}: {meant[0]}{rest}" if colon else meant[0] + rest + behind
    return f"; did you mean {row!r}?"
