"""Options of a whole strategy: degrees, micro-batches, schedule and others, written after its ``|``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from workbench.core.offload_kinds import CHOICES, offload_kind
from workbench.core.recompute_kinds import KINDS, recompute_kind
from workbench.core.suggest import elsewhere, suggest
from workbench.errors import StrategyError

PRESETS = ("data", "model", "pipeline", "hybrid")
"""Names of strategies that are made for a model."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v")
V_SCHEDULES = ("zero_bubble_v", "dualpipe_v")
"""Schedules with two stages on each of P ranks, in a V: stages r and 2P - 1 - r on rank r."""
VIRTUAL_SCHEDULES = ("interleaved", *V_SCHEDULES)
"""Schedules with several stages on a rank."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
_OTHER_OPTIONS = (
    "recompute",
    "recompute=cheap",
    "recompute=attention",
    "offload=optimizer",
    "offload=activations",
    "sequence",
    "context=2",
    "zero=1",
    "zero=2",
    "zero=3",
    "shards=8",
    "mb=4",
    "overlap=4",
)
"""For suggestions."""
_KNOWN = ", ".join(
    (
        *("PxDxM", "DxM+DxM", "mb=N", *SCHEDULES, "zero=N", "shards=N", "context=N", "overlap=N"),
        *("recompute", "recompute=attention", "recompute=cheap", "recompute=N"),
        *(f"offload={choice}" for choice in CHOICES),
        *("sequence", *PRECISIONS[1:]),
    )
)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the whole model. ``degrees`` are pipeline x data x model; None if they follow from the rows.

    Instead of degrees there may be ``widths``: data x model for every stage. ``context`` data ranks each take the same
    samples, and a slice of their sequence. ZeRO's shards are over groups of ``shards`` consecutive data ranks; 0: over
    all of them. ``recompute`` is a word as in ``recompute_kind``: True is "full". Products of row-split layers are cut
    into ``overlap`` pieces of rows, whose exchanges overlap with the products of the next.
    """

    degrees: tuple[int, int, int] | None = None
    num_micro_batches: int = 1
    schedule: str | None = None
    zero: int = 0
    recompute: str = ""
    sequence: bool = False
    precision: str = "fp32"
    widths: tuple[tuple[int, int], ...] | None = None
    context: int = 1
    shards: int = 0
    offload: str = ""
    overlap: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", recompute_kind(self.recompute))
        object.__setattr__(self, "offload", offload_kind(self.offload))

    def __str__(self) -> str:
        words = ["x".join(map(str, self.degrees))] if self.degrees else []
        words += [format_widths(self.widths)] if self.widths else []
        words += [f"mb={self.num_micro_batches}"] if self.num_micro_batches != 1 else []
        words += [self.schedule] if self.schedule else []
        words += [f"zero={self.zero}"] if self.zero else []
        words += [f"shards={self.shards}"] if self.shards else []
        words += [f"context={self.context}"] if self.context != 1 else []
        words += [f"recompute={self.recompute}".removesuffix("=full")] if self.recompute else []
        words += [f"offload={self.offload}"] if self.offload else []
        words += ["sequence"] * bool(self.sequence)
        words += [f"overlap={self.overlap}"] if self.overlap != 1 else []
        return " ".join(words + ([self.precision] if self.precision != "fp32" else []))

    @property
    def num_ranks(self) -> int:
        """The ranks of degrees or widths; 0 if there are neither."""
        if self.widths:
            return sum(data * model for data, model in self.widths)
        return prod(self.degrees) if self.degrees else 0

    def with_changes(self, **changes: Any) -> Options:
        """Options with some changed, by name. A value is right if its text is.

        Raises:
            StrategyError: there is no such option, or it cannot have this value. It lists all mistakes.

        >>> str(Options().with_changes(num_micro_batches=4, schedule="gpipe"))
        'mb=4 gpipe'
        """
        known = [field.name for field in fields(Options)]
        mistakes = [f"{name!r} is none of {', '.join(known)}" for name in changes if name not in known]
        changed = self if mistakes else parse_options(str(replace(self, **changes)), mistakes)
        if mistakes:
            asked = ", ".join(f"{name}={value!r}" for name, value in changes.items())
            raise StrategyError(f"with_options({asked}): " + "; ".join(mistakes) + ".")
        return changed


def format_widths(widths: Sequence[tuple[int, int]]) -> str:
    """Degrees of stages as text.

    >>> format_widths([(1, 2), (1, 1)])
    '1x2+1x1'
    """
    return "+".join(f"{data}x{model}" for data, model in widths)


def parse_options(text: str, mistakes: list[str], base: Options | None = None) -> Options:
    """The options that a text gives, the others from ``base``; mistakes are added to ``mistakes``.

    >>> str(parse_options("mb=8", [], Options((2, 1, 1), num_micro_batches=4, schedule="1f1b")))
    '2x1x1 mb=8 1f1b'
    """
    found, words = dict[str, Any](), dict[str, str]()
    for word in text.split():
        option = _option(word)
        if option is None:
            words_of_kind = [one for one in (*SCHEDULES, *PRECISIONS, *_OTHER_OPTIONS) if "=" in one or "=" not in word]
            meant = suggest(word, words_of_kind) or suggest(word.partition("=")[2], [*SCHEDULES, *PRECISIONS])
            hint = elsewhere(word) or (f"; did you mean {meant[0]!r}?" if meant else "")
            again = any(" is none of " in mistake for mistake in mistakes)
            mistakes.append(f"option {word!r} is {'none either' if again else f'none of {_KNOWN}'}{hint}")
            continue
        name, value = option
        what = "degrees" if name == "widths" else name  # both say where the ranks are
        if what in words:
            both = ", or offload=optimizer+activations" if what == "offload" else ""
            mistakes.append(f"both {words[what]} and {word}: give one{both}")
        found[name], words[what] = value, word
    mistakes += _out_of_range(found)
    base = base or Options()
    if "degrees" in words:
        base = replace(base, degrees=None, widths=None)
    return replace(base, **found)


def _option(word: str) -> tuple[str, Any] | None:
    """The name of an option in ``Options`` and its value; None for a word that is no option."""
    if re.fullmatch(r"\d+x\d+x\d+", word):
        return "degrees", tuple(map(int, word.split("x")))
    if re.fullmatch(r"\d+x\d+(\+\d+x\d+)+", word):
        return "widths", tuple((int(d), int(m)) for d, m in (stage.split("x") for stage in word.split("+")))
    if number := re.fullmatch(r"(mb|zero|shards|context|overlap)=(\d+)", word):
        return "num_micro_batches" if number[1] == "mb" else number[1], int(number[2])
    if word in SCHEDULES or word in PRECISIONS:
        return "schedule" if word in SCHEDULES else "precision", word
    if blocks := re.fullmatch(rf"recompute(=({'|'.join(KINDS)}|\d+))?", word):
        return "recompute", blocks[2] or "full"
    if word.startswith("offload="):
        choice = offload_kind(word.removeprefix("offload="))
        return ("offload", choice) if choice in CHOICES else None
    return (word, True) if word == "sequence" else None


_AT_LEAST = {
    "num_micro_batches": "mb=0: a step has at least 1 micro-batch",
    "context": "context=0: a sequence has at least 1 slice",
    "overlap": "overlap=0: a product has at least 1 piece; overlap=1 overlaps nothing",
    "shards": "shards=0: a group has at least 2 ranks; leave it out to split over all data ranks",
}


def _out_of_range(found: dict[str, Any]) -> list[str]:
    mistakes = [message for name, message in _AT_LEAST.items() if found.get(name) == 0]
    if found.get("recompute", "full").strip("0") == "":
        mistakes.append(f"recompute={found['recompute']}: at least 1 block runs again; leave it out for none")
    if found.get("zero", 0) > 3:
        mistakes.append(f"zero={found['zero']}: ZeRO has stages 0 to 3")
    if 0 in (found.get("degrees") or ()):
        mistakes.append(f"degrees {'x'.join(map(str, found['degrees']))}: each is at least 1")
    if any(0 in width for width in found.get("widths") or ()):
        mistakes.append(f"stages {format_widths(found['widths'])}: each degree is at least 1")
    return mistakes
