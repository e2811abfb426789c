"""Bytes of attention on a context axis: of a ring, or of boxings from the sequence to heads (or samples) and back.

With Q, K, V and O the bytes of queries, keys, values and result of all c ranks of a context, each rank receives

    ring             (K + V) (c - 1) / c in forward, twice as much in backward
    ring, causal     about half of the blocks, with keys and values, or queries and results (``core.ring_steps``)
    heads            (Q + K + V + O) (c - 1) / c^2, and as much in backward
"""

from __future__ import annotations

from workbench.core.layout import balanced_bounds
from workbench.core.model_costs import AttentionSize
from workbench.core.ring_steps import ring_steps
from workbench.cost.collectives import exchange_s
from workbench.cost.stage_settings import StageSettings

_SUMS_BYTES = 4
"""A log of the sum of exponentials."""
Received = list[tuple[str, float]]
"""Kinds of exchanges, and the bytes that a rank receives in each."""


def attention_exchange(size: AttentionSize, itemsize: float, setting: StageSettings) -> tuple[Received, Received]:
    """The exchanges of one micro-batch, in forward and in backward. The runtime decides as this does, by forward."""
    context, samples = setting.context, setting.samples * setting.context
    heads, key_heads = max(1.0, size.heads / setting.model), max(1.0, size.key_heads / setting.model)
    queries, results = (samples * heads * size.rows * width * itemsize for width in size.widths)
    keys = [samples * key_heads * size.keys * width * itemsize for width in size.widths]
    part = (context - 1) / context
    seen = 0.5 if size.is_causal and size.rows == size.keys else 1.0
    rings = [("all-gather", part * each * seen) for each in keys]
    moved = [("all-to-all", part / context * each) for each in (queries, *keys, results)]
    suffice = heads % context == 0 and (key_heads % context == 0 or key_heads == 1) and not size.has_mask

    def seconds(received: Received) -> float:  # as the runtime counts, which knows one rate for all pairs of ranks
        measured = setting.hardware.exchanges
        kinds = [(kind if kind in measured else "", number) for kind, number in received]
        return sum(exchange_s(setting.hardware, number, context, setting.model, kind) for kind, number in kinds)

    if (suffice or samples % context == 0) and seconds(moved[:3]) < seconds(rings):
        return moved, moved
    sums = samples * heads * size.rows * _SUMS_BYTES
    of_ring = [_ring_bytes(size, context, queries, sum(keys), results, sums, back) for back in (False, True)]
    return [("ring", of_ring[0])], [("ring", of_ring[1])]


def _ring_bytes(
    size: AttentionSize, context: int, queries: float, keys: float, results: float, sums: float, is_backward: bool
) -> float:
    """The bytes that a rank of a ring receives, the mean of all."""
    rows, kept = balanced_bounds(size.rows, context), balanced_bounds(size.keys, context)
    total = 0.0
    for block in (block for step in ring_steps(rows, kept, size.is_causal) for block in step):
        if block.keys != block.worker:
            start, stop = kept[block.keys]
            total += (stop - start) / size.keys * keys * (2 if is_backward else 1)
        elif block.queries != block.worker:
            share = (block.rows[1] - block.rows[0]) / size.rows
            total += share * (2 * queries + 2 * results + sums if is_backward else queries + results + sums)
    return total / context
