"""Is a run equal to one device? Any two runs of a model differ by rounding; a mistake makes them differ in another way.

A verdict compares the losses of the first steps, step by step, and how every tensor of the model has changed after two
of them. Evidence is collected in the order of its cost, until the question is decided:

1. **Tolerance.** Everything lies within a fixed tolerance of the precision: equal. This costs nothing.
2. **Noise.** One device trains once more from weights that are perturbed by one rounding unit. If the run is not
   further from one device than one device is from itself, and that noise is small enough to show a learning rate that
   is wrong by one per cent, or a tensor whose change is wrong by ten: equal.
3. **A finer precision.** A difference that is rounding shrinks with the rounding unit (2**29 between 32 and 64 bits);
   that of a mistake stays. A run in bf16, fp16 or fp8 is equal where the same strategy in fp32 was. Otherwise one
   device and the strategy train the first steps in float64. Tensors that rounding changes as much there are left out:
   an optimizer that takes the sign of a gradient takes that of its rounding where the gradient is zero.

Where a model cannot run in float64, noise decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from workbench.core.json_record import JsonRecord

CHECKED_STEPS = 20
"""Steps whose losses are compared with one device's."""
WEIGHT_STEPS = 2
"""Steps after which weights are compared: the second one uses the optimizer's state. Later, rounding grows."""
Evidence = Literal["noise", "finer"]

_NOISE_FACTOR = 10.0
"""A run may differ from one device by this multiple of its noise. The noise is measured by one sample only."""
_HARD_FACTOR = 100.0
"""Beyond this multiple of the noise, agreement in float64 does not excuse a first loss or a length of updates: the
mistake may be in code for the lower precision only. It does excuse other differences. One rounding that flips a
comparison (the sign of an input of a ReLU) changes a gradient at once, and the runs differ later."""
_OF_LENGTH = 0.2
"""The share of these factors for the length of the updates. Its noise is summed over all tensors, so one sample says
more."""
_SHARP = 8e-3
"""A limit on that length above this one would hide a learning rate that is wrong by one per cent."""
_FINE = 0.1
"""Likewise, a limit on the change of most tensors above this one would hide a change that is wrong by ten per cent."""
_SHRINKS = 1e-4
"""The share of a difference by rounding that is left in float64, with a wide margin: the rounding units differ by 2**29
and more."""
_LOOK_AHEAD = 3
"""Noise is taken from so many steps around the one in question, because that of a single step may be zero."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The differences that count as equal without further evidence, in one precision.

    Attributes:
        loss: difference of a loss (``core.metrics.difference``).
        change: difference of a tensor's change, over the change.
        length: difference in length of the first updates, over all parameters.
        unit: the rounding unit: the distance from 1 to the next number.
    """

    loss: float
    change: float
    length: float
    unit: float


TOLERANCES = {
    "float64": Tolerance(1e-9, 1e-9, 1e-9, 2.0**-52),
    "fp32": Tolerance(1e-5, 1e-4, 1e-4, 2.0**-23),
    "fp16": Tolerance(2.0**-9, 2.0**-9, 2.0**-9, 2.0**-10),
    "bf16": Tolerance(2.0**-6, 2.0**-6, 2.0**-8, 2.0**-7),
    "fp8": Tolerance(2.0**-6, 2.0**-6, 2.0**-8, 2.0**-7),
}
"""By the precision in which the model computes. In fp8, 8 bits are rounded from logical tensors under every strategy:
what differs is rounded to 16 bits.
"""


@dataclass(frozen=True, slots=True)
class TensorChange(JsonRecord):
    """The change of one tensor of the model in a run and on one device, as norms over its elements.

    Attributes:
        apart: of the difference between both changes; infinite where the tensor is missing or not finite.
        change: of the change on one device.
        own_change: of the change in the run.
        rounding: what storing the tensor rounds away: its norm times the rounding unit of its dtype.
    """

    name: str
    apart: float
    change: float
    own_change: float
    rounding: float
    is_parameter: bool = True


@dataclass(frozen=True, slots=True)
class Distance(JsonRecord):
    """The distance of a run from one device: the difference of the loss by step, that of the change by tensor."""

    losses: tuple[float, ...] = ()
    tensors: tuple[TensorChange, ...] = ()

    def first_step_beyond(self, tolerance: Tolerance) -> int | None:
        """The first step whose loss is beyond the tolerance."""
        return next((step for step, apart in enumerate(self.losses) if not apart <= tolerance.loss), None)

    def beyond(self, noise: Distance) -> Distance:
        """Without the tensors whose difference this noise explains."""
        own = {tensor.name: _NOISE_FACTOR * tensor.apart for tensor in noise.tensors if math.isfinite(tensor.apart)}
        return replace(self, tensors=tuple(each for each in self.tensors if not each.apart <= own.get(each.name, 0.0)))

    def typical(self) -> float:
        """The difference of a tensor's change from one device's, over the change. The median of all tensors."""
        ratios = [tensor.apart / tensor.change for tensor in self.tensors if 0 < tensor.change < math.inf]
        return statistics.median_low(ratios) if ratios else 0.0

    def length(self) -> float:
        """How much longer the first updates are than one device's, over all parameters: 0.01 is one per cent.

        0 where both are infinite: there is nothing to compare.
        """
        parameters = [tensor for tensor in self.tensors if tensor.is_parameter]
        ours = math.hypot(*(tensor.own_change for tensor in parameters))
        theirs = math.hypot(*(tensor.change for tensor in parameters))
        if ours == theirs:
            return 0.0
        return ours / theirs - 1 if theirs else math.inf

    def length_by_chance(self) -> float:
        """The size of ``length`` to expect where each parameter's update is longer or shorter by chance: the root of
        the sum of squares. ``length`` itself may be small by chance.
        """
        parameters = [tensor for tensor in self.tensors if tensor.is_parameter]
        theirs = math.hypot(*(tensor.change for tensor in parameters))
        if theirs in (0.0, math.inf):
            return 0.0
        pairs = ((tensor.own_change / theirs, tensor.change / theirs) for tensor in parameters)
        return math.hypot(*((ours - other) * (ours + other) for ours, other in pairs)) / 2


@dataclass(frozen=True, slots=True)
class Verdict(JsonRecord):
    """Whether a run equals one device, and what shows it.

    Attributes:
        equal: None where there was nothing to compare.
        by: what decided: ``"tolerance"``, ``"noise"``, ``"float64"``, or ``"fp32"`` for the same strategy in fp32.
        first_step: difference of the first loss.
        largest: largest difference of a loss in the compared steps.
        growth: by which factor the difference of the loss grows in a step, None where there are too few to say.
        noise: the largest difference of a loss between one device and itself with perturbed rounding; None if the
            verdict did not need it.
        float64: the largest difference of a loss in float64, likewise.
        text: a sentence: what differs, by how much, and what rounding explains.
        grown: whether rounding has grown beyond the tolerance.
        note: what the mark alone would hide, in a few words: ``"no update"`` where no weight changed until weights were
            compared, as in a warm-up of the learning rate from 0; others in ``core.not_finite``.
        num_steps: the number of first steps that were to be compared. A change to a strategy that another one-device
            run belongs to ends them.
        tolerance: the difference of a loss that counts as equal without further evidence, in the run's precision.
        differences: of the loss, by step, to the one device with as many micro-batches and the same precision and seed.
    """

    equal: bool | None
    by: str = ""
    first_step: float | None = None
    largest: float | None = None
    growth: float | None = None
    noise: float | None = None
    float64: float | None = None
    text: str = ""
    grown: bool = False
    note: str = ""
    num_steps: int = CHECKED_STEPS
    tolerance: float = TOLERANCES["fp32"].loss
    differences: tuple[float, ...] = ()

    def with_note(self, note: str, text: str) -> Verdict:
        """The verdict with one more note, and a sentence of it."""
        notes, texts = ", ".join(filter(None, (self.note, note))), "; ".join(filter(None, (self.text, text)))
        return replace(self, note=notes, text=texts)


UNKNOWN = Verdict(None)
"""Of a run that was not compared with one device."""


@dataclass(frozen=True)
class Case:
    """A run's distance from one device, and the evidence about it so far.

    ``no_float64`` says why there are no results in float64, in a sentence; empty if there are, or before a try.
    ``equal_in`` is a finer precision in which the same strategy was equal.
    """

    found: Distance
    tolerance: Tolerance
    noise: Distance | None = None
    exact: Distance | None = None
    no_float64: str = ""
    equal_in: str = ""

    # ---- the next evidence --------------------------------------------------------------------------------------

    def missing(self) -> Evidence | None:
        """The evidence that a verdict still needs; None once there is enough."""
        if self._within(self._tolerated):
            return None
        if self.noise is None:
            return "noise"
        if self._within(self._explained(_NOISE_FACTOR)) and self._is_sharp():
            return None
        is_finest = self.tolerance is TOLERANCES["float64"]
        is_known = self.exact is not None or bool(self.no_float64 or self.equal_in)
        return None if is_finest or is_known or not self._begins_alike() else "finer"

    def num_steps(self, evidence: Evidence) -> int:
        """The number of steps that this evidence has to cover."""
        if evidence == "noise" and self.equal_in:
            return WEIGHT_STEPS  # the only open question is whether the runs begin equally
        if evidence == "noise":
            return max(WEIGHT_STEPS, (self.found.first_step_beyond(self.tolerance) or 0) + 1) + _LOOK_AHEAD - 1
        limit = self._explained(_NOISE_FACTOR)
        beyond = [step for step in self._compared_steps() if not self.found.losses[step] <= limit(step)]
        return max([WEIGHT_STEPS, *(step + 1 for step in beyond)])

    def verdict(self) -> Verdict:
        """The verdict on the evidence so far."""
        if not self.found.losses and not self.found.tensors:
            return Verdict(None, text="there was nothing to compare")
        if self._within(self._tolerated):
            return self._verdict(True, "tolerance", "")
        reason = self._reason(self._tolerated)
        if self.exact is not None:
            return self._verdict(self._is_rounding(), "float64", reason)
        if self.equal_in and self._begins_alike():
            return self._verdict(True, self.equal_in, reason)
        limit = self._explained(_NOISE_FACTOR) if self.noise is not None else self._tolerated
        is_equal = self.noise is not None and self._within(limit)
        return self._verdict(is_equal, "noise", reason if is_equal else self._reason(limit))

    # ---- limits ---------------------------------------------------------------------------------------------------

    def _begins_alike(self) -> bool:
        """Whether the first loss and the length of the updates are explained. No single rounding can change these."""
        limit = self._explained(_HARD_FACTOR)
        is_finite = all(math.isfinite(tensor.apart) for tensor in self.found.tensors)
        first = all(apart <= limit(0) for apart in self.found.losses[:1])
        return is_finite and first and (not self.found.tensors or abs(self.found.length()) <= limit(None))

    def _within(self, limit: _Limit) -> bool:
        return next(self._beyond(limit), None) is None

    def _beyond(self, limit: _Limit) -> Iterator[tuple[str, float, float]]:
        """(description, size, limit) of all differences beyond a limit. NaN and infinite changes lie beyond each."""
        for step in self._compared_steps():
            apart, most = self.found.losses[step], limit(step)
            if not apart <= most:
                yield f"the loss of step {step + 1} differs by", apart, most
        for tensor in self.found.tensors:
            most, what = limit(tensor), f"the change of {tensor.name!r} in {WEIGHT_STEPS} steps differs by"
            if not math.isfinite(tensor.apart):
                yield what, math.inf, 0.0
            elif not tensor.apart <= most:
                size = tensor.change or math.inf
                yield what, tensor.apart / size, most / size
        length, most = abs(self.found.length()), limit(None)
        if self.found.tensors and not length <= most:
            yield "the first updates differ in length by", length, most

    def _compared_steps(self) -> range:
        """Steps up to the first one beyond the tolerance. Later differences follow from it."""
        beyond = self.found.first_step_beyond(self.tolerance)
        return range(len(self.found.losses) if beyond is None else beyond + 1)

    def _tolerated(self, of: int | TensorChange | None) -> float:
        if of is None:
            return self.tolerance.length
        return self.tolerance.loss if isinstance(of, int) else max(self.tolerance.change * of.change, of.rounding)

    def _explained(self, factor: float) -> _Limit:
        """Limits from the noise; never below the tolerance."""
        noise = self.noise or Distance()
        own, typical = {tensor.name: tensor.apart for tensor in noise.tensors}, noise.typical()

        def limit(of: int | TensorChange | None) -> float:
            if of is None:
                return max(self._tolerated(None), factor * _OF_LENGTH * noise.length_by_chance())
            if isinstance(of, int):
                return max(self._tolerated(of), factor * max(noise.losses[: of + _LOOK_AHEAD], default=0.0))
            return max(self._tolerated(of), factor * max(own.get(of.name, 0.0), typical * of.change))

        return limit

    def _is_sharp(self) -> bool:
        noise = self.noise or Distance()
        return self._explained(_NOISE_FACTOR)(None) <= _SHARP and _NOISE_FACTOR * noise.typical() <= _FINE

    def _is_rounding(self) -> bool:
        """Whether the difference is gone in float64."""
        exact = self.exact or Distance()
        num_steps = len(exact.losses)
        seen = max(self.found.losses[:num_steps], default=0.0)
        apart = {tensor.name: tensor.apart for tensor in self.found.tensors}
        return max(exact.losses, default=0.0) <= _SHRINKS * max(seen, self.tolerance.loss) and all(
            tensor.apart
            <= max(
                _SHRINKS * max(apart.get(tensor.name, 0.0), self.tolerance.change * tensor.change), 4 * tensor.rounding
            )
            for tensor in exact.tensors
        )

    # ---- words ----------------------------------------------------------------------------------------------------

    def _reason(self, limit: _Limit) -> str:
        """The difference that is furthest beyond its limit, with both numbers."""
        worst = max(self._beyond(limit), key=lambda row: row[1] / row[2] if row[2] else math.inf, default=None)
        if worst is None:
            return ""
        what, size, most = worst
        return f"{what} {size:.1e}, where at most {most:.0e} is rounding"

    def _verdict(self, equal: bool, by: str, reason: str) -> Verdict:
        losses = self.found.losses
        noise = max(self.noise.losses, default=None) if self.noise is not None else None
        exact = max(self.exact.losses, default=None) if self.exact is not None else None
        largest = max(losses, default=None)
        first = losses[0] if losses else None
        verdict = Verdict(
            equal,
            by,
            first,
            largest,
            _growth(losses),
            noise,
            exact,
            self._text(equal, by, reason),
            equal and self.found.first_step_beyond(self.tolerance) is not None,
            tolerance=self.tolerance.loss,
            differences=losses,
        )
        weights = [tensor for tensor in self.found.tensors if tensor.is_parameter]
        if not (equal and weights) or any(weight.change > weight.rounding for weight in weights):
            return verdict
        text = f"no weight changed by more than its rounding in {WEIGHT_STEPS} steps, so updates were not compared"
        return verdict.with_note("no update", text)

    def _text(self, equal: bool, by: str, reason: str) -> str:
        if by == "tolerance":
            return f"every loss{' and every weight' if self.found.tensors else ''} lies within the tolerance"
        exact = f"; in float64 {_largest(self.exact):.0e} is left" if self.exact is not None else ""
        exact = f"; the same strategy in {self.equal_in} is equal" if by == self.equal_in else exact
        if not equal:
            failed = f"; {self.no_float64}" if self.no_float64 else ""
            return f"{reason or 'in float64 it differs'}{exact}{failed}"
        growth = _growth(self.found.losses)
        grown = f", and grows {growth:.1f} times in a step" if growth is not None and growth > 1 else ""
        own = f"; one device differs from itself by {_largest(self.noise):.0e} when its rounding is perturbed"
        if self.noise is not None and not any(self.noise.losses):
            own = (
                f"; its weights differ by {_farthest(self.found):.0e}, one device's own by {_farthest(self.noise):.0e} "
                "when its rounding is perturbed"
            )
        stop = self._compared_steps().stop
        rest = f"; losses after step {stop} follow from it and say no more" if stop < len(self.found.losses) else ""
        return f"rounding: the loss differs by {_first(self.found.losses):.0e} at first{grown}{own}{exact}{rest}"


_Limit = Callable[[int | TensorChange | None], float]


def _largest(distance: Distance | None) -> float:
    return max(distance.losses, default=0.0) if distance is not None else 0.0


def _farthest(distance: Distance) -> float:
    return max((tensor.apart for tensor in distance.tensors), default=0.0)


def _first(losses: Sequence[float]) -> float:
    """The first difference that is not zero."""
    return next((apart for apart in losses if apart), 0.0)


def _growth(losses: Sequence[float]) -> float | None:
    """The factor per step between the first and the last difference that is not zero."""
    seen = [(step, apart) for step, apart in enumerate(losses) if apart > 0 and math.isfinite(apart)]
    if len(seen) < 2:
        return None
    (start, first), (stop, last) = seen[0], seen[-1]
    return float((last / first) ** (1 / (stop - start)))
