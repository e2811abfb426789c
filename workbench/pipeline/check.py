"""Checks any pipeline table: every action once, every dependency held, no deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from workbench.pipeline.schedules import Action, Table

Edges = Sequence[tuple[int, int | None]]
"""(from stage, to stage) of the transfers of a forward, in the order of the program; to None: a value that all other
stages wait for, and that has no gradient."""


def check_table(
    table: Table,
    num_stages: int,
    num_micro_batches: int,
    edges: Edges | None = None,
    run_again: Sequence[tuple[int, int]] = (),
) -> list[str]:
    """All mistakes of a table; empty if it can run.

    Each rank runs its actions in order. In a forward, a stage goes along the edges in the order of the program: it
    sends where an edge leaves it, which never blocks, and waits where one arrives. A backward (or the backward
    of inputs) goes along them in reverse, after its own forward; the backward of weights comes after that.

    Args:
        table: the actions of every rank, in order.
        num_stages, num_micro_batches: the sizes that the table should have.
        edges: transfers between stages, for example as a run recorded them. None: each stage to the next.
        run_again: first and last stage of blocks that a backward runs again when it comes to their last stage. What
            their stages hand on is sent again.

    >>> from workbench.pipeline.schedules import make_table
    >>> check_table(make_table("gpipe", 2, 2), 2, 2, edges=[(0, 1), (1, 0)])
    []
    >>> check_table(make_table("1f1b", 2, 2), 2, 2, edges=[(0, 1), (1, 0)])
    ['deadlock: rank 0 waits at 0F1, rank 1 waits at 1B0']
    """
    edges = along_stages(num_stages) if edges is None else edges
    listed = Counter(action for actions in table for action in actions)
    split = {(action.stage, action.micro_batch) for action in listed if action.kind in "IW"}
    wanted = {
        Action(stage, kind, m)
        for stage in range(num_stages)
        for m in range(num_micro_batches)
        for kind in ("FIW" if (stage, m) in split else "FB")
    }
    problems = [f"{action} stands {listed[action]} times" for action in sorted(listed, key=str) if listed[action] > 1]
    problems += [f"{action} is missing" for action in sorted(wanted - set(listed), key=str)]
    problems += [
        f"{action} is not of {num_stages} stages and {num_micro_batches} micro-batches"
        for action in sorted(set(listed) - wanted, key=str)
    ]
    problems += _stages_on_two_ranks(table)
    return problems or _run(table, edges, run_again)


def along_stages(num_stages: int, reads_values: bool = False) -> list[tuple[int, int | None]]:
    """The edges from each stage to the next; with ``reads_values``, all stages wait for a value of each of them."""
    edges: list[tuple[int, int | None]] = []
    for stage in range(num_stages):
        edges += [(stage, None)] * reads_values + [(stage, stage + 1)] * (stage + 1 < num_stages)
    return edges


def _stages_on_two_ranks(table: Table) -> list[str]:
    ranks_of: dict[int, set[int]] = {}
    for rank, actions in enumerate(table):
        for action in actions:
            ranks_of.setdefault(action.stage, set()).add(rank)
    return [f"stage {stage} stands on ranks {sorted(r)}" for stage, r in sorted(ranks_of.items()) if len(r) > 1]


def _run(table: Table, edges: Edges, run_again: Sequence[tuple[int, int]]) -> list[str]:
    """Run the actions of a table as far as their dependencies are done; returns the deadlock, if any."""
    done: set[Event] = set()
    programs = [
        [(action, step) for action in actions for step in _steps(action, edges, run_again)] for actions in table
    ]
    position = [0] * len(table)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                _, (waits, event) = program[position[rank]]
                if waits and event not in done:
                    break
                done.add(event)
                position[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} waits at {program[at][0]}"
        for rank, (program, at) in enumerate(zip(programs, position, strict=True))
        if at < len(program)
    ]
    return [f"deadlock: {', '.join(stuck)}"] if stuck else []


Event = tuple[str, int, int]
"""Events to wait for: ("F" or "B", edge, micro-batch) for a message, ("again", its stage, micro-batch) for one of a
second run, ("ended", stage * 3 + phase, micro-batch)."""


def _steps(action: Action, edges: Edges, run_again: Sequence[tuple[int, int]]) -> list[tuple[bool, Event]]:
    """The steps of an action, in order: (whether it waits for the event or makes it happen, event)."""
    stage, m = action.stage, action.micro_batch
    phase = {"F": 0, "B": 1, "I": 1, "W": 2}[action.kind]
    steps: list[tuple[bool, Event]] = [(True, ("ended", stage * 3 + phase - 1, m))] if phase else []
    numbered, direction = list(enumerate(edges)), "F" if phase == 0 else "B"
    for number, (source, target) in numbered if phase == 0 else reversed(numbered) if phase == 1 else ():
        if target is None and phase == 1:
            continue
        for first, last in run_again if phase == 1 else ():
            if (source, target) == (last - 1, last):
                steps += [(to == stage, ("again", to, m)) for to in range(first + 1, last + 1) if stage in (to - 1, to)]
        sender, receiver = (source, target) if phase == 0 else (target, source)
        if sender == stage:
            steps.append((False, (direction, number, m)))
        elif receiver == stage or receiver is None:
            steps.append((True, (direction, number, m)))
    return [*steps, (False, ("ended", stage * 3 + phase, m))]


def max_live_micro_batches(actions: list[Action]) -> int:
    """The largest number of micro-batches (of its stages) for which a rank holds activations at once."""
    return live_when_fullest(actions).total()


def live_when_fullest(actions: list[Action]) -> Counter[int]:
    """By stage, the number of micro-batches for which a rank holds activations, when it holds most of them."""
    live, fullest = Counter[int](), Counter[int]()
    for action in actions:
        live[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        if live.total() > fullest.total():
            fullest = live.copy()
    return fullest


def most_postponed(actions: list[Action]) -> Counter[int]:
    """By stage, the number of micro-batches whose gradients of weights wait, when a rank has most of them."""
    waiting, most = Counter[int](), Counter[int]()
    for action in actions:
        waiting[action.stage] += {"I": 1, "W": -1}.get(action.kind, 0)
        if waiting.total() > most.total():
            most = waiting.copy()
    return most
