"""Merges what ranks print: equal lines appear once, floods are folded.

Pure functions: text and times in, tagged lines out.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from workbench.session.output.lines import LineSplitter
from workbench.session.ranks import rank_label
from workbench.units import format_bytes, format_count

#: How long a line waits for the other ranks to print the same.
MERGE_WAIT_S = 0.25
#: How long the value of the cell, and a display with an image, wait for those of the other ranks. No output follows
#: the value; images of ranks that draw at different speeds are far apart.
RESULT_WAIT_S = 1.0
#: Lines this close in time are shown in the order of ranks, others in the order of time.
SAME_TIME_S = 0.5
#: How many of a rank's waiting lines are searched for an equal one.
_LOOK_AHEAD = 32
#: If more lines of a rank wait, only the first one is compared.
_BUSY_LINES = 500


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of output and the ranks that made it.

    ``kind``: ``"line"`` (content: text without its newline), ``"display"`` or ``"result"`` (content: a MIME
    bundle with metadata), ``"update"`` (content: a bundle in the place of the display with the same `display_id`),
    ``"clear"`` (content: whether to wait for the next output; earlier output of these ranks goes), ``"note"`` (content:
    a remark about folded lines).
    """

    kind: str
    ranks: tuple[int, ...]
    content: Any


@dataclass(frozen=True, slots=True)
class _Item:
    kind: str
    key: str
    content: Any
    time_s: float

    @property
    def waits_until_s(self) -> float:
        """Until when the item waits for an equal one of the other ranks."""
        return self.time_s + (RESULT_WAIT_S if self.kind == "result" or self.is_picture else MERGE_WAIT_S)

    @property
    def is_picture(self) -> bool:
        """Whether it is a display with an image that other ranks may have, too."""
        if self.kind != "display" or display_id(0, self.content):
            return False
        return any(name.startswith("image/") for name in self.content.get("data", ()))


class Merger:
    """Joins the lines and displays of several ranks into one order that respects each rank's own.

    A line that several ranks print appears once, tagged with all of them, if they print it within `MERGE_WAIT_S` of
    each other (`RESULT_WAIT_S` for the value of the cell and for images). No line is dropped. ``merge=False`` keeps the
    ranks' lines apart.
    """

    def __init__(self, ranks: Sequence[int], merge: bool = True) -> None:
        self.ranks = tuple(ranks)
        self._merge = merge
        self._queues: dict[int, deque[_Item]] = {rank: deque() for rank in ranks}
        self._splitters = {rank: LineSplitter() for rank in ranks}

    def feed_text(self, rank: int, text: str, now: float) -> None:
        for line in self._splitters[rank].feed(text):
            self._queues[rank].append(_Item("line", line, line, now))

    def feed_bundle(self, rank: int, kind: str, bundle: dict[str, Any], now: float) -> None:
        key = display_id(rank, bundle) or json.dumps(bundle.get("data", {}), sort_keys=True, default=str)
        waiting = self._queues[rank]
        if kind == "update" and waiting and (waiting[-1].kind, waiting[-1].key) == (kind, key):
            now = waiting.pop().time_s  # only the last one of a flood counts
        waiting.append(_Item(kind, key, bundle, now))

    def unfinished(self) -> list[tuple[int, str]]:
        """Rank and text of every line that is not finished."""
        return [(rank, text) for rank, splitter in self._splitters.items() if (text := splitter.unfinished)]

    def finish(self, rank: int, now: float) -> None:
        """No more text comes from this rank."""
        for line in self._splitters[rank].rest():
            self._queues[rank].append(_Item("line", line, line, now))

    def release(self, rank: int, now: float) -> list[Block]:
        """All that waits of this rank, with its unfinished line; it is not joined with that of other ranks."""
        self.finish(rank, now)
        blocks = [Block(item.kind, (rank,), item.content) for item in self._queues[rank]]
        self._queues[rank].clear()
        return blocks

    def take(self, now: float, final: bool = False) -> list[Block]:
        """The blocks that can be shown now; all that wait if ``final``."""
        blocks = []
        while any(self._queues.values()):
            item, owners = self._next()
            missing = len(owners) < len(self.ranks)
            if missing and self._merge and not final and now < item.waits_until_s:
                break
            for rank in owners:
                self._queues[rank].popleft()
            blocks.append(Block(item.kind, owners, item.content))
        return blocks

    def wakeup(self) -> float | None:
        """When a waiting line will have waited long enough; None if nothing waits."""
        return min((items[0].waits_until_s for items in self._queues.values() if items), default=None)

    def _next(self) -> tuple[_Item, tuple[int, ...]]:
        """The item to show next, and its ranks. Prefers an item that is first in every rank that has it."""
        waiting = [rank for rank in self.ranks if self._queues[rank]]
        oldest_s = min(self._queues[rank][0].time_s for rank in waiting)
        waiting.sort(key=lambda rank: self._queues[rank][0].time_s > oldest_s + SAME_TIME_S)
        heads = [self._queues[rank][0] for rank in waiting]
        if not self._merge:
            return heads[0], (waiting[0],)
        for item in heads:
            places = {rank: self._place(rank, item) for rank in self.ranks}
            if not any(places.values()):
                return item, tuple(rank for rank, place in places.items() if place == 0)
        item = heads[0]
        return item, tuple(rank for rank in self.ranks if self._place(rank, item) == 0)

    def _place(self, rank: int, item: _Item) -> int | None:
        """How many of a rank's waiting items come before an equal one; None if it has none."""
        items = self._queues[rank]
        depth = _LOOK_AHEAD if len(items) < _BUSY_LINES else 1
        for place, other in enumerate(islice(items, depth)):
            if other.kind == item.kind and other.key == item.key:
                return place
        return None


class _FoldedLines:
    """Lines of the same ranks that are not shown yet: their number, their bytes, and the last ones."""

    def __init__(self, num_kept: int) -> None:
        self.tail: deque[Block] = deque(maxlen=num_kept)
        self._num_lines = 0
        self._size_bytes = 0

    def add(self, block: Block) -> None:
        self.tail.append(block)
        self._num_lines += 1
        self._size_bytes += len(block.content)

    def open(self) -> list[Block]:
        """A note about the lines that stay hidden, then the last lines."""
        num_hidden = self._num_lines - len(self.tail)
        hidden_bytes = self._size_bytes - sum(len(block.content) for block in self.tail)
        note = f"{format_count(num_hidden)} lines folded, {format_bytes(hidden_bytes)}"
        return [*([Block("note", self.tail[-1].ranks, note)] if num_hidden else []), *self.tail]


class RateLimiter:
    """Passes a burst of lines, folds lines that come faster than people read, and shows the last of them.

    It passes at most ``burst`` lines at once and ``per_second`` in the long run. When the flood pauses or ends, it
    shows the number of folded lines and the last ``tail`` lines of each group of ranks.
    """

    def __init__(self, burst: int = 200, per_second: float = 10.0, tail: int = 10) -> None:
        self._burst, self._per_second, self._num_kept = burst, per_second, tail
        self._credit = float(burst)
        self._time_s: float | None = None
        self._folds: dict[tuple[int, ...], _FoldedLines] = {}

    def take(self, blocks: Sequence[Block], now: float, final: bool = False) -> list[Block]:
        """The blocks to show instead of these. Only lines are folded."""
        if self._time_s is not None:
            self._credit = min(self._burst, self._credit + (now - self._time_s) * self._per_second)
        self._time_s = now
        shown: list[Block] = []
        for block in blocks:
            if block.kind == "update":
                shown.append(block)
            elif block.kind != "line":
                shown += [*self._open_all(), block]
            elif not self._folds and self._credit >= 1:
                self._credit -= 1
                shown.append(block)
            else:
                self._folds.setdefault(block.ranks, _FoldedLines(self._num_kept)).add(block)
        num_waiting = sum(len(fold.tail) for fold in self._folds.values())
        if self._folds and (final or self._credit >= 2 * num_waiting):
            shown += self._open_all()
        return shown

    def _open_all(self) -> list[Block]:
        opened = [block for _, fold in sorted(self._folds.items()) for block in fold.open()]
        self._folds.clear()
        self._credit -= len(opened)
        return opened


class OutputMerger:
    """All output of one run. Standard output with displays is one stream, standard error another."""

    def __init__(self, ranks: Sequence[int], merge: bool = True) -> None:
        self._mergers = {"stdout": Merger(ranks, merge), "stderr": Merger(ranks, merge)}
        self._limiters = {name: RateLimiter() for name in self._mergers}
        self._released: list[tuple[str, Block]] = []

    def feed_stream(self, rank: int, name: str, text: str, now: float) -> None:
        self._mergers[name].feed_text(rank, text, now)

    def feed_bundle(self, rank: int, kind: str, bundle: dict[str, Any], now: float) -> None:
        if kind == "clear":  # it comes behind all that the rank has printed
            self._mergers["stdout"].finish(rank, now)
            blocks = self._mergers["stderr"].release(rank, now)
            self._released += [("stderr", each) for each in self._limiters["stderr"].take(blocks, now, final=True)]
        self._mergers["stdout"].feed_bundle(rank, kind, bundle, now)

    def finish(self, rank: int, now: float) -> None:
        for merger in self._mergers.values():
            merger.finish(rank, now)

    def take(self, now: float, final: bool = False) -> list[tuple[str, Block]]:
        """(stream, block) pairs that can be shown now."""
        shown, self._released = self._released, []
        for name, merger in self._mergers.items():
            blocks = self._limiters[name].take(merger.take(now, final), now, final)
            shown += [(name, block) for block in blocks]
        return shown

    def unfinished(self) -> list[tuple[int, str]]:
        """Rank and text of every line that is not finished, of both streams."""
        return [each for merger in self._mergers.values() for each in merger.unfinished()]

    def wakeup(self) -> float | None:
        """When to call `take` again if no new output arrives."""
        times = [time for merger in self._mergers.values() if (time := merger.wakeup()) is not None]
        return min(times, default=None)


def display_id(rank: int, bundle: dict[str, Any]) -> str:
    """The name of the place of a display that its rank may update, in the notebook; empty for other displays.

    Such displays of several ranks are not joined: each has its own updates.
    """
    own = (bundle.get("transient") or {}).get("display_id")
    return f"workbench-{rank}-{own}" if own else ""


def tag_of(ranks: Sequence[int], num_ranks: int) -> str:
    """``[all]`` for all ranks of the session, else ``[0-1,3]``."""
    return "[all]" if len(ranks) == num_ranks else f"[{rank_label(ranks)}]"


def as_text(block: Block, num_ranks: int) -> str:
    """One block as plain text, every line with its tag."""
    if block.kind == "note":
        return tagged(block.ranks, f"... {block.content} ...", num_ranks)
    text = block.content if block.kind == "line" else block.content["data"].get("text/plain", "(no text form)")
    return tagged(block.ranks, text, num_ranks)


def tagged(ranks: Sequence[int], text: str, num_ranks: int) -> str:
    """``[1] first line``, with the further lines below it."""
    tag = tag_of(ranks, num_ranks)
    if not text:
        return tag
    first, *others = text.split("\n")
    return "\n".join([f"{tag} {first}", *(f"{' ' * len(tag)} {line}" for line in others)])
