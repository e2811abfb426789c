"""Bounds from below of a candidate's step: one that costs nothing, and a close one that looks at all layers.

Both are a micro-batch's seconds through all layers with the fastest choices, stretched by the schedule, and the least
update of weights. They differ in how well they know the seconds.
"""

from __future__ import annotations

from math import ceil, inf

from workbench.planning.candidates import Candidate
from workbench.planning.chooser import Chooser
from workbench.planning.layer_prices import WAITS, bytes_of_weights, least_update_s, schedule_factor

LEAST_FORWARD = 1 / 6
"""Of a micro-batch's seconds; under the zero bubble, ranks wait for no more."""


class Bounds:
    """Of the candidates of a problem."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser, self._problem, self._incumbents = chooser, chooser.problem, chooser.incumbents
        self._per_sample: dict[tuple[int, bool, bool], float] = {}
        self._updates: dict[tuple[object, ...], float] = {}
        self._parameters = sum(row.layer.num_parameters for row in self._problem.rows if row.layer.tied_to is None)

    def quick(self, candidate: Candidate) -> float:
        """A bound of ``close`` that needs no look at layers.

        Per sample, layers take least where all samples of a step go through them at once. A function or an exchange
        takes a start and so much for each sample, so more samples share the start; and samples that the model axis
        divides are shared out evenly where their number, rounded up, is a multiple of its ranks.
        """
        (_, data, model), options, batch_size = candidate.degrees, candidate.options, self._problem.batch_size
        key = model, options.sequence, options.recompute
        if key not in self._per_sample:
            most = ceil(batch_size / model) * model
            prices = self._incumbents.prices_of(model, most, False, options.sequence)
            seconds = self._chooser.seconds(prices, options.recompute)
            self._per_sample[key] = inf if seconds is None else seconds / most
        return self._step_s(candidate, batch_size / data / options.num_micro_batches * self._per_sample[key])

    def tight(self, candidate: Candidate) -> float:
        """Seconds below which the candidate hardly gets; infinite where it cannot fit.

        Hardly: what exchanges at the borders of stages save, and uneven stages on a rank, are not in it.
        """
        prices, (pipeline, _, model) = self._incumbents.prices(candidate), candidate.degrees
        own, shared = bytes_of_weights(prices, candidate, is_least=True)
        if min(own / model, own + shared) * self._parameters / pipeline > self._problem.memory_bytes:
            return inf
        seconds = self._chooser.seconds(prices, candidate.options.recompute)
        return inf if seconds is None else self._step_s(candidate, seconds)

    def update_s(self, candidate: Candidate) -> float:
        """Sums of gradients and optimizer of a rank with an average part of the weights; alike for many candidates."""
        (pipeline, _, model), options = candidate.degrees, candidate.options
        key = candidate.degrees, options.num_micro_batches, options.zero, options.recompute, candidate.num_stages > 1
        if key not in self._updates:
            weights = self._parameters / model / pipeline
            self._updates[key] = least_update_s(self._incumbents.prices(candidate), candidate, weights)
        return self._updates[key]

    def _step_s(self, candidate: Candidate, micro_batch_s: float) -> float:
        virtual_stages = candidate.num_stages / candidate.degrees[0]
        waits = {**WAITS, "zero_bubble": LEAST_FORWARD, "interleaved": 1 / virtual_stages}
        return schedule_factor(candidate, self._problem.hardware, waits) * micro_batch_s + self.update_s(candidate)


__all__ = ["Bounds"]
