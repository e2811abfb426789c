"""Groups of ranks that hold copies of the same weight, where ZeRO splits it inside of each group."""

from __future__ import annotations


def num_groups(num_copies: int, wanted: int) -> int:
    """Into how many groups of consecutive ranks copies are cut: ``wanted``, or the next number that divides them.

    >>> num_groups(8, 2), num_groups(6, 4), num_groups(2, 4)
    (2, 6, 2)
    """
    return next(n for n in range(min(wanted, num_copies), num_copies + 1) if num_copies % n == 0)


def exchanged_copies(num_copies: int, wanted: int) -> tuple[int, int]:
    """How often a weight passes between ranks: (in one scatter or gather inside the groups, in one sum between them).

    >>> exchanged_copies(8, 1), exchanged_copies(8, 2)
    ((7, 0), (6, 2))
    """
    groups = num_groups(num_copies, wanted)
    return num_copies - groups, 2 * (groups - 1)
