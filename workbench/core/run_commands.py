"""Commands of the notebook to a running training. They take effect on all ranks at once, between two steps."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("stop", "pause", "resume", "strategy", "profile")


@dataclass(frozen=True, slots=True)
class RunCommand:
    """``kind`` is one of ``KINDS``; ``text`` is the new strategy of a ``"strategy"``.

    Raises:
        ValueError: no such kind.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"RunCommand({self.kind!r}): no such command. Commands are {', '.join(KINDS)}.")
