"""Simulates a table: takes durations of actions, returns a timeline and its bubble."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from statistics import median

from workbench.errors import StrategyError
from workbench.pipeline.schedules import Action, Table

Duration = Callable[[Action], float]
"""Seconds that an action takes on its rank."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action on a rank of the pipeline axis, from ``start_s`` to ``stop_s``, of which it waited ``waited_s``.

    A simulated action starts when its dependencies are done, and never waits. A measured action waits inside, in
    ``num_exchanges`` exchanges that send ``sent_bytes``.
    """

    rank: int
    action: Action
    start_s: float
    stop_s: float
    waited_s: float = 0.0
    num_exchanges: int = 0
    sent_bytes: int = 0

    @property
    def busy_s(self) -> float:
        """Seconds of work."""
        return self.stop_s - self.start_s - self.waited_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans by rank, in the order in which they run."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        every = [span for spans in self.spans for span in spans]
        return max(s.stop_s for s in every) - min(s.start_s for s in every) if every else 0.0

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait, from 0 to 1."""
        total = self.makespan_s * len(self.spans)
        busy = sum(span.busy_s for spans in self.spans for span in spans)
        return 1 - busy / total if total else 0.0


def running_order(table: Table, num_stages: int) -> list[tuple[int, Action, list[Action]]]:
    """All actions in an order in which they can run: (rank, action, the actions of other ranks that it waits for).

    What an action waits for on its own rank stands before it in the table.

    Raises:
        StrategyError: the table cannot run to its end.
    """
    rank_of = {action: rank for rank, actions in enumerate(table) for action in actions}
    found: list[tuple[int, Action, list[Action]]] = []
    done, place = set[Action](), [0] * len(table)
    while any(at < len(actions) for at, actions in zip(place, table, strict=True)):
        before = len(found)
        for rank, actions in enumerate(table):
            for action in actions[place[rank] :]:
                required = _dependencies(action, num_stages, rank_of)
                if not required <= done:
                    break
                found.append((rank, action, [other for other in required if rank_of[other] != rank]))
                done.add(action)
                place[rank] += 1
        if len(found) == before:
            stuck = [str(actions[at]) for at, actions in zip(place, table, strict=True) if at < len(actions)]
            raise StrategyError(f"the table cannot run to its end: stuck at {', '.join(stuck)}.")
    return found


def _dependencies(action: Action, num_stages: int, listed: Container[Action]) -> set[Action]:
    """The actions that must be done before this one; ``listed`` shows which backwards are split."""
    stage, m = action.stage, action.micro_batch
    if action.kind == "F":
        return {Action(stage - 1, "F", m)} if stage else set()
    if action.kind == "W":
        return {Action(stage, "I", m)}
    inputs_done = Action(stage + 1, "I", m)
    later = inputs_done if inputs_done in listed else Action(stage + 1, "B", m)
    return {Action(stage, "F", m)} | ({later} if stage < num_stages - 1 else set())


def simulate(table: Table, num_stages: int, duration: Duration, transfer_s: float = 0.0) -> Timeline:
    """Simulate a table: an action starts when its rank is free and its dependencies have arrived.

    Args:
        table: the actions of every rank, in order.
        num_stages: number of stages of the table.
        duration: seconds of an action.
        transfer_s: seconds from the end of an action until another rank has its result.

    Raises:
        StrategyError: the table cannot run to its end.

    One micro-batch on two stages, a second each way:

    >>> from workbench.pipeline.schedules import make_table
    >>> simulate(make_table("gpipe", 2, 1), 2, lambda action: 1.0).makespan_s
    4.0
    """
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in table]
    free = [0.0] * len(table)
    for rank, action, others in running_order(table, num_stages):
        start = max([free[rank], *(ended[other] + transfer_s for other in others)])
        free[rank] = ended[action] = start + duration(action)
        spans[rank].append(Span(rank, action, start, free[rank]))
    return Timeline(tuple(map(tuple, spans)))


def measured_durations(timelines: Sequence[Timeline]) -> Duration:
    """What an action takes by measured timelines: the median work of its stage and kind, over micro-batches and steps.

    >>> from workbench.pipeline.schedules import make_table
    >>> run = simulate(make_table("gpipe", 2, 3), 2, lambda action: 1.0 + action.stage)
    >>> measured_durations([run])(Action(1, "B", 0))
    2.0
    """
    work: dict[tuple[int, str], list[float]] = {}
    for timeline in timelines:
        for spans in timeline.spans:
            for span in spans:
                work.setdefault((span.action.stage, span.action.kind), []).append(span.busy_s)
    return lambda action: median(work[action.stage, action.kind])
