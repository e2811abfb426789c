"""Boxings of many tensors in one exchange: what shares a message, and which of them are all-gathers."""

import itertools

import torch

from workbench.core.layout import Layout
from workbench.core.moves import gathered_regions, moves_from, moves_to
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast, partial_sum, split
from workbench.tensors.boxing.bucketed import BoxingWork
from workbench.tensors.boxing.exchange import direct_exchange
from workbench.tensors.global_tensor import local_torch, spec_of
from workbench.tensors.world import current
from workbench.testing import run_ranks

SHAPES = [(3, 4), (300, 300), (5,), (1, 2), (260, 256)]
MESSAGES = {
    ("S(0)", "B"): [[45000, 33280, 13], [45000, 33280, 6]],
    ("P", "S(0)"): [[45000, 33280, 6], [45000, 33280, 13]],
}
"""By change, the numbers of elements of each rank's messages."""


def test_small_slices_share_a_message_and_large_ones_have_their_own():
    def program(rank):
        world, placement, counts = current(), Placement.of("cpu", [0, 1]), []
        start = world.transport.start_exchange

        def counted(sends, *args):
            counts.append([tensor.numel() for _, tensor in sends])
            return start(sends, *args)

        world.transport.start_exchange = counted
        torch.manual_seed(rank)
        for change, expected in MESSAGES.items():
            pairs = [[spec_of(world, Layout.of(placement, sbp), shape) for sbp in change] for shape in SHAPES]
            exchanges = [direct_exchange(*pair, torch.float32) for pair in pairs]
            shards = [torch.randn(source.local_shape) for source, _ in pairs]
            with local_torch():
                found = BoxingWork(exchanges, shards, 0, "a test").finish()
                assert counts == [expected[rank]]
                for exchange, shard, new in zip(exchanges, shards, found, strict=True):
                    assert torch.equal(exchange.run(shard, 2), new)
            counts.clear()

    run_ranks(program, 2)


GRIDS = [Placement.of("cpu", grid) for grid in ([0, 1, 2, 3], [[0, 1], [2, 3]], [3, 1, 2, 0], [[0, 2], [1, 3]], [0, 1])]
LAYOUTS = [
    Layout(placement, sbp)
    for placement in GRIDS
    for sbp in itertools.product((broadcast, split(0), split(1), partial_sum), repeat=placement.num_axes)
]


def test_ranks_agree_on_what_is_an_all_gather():
    """A rank of the group gets the parts of all of its ranks and no others, and gives its own to all of them."""
    found = set()
    for source, target, shape in itertools.product(LAYOUTS, LAYOUTS, ((5, 4), (3, 1), (0, 2))):
        groups = {rank: gathered_regions(source, target, shape, rank) for rank in range(4)}
        for rank, regions in groups.items():
            if not regions:
                continue
            found.add((source, target))
            assert all(groups[other] == regions for other in regions)
            holders = {other for other, region in regions.items() if all(start < stop for start, stop in region)}
            moves = {move.source: move.destination_region for move in moves_to(source, target, shape, rank)}
            assert moves == {other: regions[other] for other in holders}
            takers = {move.destination for move in moves_from(source, target, shape, rank)}
            assert takers == (set(regions) if rank in holders else set())
    for placement, other in itertools.product(GRIDS[:3], repeat=2):
        whole, parts = Layout.of(placement, ["B"] * placement.num_axes), Layout.of(other, ["S(0)"] * other.num_axes)
        assert (parts, whole) in found
