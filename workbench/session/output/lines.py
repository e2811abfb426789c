"""Cuts a rank's stream into lines, and shows the line that is not finished: a progress bar, for example."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: How long a line stays unfinished before its text so far is shown.
UNFINISHED_S = 0.3
#: The shortest time between two updates of the unfinished text.
PERIOD_S = 0.2
_INNER_BAR = re.compile(r"\n(\r[^\n]*)\x1b\[A")


class LineSplitter:
    """Cuts one rank's stream into lines. A carriage return starts the line again, as on a terminal.

    A terminal draws an inner progress bar one line below the outer one, then moves the cursor up. Here the inner bar
    replaces the outer one. So the newline after a bar ends the line only when other text follows.
    """

    def __init__(self) -> None:
        self._partial = ""

    def feed(self, text: str) -> list[str]:
        """The lines that are finished now."""
        text = _INNER_BAR.sub(r"\1", (self._partial + text).replace("\r\n", "\n"))
        start = text.rfind("\n") + 1
        if text[start : start + 1] in ("", "\r"):
            bar = text.rfind("\n", 0, start - 1) + 1
            start = bar if "\r" in text[bar:start] else start
        *lines, nothing = text[:start].split("\n")
        assert not nothing
        self._partial = "\n".join(map(_forget_overwritten, text[start:].split("\n")))
        return [_after_return(line) for line in lines]

    @property
    def unfinished(self) -> str:
        """The text of the line that is not finished."""
        return "\n".join(line for line in map(_after_return, self._partial.split("\n")) if line)

    def rest(self) -> list[str]:
        """The unfinished text as a last line. Call it when the stream has ended."""
        lines = self.unfinished.split("\n") if self.unfinished else []
        self._partial = ""
        return lines


class Unfinished:
    """Unfinished lines of all ranks as one text that changes, at most every `PERIOD_S`."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self._shown = ""
        self._shown_s = -PERIOD_S
        self._taken_s = 0.0
        self._is_late = False

    def take(self, lines: Iterable[tuple[int, str]], now: float) -> list[tuple[tuple[int, ...], str]] | None:
        """(ranks, text) to show instead of the last ones; None if nothing has to change.

        ``lines``: rank and text of the lines that are unfinished now.
        """
        lines, self._taken_s = list(lines), now
        self._since_s = {rank: self._since_s.get(rank, now) for rank, _ in lines}
        owners: dict[str, list[int]] = {}
        for rank, text in lines:
            if now - self._since_s[rank] >= UNFINISHED_S:
                owners.setdefault(text, []).append(rank)
        key = repr(owners)
        self._is_late = key != self._shown and now - self._shown_s < PERIOD_S
        if key == self._shown or self._is_late or not (owners or self._shown):
            return None
        self._shown, self._shown_s = (key if owners else ""), now
        return [(tuple(ranks), text) for text, ranks in owners.items()]

    def wakeup(self) -> float | None:
        """When to call `take` again if no new text arrives."""
        times = [since + UNFINISHED_S for since in self._since_s.values()]
        young = [time for time in times if time > self._taken_s]
        return min([*young, *([self._shown_s + PERIOD_S] if self._is_late else [])], default=None)


def _after_return(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _forget_overwritten(line: str) -> str:
    """The same line on a terminal, without what a carriage return has overwritten."""
    kept = _after_return(line)
    return f"\r{kept}" + ("\r" if line.endswith("\r") else "") if "\r" in line else line
