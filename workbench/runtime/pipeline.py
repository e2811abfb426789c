"""Runs one rank's actions of a pipeline table.

Every rank runs the whole program of a micro-batch; what is not placed on it is a ghost and costs almost nothing. So an
action is the whole forward, or the whole backward from that micro-batch's loss, and any forward code pipelines. Sends
never block and are tagged by micro-batch, position in the program and direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workbench.pipeline.schedules import Action
from workbench.runtime.world import World

Forward = Callable[[int], torch.Tensor]
"""micro-batch number -> its loss, already weighted with its share of the step."""


def run_actions(actions: Sequence[Action], forward: Forward, world: World) -> list[torch.Tensor]:
    """Run forwards and backwards in the order of ``actions``; returns the micro-batches' losses, detached, in their
    order.

    ``world.micro_batch`` is set around each action, so that boxings of different micro-batches never meet.
    """
    open_losses: dict[int, torch.Tensor] = {}
    losses: dict[int, torch.Tensor] = {}
    world.num_edges.clear()
    try:
        for action in actions:
            world.micro_batch = action.micro_batch
            if action.kind == "F":
                loss = forward(action.micro_batch)
                open_losses[action.micro_batch] = loss
                losses[action.micro_batch] = loss.detach()
            else:
                open_losses.pop(action.micro_batch).backward()
    finally:
        world.micro_batch = 0
    world.transport.flush()
    return [losses[index] for index in sorted(losses)]
