"""The rows of a strategy, their text, and the layers that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from urllib.parse import quote, unquote

from workbench.core.options import PRESETS
from workbench.core.suggest import elsewhere, suggest


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters: its path, class name, the parameters' shapes by short name, and their number.

    Attributes:
        tied_to: the first layer that has the same tensor as its weight, if there is one.
        calls: the positions in a forward of its first call and of its last one on what other layers have made; None
            where no forward was seen.
        groups: of a convolution in groups, how many.
        itemsize: bytes of an element of its parameters.
        itemsizes: by short name, those of parameters with another itemsize.
        frozen: short names of parameters without a gradient, which no optimizer changes.
        block: the number of the block that recomputation runs again with it, below zero outside of blocks, and how many
            blocks the model has; None if unknown.
        place: its place in the list of its model, which decides about splits and stages that rows do not name; None:
            its place here.
        elsewhere: short names of parameters that an earlier layer has, too, besides the weight of ``tied_to``.
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
    itemsizes: dict[str, int] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    place: int | None = None
    elsewhere: tuple[str, ...] = ()

    def itemsize_of(self, name: str) -> int:
        """Bytes of an element of a parameter, by its short name."""
        return self.itemsizes.get(name, self.itemsize)

    @property
    def num_frozen(self) -> int:
        """Number of its parameters without a gradient."""
        return sum(prod(self.shapes[name]) for name in self.frozen)

    def holds(self, name: str) -> bool:
        """Whether a parameter, by its short name, counts here: no earlier layer has it."""
        return name not in self.elsewhere and (self.tied_to is None or name != "weight")

    @property
    def num_elsewhere(self) -> int:
        """Number of its parameters that count at an earlier layer."""
        return sum(prod(shape) for name, shape in self.shapes.items() if not self.holds(name))


def count_parameters(layers: Iterable[Layer]) -> int:
    """Number of parameters of a model's layers; a weight that several share counts once.

    >>> words, head = Layer("words", "Embedding", {"weight": (9, 4)}, 36), {"weight": (9, 4), "bias": (9,)}
    >>> count_parameters([words, Layer("head", "Linear", head, 45, tied_to="words")])
    45
    """
    return sum(layer.num_parameters - layer.num_elsewhere for layer in layers)


def in_order_of_calls(layers: Sequence[Layer]) -> list[Layer]:
    """Layers as a forward calls them; as the model lists them, where no forward was seen.

    >>> head, body = Layer("head", "Linear", calls=(2, 2)), Layer("body", "Linear", calls=(1, 1))
    >>> [layer.name for layer in in_order_of_calls([head, body])]
    ['body', 'head']
    """
    if any(layer.calls is None for layer in layers):
        return list(layers)
    return sorted(layers, key=lambda layer: layer.calls or (0, 0))


def listed_order(layers: Sequence[Layer]) -> list[int]:
    """The positions of layers in the order in which their model lists them.

    >>> listed_order([Layer("fc1", "Linear", place=1), Layer("fc2", "Linear", place=0)])
    [1, 0]
    """
    places = [here if layer.place is None else layer.place for here, layer in enumerate(layers)]
    return sorted(range(len(layers)), key=places.__getitem__)


def num_blocks(layers: Sequence[Layer]) -> int | None:
    """How many blocks recomputation can run again; None if unknown."""
    return next((layer.block[1] for layer in layers if layer.block is not None), None)


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


_IN_QUOTES = re.compile(r"[%;|*\[\]\s]")
_SEPARATORS = re.compile(r"[;|]")
_MOST_NUMBERS = 10_000
"""In a range that is written for a model."""


def quoted(path: str) -> str:
    """The pattern of one module: its path, with ``%`` and two digits for what means something else in a strategy.

    >>> quoted("experts.a;b"), quoted("blocks.0")
    ('experts.a%3Bb', 'blocks.0')
    """
    return _IN_QUOTES.sub(lambda odd: quote(odd[0], safe=""), path)


def range_of(names: Sequence[str], siblings: Iterable[str]) -> str | None:
    """Numbered neighbours as one range, if it matches them and none other of their siblings; else None.

    >>> range_of(["08", "09", "10"], ["07", "08", "09", "10"]), range_of(["0", "2"], ["0", "1", "2"])
    ('[08-10]', None)
    """
    if len(names) < 2 or not (names[0].isdecimal() and names[-1].isdecimal()):
        return None
    if int(names[-1]) - int(names[0]) >= _MOST_NUMBERS:
        return None
    inside = set(_numbers(names[0], names[-1])).intersection(siblings)
    return f"[{names[0]}-{names[-1]}]" if inside == set(names) else None


def _numbers(first: str, last: str) -> list[str]:
    """The names in a range. They are at least as wide as its first one: ``[08-10]`` is 08, 09, 10."""
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


@lru_cache(maxsize=1024)
def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"(\*|\[\d+-\d+\])", text)
    regex = ""
    for part in parts:
        bounds = re.fullmatch(r"\[(\d+)-(\d+)\]", part)
        if bounds:
            regex += "(?:" + "|".join(_numbers(bounds[1], bounds[2])) + ")"
        else:
            regex += "[^.]*" if part == "*" else re.escape(unquote(part))
    return re.compile(regex + r"(?:\..*)?", re.DOTALL)


_CHOICE = re.compile(r"(data|model(?::column|:row)?|expert(?::\d+)?)(?:@(\d+))?")
_FORMS = "data | model | model:column | model:row | expert | expert:N"


def clauses_of(rows: Mapping[str, str], mistakes: list[str]) -> list[str]:
    """Rows of a dict as the text of each, with ``%`` and two digits for what would end it; ``mistakes`` gets one text
    for each choice that is none.

    >>> clauses_of({"experts.a;b": "data"}, [])
    ['experts.a%3Bb: data']
    """
    found = []
    for given, choice in rows.items():
        pattern = _SEPARATORS.sub(lambda odd: quote(odd[0], safe=""), str(given)).strip()
        clause = f"{pattern}: {choice}"
        if _cut(clause)[0] in ("", pattern):
            found.append(clause)
        else:
            mistakes.append(f"row {given!r}: {choice!r} is none of {_FORMS} [@stage]")
    return found


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
        pattern, match = _cut(clause)
        if match is None or not pattern:
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


def _cut(clause: str) -> tuple[str, re.Match[str] | None]:
    """The pattern and the choice of a row: the text behind the last colon that is one, since names may have colons."""
    if "@" not in clause and (match := _CHOICE.fullmatch(clause)):
        return "*", match
    for colon in reversed([place for place, letter in enumerate(clause) if letter == ":"]):
        if match := _CHOICE.fullmatch(clause[colon + 1 :].replace(" ", "")):
            return clause[:colon].strip(), match
    return "", None


def _hint(clause: str, options: str | None) -> str:
    """A suggestion for a wrong row. ``options`` are those of a single row, else None."""
    pattern, colon, choice = (part.strip() for part in clause.partition(":"))
    behind = f" | {options}" if options and not colon else ""
    if not colon and clause in PRESETS:
        if options is None:
            return f"; {clause!r} is a preset, which is a whole strategy: no other row stands beside it"
        return f"; {clause!r} is a preset, which is made for a model: wb.parallelize(model, {clause + behind!r})"
    kind, rest = re.fullmatch(r"(\w*)(.*)", choice if colon else clause, re.DOTALL).groups()  # type: ignore[union-attr]
    if hint := elsewhere(kind):
        return hint
    meant = suggest(kind, PRESETS if not colon and options is not None else ("data", "model", "expert"))
    if not meant and not colon and options is not None:
        return f"; presets are {', '.join(PRESETS)}"
    if not meant or kind in meant:
        return ""
    row = f"{pattern}: {meant[0]}{rest}" if colon else meant[0] + rest + behind
    return f"; did you mean {row!r}?"
