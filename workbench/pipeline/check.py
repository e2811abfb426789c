"""Checks a pipeline table, whoever made it: every action once, every dependency held, no deadlock."""

from __future__ import annotations

from workbench.pipeline.schedules import Action, Table


def check_table(table: Table, num_stages: int, num_micro_batches: int) -> list[str]:
    """Everything that is wrong with a table; empty where it can run.

    Each rank runs its actions in order; an action starts when what it needs is done: a forward after the previous
    stage's forward, a backward (or its first half) after the next stage's and its own forward, the weights' half after
    the first. Sends never block.
    """
    listed = [action for actions in table for action in actions]
    halves = {(action.stage, action.micro_batch) for action in listed if action.kind in "IW"}
    wanted = {
        Action(stage, kind, m)
        for stage in range(num_stages)
        for m in range(num_micro_batches)
        for kind in ("FIW" if (stage, m) in halves else "FB")
    }
    problems = [
        f"{action} stands {listed.count(action)} times"
        for action in sorted(set(listed), key=str)
        if listed.count(action) > 1
    ]
    problems += [f"{action} is missing" for action in sorted(wanted - set(listed), key=str)]
    problems += [
        f"{action} is not of {num_stages} stages and {num_micro_batches} micro-batches"
        for action in sorted(set(listed) - wanted, key=str)
    ]
    problems += _stages_on_two_ranks(table)
    return problems or _run(table, num_stages, set(listed))


def _stages_on_two_ranks(table: Table) -> list[str]:
    ranks_of: dict[int, set[int]] = {}
    for rank, actions in enumerate(table):
        for action in actions:
            ranks_of.setdefault(action.stage, set()).add(rank)
    return [f"stage {stage} stands on ranks {sorted(r)}" for stage, r in sorted(ranks_of.items()) if len(r) > 1]


def _run(table: Table, num_stages: int, listed: set[Action]) -> list[str]:
    done: set[Action] = set()
    position = [0] * len(table)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(table):
            while position[rank] < len(actions) and needs(actions[position[rank]], num_stages, listed) <= done:
                done.add(actions[position[rank]])
                position[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} waits at {actions[at]}"
        for rank, (actions, at) in enumerate(zip(table, position, strict=True))
        if at < len(actions)
    ]
    return [f"deadlock: {', '.join(stuck)}"] if stuck else []


def needs(action: Action, num_stages: int, listed: set[Action]) -> set[Action]:
    """The actions that must be done before this one; ``listed`` tells which backwards come in halves."""
    stage, m = action.stage, action.micro_batch
    if action.kind == "F":
        return {Action(stage - 1, "F", m)} if stage else set()
    if action.kind == "W":
        return {Action(stage, "I", m)}
    inputs_done = Action(stage + 1, "I", m)
    later = inputs_done if inputs_done in listed else Action(stage + 1, "B", m)
    return {Action(stage, "F", m)} | ({later} if stage < num_stages - 1 else set())


def max_live_micro_batches(actions: list[Action]) -> int:
    """The largest number of micro-batches (of its stages) for which a rank holds activations at once."""
    live = most = 0
    for action in actions:
        live += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, live)
    return most
