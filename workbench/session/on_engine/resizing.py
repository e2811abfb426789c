"""Before engines are given back: the ranks that stay get all of the modules, optimizers and global tensors.

A parallelized module keeps its strategy if that fits the ranks that stay, with another data degree if need be; else it
becomes data parallel. Other global tensors keep one split, or become whole. All stay the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.presets import refitted
from workbench.core.sbp import Split, broadcast
from workbench.session.on_engine import completion as engine_assist
from workbench.session.on_engine.sent_values import spread
from workbench.session.on_engine.shell import shell
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World, current
from workbench.training.gradients.stale_optimizer import optimizers_of
from workbench.training.parallel import place
from workbench.training.strategies.state import STATE, describe, state_of

Rows = list[tuple[str, str]]
"""(variable, how it lies now, or why it was not moved)."""


def withdraw(num_ranks: int) -> Rows:
    """Bring the user's variables onto the first ``num_ranks`` ranks. All ranks call it and get the same rows."""
    namespace = shell().user_ns
    return withdraw_from({name: namespace[name] for name in engine_assist.names()}, num_ranks, current())


def withdraw_from(variables: Mapping[str, Any], num_ranks: int, world: World) -> Rows:
    """The same for given variables."""
    found = {name: value for name, value in spread(variables).items() if _describe(value, num_ranks)}
    told = all_gather_object({name: _describe(value, num_ranks) for name, value in found.items()}, world, "resize")
    alike = [name for name, said in told[0].items() if all(each.get(name) == said for each in told)]
    alike.sort(key=lambda name: (not told[0][name].startswith(_PARALLELIZED), name))
    firsts = {name: next(other for other in alike if found[other] is found[name]) for name in alike}
    same = all_gather_object(firsts, world, "resize")
    alike = [name for name in alike if all(each[name] == same[0][name] for each in same)]
    rows = [(name, _withdraw(found[name], num_ranks, world)) for name in alike if same[0][name] == name]
    others = sorted({name for each in told for name in each} - set(alike))
    return [row for row in rows if row[1]] + [(name, "not moved: it differs between ranks") for name in others]


_PARALLELIZED = "strategies"


def _describe(value: Any, num_ranks: int) -> str:
    """What of a value lies on ranks behind the first ``num_ranks``, as all ranks say it; empty if nothing does."""
    strategies = "; ".join(str(state_of(module).strategy) for module in _parallelized(value, num_ranks))
    tensors = "; ".join(f"{each.layout_on_ranks} {tuple(each.shape)}" for each in _beyond(value, num_ranks))
    return f"{_PARALLELIZED}: {strategies}; {tensors}" if strategies else tensors


def _withdraw(value: Any, num_ranks: int, world: World) -> str:
    """Move a value; returns how it lies now, empty if it has moved with another one."""
    said = []
    for module in _parallelized(value, num_ranks):
        state = state_of(module)
        strategy = refitted(state.strategy, describe(module), num_ranks)
        place(module, strategy, optimizers_of(module, world), num_ranks)
        said.append(f"under {strategy}" + ("" if strategy == state.strategy else f" in place of {state.strategy}"))
    for tensor in _beyond(value, num_ranks):
        split = next((each for each in tensor.sbp if isinstance(each, Split)), broadcast)
        target = Layout(Placement.of(tensor.placement.type, list(range(num_ranks))), (split,))
        with torch.no_grad():
            tensor._take_data(box(tensor.detach(), target))
        said.append(str(target))
    return ", ".join(dict.fromkeys(said))


def _parallelized(value: Any, num_ranks: int) -> list[nn.Module]:
    """The parallelized modules in a value that lie on ranks behind the first."""
    modules = value.modules() if isinstance(value, nn.Module) else ()
    return [
        module
        for module in modules
        if STATE in module.__dict__ and any(max(ranks) >= num_ranks for ranks in state_of(module).placements)
    ]


def _beyond(value: Any, num_ranks: int) -> list[GlobalTensor]:
    """The global tensors in a value that lie on ranks behind the first, each once."""
    found = {id(tensor): tensor for tensor in _tensors(value) if max(tensor.placement) >= num_ranks}
    return list(found.values())


def _tensors(value: Any) -> Iterator[GlobalTensor]:
    if isinstance(value, GlobalTensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (each for each in [*value.parameters(), *value.buffers()] if isinstance(each, GlobalTensor))
    elif type(value) in (list, tuple, dict):  # the order in a set is another on each rank
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
