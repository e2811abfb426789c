"""The reports of a run in bounded memory: two curves, and for each rank its latest memory and time split."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from workbench.core.metrics import RunEvent, StepBlock, StepSpans, live_bytes
from workbench.ui.decimate import MAX_POINTS, thin

STEPS_IN_SPLIT = 20
TRACED_STEPS = 200
"""The number of steps whose spans are kept for a trace."""
_OPEN_STEPS = 20
"""The number of steps of which some ranks' spans are awaited."""
Message = StepBlock | StepSpans | RunEvent


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of one rank's time, from 0 to 1: compute, boxing, waiting for other ranks."""

    compute: float
    boxing: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the strategy at ``step``, counted from 1 like the curves."""

    step: int
    before: str
    after: str


class History:
    """Collects the reports of a run of any length in bounded memory. Steps are counted from 1.

    Attributes:
        num_steps: the number of planned steps; 0 if unknown.
        last_step: the number of steps so far.
        rate: samples/s by step; a step takes as long as its slowest rank.
        median_rate: its median over the last second.
        loss: the loss by step, for steps that have one.
        memory_by_kind: the latest memory by rank.
        latest_rate: samples/s, the median of the last second; None before the first step.
        changes: changes of the strategy, in order.
        devices: by rank, the latest state of its GPU, see ``StepBlock``.
        values, latest_values: the values by step, and the last one, by name, see ``core.step_values``.
        timeline: by rank, the spans of the latest step that all ranks have reported; empty before.
        traced: the spans of the newest ``TRACED_STEPS`` recorded steps, of all ranks.
    """

    def __init__(self, num_steps: int, num_ranks: int, label: str = "") -> None:
        self.num_steps, self.num_ranks = num_steps, num_ranks
        self.last_step = 0
        self.rate, self.median_rate, self.loss = Curve(), Curve(), Curve()
        self.latest_rate: float | None = None
        self.latest_loss: float | None = None
        self.memory_by_kind: list[dict[str, int]] = [{} for _ in range(num_ranks)]
        self.changes: list[Change] = []
        self.devices: tuple[dict[str, float], ...] = ()
        self.values: dict[str, Curve] = {}
        self.latest_values: dict[str, float] = {}
        self.timeline: tuple[StepSpans, ...] = ()
        self.traced: deque[StepSpans] = deque(maxlen=TRACED_STEPS * num_ranks)
        self._label = label
        self._running = RunningMedian()
        self._recent: deque[tuple[Sequence[float], Sequence[float], int]] = deque(maxlen=STEPS_IN_SPLIT)
        self._spans: dict[int, dict[int, StepSpans]] = {}

    def add(self, messages: Iterable[Message]) -> None:
        """Add reports, in any order of ranks."""
        for message in messages:
            if isinstance(message, StepBlock):
                self._add_block(message)
            elif isinstance(message, StepSpans):
                self._add_spans(message)
            elif message.kind == "strategy":
                self._recent.clear()
                self._running = RunningMedian()
                self.latest_rate = None

    def change(self, step: int, label: str) -> None:
        """Record that the strategy called ``label`` applies from ``step`` on."""
        self.changes.append(Change(step + 1, self._label, label))
        self._label = label

    def _add_block(self, block: StepBlock) -> None:
        times = np.array(block.step_times_s)
        steps = np.arange(block.first_step + 1, block.stop_step + 1)
        rates = np.array(block.samples) / np.where(times > 0, times, np.nan)
        medians = [self._running.add(rate, t) if t > 0 else np.nan for rate, t in zip(rates, times, strict=True)]
        self.rate.add(steps, rates)
        self.median_rate.add(steps, medians)
        self.latest_rate = next((rate for rate in reversed(medians) if rate == rate), self.latest_rate)
        self.loss.add(steps, [np.nan if loss is None else loss for loss in block.losses])
        known = [loss for loss in block.losses if loss is not None]
        self.latest_loss = known[-1] if known else self.latest_loss
        for rank, memory in enumerate(block.memory_bytes):
            self.memory_by_kind[rank] = memory
        self.devices = block.devices or self.devices
        for name, pairs in block.values.items():
            self.values.setdefault(name, Curve()).add([step + 1 for step, _ in pairs], [value for _, value in pairs])
            self.latest_values[name] = pairs[-1][1]
        by_step = zip(
            *(zip(*ranks, strict=True) for ranks in (block.time_s, block.boxing_s, block.boxed_bytes)), strict=True
        )
        self._recent.extend((time, boxing, sum(sent)) for time, boxing, sent in by_step)
        self.last_step = max(self.last_step, block.stop_step)
        self.num_steps = max(self.num_steps, block.num_steps)

    def _add_spans(self, spans: StepSpans) -> None:
        self.traced.append(spans)
        ranks = self._spans.setdefault(spans.step, {})
        ranks[spans.rank] = spans
        if len(ranks) == self.num_ranks:
            self.timeline = tuple(ranks[rank] for rank in sorted(ranks))
            self._spans = {step: found for step, found in self._spans.items() if step > spans.step}
        elif len(self._spans) > _OPEN_STEPS:  # a rank without actions reports none
            del self._spans[min(self._spans)]

    @property
    def boxed_bytes(self) -> int:
        """Bytes that all ranks together send in a step; the median of the last steps."""
        return int(median([sent for _, _, sent in self._recent])) if self._recent else 0

    @property
    def peak_bytes(self) -> list[int]:
        """By rank: the measured peak of the process, and at least the live bytes. A process that was larger before the
        run has not grown in it.
        """
        return [max(memory.get("peak", 0), live_bytes(memory)) for memory in self.memory_by_kind]

    @property
    def split(self) -> list[Split]:
        """The time split by rank over the last steps, see ``time_split``."""
        return time_split([time for time, *_ in self._recent], [boxing for _, boxing, _ in self._recent])


def time_split(time_s: Sequence[Sequence[float]], boxing_s: Sequence[Sequence[float]]) -> list[Split]:
    """The ranks' shares of some steps' time; both arguments are by step, then by rank.

    The rank with the shortest time in exchanges came last and did not wait: its time is that of boxing. The other ranks
    have waited for the rest of their time in exchanges.

    >>> time_split([(1.0, 1.0)], [(0.5, 0.25)])
    [Split(compute=0.5, boxing=0.25, waiting=0.25), Split(compute=0.75, boxing=0.25, waiting=0.0)]
    """
    if not len(time_s):
        return []
    total = np.maximum(np.array(time_s, dtype=float).sum(axis=0), 1e-12)
    inside = np.array(boxing_s, dtype=float)
    moving = np.minimum(inside.min(axis=1).sum() / total, 1.0)
    share = np.clip(inside.sum(axis=0) / total, 0.0, 1.0)
    moving = np.minimum(moving, share)
    return [Split(float(1 - s), float(m), float(s - m)) for s, m in zip(share, moving, strict=True)]


TAIL_POINTS = 100


class Curve:
    """Points (x, y) in order of x: at most ``MAX_POINTS`` settled ones, and a tail of at most ``TAIL_POINTS``.

    An update changes the tail only, so only the tail is sent again. A full tail joins the settled points. Of too many
    settled points, the smallest and the largest of every stretch of x remain, so spikes survive.

    >>> curve = Curve()
    >>> curve.add(range(5000), [0.0] * 2500 + [9.0] + [0.0] * 2499)
    >>> len(curve.settled[0]) <= 1000, float(curve.settled[1].max())
    (True, 9.0)
    """

    def __init__(self) -> None:
        self._width = 0.0  # width of the stretches of x in which two points remain; zero while all points remain
        self.settled: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.zeros(0))
        self._tail_x: list[float] = []
        self._tail_y: list[float] = []

    def add(self, x: Iterable[float], y: Iterable[float]) -> None:
        """Append points; those without a value (nan) are left out."""
        new_x, new_y = np.array([*x], dtype=np.float64), np.array([*y], dtype=np.float64)
        known = ~np.isnan(new_y)
        self._tail_x += new_x[known].tolist()
        self._tail_y += new_y[known].tolist()
        if len(self._tail_x) > TAIL_POINTS:
            self._settle()

    @property
    def tail(self) -> tuple[np.ndarray, np.ndarray]:
        """The newest points, beginning with the last settled one, so that the two parts meet; none if none is new."""
        joint_x, joint_y = (part[-1:] if self._tail_x else part[:0] for part in self.settled)
        return np.concatenate([joint_x, self._tail_x]), np.concatenate([joint_y, self._tail_y])

    @property
    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """All points that are kept."""
        x, y = self.settled
        return np.concatenate([x, self._tail_x]), np.concatenate([y, self._tail_y])

    def _settle(self) -> None:
        x, y = np.array(self._tail_x), np.array(self._tail_y)
        if self._width:
            x, y = thin(x, y, self._width)
        x, y = np.concatenate([self.settled[0], x]), np.concatenate([self.settled[1], y])
        while len(x) > MAX_POINTS:
            self._width = 2 * self._width or 4 * (x[-1] - x[0]) / MAX_POINTS
            x, y = thin(x, y, self._width)
        self.settled = x, y
        self._tail_x, self._tail_y = [], []


WINDOW_S = 1.0
_LEAST, _MOST = 5, 200


class RunningMedian:
    """The median of the last second's values, of at least 5 and at most 200.

    >>> median = RunningMedian()
    >>> [median.add(value, time_s=0.1) for value in (10.0, 10.0, 90.0, 10.0)]
    [10.0, 10.0, 10.0, 10.0]
    """

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._length_s = 0.0

    def add(self, value: float, time_s: float) -> float:
        """Add a value that lasted ``time_s`` seconds; returns the new median."""
        if len(self._values) == _MOST:
            self._length_s -= self._values[0][1]
        self._values.append((value, time_s))
        self._length_s += time_s
        while len(self._values) > _LEAST and self._length_s - self._values[0][1] >= WINDOW_S:
            self._length_s -= self._values.popleft()[1]
        return median(value for value, _ in self._values)


def running_medians(values: Sequence[float] | np.ndarray, times_s: Sequence[float] | np.ndarray) -> np.ndarray:
    """The running median at every value; nan where the value is nan."""
    running = RunningMedian()
    known = [(float(value), float(time)) for value, time in zip(values, times_s, strict=True)]
    return np.array([running.add(value, time) if value == value else np.nan for value, time in known])
