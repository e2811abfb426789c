"""The pipeline stages of a graph's modules: numbers from ``config.stage_id``, ranks from the placements of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from workbench.core.placement import Placement
from workbench.errors import StrategyError
from workbench.flow.nn.module_config import config_of
from workbench.tensors.global_tensor import GlobalTensor


def stages_of(modules: Iterable[nn.Module]) -> dict[int, list[torch.Tensor]]:
    """The weights of every stage, in the order of stages. Empty if no module has a stage.

    A module without a stage belongs to that of the nearest module around it. A weight that several stages share belongs
    to the first of them that the walk finds.

    Raises:
        StrategyError: the stage ids leave out a number.
    """
    found: dict[int, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for module in modules:
        for stage, weights in _walk(module, None):
            if stage is not None:
                found.setdefault(stage, []).extend(w for w in weights if id(w) not in seen)
            seen.update(map(id, weights))
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise StrategyError(
            f"nn.Graph: stage ids {sorted(found)} leave out {missing[0]}. {len(found)} stages are numbered 0 to "
            f"{len(found) - 1}: set module.config.stage_id accordingly."
        )
    return dict(sorted(found.items()))


def _walk(module: nn.Module, stage: int | None) -> Iterator[tuple[int | None, list[torch.Tensor]]]:
    config = config_of(module)
    if config is not None and config.stage_id is not None:
        stage = config.stage_id
    yield stage, [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for child in module.children():
        yield from _walk(child, stage)


def disjoint_placements(stages: dict[int, list[torch.Tensor]]) -> tuple[Placement, ...]:
    """The placements of the stages, if each has global weights and its own ranks, so that they can run concurrently.

    Empty if there are fewer than two such stages.
    """
    placements: list[Placement] = []
    taken: set[int] = set()
    for weights in stages.values():
        on = [weight.placement if isinstance(weight, GlobalTensor) else None for weight in weights]
        ranks = {rank for placement in on if placement is not None for rank in placement}
        if not on or on[0] is None or None in on or ranks & taken:
            return ()
        taken |= ranks
        placements.append(on[0])
    return tuple(placements) if len(placements) > 1 else ()
