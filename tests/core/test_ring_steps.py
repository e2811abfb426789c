"""The steps of ring attention: every score once, and as many on each rank."""

from collections import Counter

import pytest

from workbench.core.layout import balanced_bounds
from workbench.core.ring_steps import ring_steps


def scores_of(block, queries, keys, is_causal):
    """The places of the scores that count in a block."""
    first = queries[block.queries][0]
    rows = range(first + block.rows[0], first + block.rows[1])
    return [(row, column) for row in rows for column in range(*keys[block.keys]) if column <= row or not is_causal]


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_every_score_is_computed_once_and_each_rank_has_one_block_at_a_time(num_ranks):
    for num_rows, num_keys in ((12, 12), (13, 13), (3, 3), (12, 5), (5, 12), (0, 4)):
        for is_causal in (False, True):
            queries, keys = balanced_bounds(num_rows, num_ranks), balanced_bounds(num_keys, num_ranks)
            steps = ring_steps(queries, keys, is_causal)
            found = [score for step in steps for block in step for score in scores_of(block, queries, keys, is_causal)]
            wanted = [(n, k) for n in range(num_rows) for k in range(num_keys) if k <= n or not is_causal]
            assert sorted(found) == wanted
            for step in steps:
                assert max(Counter(block.worker for block in step).values()) == 1
                assert all(block.worker in (block.queries, block.keys) for block in step)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_causal_steps_are_half_of_all_and_equal_on_every_rank(num_ranks):
    rows = balanced_bounds(20 * num_ranks, num_ranks)
    steps = ring_steps(rows, rows, is_causal=True)
    work = Counter[int]()
    for step in steps:
        for block in step:
            work[block.worker] += len(scores_of(block, rows, rows, is_causal=True))
    assert len(steps) == num_ranks // 2 + 1
    assert set(work) == set(range(num_ranks)) and len(set(work.values())) == 1
