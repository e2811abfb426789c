"""Checks a pipeline table, whoever made it: every action once, every dependency held, no deadlock."""

from __future__ import annotations

from workbench.pipeline.schedules import Action, Table


def check_table(table: Table, num_stages: int, num_micro_batches: int) -> list[str]:
    """Everything that is wrong with a table; empty where it can run.

    Each rank runs its actions in order; an action starts when what it needs is done: a forward after the previous
    stage's forward, a backward after the next stage's backward and its own forward. Sends never block.
    """
    wanted = {Action(s, kind, m) for s in range(num_stages) for kind in "FB" for m in range(num_micro_batches)}
    listed = [action for actions in table for action in actions]
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
    return problems or _run(table, num_stages)


def _run(table: Table, num_stages: int) -> list[str]:
    done: set[Action] = set()
    position = [0] * len(table)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(table):
            while position[rank] < len(actions) and needs(actions[position[rank]], num_stages) <= done:
                done.add(actions[position[rank]])
                position[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} waits at {actions[at]}"
        for rank, (actions, at) in enumerate(zip(table, position, strict=True))
        if at < len(actions)
    ]
    return [f"deadlock: {', '.join(stuck)}"] if stuck else []


def needs(action: Action, num_stages: int) -> set[Action]:
    """The actions that must be done before this one."""
    stage, m = action.stage, action.micro_batch
    if action.kind == "F":
        return {Action(stage - 1, "F", m)} if stage else set()
    later = {Action(stage + 1, "B", m)} if stage < num_stages - 1 else set()
    return later | {Action(stage, "F", m)}


def max_live_micro_batches(actions: list[Action]) -> int:
    """The largest number of micro-batches whose activations a rank holds at once."""
    live = most = 0
    for action in actions:
        live += 1 if action.kind == "F" else -1
        most = max(most, live)
    return most
