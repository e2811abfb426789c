"""Reports of a training run: blocks of steps and events while it runs, one record at its end.

Engines publish these, figures and tables read them, files keep them. None of it needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

from workbench.core.json_record import JsonRecord
from workbench.core.step_values import GRADIENT_NORM, TOKENS_PER_S, UNKNOWN_NORM, Pairs, known, rates, whole_norms
from workbench.core.verdict import UNKNOWN, Verdict

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Kinds of live storage that are counted on every rank, in the order in which they are drawn."""
MEMORY_LABELS = {kind: kind for kind in MEMORY_KINDS} | {"buffers": "boxing buffers"}
"""What people read for these."""
DEVICE_KINDS = ("busy", "used", "total", "pool", "peak_flops_per_s", "gpu")
"""What a rank reports of its GPU: the share of time with work (0 to 1), bytes in use by all processes and in total,
bytes that this process has reserved, the datasheet's operations per second, and a number that is the GPU's own."""


def difference(value: float, truth: float) -> float:
    """The difference of a number from one device's: absolute up to 1 and relative beyond, like rounding.

    0 where both are NaN or the same infinity, infinite where only one of them is finite.

    >>> difference(0.25, 0.5), difference(404.0, 400.0), difference(float("nan"), 2.0)
    (0.25, 0.01, inf)
    """
    if value == truth or (value != value and truth != truth):
        return 0.0
    apart = abs(value - truth) / max(1.0, abs(truth))
    return apart if math.isfinite(apart) else math.inf


def live_bytes(memory: Mapping[str, int]) -> int:
    """Bytes of all kinds of live storage together, without the peak."""
    return sum(size for kind, size in memory.items() if kind != "peak")


@dataclass(frozen=True, slots=True)
class StepBlock(JsonRecord):
    """Consecutive steps of all ranks. Engines send a block about three times a second, whatever the speed of the steps.

    Attributes:
        first_step: number of the first one, from 0.
        samples: of each step, over all ranks.
        losses: of each step, the logical one; None where there is none.
        time_s, boxing_s, boxed_bytes: by rank, then by step: seconds of the step, seconds of it inside exchanges
            (moving, and waiting for others), bytes that the rank sent.
        memory_bytes: by rank, at the end of the block: kinds of ``MEMORY_KINDS``, and ``"peak"``, the process's largest
            resident size above its warm baseline, without pages of files. Empty where it was not measured.
        num_steps: number of planned steps; 0 if unknown.
        devices: by rank, at the end of the block: those of ``DEVICE_KINDS`` that are known. Empty without GPUs.
        values: other values by name, as (step, value), see ``core.step_values``. A step may be an earlier one: an
            evaluation is reported after its step.
    """

    first_step: int
    samples: tuple[int, ...]
    losses: tuple[float | None, ...]
    time_s: tuple[tuple[float, ...], ...]
    boxing_s: tuple[tuple[float, ...], ...]
    boxed_bytes: tuple[tuple[int, ...], ...]
    memory_bytes: tuple[dict[str, int], ...] = ()
    num_steps: int = 0
    devices: tuple[dict[str, float], ...] = ()
    values: dict[str, Pairs] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """How many ranks took part."""
        return len(self.time_s)

    @property
    def stop_step(self) -> int:
        """The number of the step that follows."""
        return self.first_step + len(self.samples)

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Seconds of each step: a step takes as long as its slowest rank."""
        return tuple(max(times) for times in zip(*self.time_s, strict=True))


ACTION_NAMES = {
    "F": "forward", "B": "backward", "I": "backward to inputs", "W": "gradients of weights", "O": "optimizer",
}  # fmt: skip
"""By the letter of an action."""


@dataclass(frozen=True, slots=True)
class ActionSpan(JsonRecord):
    """An action of one rank in a step from ``start_s`` to ``stop_s``: a forward, a backward, the optimizer's step.

    ``kind`` is a schedule's letter (F, B, I, W) or ``"O"``. Of the time, ``boxing_s`` was spent in ``num_exchanges``
    exchanges that sent ``sent_bytes``.
    """

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    stop_s: float
    boxing_s: float = 0.0
    num_exchanges: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepSpans(JsonRecord):
    """One rank's actions of one step. All ranks' seconds are on one clock."""

    rank: int
    step: int
    spans: tuple[ActionSpan, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepSpans:
        """The record that ``to_dict`` wrote."""
        return cls(data["rank"], data["step"], tuple(ActionSpan.from_dict(span) for span in data["spans"]))


def bubble(ranks: Sequence[StepSpans]) -> float | None:
    """The part of the ranks' time, 0 to 1, in which they wait for other stages; None before a step was recorded.

    With one stage the bubble is 0; waiting inside boxings does not count.
    """
    spans = [span for rank in ranks for span in rank.spans]
    if not spans:
        return None
    if len({span.stage for span in spans}) == 1:
        return 0.0
    total = len(ranks) * (max(span.stop_s for span in spans) - min(span.start_s for span in spans))
    busy = sum(span.stop_s - span.start_s - span.boxing_s for span in spans)
    return max(0.0, 1 - busy / total) if total else 0.0


@dataclass(frozen=True, slots=True)
class LossTerm(JsonRecord):
    """What one rank has of a loss without asking the others: a number of which ``num_copies`` ranks have a copy. Where
    there is a ``reduction``, the loss is the sum, maximum or minimum of the numbers that ``num_holders`` ranks have.
    """

    value: float
    num_copies: int = 1
    reduction: str = ""
    num_holders: int = 1


@dataclass(frozen=True, slots=True)
class LastSteps(JsonRecord):
    """The last steps of a loop as one rank saw them: what the ranks had not exchanged when the loop ended, each perhaps
    at another point. Attributes are those of ``StepBlock``, of this rank alone; a loss is None where it has nothing.
    ``tokens`` and ``norms`` are numbers of tokens, and norms of this rank's part of the gradients, by step.
    """

    rank: int
    num_ranks: int
    first_step: int
    samples: tuple[int, ...]
    losses: tuple[LossTerm | None, ...]
    time_s: tuple[float, ...]
    boxing_s: tuple[float, ...]
    boxed_bytes: tuple[int, ...]
    memory_bytes: dict[str, int] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()
    values: dict[str, tuple[tuple[int, LossTerm | None], ...]] = field(default_factory=dict)

    def cut(self, first_step: int, count: int) -> LastSteps:
        """Only ``count`` steps from ``first_step`` on."""
        part = slice(first_step - self.first_step, first_step - self.first_step + count)
        each = ("samples", "losses", "time_s", "boxing_s", "boxed_bytes", "tokens", "norms")
        return replace(self, first_step=first_step, **{name: getattr(self, name)[part] for name in each})


def joined(parts: Sequence[LastSteps]) -> StepBlock | None:
    """The steps that all ranks report; None if there are none. A lost rank reports nothing and counts as idle.

    >>> half = (LossTerm(0.25, 1, "sum", num_holders=2),)
    >>> joined([LastSteps(rank, 2, 7, (8,), half, (0.5,), (0.0,), (0,)) for rank in (0, 1)]).losses
    (0.5,)
    """
    first = max(part.first_step for part in parts)
    count = min(part.first_step + len(part.samples) for part in parts) - first
    if count < 0 or not (count or any(part.values for part in parts)):
        return None
    by_rank = {part.rank: part.cut(first, count) for part in parts}
    idle = LastSteps(-1, 0, first, (), (None,) * count, (0.0,) * count, (0.0,) * count, (0,) * count)
    there = [by_rank.get(rank, idle) for rank in range(parts[0].num_ranks)]
    times_s = tuple(part.time_s for part in there)
    one = next(iter(by_rank.values()))
    norms = [part.norms or (UNKNOWN_NORM,) * count for part in there]
    values = {
        TOKENS_PER_S: rates(first, one.tokens, list(map(max, zip(*times_s, strict=True)))) if one.tokens else (),
        GRADIENT_NORM: whole_norms(first, norms),
        **_logical_values(there),
    }
    return StepBlock(
        first,
        one.samples,
        tuple(_logical(terms) for terms in zip(*(part.losses for part in there), strict=True)),
        times_s,
        tuple(part.boxing_s for part in there),
        tuple(part.boxed_bytes for part in there),
        tuple(part.memory_bytes for part in there) if all(part.memory_bytes for part in there) else (),
        values=known(values),
    )


def _logical_values(parts: Sequence[LastSteps]) -> dict[str, Pairs]:
    """The values that the ranks' parts give, up to the last step that all of them have."""
    found: dict[str, dict[int, list[LossTerm | None]]] = {}
    last = min((part.first_step + len(part.samples) for part in parts if part.rank >= 0), default=0)
    for part in parts:
        for name, pairs in part.values.items():
            for step, term in pairs:
                if step < last:
                    found.setdefault(name, {}).setdefault(step, []).append(term)
    logical = {name: [(step, _logical(terms)) for step, terms in steps.items()] for name, steps in found.items()}
    return {name: tuple((step, value) for step, value in pairs if value is not None) for name, pairs in logical.items()}


def _logical(terms: Sequence[LossTerm | None]) -> float | None:
    """The logical loss from each rank's part of it; None if a term of the sum, or of the extremum, is missing."""
    known = [term for term in terms if term is not None]
    if not known or not known[0].reduction:
        return known[0].value if known else None
    if len(known) < known[0].num_holders:
        return None
    if known[0].reduction == "sum":
        return sum(term.value / term.num_copies for term in known)
    values = [term.value for term in known]
    return max(values) if known[0].reduction == "max" else min(values)


@dataclass(frozen=True, slots=True)
class RunEvent(JsonRecord):
    """An event of a run before ``step``: pause, continuation, a change of strategy, a refused change, a step that is
    compiled, or one that could not be, a profile that begins, or one that came to nothing; or the end of a cell.

    ``text`` is the new strategy, the reason of a refusal or failure, or which of the step's programs is compiled;
    ``time_s`` and ``boxed_bytes`` are the cost of a change.
    """

    kind: str
    step: int
    text: str = ""
    time_s: float = 0.0
    boxed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Segment(JsonRecord):
    """The figures of a run under one of its strategies, from ``first_step`` to the next segment. See ``RunRecord``.

    ``verdict`` is that of the run's steps until the next segment; None where the run's own says as much.
    """

    first_step: int
    name: str
    strategy: str
    samples_per_s: float
    peak_memory_bytes: tuple[int, ...] = ()
    memory_by_kind: tuple[dict[str, int], ...] = ()
    boxed_bytes_per_step: int = 0
    bubble: float | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Segment:
        """The segment that ``to_dict`` wrote."""
        verdict = data.get("verdict") and Verdict.from_dict(data["verdict"])
        return super(Segment, cls).from_dict({**data, "verdict": verdict})


@dataclass(frozen=True, slots=True)
class RunRecord(JsonRecord):
    """One finished run of one strategy, over all ranks. A failed run has its reason in ``error``, and empty figures.

    ``samples_per_s`` is the median of the steps' samples over the median step time, without warm-up steps. ``speedup``
    is over one engine. ``peak_memory_bytes`` and ``memory_by_kind`` have one entry per rank. ``loss_difference`` and
    ``weight_difference`` are the largest ``difference`` to one device: of losses in the first steps, and of weights
    after two of them. ``equal`` says whether that is rounding; ``verdict`` has the evidence.

    ``bubble`` is the part of the ranks' time without work, 0 to 1, in the last step that all ranks recorded.
    ``layer_forward_s`` and ``layer_backward_s`` are the seconds that a layer computes in a step, on the slowest of its
    ranks, under the last strategy. ``changes`` has (step, strategy) for every change during the run, and ``segments``
    the figures of each strategy (``core.segments.by_strategy``). Other figures are of the whole run; ``strategy`` and
    ``predicted`` are of its first strategy. ``values`` are other values of steps by name, as (step, value): learning
    rate, gradient norm and others, see ``core.step_values``. ``predicted`` holds the prediction:
    step_s, samples_per_s, peak_bytes, boxed_bytes, bubble. ``settings`` has model, seed, optimizer, versions and
    machine. ``started`` is local time (ISO 8601); ``run_id`` names the run's file. ``spread`` is that of a record of
    several seeds: standard deviations by the name of their mean (``core.seeds.over_seeds``). ``first_step`` counts from
    0: a part of a run (``core.segments.by_strategy``) begins later. ``samples`` are those of each step; one without a
    number had ``batch_size``.
    """

    name: str
    strategy: str
    num_ranks: int
    batch_size: int
    losses: tuple[float, ...] = ()
    step_times_s: tuple[float, ...] = ()
    samples_per_s: float = 0.0
    speedup: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()
    memory_by_kind: tuple[dict[str, int], ...] = ()
    boxed_bytes_per_step: int = 0
    loss_difference: float | None = None
    weight_difference: float | None = None
    equal: bool | None = None
    verdict: Verdict = UNKNOWN
    error: str | None = None
    bubble: float | None = None
    changes: tuple[tuple[int, str], ...] = ()
    layer_forward_s: dict[str, float] = field(default_factory=dict)
    layer_backward_s: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    started: str = ""
    run_id: str = ""
    segments: tuple[Segment, ...] = ()
    values: dict[str, Pairs] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    first_step: int = 0
    samples: tuple[int, ...] = ()

    @property
    def step_rates(self) -> tuple[float, ...]:
        """Samples per second of each step, NaN where no time was measured."""
        samples = chain(self.samples, repeat(self.batch_size))
        steps = zip(self.step_times_s, samples, strict=False)
        return tuple(count / time_s if time_s > 0 else math.nan for time_s, count in steps)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, None without a measurement."""
        return self.batch_size / self.samples_per_s if self.samples_per_s else None

    @property
    def final_loss(self) -> float | None:
        """The loss of the last step; None where the run ended before it, as one device does after its check."""
        num_steps = self.first_step + len(self.losses)
        is_whole = num_steps == self.settings.get("steps", num_steps)
        return self.losses[-1] if self.losses and is_whole and self.error is None else None

    @property
    def rank_seconds(self) -> float | None:
        """What the trained steps cost: ranks x seconds. None without a measurement."""
        return self.num_ranks * sum(self.step_times_s) if self.step_times_s else None

    def speedup_over(self, base: RunRecord | None) -> float | None:
        """The speed-up over a baseline that is shown beside the run; without one, ``speedup``."""
        if base is None:
            return self.speedup
        return self.samples_per_s / base.samples_per_s if base.samples_per_s else None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunRecord:
        """The record that ``to_dict`` wrote; one of an older version has no verdict beyond ``equal``."""
        verdict = Verdict.from_dict(data.get("verdict") or {"equal": data.get("equal")})
        segments = tuple(map(Segment.from_dict, data.get("segments", ())))
        return super(RunRecord, cls).from_dict({**data, "verdict": verdict, "segments": segments})
