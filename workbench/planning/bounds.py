"""Lower bounds of a candidate's step: a quick one, and a tight one that looks at all layers.

Both multiply the seconds of a micro-batch through all layers, with the fastest choices, by a factor of the schedule,
and add the least time of an update. They differ in how exactly they know the seconds.
"""

from __future__ import annotations

from math import ceil, inf

from workbench.core.options import V_SCHEDULES
from workbench.cost.stage_settings import weights_of
from workbench.planning.candidates import Candidate
from workbench.planning.chooser import Chooser
from workbench.planning.layer_prices import WAITS, bytes_of_weights, data_ranks, least_update_s, schedule_factor

LEAST_FORWARD = 1 / 6
"""The part of a micro-batch's seconds that is forward, at least. Zero-bubble schedules wait for no more; in a V, for
half of it.
"""


class Bounds:
    """Bounds of the candidates of one problem."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser, self._problem, self._incumbents = chooser, chooser.problem, chooser.incumbents
        self._per_sample: dict[tuple[int, int, bool, str, int, int], float] = {}
        self._updates: dict[tuple[object, ...], float] = {}
        self._parameters, self._frozen = self._problem.num_weights
        software, rows = self._problem.software, self._problem.rows
        in_experts = [weights_of(rows[index].layer, software) for index in self._problem.free_experts]
        self._in_experts = sum(trained for trained, _ in in_experts)
        self._frozen_in_experts = sum(frozen for _, frozen in in_experts)

    def quick(self, candidate: Candidate) -> float:
        """A lower bound of ``tight``, without a look at the layers.

        Layers take the least time per sample if all samples of a step pass at once: a function or an exchange takes a
        start and a time per sample, and more samples share the start. The number of samples is rounded up to a multiple
        of the model axis, which then divides them evenly.
        """
        (_, data, model), options, batch_size = candidate.degrees, candidate.options, self._problem.batch_size
        ranks = data_ranks(self._problem, data)
        key = model, ranks, options.sequence, options.recompute, options.context, options.overlap
        if key not in self._per_sample:
            most = ceil(batch_size / model) * model
            prices = self._incumbents.prices_of(
                model, ranks, most, False, options.sequence, options.context, options.overlap
            )
            seconds = self._chooser.seconds(prices, options.recompute)
            self._per_sample[key] = inf if seconds is None else seconds / most
        samples = batch_size / (data // options.context) / options.num_micro_batches
        return self._step_s(candidate, samples * self._per_sample[key])

    def tight(self, candidate: Candidate) -> float:
        """A lower bound in seconds; infinite if the candidate cannot fit.

        It is not strict: it ignores what exchanges at the borders of stages save, what calls of a layer share, and
        uneven stages on a rank.
        """
        prices, (pipeline, data, model) = self._incumbents.prices(candidate), candidate.degrees
        own, shared, still = bytes_of_weights(prices, candidate, is_least=True)
        spread = 1 - 1 / data  # of experts over all data ranks
        held = min(own / model, own + shared) * (self._parameters - self._in_experts * spread)
        held += still / model * (self._frozen - self._frozen_in_experts * spread)
        if held / pipeline > self._problem.memory_bytes:
            return inf
        seconds = self._chooser.seconds(prices, candidate.options.recompute)
        return inf if seconds is None else self._step_s(candidate, seconds)

    def update_s(self, candidate: Candidate) -> float:
        """Seconds of gradient reduction and optimizer on a rank with an average part of the weights.

        Many candidates share the value.
        """
        (pipeline, _, model), options = candidate.degrees, candidate.options
        key = (
            candidate.degrees, options.num_micro_batches, options.zero, options.shards, options.recompute,
            options.context, candidate.num_stages > 1, options.offload,
        )  # fmt: skip
        if key not in self._updates:
            is_spread = data_ranks(self._problem, candidate.degrees[1]) > 1  # then nobody may sum gradients of experts
            weights = (self._parameters - (self._in_experts if is_spread else 0)) / model / pipeline
            self._updates[key] = least_update_s(self._incumbents.prices(candidate), candidate, weights)
        return self._updates[key]

    def _step_s(self, candidate: Candidate, micro_batch_s: float) -> float:
        virtual_stages = candidate.num_stages / candidate.degrees[0]
        least = LEAST_FORWARD / (1 + LEAST_FORWARD) if candidate.options.recompute else LEAST_FORWARD
        waits = {**WAITS, "zero_bubble": least, "interleaved": 1 / virtual_stages}
        waits |= dict.fromkeys(V_SCHEDULES, least / 2)
        micro_batch_s += self._chooser.tied_s(candidate)
        return schedule_factor(candidate, self._problem.hardware, waits) * micro_batch_s + self.update_s(candidate)
