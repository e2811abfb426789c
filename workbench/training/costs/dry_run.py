"""``wb.planner.dry_run``: one training step of a strategy, without its ranks, to count the bytes that they would send.

It runs the real program in this process: ``parallelize``, forward, backward and optimizer, with the real boxing plans,
on tensors without data, over a transport that moves nothing. So it counts the bytes of the program, not those of a
formula.

It does not run thousands of ranks one by one. A boxing plan says what each of its ranks sends, and every rank of a
stage passes all boxings of the stage. One rank's forward and backward therefore give the bytes of the whole stage. A
rank knows only its own exchanges around the optimizer's step (sums of gradients, shards of ZeRO): the dry run asks the
corners of a stage's grid, and all its ranks if the corners differ. Stages with the same layers between the same
neighbours run once, if they exchange the same in forward, as the first rank has seen. Two micro-batches stand for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from workbench.core.boxing import LinkCost
from workbench.core.presets import StrategyLike, stages_preset, strategy_of
from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy, Strategy
from workbench.errors import StrategyError
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.training.batches import Batch, LossFunction, cast
from workbench.training.costs.boxing_collector import BoxingCollector, Kinds
from workbench.training.parallel import describe, parallelize, state_of
from workbench.training.pipelining.step import forward_backward
from workbench.training.runs.job_checks import check_functions
from workbench.training.traced_calls import describe_with_calls
from workbench.transport.fake import FakeTransport
from workbench.transport.threads import ThreadTransport
from workbench.units import format_bytes

META = torch.device("meta")


class DryRunEnded(Exception):
    """A dry run was ended by the one who asked for it."""


@dataclass(frozen=True)
class DryRun:
    """The bytes that ranks would send in a training step.

    Attributes:
        strategy: the resolved strategy.
        sent_bytes: by rank.
        by_kind: bytes of all ranks by kind of exchange; "gradients" and "parameters" are sums of gradients and
            gatherings of shards, the others are boxings.
        num_run: number of ranks that were run; each other rank equals one of them.
    """

    strategy: ResolvedStrategy
    sent_bytes: tuple[int, ...]
    by_kind: dict[str, int]
    num_run: int

    @property
    def boxed_bytes(self) -> int:
        """Bytes of all ranks together."""
        return sum(self.sent_bytes)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.by_kind.items() if size)
        return (
            f"{len(self.sent_bytes)} ranks send {format_bytes(self.boxed_bytes)} in a step, one at most "
            f"{format_bytes(max(self.sent_bytes))}: {kinds or 'nothing'} ({self.num_run} ranks were run on metadata)"
        )


def dry_run(
    model_fn: Callable[[], nn.Module],
    strategy: StrategyLike,
    num_ranks: int,
    inputs: Any,
    targets: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None = None,
    cost: LinkCost = ThreadTransport.cost,
    is_ended: Callable[[], bool] = lambda: False,
) -> DryRun:
    """Run one training step of ``strategy`` on metadata for ``num_ranks`` ranks, and count the bytes that they send.

    It needs no device and allocates no weight: the model may have any size, on any number of ranks.

    Args:
        model_fn: makes the model; called with ``meta`` as the default device.
        strategy: as for ``wb.parallelize``.
        num_ranks: number of ranks.
        inputs, targets, loss_fn: a whole batch, as for ``wb.forward_backward``; only shapes and dtypes matter.
        optimizer_fn: parameters -> torch optimizer; default SGD.
        cost: the link by which boxing chooses paths and the number of steps of a sum.
        is_ended: asked before every rank and at every operation on tensors; True ends the dry run.

    Raises:
        DryRunEnded: ``is_ended`` said so.
        StrategyError: the strategy does not fit the model or the number of ranks, or the forward or the loss reads
            values.
        RunError: a model or an optimizer in place of the function that makes it.

    >>> batch = torch.empty(8, 4), torch.empty(8, dtype=torch.int64)
    >>> run = dry_run(lambda: nn.Linear(4, 6), "data", 2, *batch, nn.functional.cross_entropy)
    >>> run.by_kind                                     # 30 gradients of 4 bytes, from each rank to the other
    {'gradients': 240}
    """
    check_functions({"model_fn": model_fn, "loss_fn": loss_fn, "optimizer_fn": optimizer_fn})
    given = Batch.of_arguments(inputs, targets, loss_fn)
    with META:
        model = model_fn()
    layers = describe_with_calls(model, given) if stages_preset(strategy) else describe(model)
    strategy = strategy_of(strategy, layers, num_ranks)
    resolved = strategy.resolve(layers, num_ranks)
    batch = tree_map_only(torch.Tensor, lambda leaf: leaf.to(META), (given.inputs, given.targets))
    program = _Program(model_fn, loss_fn, optimizer_fn, num_ranks, cost, strategy, batch, given.num_samples, is_ended)
    asked: dict[Any, dict[int, Kinds]] = {}
    grids: dict[Any, Grid] = {}
    by_rank: dict[int, Kinds] = {}
    num_run = 0
    for stage in range(resolved.degrees[0]):
        grid, kind = resolved.stage_grid(stage), _kind_of(stage, resolved, layers, program)
        if kind not in asked:
            asked[kind], how_many = _boxings_of_stage(grid, program)
            grids[kind], num_run = grid, num_run + how_many
        pairs = zip(chain(*grid), chain(*grids[kind]), strict=True)
        by_rank |= {rank: asked[kind][other] for rank, other in pairs}
    by_kind: Kinds = {}
    for kinds in by_rank.values():
        by_kind = _sum_of(by_kind, kinds)
    sent = tuple(sum(by_rank[rank].values()) for rank in range(num_ranks))
    return DryRun(resolved, sent, {kind: size for kind, size in by_kind.items() if size}, num_run)


Grid = list[list[int]]
_MAX_STAGES_ONE_BY_ONE = 4


def _sum_of(one: Kinds, two: Kinds, factor: int = 1) -> Kinds:
    return {kind: one.get(kind, 0) + factor * two.get(kind, 0) for kind in (*one, *(k for k in two if k not in one))}


def _kind_of(stage: int, resolved: ResolvedStrategy, layers: Sequence[Layer], program: _Program) -> Any:
    """The key of a stage's traffic: its layers, their neighbours, and what its ranks exchange in forward. Stages with
    equal keys run once; a few stages all run.
    """
    if resolved.num_stages <= _MAX_STAGES_ONE_BY_ONE or resolved.num_stages > resolved.degrees[0]:
        return stage

    def described(of_stage: int) -> list[Any]:
        pairs = zip(layers, resolved.layers, strict=True)
        return [_described(layer, choice) for layer, choice in pairs if choice.stage == of_stage]

    before, behind = described(stage - 1)[-1:], described(stage + 1)[:1]
    widths = [resolved.stage_width(min(max(0, stage + step), resolved.num_stages - 1)) for step in (-1, 0, 1)]
    pairs = zip(layers, resolved.layers, strict=True)
    has_gradients = any(c.stage < stage and len(layer.frozen) < len(layer.shapes) for layer, c in pairs)
    exchanged = [sorted(program.exchanged_by(rank).items()) for rank in resolved.stage_ranks(stage)]
    return repr((described(stage), before, behind, widths, has_gradients, exchanged))


def _described(layer: Layer, choice: ResolvedLayer) -> Any:
    parameters = tuple((name, shape, layer.itemsize_of(name)) for name, shape in layer.shapes.items()), layer.frozen
    return layer.kind, parameters, choice.parallel, choice.split, choice.over_data, layer.tied_to


def _boxings_of_stage(grid: Grid, program: _Program) -> tuple[dict[int, Kinds], int]:
    """The bytes that each rank of a stage sends, and the number of ranks that were run: the corners of its grid, and
    all ranks where the corners differ.
    """
    boxed = program.boxings(grid[0][0])
    corners = list(dict.fromkeys((grid[0][0], grid[0][-1], grid[-1][0], grid[-1][-1])))
    around = {rank: program.around_step(rank) for rank in corners}
    if any(kinds != around[corners[0]] for kinds in around.values()):
        around |= {rank: program.around_step(rank) for rank in chain(*grid) if rank not in around}
    found = {rank: _sum_of(boxed.get(rank, {}), around.get(rank, around[corners[0]])) for rank in chain(*grid)}
    return found, len(around)


def _first_rows(leaf: Any, num_rows: int, wanted: int) -> Any:
    is_of_batch = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == num_rows
    return leaf[:wanted] if is_of_batch else leaf


def _end_if(is_ended: Callable[[], bool]) -> None:
    if is_ended():
        raise DryRunEnded("dry_run: ended before its last operation")


class _Shards(TorchDispatchMode):
    """A mode in which torch's formulas for metadata, which are Python functions, see shards and not logical tensors.

    Tensors that a forward makes, such as positions, lie on the CPU: beside metadata, only theirs counts. Every
    operation passes here, so here a dry run ends that nobody waits for any more.
    """

    def __init__(self, is_ended: Callable[[], bool]) -> None:
        super().__init__()
        self._is_ended = is_ended

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _end_if(self._is_ended)
        given = args, kwargs or {}
        devices = {leaf.device for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if META in devices and len(devices) > 1:
            given = tree_map_only(torch.Tensor, lambda leaf: leaf.to(META), given)
        with local_torch():
            return func(*given[0], **given[1])


_CAST = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "scaled_dot_product_attention",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
"""Functions that autocast computes in 16 bits. Others keep the dtype, as on CPUs; on GPUs norms and softmax give 32."""


def _cast(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of shards with autocast's casts. torch's autocast goes by the device and ignores metadata."""
    if name not in _CAST:
        return function

    def with_casts(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = cast((args, kwargs), torch.get_autocast_dtype("cpu"))
        return function(*args, **kwargs)

    return with_casts


@contextmanager
def _explaining_value_reads() -> Iterator[None]:
    """Context that explains the error of a forward or a loss that reads values, which metadata does not have."""
    try:
        yield
    except RuntimeError as error:
        told = str(error).partition(". ")[0]
        if not any(words in told.lower() for words in ("meta tensors", "register_meta")):
            raise
        raise StrategyError(
            f"dry_run: the forward or loss_fn reads values of tensors, and on metadata there are 0 ({told}). Compute "
            "it from shapes, or leave the input out: models of transformers look whether an attention_mask hides "
            "anything."
        ) from error


@dataclass(frozen=True)
class _Program:
    """One rank's part of a training step."""

    model_fn: Callable[[], nn.Module]
    loss_fn: LossFunction | None
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None
    num_ranks: int
    cost: LinkCost
    strategy: Strategy
    batch: Any
    num_samples: int
    is_ended: Callable[[], bool]
    seen: list[BoxingCollector] = field(default_factory=list)
    """By the first run."""

    def exchanged_by(self, rank: int) -> Kinds:
        """What a rank sends and receives in forward; nothing before the first run."""
        return self.seen[0].in_forward.get(rank, {}) if self.seen else {}

    def boxings(self, rank: int) -> dict[int, Kinds]:
        """The bytes that ranks send in the boxings of a step that ``rank`` sees: all ranks of its stage, and some
        others.
        """
        return self._of_all_micro_batches(lambda *step: self._run(rank, *step)[0])

    def around_step(self, rank: int) -> Kinds:
        """The bytes that a rank sends besides boxings: gradients, and parameters of which it holds a shard."""
        if self.strategy.options.zero >= 2:  # in forward and backward too
            return self._of_all_micro_batches(lambda *step: {rank: self._run(rank, *step)[1]})[rank]
        with self._on(rank) as world:
            model, optimizer = self._made(self.strategy)
            with torch.no_grad(), local_torch():
                for parameter in model.parameters():
                    is_here = isinstance(parameter, GlobalTensor) and not parameter._spec.is_placeholder
                    if is_here and parameter.requires_grad:
                        parameter.grad = torch.empty_like(plain(parameter))
            world.traffic.reset()
            optimizer.step()
            return dict(world.traffic.by_kind)

    def _of_all_micro_batches(self, run: Callable[[Strategy, Any], dict[int, Kinds]]) -> dict[int, Kinds]:
        """The bytes of all micro-batches from a run of two: each further one adds as much as the second."""
        num, rows = self.strategy.options.num_micro_batches, self.num_samples
        if num <= 2 or rows % num:
            return run(self.strategy, self.batch)
        one, two = (
            run(
                self.strategy.with_options(num_micro_batches=how_many),
                tree_map(partial(_first_rows, num_rows=rows, wanted=rows // num * how_many), self.batch),
            )
            for how_many in (1, 2)
        )
        return {
            rank: _sum_of(_sum_of(one.get(rank, {}), kinds, num - 1), one.get(rank, {}), 1 - num)
            for rank, kinds in two.items()
        }

    def _run(self, rank: int, strategy: Strategy, batch: Any) -> tuple[dict[int, Kinds], Kinds]:
        """A whole step of ``rank``: (what ranks send in the boxings that it sees, what it sends besides)."""
        with self._on(rank) as world:
            model, optimizer = self._made(strategy)
            plan = state_of(model).layouts.plan
            for _ in range(2):
                world.context.tracer = collector = BoxingCollector()
                world.traffic.reset()
                with _explaining_value_reads():
                    forward_backward(model, self.loss_fn, *batch)
                optimizer.step()
                if not plan.settle():
                    break  # else the next step is like all later ones
            if not self.seen:
                self.seen.append(collector)
            sent = collector.sent
            return sent, _sum_of(dict(world.traffic.by_kind), sent.get(rank, {}), -1)

    @contextmanager
    def _on(self, rank: int) -> Iterator[World]:
        _end_if(self.is_ended)
        world = World(rank, self.num_ranks, META, FakeTransport(self.num_ranks, self.cost))
        world.context.generator = torch.Generator().manual_seed(0)
        world.casts = _cast
        with Simulated(world), _Shards(self.is_ended):
            yield world

    def _made(self, strategy: Strategy) -> tuple[nn.Module, torch.optim.Optimizer]:
        with META:
            model = self.model_fn()
        model = parallelize(model, strategy)
        make = self.optimizer_fn or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return model, make(model.parameters())
