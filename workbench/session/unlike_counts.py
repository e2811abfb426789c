"""Whether all ranks have called as many exchanges, at the end of a request.

A call on one rank that need not wait for others, such as one of a model on the first stage, succeeds. Its messages
would reach a later cell as that cell's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.session.outcome import Outcome
from workbench.session.protocol import Progress
from workbench.session.ranks import describe_ranks

_ADVICE = (
    "All ranks must make the same calls that exchange data, also calls that need not wait: call the model on all "
    "ranks, and print on one. The next cell begins in a new world; variables are kept."
)


class ExchangeCounts:
    """What the ranks of a session have said of their exchanges."""

    def __init__(self) -> None:
        self._known: dict[int, Progress] = {}

    def check(self, outcome: Outcome, ranks: Sequence[int], ask: Callable[[int, str], Any]) -> None:
        """Note in the outcome of a request how the counts of the ranks differ.

        Ranks that seem to differ are asked again: other requests exchange data, too, and tell nothing.
        """
        self._known |= outcome.progress
        if not outcome.progress or outcome.stopped or outcome.dead or outcome.left_exchanges_open:
            return
        if set(ranks) <= set(self._known) and not describe_unlike({rank: self._known[rank] for rank in ranks}):
            return
        found = {rank: ask(rank, "progress") for rank in ranks}
        if None not in found.values():
            self._known = found
            outcome.unlike_counts = describe_unlike(found)


def describe_unlike(progress: Mapping[int, Progress]) -> str:
    """An error about ranks that have called unlike numbers of exchanges; empty if there are none.

    >>> print(describe_unlike({0: Progress(num_boxings=8, latest="boxing B -> P"), 1: Progress(num_boxings=7)})[:79])
    The ranks have called unlike numbers of exchanges: rank 0 called 8, rank 1 7. T
    """
    if len({each.generation for each in progress.values()}) > 1:
        return ""
    boxings = {rank: each.num_boxings for rank, each in progress.items()}
    if len(set(boxings.values())) > 1:
        last = progress[max(boxings, key=lambda rank: boxings[rank])].latest
        return _error("exchanges", boxings) + (f" The last one there: {last}." if last else "") + f" {_ADVICE}"
    sums = {rank: dict(each.num_sums) for rank, each in progress.items()}
    for group in sorted({group for own in sums.values() for group in own}):
        counts = {rank: sums[rank].get(group, 0) for rank in group if rank in sums}
        if len(set(counts.values())) > 1:
            return f"{_error(f'sums over {describe_ranks(group)}', counts)} {_ADVICE}"
    return ""


def _error(what: str, counts: Mapping[int, int]) -> str:
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        by_count.setdefault(count, []).append(rank)
    told = [f"{describe_ranks(ranks)} {count}" for count, ranks in sorted(by_count.items(), reverse=True)]
    first, _, number = told[0].rpartition(" ")
    return f"The ranks have called unlike numbers of {what}: {', '.join([f'{first} called {number}', *told[1:]])}."
