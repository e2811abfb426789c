"""Merging and folding, with made-up times."""

import random

import pytest

from workbench.session.output.merging import MERGE_WAIT_S, Block, Merger, RateLimiter, as_text, tag_of

LATE = MERGE_WAIT_S * 2


def merged(prints: dict[int, list[str]], now: float = 0.0) -> list[str]:
    """What is shown when every rank has printed its lines and the cell is over."""
    merger = Merger(sorted(prints))
    for rank, lines in prints.items():
        merger.feed_text(rank, "".join(f"{line}\n" for line in lines), now)
    return [as_text(block, len(prints)) for block in merger.take(now, final=True)]


def test_alike_lines_once():
    assert merged({0: ["a", "b"], 1: ["a", "b"]}) == ["[all] a", "[all] b"]


def test_different_lines_under_their_ranks_as_ranges():
    assert merged({0: ["x"], 1: ["x"], 2: ["y"], 3: ["x"]}) == ["[0-1,3] x", "[2] y"]


def test_one_rank_has_a_line_more():
    assert merged({0: ["extra", "a", "b"], 1: ["a", "b"]}) == ["[0] extra", "[all] a", "[all] b"]
    assert merged({0: ["a", "b"], 1: ["a", "extra", "b"]}) == ["[all] a", "[1] extra", "[all] b"]


def test_lines_that_differ_only_in_a_number_are_not_joined():
    assert merged({0: ["loss 1.0"], 1: ["loss 1.1"]}) == ["[0] loss 1.0", "[1] loss 1.1"]


def test_opposite_sequences_lose_nothing():
    assert merged({0: ["a", "b"], 1: ["b", "a"]}) == ["[0] a", "[all] b", "[1] a"]


def test_repeated_lines_keep_their_number():
    assert merged({0: ["a", "a", "a"], 1: ["a"]}) == ["[all] a", "[0] a", "[0] a"]


@pytest.mark.parametrize("seed", range(30))
def test_every_rank_keeps_its_lines_in_order(seed):
    rng = random.Random(seed)
    prints = {rank: [rng.choice("abcd") for _ in range(rng.randrange(40))] for rank in range(3)}
    merger, shown = Merger([0, 1, 2]), []
    pending = {rank: list(lines) for rank, lines in prints.items()}
    now = 0.0
    while any(pending.values()):
        rank = rng.choice([rank for rank, lines in pending.items() if lines])
        merger.feed_text(rank, pending[rank].pop(0) + "\n", now)
        now += rng.random() * 0.2
        shown += merger.take(now)
    shown += merger.take(now, final=True)
    for rank, lines in prints.items():
        assert [block.content for block in shown if rank in block.ranks] == lines


def test_a_line_waits_for_the_other_rank_and_then_goes_alone():
    merger = Merger([0, 1])
    merger.feed_text(0, "a\n", now=0.0)
    assert merger.take(0.01) == []
    assert merger.wakeup() == pytest.approx(MERGE_WAIT_S)
    merger.feed_text(1, "a\n", now=0.05)
    assert merger.take(0.05) == [Block("line", (0, 1), "a")]
    merger.feed_text(0, "b\n", now=1.0)
    assert merger.take(1.0 + LATE) == [Block("line", (0,), "b")]


def test_unlike_lines_come_in_the_order_in_which_they_were_printed():
    merger = Merger([0, 1])
    for now, rank in enumerate((1, 0, 1, 0)):
        merger.feed_text(rank, f"{now}\n", float(now))
    assert [block.content for block in merger.take(9.0)] == ["0", "1", "2", "3"]


def test_displays_are_joined_by_their_data():
    merger = Merger([0, 1])
    for rank, html in ((0, "<b>x</b>"), (1, "<b>x</b>")):
        merger.feed_bundle(rank, "display", {"data": {"text/html": html}}, 0.0)
    merger.feed_bundle(1, "display", {"data": {"text/html": "<i>"}}, 0.0)
    assert [block.ranks for block in merger.take(0.0, final=True)] == [(0, 1), (1,)]


def test_not_merging_keeps_ranks_apart():
    merger = Merger([0, 1], merge=False)
    for rank in (0, 1):
        merger.feed_text(rank, "a\n", 0.0)
    assert [block.ranks for block in merger.take(0.0)] == [(0,), (1,)]


def test_the_value_of_a_cell_waits_longer_for_the_other_ranks():
    merger = Merger([0, 1])
    value = {"data": {"text/plain": "3"}}
    merger.feed_bundle(0, "result", value, 0.0)
    assert merger.take(LATE) == [] and merger.wakeup() > LATE
    merger.feed_bundle(1, "result", value, LATE)
    assert [block.ranks for block in merger.take(LATE)] == [(0, 1)]
    merger.feed_bundle(0, "result", value, 0.0)
    assert [block.ranks for block in merger.take(merger.wakeup())] == [(0,)]


def lines(count: int, start: int = 0) -> list[Block]:
    return [Block("line", (0,), f"line {index}") for index in range(start, start + count)]


def test_a_flood_is_folded_to_head_count_and_tail():
    limiter = RateLimiter(burst=20, per_second=10, tail=5)
    shown = limiter.take(lines(1000), now=0.0) + limiter.take([], now=0.0, final=True)
    texts = [block.content for block in shown]
    assert texts[:20] == [f"line {index}" for index in range(20)]
    assert texts[20].startswith("975 lines folded, ")
    assert texts[21:] == [f"line {index}" for index in range(995, 1000)]


def test_ranks_that_flood_together_each_keep_their_last_lines():
    limiter = RateLimiter(burst=2, per_second=1, tail=2)
    blocks = [Block("line", (rank,), f"{rank} {index}") for index in range(10) for rank in (0, 1)]
    shown = [block.content for block in limiter.take(blocks, now=0.0, final=True)]
    assert shown[2:] == ["7 lines folded, 21 B", "0 8", "0 9", "7 lines folded, 21 B", "1 8", "1 9"]


def test_slow_lines_are_never_folded():
    limiter = RateLimiter(burst=5, per_second=10, tail=5)
    shown = [block for step in range(100) for block in limiter.take(lines(1, step), now=step * 0.2)]
    assert [block.content for block in shown] == [f"line {index}" for index in range(100)]


def test_a_flood_that_pauses_is_summed_up_before_the_end():
    limiter = RateLimiter(burst=20, per_second=10, tail=5)
    limiter.take(lines(100), now=0.0)
    shown = [block.content for block in limiter.take([], now=1.5)]
    assert shown[0].startswith("75 lines folded")
    assert shown[-1] == "line 99"


def test_a_fold_that_hides_nothing_has_no_note():
    limiter = RateLimiter(burst=2, per_second=1, tail=5)
    shown = limiter.take(lines(4), now=0.0, final=True)
    assert [block.content for block in shown] == [f"line {index}" for index in range(4)]


def test_an_image_waits_for_ranks_that_draw_later():
    image, other = {"data": {"image/png": "iVBO"}}, {"data": {"text/html": "<b>"}}
    for bundle, ranks in ((image, [(0, 1)]), (other, [(0,), (1,)])):
        merger = Merger((0, 1))
        merger.feed_bundle(0, "display", bundle, 0.0)
        shown = merger.take(LATE)
        merger.feed_bundle(1, "display", bundle, LATE)
        assert [block.ranks for block in [*shown, *merger.take(2 * LATE + MERGE_WAIT_S)]] == ranks
    updated = image | {"transient": {"display_id": "a"}}  # never that of another rank
    merger.feed_bundle(0, "display", updated, 0.0)
    assert len(merger.take(LATE)) == 1


def test_displays_are_shown_in_the_middle_of_a_flood():
    limiter = RateLimiter(burst=2, per_second=1, tail=2)
    picture = Block("display", (0,), {"data": {}})
    shown = limiter.take([*lines(10), picture, *lines(1, 10)], now=0.0, final=True)
    assert [block.kind for block in shown] == ["line", "line", "note", "line", "line", "display", "line"]


def test_text_of_blocks():
    assert tag_of((0, 1), 2) == "[all]"
    assert tag_of((0, 1), 4) == "[0-1]"
    assert as_text(Block("result", (1,), {"data": {"text/plain": "a\nb"}}), 2) == "[1] a\n    b"
    assert as_text(Block("line", (1,), ""), 2) == "[1]"
