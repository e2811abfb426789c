"""``wb.debug.first_difference``: finds the first function of a step in which two strategies compute different numbers.

Both take one step with the same weights and batch. Values are compared in the order of one device: bytes first, then
numbers. Whether a difference is rounding is decided as for runs (``core.verdict``): by the tolerance, then by the noise
of one device, then by the same step in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.presets import StrategyLike, strategy_of
from workbench.core.sbp import Partial
from workbench.core.strategy import Strategy
from workbench.core.verdict import TOLERANCES, Case, Distance, TensorChange
from workbench.errors import CollectiveAborted
from workbench.kernels.blocks import slice_region
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.program_state import undrawn
from workbench.tensors.world import World, current
from workbench.training.batches import Batch, LossFunction
from workbench.training.runs.exact_dtypes import KeepsFloat64, wide, wide_model
from workbench.training.runs.recorded_values import (
    LOSS,
    RecordedValue,
    ValueName,
    values_in_plain_torch,
    values_on_one_rank,
    values_under,
)
from workbench.training.runs.weight_changes import WeightHistory, changes_apart, perturb, precision_of
from workbench.training.strategies.state import describe

_ONE_DEVICE = "one device"


@dataclass(frozen=True)
class FirstDifference:
    """The result of ``first_difference``. It is true if there is a difference, and prints what it is.

    Attributes:
        layer, function: where the first difference beyond rounding is; empty without one. ``function`` is that of torch
            in the layer's forward, or empty for the gradient of a parameter.
        what: ``"result"``, ``"gradient of the result"``, ``"gradient of 'weight'"``.
        ranks: the ranks whose part differs.
        size: the norm of the difference over the norm of the value, on the ranks where it is largest.
        layouts: the value's layout under each of the two.
        operands: the layouts of the function's operands under the first one.
        num_compared, num_same_bytes: how many values were compared until then, and how many were equal in every bit.
        largest: the largest difference that rounding explains, like ``size``.
    """

    layer: str = ""
    function: str = ""
    what: str = ""
    ranks: tuple[int, ...] = ()
    size: float = 0.0
    layouts: tuple[str, str] = ("", "")
    operands: tuple[str, ...] = ()
    num_compared: int = 0
    num_same_bytes: int = 0
    largest: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.what)

    def __str__(self) -> str:
        seen = f"{self.num_compared} values were compared, {self.num_same_bytes} are equal in every bit"
        if not self:
            others = f", and the others differ by at most {self.largest:.0e}"
            if not self.largest:
                seen, others = f"{self.num_compared} values were compared, and all are equal", ""
            return f"no difference beyond rounding: {seen}{others}."
        of = f" of {self.function} in" if self.function else " in"
        layer = self.layer if self.layer == LOSS else f"layer {self.layer!r}" if self.layer else "the model"
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        operands = f", from {' and '.join(self.operands)}" if self.operands else ""
        return (
            f"the first difference beyond rounding is the {self.what}{of} {layer}, on {ranks}: {self.size:.1e} of its "
            f"norm. Layouts: {self.layouts[0]}{operands}; compared with {self.layouts[1]}. Before it, {seen}."
        )


def first_difference(
    model: nn.Module,
    strategy: StrategyLike,
    other: StrategyLike | None = None,
    *,
    batch: Any,
    loss_fn: LossFunction | None = None,
) -> FirstDifference:
    """Take one step under a strategy and under another one, or on one device, and find the first value that differs by
    more than rounding: of which layer, of which function in it, on which rank. All ranks call it.

    Results of functions, their gradients and the gradients of parameters are compared. Everything is computed several
    times and held in host memory: use it with a small batch, to look for a mistake.

    Args:
        model: a plain module with the same weights on all ranks; it is not changed.
        strategy: a text, ``wb.Strategy`` or a preset.
        other: the strategy to compare with, with the micro-batches and the precision of the first; None for one device
            in plain torch.
        batch: a whole batch with its targets, equal on all ranks, as in a data set of ``wb.compare``.
        loss_fn: (output, targets) -> scalar, a mean over the samples. None: the model returns its own loss.

    Raises:
        StrategyError: a strategy does not fit the model.

    >>> model, batch = torch.nn.Linear(4, 2), (torch.ones(6, 4), torch.zeros(6, 2))
    >>> print(wb.debug.first_difference(model, "*: data", batch=batch, loss_fn=F.mse_loss))    # doctest: +SKIP
    no difference beyond rounding: ...
    """
    taken = batch if isinstance(batch, Batch) else Batch.of(batch, loss_fn)
    return _Search(model, strategy, other, taken, loss_fn).find()


def _once(make: Callable[[Any], Any]) -> property:
    """A property that is made when it is first read. (``cached_property`` has one lock for all simulated ranks.)"""

    def read(search: Any) -> Any:
        if make not in search.made:
            search.made[make] = make(search)
        return search.made[make]

    return property(read)


@dataclass(frozen=True)
class _Part:
    """The same part of a value as two sides have it: ``own`` and ``truth``, of these ranks."""

    ranks: tuple[int, ...]
    own: torch.Tensor
    truth: torch.Tensor


class _Search:
    """Takes the steps that are needed, on all ranks together, and compares their values."""

    def __init__(
        self,
        model: nn.Module,
        strategy: StrategyLike,
        other: StrategyLike | None,
        batch: Batch,
        loss_fn: LossFunction | None,
    ) -> None:
        self.world: World = current()
        self.made: dict[Any, Any] = {}
        self.draws = False  # the model draws random numbers: one device is then a world of one rank, which draws alike
        self.model, self.batch, self.loss_fn = model, batch, loss_fn
        layers = describe(model)
        self.strategy = strategy_of(strategy, layers, self.world.world_size)
        options = self.strategy.options
        self.num_micro_batches, precision = options.num_micro_batches, options.precision
        same = {"num_micro_batches": self.num_micro_batches, "precision": precision}
        self.other = None if other is None else strategy_of(other, layers, self.world.world_size).with_options(**same)
        self.tolerance = TOLERANCES[precision_of(model, precision)]

    def find(self) -> FirstDifference:
        """The first difference that is not rounding. Random numbers then go on as if there had been no search."""
        with undrawn(self.world.device):
            all_gather_object(None, self.world, "the beginning of a search")  # simulated ranks share a generator
            return self._first()

    def _first(self) -> FirstDifference:
        """See ``find``."""
        names = _of_rank_0(list(self._one_device), self.world)
        own, truth = self._taken(self.strategy), self._truth
        same = all_gather_object(self._same_bytes(names, own, truth), self.world, "names of equal values")
        there = all_gather_object({n for n in names if n in own}, self.world, "names of values")
        compared = same_bytes = 0
        largest = 0.0
        for name in names:
            holders = [rank for rank, found in enumerate(there) if name in found]
            if not holders:
                continue
            compared += 1
            if all(name in same[rank] for rank in holders):
                same_bytes += 1
                continue
            parts = self._parts(name, own, truth)
            if not parts:
                compared -= 1
                continue
            change = _change(parts)
            if self._is_rounding(name, change):
                largest = max(largest, _relative(change))
                continue
            sizes = [_change([part]).apart for part in parts]
            worst = max(sizes)
            ranks = sorted(
                {rank for part, size in zip(parts, sizes, strict=True) if size >= worst / 10 for rank in part.ranks}
            )
            where, size = (name.layer, name.function, name.what, tuple(ranks)), _relative(change)
            layouts, operands = self._layouts(name, own, truth)
            return FirstDifference(*where, size, layouts, operands, compared - 1, same_bytes, largest)
        return FirstDifference(num_compared=compared, num_same_bytes=same_bytes, largest=largest)

    # ---- steps ----------------------------------------------------------------------------------------------------

    @_once
    def _one_device(self) -> dict[ValueName, RecordedValue]:
        values = self._taken(None)
        return self._taken(None) if self.draws else values

    @_once
    def _truth(self) -> dict[ValueName, RecordedValue]:
        return self._one_device if self.other is None else self._taken(self.other)

    @_once
    def _noise(self) -> Distance:
        """How far one device is from itself when its weights change by a rounding unit, as rank 0 finds."""
        perturbed = self._taken(None, perturbed=True)
        pairs = [(name, perturbed.get(name), value) for name, value in self._one_device.items()]
        changes = [
            replace(_change([_Part((0,), own.local, value.local)]), name=str(name))
            for name, own, value in pairs
            if own is not None and own.shape == value.shape
        ]
        return Distance((), tuple(_of_rank_0(changes, self.world)))

    @_once
    def _in_float64(self) -> tuple[dict[ValueName, RecordedValue], dict[ValueName, RecordedValue]] | None:
        """Both sides in float64; None if the model cannot run so."""
        if self.tolerance is TOLERANCES["float64"]:
            return None
        exact = [None if one is None else one.with_options(precision="fp32") for one in (self.strategy, self.other)]
        try:
            with KeepsFloat64():
                return self._taken(exact[0], is_wide=True), self._taken(exact[1], is_wide=True)
        except CollectiveAborted:
            raise
        except (RuntimeError, TypeError, ValueError):  # the same on all ranks: a function without float64
            return None

    def _taken(
        self, strategy: Strategy | None, *, is_wide: bool = False, perturbed: bool = False
    ) -> dict[ValueName, RecordedValue]:
        """This rank's values of a step under a strategy, or on one device."""
        model, batch = copy.deepcopy(self.model), self.batch
        if perturbed:
            perturb(model, self.tolerance)
        if is_wide:
            inputs, targets = wide((batch.inputs, batch.targets))
            model, batch = wide_model(model), replace(batch, inputs=inputs, targets=targets)
        parts = batch.cut(self.num_micro_batches)
        if strategy is not None:
            return values_under(strategy, model, parts, self.loss_fn)
        precision = self.strategy.options.precision if not is_wide else "fp32"
        if not self.draws:
            values, self.draws = values_in_plain_torch(model, parts, self.loss_fn, precision)
            return values
        same = {"num_micro_batches": self.num_micro_batches, "precision": precision}
        return values_on_one_rank(Strategy("*: data").with_options(**same), model, parts, self.loss_fn)

    # ---- comparisons ----------------------------------------------------------------------------------------------

    def _same_bytes(
        self, names: Sequence[ValueName], own: dict[ValueName, RecordedValue], truth: dict[ValueName, RecordedValue]
    ) -> set[ValueName]:
        """The values whose part on this rank has the same bytes on both sides. All ranks call it."""
        same = {name for name in names if self._is_same(own.get(name), truth.get(name))}
        if self.other is not None:
            return same
        hashes = _of_rank_0({name: value.hash for name, value in truth.items()}, self.world)
        return {name for name in same if truth[name].hash == hashes[name]}  # a model's code may differ by rank

    def _is_same(self, own: RecordedValue | None, truth: RecordedValue | None) -> bool:
        """Whether this rank's part has the bytes of the other side, as far as this rank can say alone."""
        if own is None or truth is None or own.shape != truth.shape:
            return False
        if truth.layout is None and own.layout is not None:
            axes = zip(own.layout.sbp, own.layout.placement.shape, strict=True)
            if any(isinstance(entry, Partial) and size > 1 for entry, size in axes):
                return False
            truth = replace(truth, local=slice_region(truth.local, own.layout.region(own.shape, self.world.rank)))
        elif truth.layout != own.layout:
            return False
        return own.local.dtype == truth.local.dtype and own.hash == truth.hash

    def _parts(
        self, name: ValueName, own: dict[ValueName, RecordedValue], truth: dict[ValueName, RecordedValue]
    ) -> list[_Part]:
        """The value as both sides have it, by the ranks that hold the same part of it. All ranks call it."""
        sides = all_gather_object((own.get(name), truth.get(name)), self.world, f"values of {name.layer}")
        whole = _whole([side[1] for side in sides])
        mine = {rank: side[0] for rank, side in enumerate(sides) if side[0] is not None}
        found = []
        for ranks, region, local in _terms_summed(mine):
            if whole is None or next(iter(mine.values())).shape != tuple(whole.shape):
                return []
            found.append(_Part(ranks, local, slice_region(whole, region)))
        return found

    def _is_rounding(self, name: ValueName, change: TensorChange) -> bool:
        """Whether rounding explains the difference, as the verdict on a run decides it."""
        case = Case(Distance((), (replace(change, name=str(name)),)), self.tolerance)
        while (evidence := case.missing()) is not None:
            if evidence == "noise":
                case = replace(case, noise=self._noise)
            elif self._in_float64 is None:
                case = replace(case, no_float64="it fails")
            else:
                parts = self._parts(name, *self._in_float64)
                case = replace(case, exact=Distance((), (replace(_change(parts), name=str(name)),)))
        return case.verdict().equal is True

    def _layouts(
        self, name: ValueName, own: dict[ValueName, RecordedValue], truth: dict[ValueName, RecordedValue]
    ) -> tuple[tuple[str, str], tuple[str, ...]]:
        result = replace(name, what=name.what.replace("gradient of the ", ""))
        mine = [own.get(name), truth.get(name), own.get(result)]
        described = [None if one is None else (str(one.layout or _ONE_DEVICE), one.operands) for one in mine]
        rows = all_gather_object(described, self.world, "layouts")
        first = [next((row[side] for row in rows if row[side] is not None), ("?", ())) for side in range(3)]
        return (first[0][0], first[1][0] if self.other is not None else _ONE_DEVICE), first[2][1]


def _of_rank_0(value: Any, world: World) -> Any:
    return all_gather_object(value if world.rank == 0 else None, world, "what rank 0 has")[0]


def _terms_summed(
    by_rank: dict[int, RecordedValue],
) -> Iterator[tuple[tuple[int, ...], Sequence[tuple[int, int]], torch.Tensor]]:
    """The parts of a value that differ by their place: the ranks of each, its region, and the sum of their terms."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, value in by_rank.items():
        layout = value.layout
        if layout is None:
            groups[rank,] = [rank]
            continue
        at = zip(layout.placement.coordinates(rank), layout.sbp, strict=True)
        groups.setdefault(tuple(-1 if isinstance(entry, Partial) else place for place, entry in at), []).append(rank)
    for ranks in groups.values():
        value = by_rank[ranks[0]]
        region = (
            [(0, size) for size in value.shape] if value.layout is None else value.layout.region(value.shape, ranks[0])
        )
        yield tuple(ranks), region, _summed([by_rank[rank].local for rank in ranks], value.layout)


def _summed(terms: Sequence[torch.Tensor], layout: Layout | None) -> torch.Tensor:
    kinds = [entry.reduction for entry in layout.sbp if isinstance(entry, Partial)] if layout is not None else []
    stacked = torch.stack([wide(term) for term in terms])
    return stacked.amax(0) if kinds[:1] == ["max"] else stacked.amin(0) if kinds[:1] == ["min"] else stacked.sum(0)


def _whole(by_rank: Sequence[RecordedValue | None]) -> torch.Tensor | None:
    """The logical value of the other side: rank 0's, on one device."""
    there = {rank: value for rank, value in enumerate(by_rank) if value is not None}
    if not there:
        return None
    first = next(iter(there.values()))
    if first.layout is None:
        return wide(first.local)
    whole = wide(torch.zeros(first.shape, dtype=first.local.dtype))
    for _, region, local in _terms_summed(there):
        slice_region(whole, region).copy_(local)
    return whole


def _relative(change: TensorChange) -> float:
    """The norm of the difference over the norm of the value. Infinite where a value that differs is zero."""
    if not change.apart:
        return 0.0
    return change.apart / change.change if change.change else math.inf


def _change(parts: Sequence[_Part]) -> TensorChange:
    """Both sides as a verdict compares them: the norm of the difference, and of each side."""
    both = [torch.cat([getattr(part, side).reshape(-1) for part in parts]) for side in ("own", "truth")]
    own, truth = ({"": side} for side in both)
    zero = {"": torch.zeros_like(both[1])}
    return replace(changes_apart(WeightHistory(zero, own), WeightHistory(zero, truth))[0], is_parameter=False)
