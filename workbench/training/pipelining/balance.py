"""Stages cut by the measured costs of their layers: forward and backward are timed layer by layer."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from workbench.core.options import V_SCHEDULES
from workbench.core.presets import balanced_cuts, block_of, stage_parts
from workbench.core.rows import Row, quoted
from workbench.core.strategy import Options, Strategy
from workbench.errors import StrategyError
from workbench.pipeline.schedules import make_table
from workbench.pipeline.simulate import simulate
from workbench.tensors import default_generator
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.program_state import ProgramState, tables_of
from workbench.tensors.world import current
from workbench.training.batches import Batch, LossFunction
from workbench.training.fresh_inputs import fresh
from workbench.training.strategies.state import STATE, describe, layers_of
from workbench.training.traced_calls import describe_with_calls
from workbench.transport.traffic import Time, seconds


@dataclass(frozen=True)
class Balance:
    """Stages with measured costs; ``print`` it.

    Attributes:
        strategy: one row per part, with its stage.
        costs_s: seconds of forward and backward of every part of the model, in the order of the forward. A part is
            an element of a list of modules (a block), or a single layer; those that take turns are one part, named
            by the first.
        stages: the stage of every part.
    """

    strategy: Strategy
    costs_s: Mapping[str, float]
    stages: Mapping[str, int]

    def stage_costs_s(self) -> list[float]:
        """Seconds of every stage."""
        totals = [0.0] * (max(self.stages.values()) + 1)
        for part, stage in self.stages.items():
            totals[stage] += self.costs_s[part]
        return totals

    def __str__(self) -> str:
        costs = ", ".join(f"{cost * 1e3:.1f}" for cost in self.stage_costs_s())
        return f"{self.strategy}\nstages of {costs} ms"


def partition_stages(
    module: nn.Module,
    loss_fn: LossFunction | None,
    inputs: Any,
    targets: Any,
    num_stages: int,
    *,
    num_micro_batches: int | None = None,
    schedule: str | None = None,
    num_repeats: int = 5,
) -> Balance:
    """Cut a model into stages for the shortest step, by measuring its layers. All ranks call it.

    It runs forward and backward of one micro-batch on this rank, in plain torch, and takes the least time of each part
    over the repetitions and over the ranks, because other programs on the machine only make times longer. The loss
    counts with the last layer. Cuts fall between blocks and layers, never inside a block, in the order in which the
    forward calls them. Cuts are compared by the simulated time of a step. With few micro-batches the best cut is not
    the one whose slowest stage is fastest: early stages may be slower than late ones.

    Args:
        module: the whole model, before ``wb.parallelize``. Nothing of it changes.
        loss_fn, inputs, targets: the loss and one micro-batch, as for ``wb.forward_backward``.
        num_stages: number of stages.
        num_micro_batches: micro-batches per step; default: the number of stages.
        schedule: with one stage per rank, or two in a V; default ``1f1b``. Values that you give become options of the
            strategy.
        num_repeats: repetitions, after one that does not count.

    Raises:
        StrategyError: fewer parts than stages, a number below 1, or a module that is already parallelized.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512), nn.Linear(512, 512))
    >>> str(wb.planner.partition_stages(model, F.mse_loss, torch.ones(64, 8), torch.ones(64, 512), 2).strategy)
    '0: data@0; 1: data@0; 2: data@1 | 2x1x1'
    """
    _check(module)
    for name, number, what in (
        ("num_stages", num_stages, "pipeline"),
        ("num_micro_batches", 1 if num_micro_batches is None else num_micro_batches, "step"),
        ("num_repeats", num_repeats, "measurement"),
    ):
        if not (isinstance(number, int) and number >= 1):
            raise StrategyError(
                f"partition_stages: {name}={number!r}, but a {what} has a whole number of them, from 1 on."
            )
    batch = Batch.of_arguments(inputs, targets, loss_fn)
    layers = _restoring_state(module, lambda: describe_with_calls(module, _fresh(batch)))
    parts = [[layer.name for layer in part] for part in stage_parts(layers)]
    if num_stages > len(parts):
        raise StrategyError(
            f"partition_stages: {num_stages} stages, but the model has {len(parts)} parts between which it can be cut "
            f"(blocks and single layers). Each stage needs one: use at most {len(parts)} stages."
        )
    samples = _restoring_state(module, lambda: _samples(module, loss_fn, batch, num_repeats + 1))
    own = [sum(min(sample[name] for sample in samples[1:]) for name in part) for part in parts]
    costs = [min(times) for times in zip(*all_gather_object(own, current(), "partition_stages()"), strict=True)]
    cuts = fastest_partition(costs, num_stages, num_micro_batches or num_stages, schedule or "1f1b")
    units = [
        (unit, stage) for part, stage in zip(parts, cuts, strict=True) for unit in dict.fromkeys(map(block_of, part))
    ]
    rows = [Row(quoted(unit), "data", None, stage) for unit, stage in units]
    num_ranks = num_stages // 2 if schedule in V_SCHEDULES else num_stages
    options = Options((num_ranks, 1, 1), num_micro_batches=num_micro_batches or 1, schedule=schedule)
    strategy = Strategy.from_rows(rows, options)
    names = [block_of(part[0]) for part in parts]
    return Balance(strategy, dict(zip(names, costs, strict=True)), dict(zip(names, cuts, strict=True)))


def _check(module: nn.Module) -> None:
    if STATE in module.__dict__ or any(isinstance(p, GlobalTensor) for p in module.parameters()):
        raise StrategyError(
            f"partition_stages: {type(module).__name__} is spread over {current().world_size} ranks already; layers "
            "are timed on 1. Call it on the plain module, before wb.parallelize."
        )


def _samples(module: nn.Module, loss_fn: LossFunction | None, batch: Batch, num_samples: int) -> list[dict[str, float]]:
    """Costs of layers, measured several times, with pauses of different lengths on the ranks of a host.

    Without the pauses, all ranks run the largest layer at the same time and share the memory's bandwidth. Stages do
    not.
    """
    found: list[dict[str, float]] = []
    for number in range(num_samples):
        quarters = number * (current().rank + 1) % 4
        time.sleep(quarters / 4 * sum(found[-1].values()) if found else 0.0)
        found.append(_measure(module, loss_fn, _fresh(batch)))
    return found


def _fresh(batch: Batch) -> Batch:
    return replace(batch, inputs=fresh(batch.inputs))


def _measure(module: nn.Module, loss_fn: LossFunction | None, batch: Batch) -> dict[str, float]:
    """Seconds of forward and backward by layer. Functions between two layers count with the one before."""
    now = current().traffic.now
    begun: list[tuple[str, Time]] = []
    ended: list[tuple[str, Time]] = []
    handles = [_record(layer, name, now, begun, ended) for name, layer in layers_of(module)]
    try:
        loss = batch.loss(module, loss_fn)
        forward_end = now()
        loss.backward()
        end = now()
    finally:
        for handle in handles:
            handle.remove()
    costs = {layer.name: 0.0 for layer in describe(module)}
    for (name, start), stop in zip(begun, [*(at for _, at in begun[1:]), forward_end], strict=True):
        costs[name] += seconds(stop) - seconds(start)
    before = forward_end
    for name, at in ended:
        costs[name] += seconds(at) - seconds(before)
        before = at
    costs[begun[0][0]] += seconds(end) - seconds(before)
    return costs


def _record(
    layer: nn.Module, name: str, now: Callable[[], Time], begun: list[tuple[str, Time]], ended: list[tuple[str, Time]]
) -> Any:
    """Record when a layer begins, and when its backward ends, which is when the gradient of its input is ready."""
    name = name or "(root)"

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        if tensors:
            tensors[0].register_hook(lambda grad: ended.append((name, now())))
        if torch._C._current_graph_task_id() < 0:  # what a checkpoint runs again is in the time of the backward
            begun.append((name, now()))

    return layer.register_forward_pre_hook(begin, with_kwargs=True)


def _restoring_state(module: nn.Module, run: Callable[[], Any]) -> Any:
    """``run()`` after which the module, its gradients and random numbers are as before."""
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    values = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]
    with default_generator.restored():
        before = ProgramState([module, *tables_of(module)], current().device)
        try:
            for parameter, _ in grads:
                parameter.grad = None
            return run()
        finally:
            before.put_back()
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for tensor, value in values:
                    if not torch.equal(tensor, value):  # a write would stop the backward of what has saved this tensor
                        tensor.copy_(value)


_MAX_CUTS = 300
"""So many are tried."""
_SHARES = {"F": 0.4, "B": 0.6, "I": 0.4, "W": 0.35}
"""What an action takes of its stage's cost, measured on blocks of a GPT: a split backward takes longer."""


def fastest_partition(costs: Sequence[float], num_stages: int, num_micro_batches: int, schedule: str) -> list[int]:
    """The stage of every part, for the shortest simulated step.

    With few micro-batches, filling and emptying the pipeline counts as much as the slowest stage. Early stages wait for
    their first backward, so they may be slower than late ones.

    It tries all cuts if there are at most 300. Otherwise it descends from the cut whose slowest stage is fastest.

    Args:
        costs: seconds, or other units, of forward and backward of one micro-batch, for each part.
        num_stages: at most as many as parts.
        num_micro_batches: micro-batches of a step.
        schedule: see ``make_table``.

    >>> balanced_cuts([2, 8, 8, 8, 8, 8, 8, 8, 8, 14], 4)
    [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    >>> fastest_partition([2, 8, 8, 8, 8, 8, 8, 8, 8, 14], 4, 4, "1f1b")
    [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]
    """
    total = sum(costs) or 1.0

    def price(ends: Sequence[int]) -> tuple[float, float]:
        """The time of a step, rounded to a millionth of the work, and that of its slowest stage."""
        stages = [sum(costs[start:end]) for start, end in itertools.pairwise((0, *ends, len(costs)))]
        return round(step_s(stages, num_micro_batches, schedule) / total, 6), max(stages)

    if math.comb(len(costs) - 1, num_stages - 1) <= _MAX_CUTS:
        best = min(itertools.combinations(range(1, len(costs)), num_stages - 1), key=price)
    else:
        first = balanced_cuts(costs, num_stages)
        best = tuple(first.index(stage) for stage in range(1, num_stages))
        best_price, tried = price(best), 0
        cuts = _beside(best, len(costs))
        while tried < _MAX_CUTS and (cut := next(cuts, None)):
            tried += 1
            if (cut_price := price(cut)) < best_price:
                best, best_price, cuts = cut, cut_price, _beside(cut, len(costs))
    return [sum(end <= part for end in best) for part in range(len(costs))]


def step_s(stages: Sequence[float], num_micro_batches: int, schedule: str) -> float:
    """Seconds of a simulated step, from the seconds of forward and backward of one micro-batch on every stage.

    Once the pipeline is full, each further micro-batch takes as long as on the slowest rank.
    """
    simulated = min(num_micro_batches, 2 * len(stages))
    table = make_table(schedule, len(stages), simulated)
    timeline = simulate(table, len(stages), lambda action: stages[action.stage] * _SHARES[action.kind])
    slowest = max(sum(stages[stage] for stage in {action.stage for action in actions}) for actions in table)
    return timeline.makespan_s + (num_micro_batches - simulated) * slowest


def _beside(ends: tuple[int, ...], num_parts: int) -> Iterator[tuple[int, ...]]:
    """Cuts with one border moved by one part, or two neighbours."""
    for border in range(len(ends)):
        for here, next_one in itertools.product((-1, 0, 1), repeat=2):
            moved = [*ends, num_parts]
            moved[border] += here
            moved[border + 1] += next_one
            if moved[-1] == num_parts and all(start < end for start, end in itertools.pairwise((0, *moved))):
                yield tuple(moved[:-1])
