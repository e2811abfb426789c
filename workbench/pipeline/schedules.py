"""Pipeline schedules as data: for each rank of the pipeline axis, a list of actions.

An action prints and parses as ``2F0`` (stage 2, forward of micro-batch 0). Generators only make tables; checker,
executor and simulator read them and share no code with this module. A rank holds one stage, or several: stage ``s``
then lies on rank ``s % num_ranks``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from workbench.errors import StrategyError

KINDS = "FBIW"
"""Forward; backward; or a split backward: the gradients of the inputs, then those of the weights."""


@dataclass(frozen=True, slots=True)
class Action:
    """Work of a stage on one micro-batch; ``kind`` is one of ``KINDS``."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``str`` printed."""
        match = re.fullmatch(rf"(\d+)([{KINDS}])(\d+)", text)
        if match is None:
            raise StrategyError(f"action {text!r} is not of the form 2F0: stage, one of {KINDS}, micro-batch.")
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
    forwards = [[Action(s, "F", m) for m in range(num_micro_batches)] for s in range(num_stages)]
    backwards = [[Action(s, "B", m) for m in range(num_micro_batches)] for s in range(num_stages)]
    return [_alternate(forwards[s], backwards[s], num_stages - s) for s in range(num_stages)]


def interleaved(num_stages: int, num_micro_batches: int, num_ranks: int) -> Table:
    """1F1B with several stages on each rank: a micro-batch goes round the ranks more than once, the bubble shrinks.

    Micro-batches go in groups of ``num_ranks``, each group through one stage of a rank after the other. A last group
    that is not full is scheduled as if it were, and what does not exist is left out. (Narayanan et al., 2104.04473.)
    """
    stages_per_rank, rest = divmod(num_stages, num_ranks)
    if rest:
        raise StrategyError(
            f"interleaved: {num_stages} stages on {num_ranks} ranks. Every rank holds the same number of stages: use a "
            f"multiple of {num_ranks}."
        )
    if stages_per_rank == 1:
        return one_forward_one_backward(num_stages, num_micro_batches)
    num_groups = -(-num_micro_batches // num_ranks)
    table = []
    for rank in range(num_ranks):
        stages = [rank + virtual_stage * num_ranks for virtual_stage in range(stages_per_rank)]
        groups = [range(group * num_ranks, (group + 1) * num_ranks) for group in range(num_groups)]
        forwards = [Action(s, "F", m) for group in groups for s in stages for m in group]
        backwards = [Action(s, "B", m) for group in groups for s in reversed(stages) for m in group]
        ahead = (stages_per_rank - 1) * num_ranks + 2 * (num_ranks - rank - 1) + 1
        actions = _alternate(forwards, backwards, ahead)
        table.append([action for action in actions if action.micro_batch < num_micro_batches])
    return table


def zero_bubble(num_stages: int, num_micro_batches: int) -> Table:
    """1F1B with a split backward: gradients of inputs, for which other stages wait, come first; weights fill the gaps.

    Stage ``s`` is ``s`` micro-batches late with its weights, so that every stage holds at most ``num_stages``
    micro-batches, as many as the first one does under 1F1B. No stage waits for the first one, whose
    backwards stay whole. (ZB-H1 of Qi et al., arXiv 2401.10241.)
    """
    table = one_forward_one_backward(num_stages, num_micro_batches)[:1]
    for stage in range(1, num_stages):
        ahead = min(num_stages - stage, num_micro_batches)
        actions = [Action(stage, "F", m) for m in range(ahead)]
        for m in range(num_micro_batches):
            actions.append(Action(stage, "I", m))
            if m >= stage:
                actions.append(Action(stage, "W", m - stage))
            if ahead + m < num_micro_batches:
                actions.append(Action(stage, "F", ahead + m))
        late = range(max(0, num_micro_batches - stage), num_micro_batches)
        table.append(actions + [Action(stage, "W", m) for m in late])
    return table


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """``ahead`` forwards, then one backward and one forward by turns as long as there are any."""
    actions = forwards[:ahead]
    for i, backward in enumerate(backwards):
        actions.append(backward)
        actions += forwards[ahead + i : ahead + i + 1]
    return actions


GENERATORS: dict[str, Callable[[int, int, int], Table]] = {
    "gpipe": lambda stages, micro_batches, ranks: gpipe(stages, micro_batches),
    "1f1b": lambda stages, micro_batches, ranks: one_forward_one_backward(stages, micro_batches),
    "interleaved": interleaved,
    "zero_bubble": lambda stages, micro_batches, ranks: zero_bubble(stages, micro_batches),
}


def make_table(schedule: str, num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Table:
    """The table of a schedule by name, for as many ranks as stages unless ``num_ranks`` says otherwise.

    >>> [" ".join(map(str, actions)) for actions in make_table("1f1b", 2, 2)]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']

    Raises:
        StrategyError: no such schedule, or one that does not put several stages on a rank.
    """
    if schedule not in GENERATORS:
        raise StrategyError(f"schedule {schedule!r} is not available; available are {', '.join(GENERATORS)}.")
    ranks = num_stages if num_ranks is None else num_ranks
    if ranks != num_stages and schedule != "interleaved":
        raise StrategyError(
            f"{schedule}: {num_stages} stages on {ranks} ranks, but it runs one stage on each. Use interleaved, or "
            f"{ranks} stages."
        )
    return GENERATORS[schedule](num_stages, num_micro_batches, ranks)
