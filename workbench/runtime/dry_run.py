"""``wb.dry_run``: a training step of a strategy on ranks that nobody has, to count what it sends.

The program is the real one: ``parallelize``, forward, backward and optimizer run rank by rank in this process, with the
real boxing plans, on tensors without data, through a transport that moves nothing. So what is counted are the bytes
that the ranks would send, not a formula's.

Thousands of ranks are not run one by one. Within a stage all ranks do the same on slices of one size, unless sizes do
not divide evenly: the corners of the stage's grid tell. Stages of many that have the same layers between the same
neighbours do the same. And every micro-batch is like the other: two tell of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from workbench.core.boxing import LinkCost
from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy, Strategy
from workbench.errors import StrategyError
from workbench.runtime.parallel import describe, parallelize
from workbench.runtime.pipelining.step import forward_backward
from workbench.runtime.tensor import local_torch
from workbench.runtime.transport.paper import PaperTransport
from workbench.runtime.transport.threads import ThreadTransport
from workbench.runtime.world import Simulated, World
from workbench.units import format_bytes

_MAX_RANKS_ONE_BY_ONE = 16
META = torch.device("meta")


@dataclass(frozen=True)
class DryRun:
    """What the ranks would send in a training step.

    Attributes:
        strategy: as it was resolved.
        sent_bytes: by rank.
        by_kind: bytes of all ranks by kind of exchange; "gradients" and "parameters" are those around the optimizer's
            step, the others are boxings.
        num_run: how many ranks were run; the others are like one of them.
    """

    strategy: ResolvedStrategy
    sent_bytes: tuple[int, ...]
    by_kind: dict[str, int]
    num_run: int

    @property
    def boxed_bytes(self) -> int:
        """Of all ranks together."""
        return sum(self.sent_bytes)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.by_kind.items() if size)
        return (
            f"{len(self.sent_bytes)} ranks send {format_bytes(self.boxed_bytes)} in a step, one at most "
            f"{format_bytes(max(self.sent_bytes))}: {kinds or 'nothing'} ({self.num_run} ranks were run on metadata)"
        )


def dry_run(
    model_fn: Callable[[], nn.Module],
    strategy: Strategy | str,
    num_ranks: int,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None = None,
    cost: LinkCost = ThreadTransport.cost,
) -> DryRun:
    """Run one training step of ``strategy`` on metadata for ``num_ranks`` ranks and count the bytes they send.

    No weight is allocated and no device is needed: a model of any size, on any number of ranks.

    Args:
        model_fn: makes the model; called with ``meta`` as the default device.
        inputs, targets: of a whole batch; only shapes and dtypes are looked at.
        loss_fn: (output, targets) -> scalar.
        optimizer_fn: parameters -> torch optimizer; default SGD.
        cost: of the link that boxing decides by: routes, and in how many steps sums are made.

    Raises:
        StrategyError: the strategy does not fit the model or the number of ranks.

    >>> batch = torch.empty(8, 4), torch.empty(8, dtype=torch.int64)
    >>> run = dry_run(lambda: nn.Linear(4, 6), "data", 2, *batch, nn.functional.cross_entropy)
    >>> run.by_kind                                     # 30 gradients of 4 bytes, from each rank to the other
    {'gradients': 240}
    """
    strategy = Strategy(strategy) if isinstance(strategy, str) else strategy
    with META:
        layers = describe(model_fn())
    if strategy.options.precision != "fp32":
        raise StrategyError(
            f"dry_run: strategy {str(strategy)!r} casts to {strategy.options.precision}. What autocast does depends on "
            f"the device, and metadata lies on none: only fp32 is counted. Leave {strategy.options.precision} out."
        )
    program = _Program(model_fn, loss_fn, optimizer_fn, num_ranks, cost)
    resolved = strategy.resolve(layers, num_ranks)
    batch = tree_map(lambda leaf: leaf.to(META) if isinstance(leaf, torch.Tensor) else leaf, (inputs, targets))
    count = _counting_micro_batches(program, strategy, batch)
    counts: dict[int, dict[str, int]] = {}
    stands_for: dict[int, int] = {}
    grid_of: dict[Any, Grid] = {}
    for stage in range(resolved.degrees[0]):
        grid = resolved.stage_grid(stage)
        first = grid_of.setdefault(_kind_of(stage, resolved, layers), grid)
        if first is grid:
            _run_stage(grid, count, counts, stands_for)
        else:
            stands_for |= {
                rank: stands_for[other]
                for mine, others in zip(grid, first, strict=True)
                for rank, other in zip(mine, others, strict=True)
            }
    by_kind: dict[str, int] = {}
    for like in stands_for.values():
        for kind, size in counts[like].items():
            by_kind[kind] = by_kind.get(kind, 0) + size
    sent = tuple(sum(counts[stands_for[rank]].values()) for rank in range(num_ranks))
    return DryRun(resolved, sent, by_kind, len(counts))


Count = Callable[[int], dict[str, int]]
"""rank -> bytes sent by kind."""
Grid = list[list[int]]
_MAX_STAGES_ONE_BY_ONE = 4


def _kind_of(stage: int, resolved: ResolvedStrategy, layers: Sequence[Layer]) -> Any:
    """What the traffic of a stage follows from: its layers, and what stands on either side. Few stages are all run."""
    if resolved.num_stages <= _MAX_STAGES_ONE_BY_ONE or resolved.num_stages > resolved.degrees[0]:
        return stage

    def told(of_stage: int) -> list[Any]:
        pairs = zip(layers, resolved.layers, strict=True)
        return [_told(layer, choice) for layer, choice in pairs if choice.stage == of_stage]

    before, behind = told(stage - 1)[-1:], told(stage + 1)[:1]
    widths = [resolved.stage_width(max(0, stage + step)) for step in (-1, 0, 1)]
    return repr((told(stage), before, behind, widths))


def _told(layer: Layer, choice: ResolvedLayer) -> Any:
    return layer.kind, tuple(layer.shapes.items()), choice.parallel, choice.split, layer.tied_to


def _run_stage(grid: Grid, count: Count, counts: dict[int, dict[str, int]], stands_for: dict[int, int]) -> None:
    """Count for the ranks of a stage: for its corners, and for all where these are not alike."""
    ranks = [rank for row in grid for rank in row]
    chosen = list(dict.fromkeys((grid[0][0], grid[0][-1], grid[-1][0], grid[-1][-1])))
    if len(ranks) <= _MAX_RANKS_ONE_BY_ONE:
        chosen = ranks
    found = {rank: count(rank) for rank in chosen}
    if len(chosen) < len(ranks) and len({tuple(sorted(kinds.items())) for kinds in found.values()}) > 1:
        found |= {rank: count(rank) for rank in ranks if rank not in found}
    counts |= found
    stands_for |= {rank: rank if rank in found else chosen[0] for rank in ranks}


def _counting_micro_batches(program: _Program, strategy: Strategy, batch: Any) -> Count:
    """Of many equal micro-batches two are run, and what the second adds is what each one adds."""
    num = strategy.options.num_micro_batches
    rows = max(leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    if num <= 2 or rows % num:
        return lambda rank: program.run(rank, strategy, batch)

    def of_some(rank: int, how_many: int) -> dict[str, int]:
        some = tree_map(lambda leaf: _first_rows(leaf, rows, rows // num * how_many), batch)
        return program.run(rank, strategy.with_options(num_micro_batches=how_many), some)

    def count(rank: int) -> dict[str, int]:
        one, two = of_some(rank, 1), of_some(rank, 2)
        return {kind: one.get(kind, 0) + (num - 1) * (size - one.get(kind, 0)) for kind, size in two.items()}

    return count


def _first_rows(leaf: Any, num_rows: int, wanted: int) -> Any:
    is_of_batch = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == num_rows
    return leaf[:wanted] if is_of_batch else leaf


class _Shards(TorchDispatchMode):
    """Torch's formulas for metadata are Python functions; what they are called with are shards, not logical tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with local_torch():
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Program:
    """A training step, as one rank of many runs it."""

    model_fn: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None
    num_ranks: int
    cost: LinkCost

    def run(self, rank: int, strategy: Strategy, batch: Any) -> dict[str, int]:
        """Bytes that ``rank`` sends in a step, by kind."""
        world = World(rank, self.num_ranks, META, PaperTransport(self.num_ranks, self.cost))
        world.generator = torch.Generator().manual_seed(0)
        with Simulated(world), _Shards():
            with META:
                model = self.model_fn()
            model = parallelize(model, strategy)
            make = self.optimizer_fn or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
            optimizer = make(model.parameters())
            world.traffic.reset()
            forward_backward(model, self.loss_fn, *batch)
            optimizer.step()
        return {kind: size for kind, size in world.traffic.by_kind.items() if size}


__all__ = ["DryRun", "dry_run"]
