"""Sets of ranks as people write them: ``0,2-3``."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.errors import SessionError
from workbench.units import format_ranks


def rank_label(ranks: Iterable[int]) -> str:
    """The shortest spelling of a set of ranks: ``(0, 1, 3)`` is ``"0-1,3"``."""
    return format_ranks(sorted(set(ranks))).replace(" ", "")


def describe_ranks(ranks: Iterable[int]) -> str:
    """``"rank 1"`` or ``"ranks 0-1,3"``, for sentences."""
    ranks = set(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {rank_label(ranks)}"


def parse_ranks(text: str, num_ranks: int) -> tuple[int, ...]:
    """Ranks named by a text such as ``"0,2-3"``, in rising order, each once.

    Raises:
        SessionError: the text is not a list of numbers and ranges, or names a rank that does not exist.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.strip().isdecimal()):
            raise SessionError(
                f"ranks {text!r}: {part.strip()!r} is not a rank. "
                f"Ranks are numbers and ranges separated by commas, e.g. 0,2-3."
            )
        ranks.update(range(int(first), int(last if dash else first) + 1))
    return check_ranks(ranks, num_ranks, asked=f"ranks {text!r}")


def check_ranks(ranks: Iterable[int] | None, num_ranks: int, asked: str = "ranks") -> tuple[int, ...]:
    """The ranks in rising order, each once; all of them for None.

    Raises:
        SessionError: no rank at all, or a rank outside ``0..num_ranks-1``.
    """
    if ranks is None:
        return tuple(range(num_ranks))
    wanted = sorted(set(ranks))
    unknown = [rank for rank in wanted if not 0 <= rank < num_ranks]
    if unknown or not wanted:
        what = f"rank {unknown[0]} does not exist" if unknown else "no rank is named"
        raise SessionError(
            f"{asked}: {what}. The session has {num_ranks} engines, so ranks go from 0 to {num_ranks - 1}."
        )
    return tuple(wanted)
