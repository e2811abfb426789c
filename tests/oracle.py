"""An oracle of layouts in numpy: walk the axes, cut, place. Shares no code with the package's planner or layouts."""

from __future__ import annotations

import itertools

import numpy as np

from workbench.core.layout import Layout
from workbench.core.sbp import Broadcast, Partial, Split


def coordinates(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Grid coordinates by rank."""
    shape = layout.placement.shape
    return dict(zip(layout.placement.grid, itertools.product(*map(range, shape)), strict=True))


def shard(full: np.ndarray, layout: Layout, seed: int = 0) -> dict[int, np.ndarray]:
    """What every rank holds of ``full``: partial sums are cut into terms of 0.6 and 0.4 and random parts."""
    rng = np.random.default_rng(seed)
    result = {}
    axes = [axis for axis, entry in enumerate(layout.sbp) if isinstance(entry, Partial)]
    keys = list(itertools.product(*(range(layout.placement.shape[axis]) for axis in axes)))
    terms = _terms(full, keys, layout, rng)
    for rank, place in coordinates(layout).items():
        part = terms[tuple(place[axis] for axis in axes)].astype(full.dtype)
        for axis, entry in enumerate(layout.sbp):
            if isinstance(entry, Split):
                part = np.array_split(part, layout.placement.shape[axis], axis=entry.dim)[place[axis]]
        result[rank] = part
    return result


def _terms(full, keys, layout, rng):
    kinds = {entry.reduction for entry in layout.sbp if isinstance(entry, Partial)}
    if kinds <= {"sum"}:
        if full.dtype.kind != "f":
            return {key: full if key == keys[0] else np.zeros_like(full) for key in keys}
        terms = {key: full * 0.4 / max(1, len(keys) - 1) + rng.standard_normal(full.shape) for key in keys[1:]}
        terms[keys[0]] = full - sum(terms.values()) if terms else full
        return terms
    worse = -1 if kinds == {"max"} else 1
    holder = rng.integers(len(keys), size=full.shape)
    return {key: np.where(holder == i, full, full + worse * rng.random(full.shape)) for i, key in enumerate(keys)}


def assert_holds(shards: dict[int, np.ndarray], layout: Layout, full: np.ndarray, atol: float = 1e-5) -> None:
    """Assert that the shards, terms combined, are the parts of ``full`` that the layout says."""
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    kinds = [entry.reduction for entry in layout.sbp if isinstance(entry, Partial)]
    whole = shard(full, layout.with_sbp(tuple(Broadcast() if isinstance(e, Partial) else e for e in layout.sbp)))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in coordinates(layout).items():
        key = tuple(0 if isinstance(e, Partial) else c for c, e in zip(place, layout.sbp, strict=True))
        groups.setdefault(key, []).append(rank)
    for ranks in groups.values():
        total = shards[ranks[0]]
        for rank in ranks[1:]:
            total = combine[kinds[0]](total, shards[rank])
        assert total.shape == whole[ranks[0]].shape, (layout, ranks)
        np.testing.assert_allclose(total, whole[ranks[0]], atol=atol, err_msg=f"{layout} on ranks {ranks}")
