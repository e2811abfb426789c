"""Pipeline schedules as data: for each rank of the pipeline axis, a list of actions.

An action prints and parses as ``2F0`` (stage 2, forward of micro-batch 0) or ``2B0``. Generators only make tables;
checker, executor and simulator read them and share no code with this module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from workbench.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Action:
    """Forward (``"F"``) or backward (``"B"``) of one micro-batch on one stage."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``str`` printed."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise StrategyError(f"action {text!r} is not of the form 2F0: stage, F or B, micro-batch.")
        return cls(int(match[1]), match[2], int(match[3]))


Table = list[list[Action]]
"""Actions by rank of the pipeline axis, in the order in which the rank runs them."""


def gpipe(num_stages: int, num_micro_batches: int) -> Table:
    """All forwards, then all backwards. (Huang et al., arXiv 1811.06965.)"""
    each = range(num_micro_batches)
    return [[Action(s, "F", m) for m in each] + [Action(s, "B", m) for m in each] for s in range(num_stages)]


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> Table:
    """Forwards until the pipeline is full, then one backward and one forward by turns.

    Stage ``s`` holds at most ``num_stages - s`` micro-batches. (Narayanan et al., arXiv 2104.04473.)
    """
    table = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_micro_batches)
        actions = [Action(stage, "F", m) for m in range(ahead)]
        for backward in range(num_micro_batches):
            actions.append(Action(stage, "B", backward))
            if ahead + backward < num_micro_batches:
                actions.append(Action(stage, "F", ahead + backward))
        table.append(actions)
    return table


GENERATORS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def make_table(schedule: str, num_stages: int, num_micro_batches: int) -> Table:
    """The table of a schedule by name; raises ``StrategyError`` for one that is not there."""
    if schedule not in GENERATORS:
        raise StrategyError(f"schedule {schedule!r} is not available; available are {', '.join(GENERATORS)}.")
    return GENERATORS[schedule](num_stages, num_micro_batches)
