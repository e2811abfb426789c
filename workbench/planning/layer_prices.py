"""Prices of layers for one width of the model axis and one micro-batch. The search adds them up.

They are those of the cost model (``workbench.cost``). Parts that do not depend on the other options of a strategy are
computed once for all strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from workbench.core.layer_layouts import following_of
from workbench.core.options import Options
from workbench.core.recompute_kinds import KINDS
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.core.weight_splits import share_input
from workbench.cost.accumulation import accumulation_s
from workbench.cost.between_stages import prices_with_ties
from workbench.cost.calls import prices_with_calls
from workbench.cost.hardware import Hardware
from workbench.cost.layers import LayerPrice, Weights, layer_price, state_bytes
from workbench.cost.offload import offloads
from workbench.cost.reduction import optimizer_s, reduction_s
from workbench.cost.stage_settings import StageSettings, settings_of, splits_backward
from workbench.cost.stages import StagePrice, rows_again, stage_prices
from workbench.planning.candidates import Candidate
from workbench.planning.problem import Choice, Problem

_EMPTY = StagePrice(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
WAITS: Mapping[str | None, float] = {"1f1b": 1.0, "gpipe": 1.0}
"""By schedule: the part of a micro-batch's seconds on a rank for which later ranks wait at the start and the end."""


class RowClasses:
    """Class numbers of rows. Rows of one class cost the same with equal choices and neighbours."""

    def __init__(self, problem: Problem) -> None:
        known: dict[object, int] = {}
        calls = Counter(call.row.layer.name for call in problem.counted.calls)
        self.num_calls = [calls[row.layer.name] or 1 for row in problem.rows]
        self.of_row, self.with_before = [], []
        for index, row in enumerate(problem.rows):
            layer = row.layer
            key = (row.counted, layer.kind, layer.tied_to is None, self.num_calls[index])
            self.of_row.append(known.setdefault(key, len(known)))
            shares = index > 0 and share_input(problem.rows[index - 1].layer, layer)
            goes_on = index > 0 and problem.rows[index - 1].layer.expert == layer.expert
            before = (self.of_row[index - 1], shares, goes_on) if index else None
            self.with_before.append(known.setdefault((self.of_row[index], before), len(known)))
        experts = [row.layer.expert for row in problem.rows]
        self.kinds = [
            (row.layer.kind, expert == before)
            for row, expert, before in zip(problem.rows, experts, [None, *experts], strict=False)
        ]
        self.recomputed, self.are_alone = rows_again(problem.costs)


class LayerPrices:
    """Prices of all rows, on a stage whose model axis has ``model`` ranks, for micro-batches of ``samples`` samples.

    Args:
        problem: the model and the machine.
        classes: classes of the problem's rows.
        model, data: degrees; 1 data rank where no layer's price depends on their number (``data_ranks``).
        samples: samples of a micro-batch on a data-parallel rank.
        several: whether a step has more than one micro-batch.
        sequence, context, overlap: the strategy's options.
    """

    def __init__(
        self, problem: Problem, classes: RowClasses, model: int, data: int, samples: float, several: bool,
        sequence: bool, context: int, overlap: int = 1,
    ) -> None:  # fmt: skip
        self._problem, self.width = problem, (model, data)
        self._costs, self._rows, self._classes = problem.counted, problem.rows, classes
        options = Options((1, 1, model), 1, None, 0, "", sequence, problem.precision)
        alone = ResolvedStrategy((ResolvedLayer("", "data", None, 0),), (1, 1, model), options)
        (setting,) = settings_of(problem.counted, alone, problem.hardware, 1, problem.optimizer, problem.software)
        self.setting = replace(
            setting,
            data=data,
            samples=samples / context,
            context=context,
            num_micro_batches=2 if several else 1,
            overlap=overlap,
        )
        self._known: dict[tuple[object, ...], LayerPrice] = {}
        self._with_calls: dict[tuple[ResolvedLayer, ...], list[LayerPrice]] = {}
        # under a context, the row of a layer has the exchanges of all its calls of attention
        self._num_calls = [1 if context > 1 else number for number in classes.num_calls]

    def row(self, index: int, before: Choice | None, choice: Choice, following: Choice | None) -> LayerPrice:
        """The price of one layer. A neighbour is None if it is on another stage or does not exist."""
        classes = self._classes
        own = classes.of_row[index] if before is None else classes.with_before[index]
        is_last = index == len(self._rows) - 1
        key = (own, before, choice, following, None if following is None else classes.kinds[index + 1], is_last)
        price = self._known.get(key)
        if price is None:
            previous = None if before is None else (self._rows[index - 1], self._layer(index - 1, before))
            after = None if following is None else self._layer(index + 1, following)
            row = self._rows[index]
            price = self._known[key] = layer_price(
                row, self._layer(index, choice), previous, after, self.setting, is_last
            )
        return price

    def _layer(self, index: int, choice: Choice) -> ResolvedLayer:
        model, data = self.width
        return self._problem.resolve_layer(self._rows[index].layer, choice, 0, data, model)

    def of_strategy(self, candidate: Candidate, strategy: ResolvedStrategy) -> list[StagePrice]:
        """Prices of the stages of a strategy."""
        layers = strategy.layers
        choices = self._problem.choices_of(strategy)
        prices = []
        for index, layer in enumerate(layers):
            before = choices[index - 1] if index and layers[index - 1].stage == layer.stage else None
            following = choices[index + 1] if following_of(layers, index) is not None else None
            prices.append(self.row(index, before, choices[index], following))
        prices = self._prices_with_calls(layers, prices, candidate.num_stages)
        setting = with_options(self.setting, candidate)
        settings = [setting] * candidate.num_stages
        if any(splits := [splits_backward(strategy.schedule, stage) for stage in range(candidate.num_stages)]):
            split = replace(setting, splits_backward=True)
            settings = [split if is_split else setting for is_split in splits]
        prices = prices_with_ties(self._costs, self._problem.ties, strategy, prices, settings)
        return stage_prices(self._costs, layers, prices, settings)

    def _prices_with_calls(
        self, layers: tuple[ResolvedLayer, ...], prices: list[LayerPrice], num_stages: int
    ) -> list[LayerPrice]:
        """The prices with the boxings of all calls. Candidates with equal layers share them."""
        if not self._costs.calls:
            return prices
        if layers not in self._with_calls:
            self._with_calls[layers] = prices_with_calls(self._costs, layers, prices, [self.setting] * num_stages)
        return self._with_calls[layers]

    def is_recomputed(self, index: int) -> bool:
        """Whether ``recompute`` runs the row again, with its block or alone."""
        is_alone = self._classes.are_alone and self._rows[index].has_gradients[1]
        return self._classes.recomputed[index] >= 0 or is_alone

    @property
    def has_blocks(self) -> bool:
        """Whether blocks are recomputed as a whole, and not each layer alone."""
        return not self._classes.are_alone

    def seconds(self, index: int, price: LayerPrice, recompute: str, num_boxed: int | None = None) -> float:
        """Forward and backward of one micro-batch, as if each call of a layer boxed as much as its row; or with the
        boxings of ``num_boxed`` calls.

        Of a layer that is called once it is a lower bound: exchanges may overlap with products.
        """
        software = self.setting.software
        seconds = price.forward_s + price.input_s + price.weight_s
        weights = price.weights + price.tied - price.added_in_place  # a lower bound: in place wherever it may be
        seconds += accumulation_s(weights, self.setting)  # that of two micro-batches
        boxing_s = price.boxing_forward_s + price.boxing_backward_s
        if software.hides_tensor_parallel != "none":
            boxing_s -= price.boxing_backward_s if software.hides_tensor_parallel == "all" else price.boxing_sums_s
        if recompute in KINDS and software.recompute == "full" and self.is_recomputed(index):
            seconds += price.again_s(recompute)
            boxing_s += price.boxing_forward_s
        return seconds + (self._num_calls[index] if num_boxed is None else num_boxed) * boxing_s

    def least_seconds(self, choices: Sequence[Choice], recompute: str) -> float:
        """A lower bound of one micro-batch through all layers, for every cut into stages. Without boxings where layers
        are called several times: a tensor may be boxed once for several calls.
        """
        total, last, num_boxed = 0.0, len(choices) - 1, 0 if self._costs.calls else 1
        for index, choice in enumerate(choices):
            befores = {None, choices[index - 1]} if index else {None}
            followings = {None, choices[index + 1]} if index < last else {None}
            total += min(
                self.seconds(index, self.row(index, before, choice, following), recompute, num_boxed)
                for before in befores
                for following in followings
            )
        return total

    def summed_weights(self, index: int, choice: Choice) -> float:
        """Weights of a layer on one rank whose gradients are summed; a tied weight counts at the first layer."""
        if self._rows[index].layer.tied_to is not None:
            return 0.0
        price = self.row(index, None, choice, None)
        return price.weights - price.apart


def data_ranks(problem: Problem, data: int) -> int:
    """The number of data ranks as prices of layers depend on it: 1 for models without experts to spread."""
    return data if problem.free_experts else 1


def bytes_of_weights(prices: LayerPrices, candidate: Candidate, is_least: bool = False) -> tuple[float, float, float]:
    """Bytes that a rank holds: (per trained weight, in addition per one that all ranks of the model axis have, per
    frozen weight).

    ``is_least``: without gradients, if activations are freed while gradients are made.
    """
    setting = with_options(prices.setting, candidate)
    has_gradients = not is_least or setting.software.keeps_gradients
    own, shared = (
        parameter + (0.0 if offloads(setting, "optimizer") else optimizer) + (gradient if has_gradients else 0.0)
        for parameter, gradient, optimizer in (state_bytes(1.0, each, setting) for each in (0.0, 1.0))
    )
    return own, shared - own, state_bytes(0.0, 0.0, setting, frozen=Weights(1.0))[0]


def seconds_of_weights(prices: LayerPrices, candidate: Candidate, is_hidden: bool) -> tuple[float, float]:
    """Seconds of an update: (per weight, in addition per weight that all ranks of the model axis have).

    ``is_hidden``: as if exchanges could overlap with all of forward and backward.
    """
    setting, many = with_options(prices.setting, candidate), 1e9
    hiding = inf if is_hidden else 0.0
    stages = [replace(_EMPTY, weights=many, shared=shared, forward_s=hiding, input_s=hiding) for shared in (0.0, many)]
    own, shared = ((reduction_s([stage], setting) + optimizer_s(stage.trained, setting)) / many for stage in stages)
    return own, shared - own


def least_step_s(prices: LayerPrices, candidate: Candidate, micro_batch_s: float, weights: float) -> float:
    """A lower bound of a step, from the seconds of one micro-batch through all layers and the weights of all stages."""
    makespan = schedule_factor(candidate, prices.setting.hardware) * micro_batch_s
    return makespan + least_update_s(prices, candidate, weights / candidate.degrees[0])


def schedule_factor(candidate: Candidate, hardware: Hardware, waits: Mapping[str | None, float] = WAITS) -> float:
    """A lower bound of a schedule's seconds, over those of one micro-batch through all layers.

    The slowest rank has at least the average work. Besides, the rank of stage s waits for those before it to go forward
    at the start, and backward at the end: for a part w of a micro-batch's seconds on them, which is 1 under 1F1B and
    GPipe. With m micro-batches of t_s seconds, it takes w sum(t_i, i < s) + m t_s. The largest of these is least when
    all are equal, and then w T / (1 - (1 - w/m)^p) for T = sum(t_s); without waiting, m T / p.
    """
    pipeline, m = candidate.degrees[0], candidate.options.num_micro_batches
    busy, waited = m / pipeline, waits.get(candidate.options.schedule, 0.0)
    makespan = waited / (1 - (1 - waited / m) ** pipeline) if waited else busy
    return max(makespan / hardware.alone_speedup, busy)


def least_update_s(prices: LayerPrices, candidate: Candidate, weights: float) -> float:
    """A lower bound of gradient reduction and optimizer, for a rank with ``weights`` weights."""
    setting = with_options(prices.setting, candidate)
    # unlimited compute to overlap with; ZeRO 3 gathers embeddings for forward only, which is least
    stage = replace(_EMPTY, weights=weights, tables=weights, forward_s=inf, input_s=inf)
    update = optimizer_s(Weights(weights, shared=weights), setting)  # of which a shard has least
    return reduction_s([stage], setting) + update + setting.hardware.step_s


def with_options(setting: StageSettings, candidate: Candidate) -> StageSettings:
    """The setting of a candidate's stages."""
    options, (_, data, _) = candidate.options, candidate.degrees
    return replace(
        setting,
        data=data,
        stages=candidate.num_stages,
        num_micro_batches=options.num_micro_batches,
        zero=options.zero,
        shards=options.shards or data,
        recompute=options.recompute,
        offload=options.offload,
    )
