"""Pipeline schedules as data: for each rank of the pipeline axis, a list of actions.

An action prints and parses as ``2F0`` (stage 2, forward of micro-batch 0). Generators only make tables; checker,
executor and simulator read them and share no code with this module. A rank holds one stage, or several: stage ``s``
then lies on rank ``s % num_ranks``, or rank ``r`` of P holds the two stages ``r`` and ``2P - 1 - r``, in a V.
"""

from __future__ import annotations

import re
from collections import Counter, deque
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


def zero_bubble_v(num_stages: int, num_micro_batches: int, num_ranks: int) -> Table:
    """Zero bubble with two stages on each rank, in a V: the first rank also has the last stage, where backwards begin.

    A rank has no gap between its first action and its last one if forward, gradients of inputs and gradients of
    weights take equal times, and at least ``2 num_ranks - 1`` micro-batches. It holds at most ``2 num_ranks``
    micro-batches of a stage, which has half of the layers that a stage of 1F1B has. (ZB-V of Qi et al., arXiv
    2401.10241.)
    """
    _check_v("zero_bubble_v", num_stages, num_ranks)
    rounds, table = max(num_micro_batches, 2 * num_ranks - 1) - num_ranks, []
    for rank in range(num_ranks):
        behind = num_ranks - rank
        program = [
            (2 * behind - 1, "0F"),
            (rank, "1F 0F"),
            (behind, "1F 1I W"),
            (rounds, "0F 0I W 1F 1I W"),
            (rank, "0I 1I"),
            (behind, "0I W"),
            (2 * rank, "W"),
        ]
        table.append(_two_stages(rank, num_stages, program, num_micro_batches))
    return table


def dualpipe_v(num_stages: int, num_micro_batches: int, num_ranks: int) -> Table:
    """Two stages on each rank, in a V; once the pipeline is full, a forward of one with a backward of the other.

    Backwards are split only where other ranks would wait: in the middle of the start, and at the end. It holds at most
    ``2 num_ranks + 1`` micro-batches of a stage. (DualPipe of DeepSeek-V3, arXiv 2412.19437, cut in half: each rank
    has one copy of the parameters.)
    """
    _check_v("dualpipe_v", num_stages, num_ranks)
    table = []
    for rank in range(num_ranks):
        behind, ahead = num_ranks - 1 - rank, rank + 1
        rounds = max(num_micro_batches - 2 * num_ranks, 0) + ahead
        drain = ["1B", "0B"] * ahead
        drain[ahead:] = [word.replace("B", "I") for word in drain[ahead:]]
        program = [
            (2 * behind, "0F"),
            (ahead, "0F 1F"),
            (behind, "1I W 1F"),
            (rounds, "0F 1B 1F 0B"),
            (behind, "1B 1F 0B"),
            (1, " ".join(drain)),
            (behind, "W 0I"),
            (ahead, "W"),
        ]
        table.append(_two_stages(rank, num_stages, program, num_micro_batches))
    return table


def _check_v(schedule: str, num_stages: int, num_ranks: int) -> None:
    if num_stages != 2 * num_ranks:
        raise StrategyError(
            f"{schedule}: {num_stages} stages on {num_ranks} ranks. Every rank holds 2 stages, r and "
            f"{2 * num_ranks - 1} - r: use {2 * num_ranks} stages."
        )


def _two_stages(rank: int, num_stages: int, program: list[tuple[int, str]], num_micro_batches: int) -> list[Action]:
    """The actions of a rank of a V, from a program: words, and how often they are repeated.

    ``0F`` is the next forward of its first stage, ``1F`` of its second one, and so on; ``W`` computes the gradients of
    weights that have waited longest. Micro-batches that do not exist are left out. No stage waits for the first one, so
    its ``I`` and ``W`` are one backward where nothing is between them.
    """
    stages, count = (rank, num_stages - 1 - rank), Counter[tuple[int, bool]]()
    actions, waiting = list[Action](), deque[Action]()
    for times, words in program:
        for word in words.split() * times:
            if word == "W":
                action = waiting.popleft()
                if action.stage == 0 and actions[-1] == Action(0, "I", action.micro_batch):
                    actions[-1] = Action(0, "B", action.micro_batch)
                    continue
            else:
                stage, kind = stages[int(word[0])], word[1]
                action = Action(stage, kind, count[stage, kind == "F"])
                count[stage, kind == "F"] += 1
                if kind == "I":
                    waiting.append(Action(stage, "W", action.micro_batch))
            actions.append(action)
    return [action for action in actions if action.micro_batch < num_micro_batches]


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
    "zero_bubble_v": zero_bubble_v,
    "dualpipe_v": dualpipe_v,
}
_SEVERAL = ("interleaved", "zero_bubble_v", "dualpipe_v")
"""Schedules with several stages on a rank."""


def make_table(schedule: str, num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Table:
    """The table of a schedule by name, for as many ranks as stages (in a V: half as many) unless ``num_ranks`` says
    otherwise.

    >>> [" ".join(map(str, actions)) for actions in make_table("1f1b", 2, 2)]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']

    Raises:
        StrategyError: no such schedule, or one that does not put so many stages on a rank.
    """
    if schedule not in GENERATORS:
        raise StrategyError(f"schedule {schedule!r} is not available; available are {', '.join(GENERATORS)}.")
    is_v = schedule in ("zero_bubble_v", "dualpipe_v")
    ranks = num_ranks or ((num_stages + 1) // 2 if is_v else num_stages)
    if ranks != num_stages and schedule not in _SEVERAL:
        raise StrategyError(
            f"{schedule}: {num_stages} stages on {ranks} ranks, but it runs one stage on each. Use interleaved, or "
            f"{ranks} stages."
        )
    return GENERATORS[schedule](num_stages, num_micro_batches, ranks)
