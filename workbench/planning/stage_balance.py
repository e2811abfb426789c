"""Cuts of a long chain of layers into stages: the slowest stage is as fast as possible, and every stage fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

PRECISION = 1e-4
"""Relative precision of the slowest stage's seconds."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that a cut keeps together: a block, or a layer outside of blocks.

    Attributes:
        seconds: forward and backward of a micro-batch.
        kept_bytes: activations of one micro-batch that is alive.
        weights: trained ones on one rank.
        shared: of these, the weights that all ranks of the model axis have.
        transient_bytes: activations that exist only while the unit is recomputed.
        num_rows: number of layers.
        stage: the stage that a constraint requires; None for any.
        frozen: weights on one rank that are not trained.
    """

    seconds: float
    kept_bytes: float
    weights: float
    shared: float
    transient_bytes: float
    num_rows: int
    stage: int | None = None
    frozen: float = 0.0


def held_bytes(unit: Unit, bytes_of_weights: tuple[float, float, float]) -> float:
    """Bytes that a rank holds for the weights of a unit; ``bytes_of_weights`` as in ``balanced_stages``."""
    own, shared, frozen = bytes_of_weights
    return own * unit.weights + shared * unit.shared + frozen * unit.frozen


def balanced_stages(
    units: Sequence[Unit],
    alive: Sequence[float],
    bytes_of_weights: tuple[float, float, float],
    memory_bytes: float,
    ranks: int,
) -> list[tuple[int, ...]]:
    """Stages of the rows, at most two cuts with the fastest possible slowest stage: one fills early stages, one late.

    Args:
        units: the units of the chain.
        alive: by stage, the number of micro-batches whose activations it holds at once.
        bytes_of_weights: bytes of a weight, additional bytes of a shared weight, and bytes of a frozen weight.
        memory_bytes: memory of one rank.
        ranks: slices of the pipeline axis. Stages on one rank share its memory evenly.

    Returns:
        An empty list if no cut fits.
    """
    limit = memory_bytes * ranks / len(alive)
    held = [held_bytes(unit, bytes_of_weights) for unit in units]
    low = max(max(unit.seconds for unit in units), sum(unit.seconds for unit in units) / len(alive))
    high = inf
    counts = _fill(units, alive, held, limit, inf)
    while counts is not None:
        best, high = counts, _slowest(units, counts)
        if high - low <= PRECISION * high:
            break
        middle = (low + high) / 2
        while (counts := _fill(units, alive, held, limit, middle)) is None and high - middle > PRECISION * high:
            low, middle = middle, (middle + high) / 2
    if high == inf:
        return []
    late = _fill(units[::-1], alive[::-1], held[::-1], limit, high, is_reversed=True)
    cuts = [best] if late is None else [best, late[::-1]]
    return list(dict.fromkeys(_rows(units, cut) for cut in cuts))


def _slowest(units: Sequence[Unit], counts: Sequence[int]) -> float:
    seconds, at = [], 0
    for count in counts:
        seconds.append(sum(unit.seconds for unit in units[at : at + count]))
        at += count
    return max(seconds)


def _fill(
    units: Sequence[Unit],
    alive: Sequence[float],
    held: Sequence[float],
    limit: float,
    most_s: float,
    is_reversed: bool = False,
) -> list[int] | None:
    """Units of each stage. Stages are filled in order; each leaves at least one unit for every later stage.

    None if they do not fit.
    """
    num_stages, counts, at = len(alive), [], 0
    most_s *= 1 + 1e-12
    for place, live in enumerate(alive):
        stage = num_stages - 1 - place if is_reversed else place
        seconds = kept = fixed = transient = 0.0
        start, most = at, len(units) - (num_stages - 1 - place)
        while at < most and units[at].stage in (None, stage):
            unit = units[at]
            seconds, kept, fixed = seconds + unit.seconds, kept + unit.kept_bytes, fixed + held[at]
            transient = max(transient, unit.transient_bytes)
            if seconds > most_s or live * kept + fixed + transient > limit:
                break
            at += 1
        if at == start:
            return None
        counts.append(at - start)
    return counts if at == len(units) else None


def _rows(units: Sequence[Unit], counts: Sequence[int]) -> tuple[int, ...]:
    stages: list[int] = []
    rest = iter(units)
    for stage, count in enumerate(counts):
        for _ in range(count):
            stages += [stage] * next(rest).num_rows
    return tuple(stages)
