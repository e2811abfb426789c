"""What the option ``recompute`` of a strategy says: which blocks run again in backward, and what they keep."""

from __future__ import annotations

from collections.abc import Collection

KINDS = ("full", "attention", "cheap")
"""In this order, each keeps more and computes less again: only the block's input; also results of products with
weights; also those of attention."""


def recompute_kind(value: object) -> str:
    """The option as a word: one of ``KINDS``, a number of blocks, or empty.

    True is "full", "none" and False are empty. Texts of other words stay as they are.

    >>> recompute_kind(True), recompute_kind(False), recompute_kind("none"), recompute_kind(4), recompute_kind("cheap")
    ('full', '', '', '4', 'cheap')
    """
    if isinstance(value, bool) or value == "none":
        return "full" if value is True else ""
    return str(value)


def chosen_blocks(num_blocks: int, recompute: str) -> Collection[int]:
    """The numbers of the blocks that run again: all, or so many as the option says, evenly spread.

    >>> list(chosen_blocks(4, "full")), sorted(chosen_blocks(4, "2"))
    ([0, 1, 2, 3], [0, 2])
    """
    if not recompute.isdecimal():
        return range(num_blocks)
    wanted = min(int(recompute), num_blocks)
    return {place * num_blocks // wanted for place in range(wanted)}


def runs_again(block: tuple[int, int] | None, recompute: str) -> bool:
    """Whether a layer of this block (see ``Layer.block``) runs again.

    >>> runs_again((1, 4), "full"), runs_again((1, 4), "2"), runs_again((-1, 4), "full"), runs_again((1, 4), "")
    (True, False, False, False)
    """
    number, count = block or (-1, 0)
    return bool(recompute) and number in chosen_blocks(count, recompute)


def mistakes_of_recompute(recompute: str, num_blocks: int | None) -> list[tuple[str, tuple[str, ...]]]:
    """What is wrong with a number of blocks, and fixes. ``num_blocks`` is what the model has; None if unknown.

    >>> mistakes_of_recompute("9", 4)[0][0].partition(":")[0]
    'recompute=9, but the model has 4 blocks'
    """
    if num_blocks is None or not recompute.isdecimal() or int(recompute) <= num_blocks:
        return []
    message = f"recompute={recompute}, but the model has {num_blocks} blocks: so many of them run again"
    return [(message, (f"use recompute={num_blocks} or less, or recompute, which is all",))]
