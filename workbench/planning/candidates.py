"""All combinations of degrees, micro-batches, schedule, ZeRO with its shards, recomputation and sequence that a problem
leaves open, and those values of context, offload and overlap that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from workbench.core.offload_kinds import offload_kind
from workbench.core.options import V_SCHEDULES, Options
from workbench.core.recompute_kinds import recompute_kind
from workbench.core.strategy import ResolvedStrategy
from workbench.planning.problem import Problem

MAX_VIRTUAL_STAGES = 8
"""The largest number of stages on a rank under the interleaved schedule."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Options, and the number of stages."""

    options: Options
    num_stages: int

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Pipeline, data, model."""
        assert self.options.degrees is not None
        return self.options.degrees


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates with the same degrees, micro-batches and context."""

    degrees: tuple[int, int, int]
    num_micro_batches: int
    context: int = 1


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Every candidate."""
    for group in groups(problem):
        yield from candidates_of(problem, group)


def groups(problem: Problem, span: int | None = None) -> Iterator[Group]:
    """Every combination of degrees, context and micro-batches.

    With a ``span`` and no constraint on model, model degrees divide twice the span.
    """
    ranks = divisors(problem.num_ranks) if problem.objective == "cost" else [problem.num_ranks]
    for num_ranks, context in product(ranks, problem.contexts):
        for degrees in _degrees(problem, num_ranks, span, context):
            for num_micro_batches in divisors(problem.batch_size // (degrees[1] // context)):
                if problem.constraints.allows("micro_batches", num_micro_batches):
                    yield Group(degrees, num_micro_batches, context)


def _degrees(problem: Problem, num_ranks: int, span: int | None, context: int) -> Iterator[tuple[int, int, int]]:
    constraints = problem.constraints
    for pipeline in divisors(num_ranks):
        if pipeline > len(problem.rows) or not constraints.allows("pipeline", pipeline):
            continue
        for model in divisors(num_ranks // pipeline):
            if span is not None and constraints.model is None and (2 * span) % model:
                continue
            if not problem.fits_heads(model):
                continue
            data = num_ranks // pipeline // model
            fits = data % context == 0 and problem.batch_size % (data // context) == 0
            if fits and constraints.allows("data", data) and constraints.allows("model", model):
                yield pipeline, data, model


def candidates_of(problem: Problem, group: Group) -> Iterator[Candidate]:
    """Every candidate of a group."""
    constraints, (pipeline, data, model) = problem.constraints, group.degrees
    zeros = [zero for zero in (range(4) if data * model > 1 else (0,)) if constraints.allows("zero", zero)]
    sharded = [(zero, shards) for zero in zeros for shards in _shards(problem, zero, data, model)]
    recomputes = _recomputes(problem) or ["", "full"]  # finer_recompute looks at the others
    offloads = _offloads(problem)
    sequences = [value for value in ((False, True) if model > 1 else (False,)) if constraints.allows("sequence", value)]
    can_overlap = model > 1 and problem.precision != "fp8"
    overlaps = [value for value in _overlaps(problem) if value == 1 or (value > 1 and can_overlap)]
    for schedule, num_stages in _schedules(pipeline, len(problem.rows)):
        if schedule is not None and not constraints.allows("schedule", schedule):
            continue
        every = product(sharded, recomputes, sequences, offloads, overlaps)
        for (zero, shards), recompute, sequence, offload, overlap in every:
            m = group.num_micro_batches
            options = Options(
                group.degrees,
                m,
                schedule,
                zero,
                recompute,
                sequence,
                problem.precision,
                None,
                group.context,
                shards,
                offload,
                overlap,
            )
            yield Candidate(options, num_stages)


def _recomputes(problem: Problem) -> list[str]:
    """The kinds that a constraint names; none: all of them."""
    return [recompute_kind(value) for value in problem.constraints.values("recompute")]


def _offloads(problem: Problem) -> list[str]:
    return [offload_kind(value) for value in problem.constraints.values("offload")] or [""]


def _overlaps(problem: Problem) -> list[int]:
    return [value for value in problem.constraints.values("overlap") if isinstance(value, int)] or [1]


def not_searched(problem: Problem, strategy: ResolvedStrategy) -> list[str]:
    """What the search of a problem does not look at in a strategy: ``["precision bf16", "context 2"]``."""
    constraints, options, degrees = problem.constraints, strategy.options, strategy.degrees
    is_searched = {
        "precision": options.precision == problem.precision,
        "widths": options.widths is None,
        "num_micro_batches": constraints.allows("micro_batches", options.num_micro_batches),
        "schedule": options.schedule is None or constraints.allows("schedule", options.schedule),
        "zero": constraints.allows("zero", options.zero),
        "sequence": constraints.allows("sequence", options.sequence),
        "recompute": options.recompute in (_recomputes(problem) or [options.recompute]),
        "offload": options.offload in _offloads(problem),
        "overlap": options.overlap in _overlaps(problem),
        "context": options.context in problem.contexts,
        "shards": options.shards in _shards(problem, options.zero, *degrees[1:]),
    }
    names = ("pipeline", "data", "model")
    fits = all(constraints.allows(name, degree) for name, degree in zip(names, degrees, strict=True))
    found = [] if fits else [f"degrees {'x'.join(map(str, degrees))}"]
    found += [f"{name.replace('_', ' ')} {getattr(options, name)}" for name, known in is_searched.items() if not known]
    chosen = zip(problem.choices_of(strategy), problem.rows, strategy.layers, strict=True)
    widths = (strategy.stage_width(layer.stage) for layer in strategy.layers)
    spread = {
        layer.over_data * width[1]
        for (choice, row, layer), width in zip(chosen, widths, strict=True)
        if choice[0] == "expert" and layer != problem.resolve_layer(row.layer, choice, layer.stage, *width)
    }
    found += [f"experts over {number} ranks" for number in sorted(spread)]
    pins = zip(problem.pins, strategy.layers, strict=True)
    is_pinned = all(
        pin is None or (pin.parallel == layer.parallel and pin.split in (None, layer.split)) for pin, layer in pins
    )
    stages = [layer.stage for layer in strategy.layers]
    return found if is_pinned and problem.fits_stages(stages) else [*found, "its choices of pinned layers"]


def _shards(problem: Problem, zero: int, data: int, model: int) -> list[int]:
    """Sizes of the groups of ZeRO's shards: all data ranks, and for ZeRO 3, which gathers in every micro-batch, those
    of a host.
    """
    if problem.constraints.shards is not None:
        wanted = [number for number in problem.constraints.values("shards") if isinstance(number, int)]
        return [number for number in wanted if number == 0 or (zero and number > 1 and data % number == 0)]
    spans = [link.span // model for link in problem.hardware.links] if zero == 3 else []
    return [0, *(number for number in spans if 1 < number < data and data % number == 0)]


def _schedules(pipeline: int, num_layers: int) -> Iterator[tuple[str | None, int]]:
    """(schedule, number of stages)."""
    if pipeline == 1:
        yield None, 1
        return
    for schedule in ("1f1b", "gpipe", "zero_bubble"):
        yield schedule, pipeline
    for schedule in V_SCHEDULES if 2 * pipeline <= num_layers else ():
        yield schedule, 2 * pipeline
    for virtual_stages in range(2, min(MAX_VIRTUAL_STAGES, num_layers // pipeline) + 1):
        yield "interleaved", virtual_stages * pipeline


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
