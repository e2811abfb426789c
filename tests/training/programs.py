"""SPMD programs that run on simulated ranks and on real processes alike; each asserts on every rank."""

from __future__ import annotations

import functools
import itertools
import random
import threading

import numpy as np
import torch
import torch.nn.functional as F

import workbench as wb
from tests.oracle import assert_holds, shard
from tests.training.models import batch_for, make
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.presets import strategy_of
from workbench.tensors.global_tensor import spec_of, wrap
from workbench.tensors.world import current
from workbench.training.parallel import describe
from workbench.training.runs.job import Job, RankResult
from workbench.training.runs.train import largest_difference, run_one_device, run_strategy

ENTRIES = ("S(0)", "S(1)", "B", "P")


def grids(num_ranks: int) -> list[list]:
    """Rank lists and grids that fit into a world, permuted and partial ones among them."""
    ranks = list(range(num_ranks))
    found = [ranks, ranks[::-1], [num_ranks - 1], ranks[: max(1, num_ranks - 1)]]
    if num_ranks >= 4:
        found += [[ranks[:2], ranks[2:4]], [[3, 0], [1, 2]]]
    return found


def boxing_pairs(num_ranks: int, count: int, seed: int) -> list[tuple[Layout, Layout]]:
    """A seeded sample of pairs of layouts."""
    layouts = []
    for grid in grids(num_ranks):
        placement = Placement.of("cpu", grid)
        layouts += [Layout.of(placement, list(sbp)) for sbp in itertools.product(ENTRIES, repeat=placement.num_axes)]
    pairs = list(itertools.product(layouts, layouts))
    random.Random(seed).shuffle(pairs)
    return pairs[:count]


def boxing_forward_and_backward(num_ranks: int, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> int:
    """Box a tensor between sampled layouts; check every shard, the gradient, and the bytes that moved."""
    world, checked = current(), 0
    shapes = itertools.cycle([(5, 7), (2, 3), (8, 4), (1, 6), (0, 4)])
    for source, target in boxing_pairs(num_ranks, count, seed):
        shape = next(shapes)
        full = np.random.default_rng(checked).standard_normal(shape).astype(np.float32)
        tensor = _leaf(full, source, dtype)
        sent_before = world.traffic.sent_bytes
        boxed = tensor.to_global(placement=target.placement, sbp=target.sbp)
        plan = tensor.boxing_plan(placement=target.placement, sbp=target.sbp)
        assert world.traffic.sent_bytes - sent_before == plan.bytes_sent.get(world.rank, 0), str(plan)
        _assert_shard(boxed.detach(), full, target)
        (boxed * torch.from_numpy(full).to(dtype)).sum().backward()
        _assert_shard(tensor.grad, full, source.dual())
        checked += 1
    return checked


def _leaf(full: np.ndarray, layout: Layout, dtype: torch.dtype):
    world = current()
    spec = spec_of(world, layout, full.shape)
    if spec.is_placeholder:
        placeholder = wb.empty(
            *full.shape, placement=layout.placement, sbp=["B"] * layout.placement.num_axes, dtype=dtype
        )
        return wrap(placeholder.as_subclass(torch.Tensor), spec).requires_grad_()
    return wrap(torch.from_numpy(np.array(shard(full, layout)[world.rank])).to(dtype), spec).requires_grad_()


def _assert_shard(tensor, full: np.ndarray, layout: Layout) -> None:
    """Every rank of the placement holds its part; terms of a sum are collected over all ranks first."""
    world = current()
    local = tensor.to_local().float()
    biggest = torch.zeros(2 * max(1, full.size))
    biggest[: local.numel()] = local.reshape(-1)
    collected = world.transport.all_gather(biggest, "test")
    shapes = {rank: layout.local_shape(full.shape, rank) for rank in layout.placement}
    shards = {rank: collected[rank][: int(np.prod(s))].reshape(s).numpy() for rank, s in shapes.items()}
    assert_holds(shards, layout, full, atol=1e-4)


def _job(kind: str, steps: int) -> Job:
    return Job(lambda: make(kind), batch_for(kind), F.cross_entropy, None, batch_size=7, num_steps=steps)


@functools.cache
def _one_device(kind: str, num_micro_batches: int, steps: int) -> RankResult:
    return run_one_device(_job(kind, steps), num_micro_batches)


_ONE_AT_A_TIME = threading.Lock()
"""Simulated ranks are threads: the first one trains on one device, and the others take its numbers."""


def training_equals_one_device(kind: str, strategy: str, num_ranks: int, steps: int = 6) -> tuple[float, float]:
    """Train a model under a strategy (a preset's name, a text or rows); returns the differences to one device."""
    num_micro_batches = strategy_of(strategy, describe(make(kind)), num_ranks).options.num_micro_batches
    with _ONE_AT_A_TIME:
        truth = _one_device(kind, num_micro_batches, steps)
    ours = run_strategy(_job(kind, steps), strategy, keeps_weights=True)
    assert len(ours.losses) == steps
    losses = max(abs(a - b) for a, b in zip(ours.losses, truth.losses, strict=True))
    return losses, largest_difference(ours.weights, truth.weights)
