"""An oracle of layouts in numpy: walk the axes, cut, place. Shares no code with the package's planner or layouts."""

from __future__ import annotations

import itertools

import numpy as np

from workbench.core.layout import Layout
from workbench.core.sbp import Broadcast, Partial, Split

COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def coordinates(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Grid coordinates by rank."""
    shape = layout.placement.shape
    return dict(zip(layout.placement.grid, itertools.product(*map(range, shape)), strict=True))


def shard(full: np.ndarray, layout: Layout, seed: int = 0) -> dict[int, np.ndarray]:
    """What every rank holds of ``full``; a reduction has random terms, integers for an array of integers."""
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
    noise = rng.random if full.dtype.kind == "f" else lambda size: rng.integers(0, 4, size)
    if full.dtype.kind == "b":  # a sum of booleans is their "or"
        kinds, noise = {"max"} if kinds == {"sum"} else kinds, lambda size: rng.integers(0, 2, size)
    if kinds <= {"sum"}:
        terms = {key: noise(full.shape) - noise(full.shape) for key in keys[1:]}
        terms[keys[0]] = full - sum(terms.values()) if terms else full
        return terms
    worse = -1 if kinds == {"max"} else 1
    holder = rng.integers(len(keys), size=full.shape)
    lesser = [np.clip(full + worse * noise(full.shape), 0, 1) if full.dtype.kind == "b" else
              full + worse * noise(full.shape) for _ in keys]  # fmt: skip
    return {key: np.where(holder == i, full, lesser[i]) for i, key in enumerate(keys)}


def assert_holds(shards: dict[int, np.ndarray], layout: Layout, full: np.ndarray, atol: float = 1e-5) -> None:
    """Assert that the shards, terms combined, are the parts of ``full`` that the layout says."""
    kinds = [entry.reduction for entry in layout.sbp if isinstance(entry, Partial)]
    whole = shard(full, layout.with_sbp(tuple(Broadcast() if isinstance(e, Partial) else e for e in layout.sbp)))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in coordinates(layout).items():
        key = tuple(0 if isinstance(e, Partial) else c for c, e in zip(place, layout.sbp, strict=True))
        groups.setdefault(key, []).append(rank)
    for ranks in groups.values():
        total = shards[ranks[0]]
        for rank in ranks[1:]:
            total = COMBINE[kinds[0]](total, shards[rank])
        assert total.shape == whole[ranks[0]].shape, (layout, ranks)
        np.testing.assert_allclose(total, whole[ranks[0]], rtol=0, atol=atol, err_msg=f"{layout} on ranks {ranks}")
