"""The fixes of mistakes and hints that the panel can make by itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from workbench.core.options import PRECISIONS, SCHEDULES, Options
from workbench.core.strategy import Strategy
from workbench.ui.strategy.choices import Degrees

if TYPE_CHECKING:
    from workbench.ui.strategy.state import PanelState

_FIX = re.compile(
    r"use stage (?P<stage>\d+)|use (?P<degrees>\d+x\d+x\d+)|use mb=(?P<num_micro_batches>\d+)"
    rf"|use context=(?P<context>\d+)|use shards=(?P<shards>\d+)|use zero=(?P<zero>\d)"
    rf"|use (?P<precision>{'|'.join(PRECISIONS)})|leave (?P<option>\S+) out|write '(?P<row>.+)'"
)


def can_apply(fix: str) -> bool:
    """Whether ``apply_fix`` can make a fix; else only the user can.

    >>> can_apply("use bf16"), can_apply("use recompute=4 or less, or recompute, which is all")
    (True, False)
    """
    return _FIX.fullmatch(fix) is not None


def apply_fix(state: PanelState, fix: str, row: str | None = None) -> bool:
    """Make a fix, of the mistake of a row if it has one; False if only the user can."""
    match = _FIX.fullmatch(fix)
    if match is None:
        return False
    kind = str(match.lastgroup)
    value = match[kind]
    if kind == "stage":
        state.set_stage([row] if row else [], int(value))
    elif kind == "degrees":
        state.set_degrees(Degrees(*map(int, value.split("x"))))
    elif kind == "precision":
        state.set_options(precision=value)
    elif kind == "option":
        name = "schedule" if value in SCHEDULES else value.partition("=")[0]
        state.set_options(**{name: getattr(Options(), name)})
    elif kind == "row":
        state.write_row(Strategy(value).rows[0])
    else:
        state.set_options(**{kind: int(value)})
    return True
