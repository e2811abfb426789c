"""The steps of ring attention: which rank computes which block of scores.

Queries and keys are split along the sequence over the ranks of a ring. A block is the scores of one rank's queries and
one rank's keys. In each step every rank computes one block, and in most of them one side of it comes from another rank:

    all keys are seen     rank r has its queries; in step s come the keys of rank r - s
    causal                in step s come the keys of rank r - s, if those are earlier; else the queries of rank r - s,
                          and the results go back. Half the steps, of which the last one is half a block

The causal steps do as much on every rank, where a plain ring leaves the first ranks idle. The rows need not be dealt
out in zig-zag for that: each rank keeps one slice of the sequence. Where queries and keys are not the same rows, causal
attention takes the steps of the first line, without the blocks that no query sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Interval = tuple[int, int]
"""First row and the row after the last."""


@dataclass(frozen=True, slots=True)
class Block:
    """The scores of ``rows`` of the queries of one rank and all keys of another, computed by one of the two.

    Ranks are places in the ring; ``rows`` count from the first of the rank's queries.
    """

    worker: int
    queries: int
    keys: int
    rows: Interval


@lru_cache(maxsize=256)
def ring_steps(
    queries: tuple[Interval, ...], keys: tuple[Interval, ...], is_causal: bool
) -> tuple[tuple[Block, ...], ...]:
    """The blocks of every step, at most one for each worker.

    Args:
        queries, keys: by rank of the ring, its rows of the sequence.
        is_causal: whether query n sees the keys up to n only.

    >>> [len(step) for step in ring_steps(((0, 4), (4, 8)), ((0, 4), (4, 8)), is_causal=True)]
    [2, 2]
    >>> ring_steps(((0, 4), (4, 8)), ((0, 4), (4, 8)), is_causal=True)[1][0]
    Block(worker=0, queries=1, keys=0, rows=(0, 2))
    """
    shares = is_causal and queries == keys
    num_ranks = len(queries)
    steps = []
    for step in range(num_ranks // 2 + 1 if shares else num_ranks):
        found = [_block(rank, (rank - step) % num_ranks, step, queries, shares) for rank in range(num_ranks)]
        steps.append(tuple(block for block in found if _is_seen(block, queries, keys, is_causal)))
    return tuple(filter(None, steps))


def _block(rank: int, other: int, step: int, queries: tuple[Interval, ...], shares: bool) -> Block:
    """The block of a rank in a step of the ring. In the step between opposite ranks, both would have the same block:
    each takes half of its rows.
    """
    is_own = not shares or other <= rank
    start, stop = queries[rank if is_own else other]
    rows = (0, stop - start)
    if shares and step and 2 * step == len(queries):
        half = (stop - start) // 2
        rows = (half, stop - start) if is_own else (0, half)
    return Block(rank, rank, other, rows) if is_own else Block(rank, other, rank, rows)


def _is_seen(block: Block, queries: tuple[Interval, ...], keys: tuple[Interval, ...], is_causal: bool) -> bool:
    first_key, end = keys[block.keys]
    last_query = queries[block.queries][0] + block.rows[1] - 1
    return block.rows[0] < block.rows[1] and first_key < end and not (is_causal and first_key > last_query)
