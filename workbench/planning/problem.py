"""The question of a search: model, machine, batch, objective and constraints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from numbers import Integral, Real
from typing import Any

from workbench.core.expert_rows import fitting_ranks, number_in_list, over_data
from workbench.core.model_costs import LayerCost, ModelCosts
from workbench.core.offload_kinds import CHOICES, offload_kind
from workbench.core.options import PRECISIONS, SCHEDULES, Options
from workbench.core.recompute_kinds import KINDS, mistakes_of_recompute, recompute_kind
from workbench.core.row_mistakes import mistakes_of_rows
from workbench.core.rows import Layer, Row, num_blocks
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy, Strategy
from workbench.core.weight_splits import overlaps, possible_splits, split_dim, tied_pairs
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware import Hardware
from workbench.cost.software import OPTIMIZERS, WORKBENCH, Software
from workbench.cost.stage_settings import counted_at, numbers_per_weight, weights_of
from workbench.errors import StrategyError

OBJECTIVES = ("throughput", "memory", "cost")
"""In this order: seconds of a step; bytes of the fullest rank; rank-seconds of a step, on all ranks or fewer."""

Choice = tuple[str, str | None]
"""The choice of a layer: ("data", None), ("model", "column", "row" or for experts "expert"), ("model", None) if it
cannot be split, or for experts over ranks of the data axis too, over as many as fit ("expert", "expert"), or as many
as fit into a host ("expert", "host")."""
DATA: Choice = ("data", None)
WHOLE: tuple[Choice, ...] = (DATA, ("model", None))
SPREAD: Choice = ("expert", "expert")
IN_HOST: Choice = ("expert", "host")
EXPERTS: tuple[Choice, ...] = (DATA, ("model", "expert"), SPREAD, IN_HOST)


_NUMBERS = ("pipeline", "data", "model", "micro_batches", "zero", "heads", "context", "shards", "overlap")
"""Constraints that are whole numbers."""


def check_constraint_names(asked: str, names: Collection[str]) -> None:
    """Raise for a name that is no constraint.

    Raises:
        StrategyError: names it and all constraints.
    """
    known = tuple(one.name for one in fields(Constraints))
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise StrategyError(f"{asked}({unknown[0]}=): no such constraint; there are {', '.join(known)}.")


@dataclass(frozen=True)
class Constraints:
    """Limits on the search. None leaves a value open; a collection gives several values to choose from.

    Attributes:
        pipeline, data, model: degrees.
        micro_batches: per step.
        schedule: of strategies with more than one stage.
        zero, sequence: as in strategies.
        recompute: as in strategies ("full", "attention", "cheap", or a number of blocks), "none"; None: what saves the
            bytes that lack for the fewest seconds.
        shards: as in strategies, 0 for all data ranks; None: those, and under ZeRO 3 the ranks of a host.
        context: as in strategies; None: 1, because slices of a sequence are worth it where samples are too few.
        offload: as in strategies ("optimizer", "activations", "optimizer+activations"), "none"; None: nothing, which is
            fastest where it fits.
        overlap: as in strategies; None: 1, because no machine file says whether pieces gain what is predicted. A
            strategy of which no layer is split by rows has nothing to overlap, and 1.
        layers: rows of a strategy: choices and stages of some layers ("head: data@1; blocks.*.fc1: model").
        heads: numbers of heads of attention and of keys and values, which the model degree divides. None: the model's.
    """

    pipeline: int | Collection[int] | None = None
    data: int | Collection[int] | None = None
    model: int | Collection[int] | None = None
    micro_batches: int | Collection[int] | None = None
    schedule: str | Collection[str] | None = None
    zero: int | Collection[int] | None = None
    recompute: bool | int | str | Collection[bool | int | str] | None = None
    sequence: bool | None = None
    layers: str | None = None
    heads: int | Collection[int] | None = None
    context: int | Collection[int] | None = None
    shards: int | Collection[int] | None = None
    offload: bool | str | Collection[bool | str] | None = None
    overlap: int | Collection[int] | None = None

    def allows(self, name: str, value: object) -> bool:
        """Whether the constraint ``name`` allows a value."""
        return getattr(self, name) is None or value in self.values(name)

    def values(self, name: str) -> tuple[object, ...]:
        """The values that the constraint ``name`` allows; empty if it is open."""
        wanted = getattr(self, name)
        if wanted is None:
            return ()
        return tuple(wanted) if isinstance(wanted, Collection) and not isinstance(wanted, str) else (wanted,)

    def given(self) -> dict[str, object]:
        """The constraints that are not open, by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name) is not None}

    def with_ints(self) -> Constraints:
        """The same, with an int for each whole number, such as NumPy's.

        Raises:
            StrategyError: a value that has to be a whole number is none.
        """
        changed: dict[str, Any] = {}
        for name in _NUMBERS:
            numbers = tuple(_whole(name, value) for value in self.values(name))
            if numbers:
                changed[name] = numbers if isinstance(getattr(self, name), Collection) else numbers[0]
        return replace(self, **changed)


def _whole(name: str, value: object) -> int:
    if not isinstance(value, Integral):
        raise StrategyError(f"{name}={value!r}: a whole number, or several: {name}=1 or {name}=(1, 2).")
    return int(value)


@dataclass(frozen=True)
class Problem:
    """The question of a search; a frozen value.

    Attributes:
        costs: costs of the model's layers.
        hardware: the machine of one rank.
        num_ranks: number of ranks. The strategy uses all, except for the objective "cost".
        batch_size: samples per step.
        objective: one of ``OBJECTIVES``.
        memory_bytes: the most bytes that a rank may hold.
        precision: of the strategies.
        optimizer, software: as in ``estimate``.
        constraints: limits on the search.
    """

    costs: ModelCosts
    hardware: Hardware
    num_ranks: int
    batch_size: int
    objective: str = "throughput"
    memory_bytes: float = inf
    precision: str = "fp32"
    optimizer: str = "adamw"
    software: Software = WORKBENCH
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self) -> None:
        examples = (("num_ranks", Integral, "8"), ("batch_size", Integral, "64"), ("memory_bytes", Real, "80e9"))
        for name, kind, example in examples:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise StrategyError(
                    f"{name}={value!r}: a {'whole ' if kind is Integral else ''}number, such as {example}."
                )
        if self.objective not in OBJECTIVES:
            raise StrategyError(f"objective {self.objective!r} is none of {', '.join(OBJECTIVES)}.")
        if self.num_ranks < 1 or self.batch_size < 1 or not self.costs.rows:
            sizes = f"{self.num_ranks} ranks, batch_size={self.batch_size}, {len(self.costs.rows)} layers"
            raise StrategyError(f"{sizes}: each is at least 1.")
        if self.memory_bytes <= 0:
            raise StrategyError(f"memory_bytes={self.memory_bytes:g}: the memory of a rank is above 0.")
        object.__setattr__(self, "constraints", self.constraints.with_ints())
        self._refuse_unknown("optimizer", OPTIMIZERS, [self.optimizer])
        self._refuse_unknown("precision", PRECISIONS, [self.precision])
        self._refuse_unknown("schedule", SCHEDULES, self.constraints.values("schedule"))
        self._refuse_unknown("zero", range(4), self.constraints.values("zero"))
        kinds = [recompute_kind(value) or "none" for value in self.constraints.values("recompute")]
        offloads = [offload_kind(value) or "none" for value in self.constraints.values("offload")]
        self._refuse_unknown("offload", ("none", *CHOICES), offloads)
        for one in kinds:
            if one not in ("none", *KINDS) and not (one.isdecimal() and int(one) > 0):
                words = ", ".join(("none", *KINDS))
                raise StrategyError(f"recompute={one!r}: it is one of {words}, or a number of blocks from 1 on.")
            for message, fixes in mistakes_of_recompute(one, num_blocks(self.costs.layers)):
                raise StrategyError(f"{message}. Fix: {fixes[0]}.")

    def _refuse_unknown(self, name: str, known: Collection[object], given: Collection[object]) -> None:
        for value in given:
            if value not in known:
                raise StrategyError(f"{name}={value!r}: it is one of {', '.join(map(str, known))}.")

    @cached_property
    def counted(self) -> ModelCosts:
        """Costs of the model at the precision of the problem."""
        return counted_at(self.costs, self.precision, self.software)

    @property
    def rows(self) -> tuple[LayerCost, ...]:
        """The layers."""
        return self.counted.rows

    @property
    def is_infeasible(self) -> bool:
        """Whether nothing can fit: parameters and optimizer states are too large even if all ranks share them."""
        software, (trained, frozen) = self.software, self.num_weights
        parameter: float = software.parameter_bytes(self.precision)
        each = parameter
        if not any("optimizer" in offload_kind(value) for value in self.constraints.values("offload")):
            per_weight = numbers_per_weight(self.costs, software, self.optimizer)
            each += software.optimizer_bytes(self.precision, self.optimizer) * per_weight
        if software.keeps_gradients:
            each += software.gradient_bytes(self.precision)
        return (trained * each + frozen * parameter) / self.num_ranks > self.memory_bytes

    @cached_property
    def num_weights(self) -> tuple[float, float]:
        """(trained weights, frozen weights) of the model in units of ``weights_of``; tied ones count once."""
        found = [weights_of(row.layer, self.software) for row in self.rows if row.layer.tied_to is None]
        return sum(trained for trained, _ in found), sum(frozen for _, frozen in found)

    @cached_property
    def pins(self) -> list[Row | None]:
        """For every layer the row of ``constraints.layers`` that decides for it, or None.

        Raises:
            StrategyError: a row that matches no layer, or a choice that the search does not price.
        """
        if self.constraints.layers is None:
            return [None] * len(self.rows)
        strategy = Strategy(self.constraints.layers)
        wrong = [message for message, _ in mistakes_of_rows(strategy.rows, self.costs.layers)]
        if strategy.options != Options():
            wrong.append(f"{str(strategy.options)!r} is no row; options are constraints of their own, such as zero=1")
        if any(row.parallel == "expert" for row in strategy.rows):
            wrong.append(
                "a search cannot pin expert, and tries it for layers without a pin; wb.planner.simulate prices it"
            )
        if wrong:
            raise StrategyError(f"layers={self.constraints.layers!r}: {'; '.join(wrong)}.")
        return [strategy.row_of(row.layer) for row in self.rows]

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Numbers that the model degree divides, because a rank has whole heads. A single head is no limit."""
        given = self.constraints.heads
        known = self.costs.heads if given is None else (given,) if isinstance(given, int) else tuple(given)
        return tuple(number for number in known if number > 1)

    @property
    def contexts(self) -> tuple[int, ...]:
        """The values of the option ``context`` to search: with more of them than positions, some rank has none."""
        wanted: tuple[int, ...] = self.constraints.values("context") or (1,)  # type: ignore[assignment]
        return tuple(number for number in wanted if number <= (self.num_positions or number))

    @cached_property
    def num_positions(self) -> int:
        """Those of the shortest sequence of queries in attention; 0 if unknown."""
        works = (work for row in self.rows for work in (*row.own, *row.after))
        return min((work.attention.rows for work in works if work.attention is not None), default=0)

    def fits_heads(self, model: int) -> bool:
        """Whether each rank of a model axis of this size has whole heads."""
        return all(number % model == 0 for number in self.heads)

    @cached_property
    def ties(self) -> list[tuple[int, int]]:
        """Rows that share a weight."""
        return tied_pairs(self.costs.layers)

    @cached_property
    def free_experts(self) -> tuple[int, ...]:
        """The rows of fused experts without a pin, which a search may spread over the data axis."""
        return tuple(i for i, row in enumerate(self.rows) if self._is_fused(row.layer) and self.pins[i] is None)

    def _is_fused(self, layer: Layer) -> bool:
        return layer.experts > 0 and layer.expert is None

    def choices(self, index: int, model: int, data: int = 1) -> list[Choice]:
        """The choices of a layer on a model axis of ``model`` ranks, with ``data`` ranks on the data axis."""
        pin = self.pins[index]
        layer = self.rows[index].layer
        splits = possible_splits(layer)
        whole = EXPERTS if self._is_fused(layer) else WHOLE
        known = (DATA, *(("model", split) for split in splits)) if splits else whole
        if pin is None:
            most, inside = (self._expert_ranks(layer, choice, data, model) for choice in (SPREAD, IN_HOST))
            axes = {"data": True, "model": model > 1, "expert": data > 1 and most > model}
            return [each for each in known if axes[each[0]] and (each != IN_HOST or model < inside < most)]
        return [(p, s) for p, s in known if p == pin.parallel and (pin.split in (None, s) or len(splits) < 2)]

    def fits_ties(self, choices: Sequence[Choice]) -> bool:
        """Whether layers that share a weight cut it alike."""
        layers = self.costs.layers
        return all(
            split_dim(layers[a].kind, choices[a][1]) == split_dim(layers[b].kind, choices[b][1]) for a, b in self.ties
        )

    def fits_stages(self, stages: Sequence[int]) -> bool:
        """Whether layers are on the stages that the constraints require."""
        return all(pin is None or pin.stage in (None, stage) for pin, stage in zip(self.pins, stages, strict=True))

    def resolve(self, choices: Sequence[Choice], stages: Sequence[int], options: Options) -> ResolvedStrategy:
        """The strategy as the cost model reads it. Where a layer can overlap, it does as the constraints ask, also with
        the ``options`` of a strategy that could not.
        """
        assert options.degrees is not None
        _, data, model = options.degrees
        layers = tuple(
            self.resolve_layer(row.layer, choice, stage, data, model)
            for row, choice, stage in zip(self.rows, choices, stages, strict=True)
        )
        has_rows = any(overlaps(layer.kind, layer.split, model) for layer in layers)
        asked = [value for value in self.constraints.values("overlap") if isinstance(value, int)]
        overlap = max(options.overlap, min(asked, default=1)) if has_rows else 1
        return ResolvedStrategy(layers, options.degrees, replace(options, overlap=overlap))

    def resolve_layer(self, layer: Layer, choice: Choice, stage: int, data: int, model: int) -> ResolvedLayer:
        """One layer as the cost model reads it."""
        resolved = ResolvedLayer(layer.name, choice[0], choice[1], stage, layer.kind)
        if choice[0] != "expert":
            return resolved
        row = Row(layer.name, "expert", ranks=self._expert_ranks(layer, choice, data, model))
        number, split = number_in_list(row, layer, data, model), choice[1] and SPREAD[1]
        return replace(resolved, split=split, over_data=over_data(row, data, model), expert=number)

    def _expert_ranks(self, layer: Layer, choice: Choice, data: int, model: int) -> int:
        """Over how many ranks a choice splits the experts of a layer."""
        links = self.hardware.links
        most = links[-2].span if choice == IN_HOST and len(links) > 1 else data * model
        return max((number for number in fitting_ranks(layer.experts, data, model) if number <= most), default=model)

    def choices_of(self, strategy: ResolvedStrategy) -> list[Choice]:
        """The choices of a strategy's layers."""
        choices = [(layer.parallel, layer.split) for layer in strategy.layers]
        for index in self.free_experts:
            layer, chosen = self.rows[index].layer, strategy.layers[index]
            width = strategy.stage_width(chosen.stage)
            if choices[index] == SPREAD and chosen != self.resolve_layer(layer, SPREAD, chosen.stage, *width):
                choices[index] = IN_HOST
        return choices

    def estimate(self, strategy: ResolvedStrategy, with_timeline: bool = False) -> Estimate:
        """Seconds and bytes of a step."""
        return estimate(
            self.costs,
            strategy,
            self.hardware,
            self.batch_size,
            optimizer=self.optimizer,
            software=self.software,
            with_timeline=with_timeline,
        )

    def value(self, strategy: ResolvedStrategy, found: Estimate) -> tuple[float, float]:
        """The value that the search minimizes; the second figure decides among equals."""
        if self.objective == "memory":
            return found.peak_bytes, found.step_s
        return (strategy.num_ranks if self.objective == "cost" else 1) * found.step_s, found.peak_bytes
