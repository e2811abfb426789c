"""What a profile says of each rank: its seconds of a step in compute, in exchanges, and idle. It needs no torch."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from workbench.core.intervals import Interval, common, total, united, without
from workbench.core.json_record import JsonRecord
from workbench.units import counted, format_bytes, format_seconds

DEFAULT_STEPS = 3
DEFAULT_WARMUP = 4
MOST_STEPS = 20
"""More are profiled only where their size does not matter: nobody knows it before."""
_SECONDS = ("compute_s", "exchange_s", "overlapped_s", "idle_s")
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "other")
"""Kinds of memory over a step, in the order in which they are drawn."""


_OPEN_IN_PERFETTO = """
const link = this.previousElementSibling, site = 'https://ui.perfetto.dev', page = window.open(site);
fetch(link.href).then(answer => answer.arrayBuffer()).then(buffer => {
  const timer = setInterval(() => page.postMessage('PING', site), 100);
  window.addEventListener('message', function hear(event) {
    if (event.source !== page || event.data !== 'PONG') return;
    clearInterval(timer);
    window.removeEventListener('message', hear);
    page.postMessage({perfetto: {buffer, title: link.textContent}}, site);
  });
});
"""
"""Hands the file to a page of Perfetto once that answers (perfetto.dev, "Deep linking"). It stays in the browser."""


@dataclass(frozen=True, slots=True)
class RankProfile(JsonRecord):
    """The mean step of one rank. ``step_s`` is ``compute_s + exchange_s - overlapped_s + idle_s``.

    Attributes:
        rank, num_steps: of whom, and over how many steps the means are.
        step_s: seconds of a step.
        compute_s: seconds in which the device computes: operators on a CPU, kernels and copies on a GPU, without those
            that are part of an exchange.
        exchange_s: seconds in which an exchange is in progress, from its start until the rank has the result. The rank
            may wait for others in them.
        overlapped_s: the part of ``exchange_s`` in which the rank also computes.
        idle_s: seconds with neither. On a CPU that is Python's own time, loading of data, and waits for the schedule.
        num_exchanges, sent_bytes: of a step.
    """

    rank: int
    num_steps: int
    step_s: float
    compute_s: float
    exchange_s: float
    overlapped_s: float
    idle_s: float
    num_exchanges: float = 0.0
    sent_bytes: float = 0.0

    def share(self, name: str) -> float:
        """Seconds as a part of the step, 0 to 1: ``share("idle_s")``."""
        return float(getattr(self, name)) / self.step_s if self.step_s else 0.0


def rank_profile(
    rank: int,
    steps: Sequence[Interval],
    computes: Iterable[Interval],
    calls: Iterable[Interval],
    in_progress: Iterable[Interval],
    sent_bytes: Sequence[int] = (),
) -> RankProfile:
    """The profile of a rank from the times of what it did, in seconds on one clock.

    Args:
        rank: its number.
        steps: the profiled steps, one after the other.
        computes: operators or kernels, which may lie inside one another.
        calls: the rank starts an exchange or waits for one. What it computes there is part of the exchange.
        in_progress: exchanges from start to end, in which the rank may do other things.
        sent_bytes: of each exchange.

    >>> rank_profile(0, [(0, 10)], computes=[(0, 4), (5, 8)], calls=[(4, 5)], in_progress=[(4, 6)])
    RankProfile(rank=0, num_steps=1, step_s=10.0, compute_s=7.0, exchange_s=2.0, overlapped_s=1.0, idle_s=2.0, ...)
    """
    window = united(steps)
    exposed = common(united(calls), window)
    exchanges = common(united([*exposed, *in_progress]), window)
    work = without(common(united(computes), window), exposed)
    overlapped_s, step_s = total(common(work, exchanges)), total(window)
    compute_s, exchange_s = total(work), total(exchanges)
    idle_s = max(0.0, step_s - compute_s - exchange_s + overlapped_s)
    count = max(1, len(steps))
    return RankProfile(
        rank,
        len(steps),
        step_s=step_s / count,
        compute_s=compute_s / count,
        exchange_s=exchange_s / count,
        overlapped_s=overlapped_s / count,
        idle_s=idle_s / count,
        num_exchanges=len(sent_bytes) / count,
        sent_bytes=sum(sent_bytes) / count,
    )


@dataclass(frozen=True, slots=True)
class MemoryCurve(JsonRecord):
    """Bytes of one rank by kind over one step.

    Attributes:
        time_s: seconds from the beginning of the step.
        size_bytes: kind (of ``MEMORY_KINDS``) -> bytes at each of these times.
    """

    rank: int
    time_s: tuple[float, ...]
    size_bytes: dict[str, tuple[int, ...]]

    @property
    def peak_bytes(self) -> int:
        """The largest sum over the kinds."""
        return max(map(sum, zip(*self.size_bytes.values(), strict=True)), default=0)


@dataclass
class RankPart:
    """A rank's part of a profile. ``events`` are compressed, ``snapshot`` is a pickle of torch's.

    ``events_bytes`` is the size of the events in the file. ``num_wanted`` are the steps that were asked for.
    """

    profile: RankProfile
    events: bytes
    events_bytes: int
    num_wanted: int
    memory: MemoryCurve | None = None
    snapshot: bytes = b""
    notes: tuple[str, ...] = ()


@dataclass
class Profile:
    """A profile of some steps on all ranks; ``print`` it for the table. See ``wb.debug.profile``.

    Attributes:
        ranks: a ``RankProfile`` per rank.
        path: the file for Perfetto; None where none was asked for.
        size_bytes: its size.
        snapshots: the files of allocator snapshots, one per rank on a GPU; https://pytorch.org/memory_viz shows them.
        memory: memory over one step by kind, a ``MemoryCurve`` per rank; ``wb.draw.memory(profile)`` draws it. Empty
            where it was not measured.
        notes: what a reader of the table should know.
    """

    ranks: tuple[RankProfile, ...] = ()
    path: Path | None = None
    size_bytes: int = 0
    snapshots: tuple[Path, ...] = ()
    memory: tuple[MemoryCurve, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def num_steps(self) -> int:
        """The number of profiled steps; 0 before there are some."""
        return min((rank.num_steps for rank in self.ranks), default=0)

    @property
    def _title(self) -> str:
        return f"{counted(self.num_steps, 'step')} on {counted(len(self.ranks), 'rank')}, seconds of a step"

    def _rows(self) -> Iterator[list[str]]:
        yield ["rank", "step", *(name.removesuffix("_s") for name in _SECONDS), "exchanges", "sent"]
        for rank in self.ranks:
            seconds = [f"{format_seconds(getattr(rank, name))} {rank.share(name):4.0%}" for name in _SECONDS]
            counts = [f"{rank.num_exchanges:.0f}", format_bytes(rank.sent_bytes)]
            yield [str(rank.rank), format_seconds(rank.step_s), *seconds, *counts]

    def _files(self) -> list[str]:
        found = [f"{self.path} ({format_bytes(self.size_bytes)}): open it in https://ui.perfetto.dev"] * bool(self.path)
        if self.snapshots:
            names = ", ".join(map(str, self.snapshots))
            found.append(f"allocator snapshots for https://pytorch.org/memory_viz: {names}")
        return found

    def __str__(self) -> str:
        if not self.ranks:
            return "no steps were profiled yet"
        rows = list(self._rows())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self._title, *table, *self.notes, *self._files()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.ranks:
            return html.escape(str(self))
        header, *rows = self._rows()
        cells = "".join(f"<th>{html.escape(text)}</th>" for text in header)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>" for row in rows)
        lines = [*map(html.escape, self.notes), *self._links()]
        return f"<p>{self._title}</p><table><tr>{cells}</tr>{body}</table><p>{'<br>'.join(lines)}</p>"

    def _links(self) -> Iterator[str]:
        """The files, as links that a notebook in their folder follows."""
        if self.path is not None:
            open_it = f'<button onclick="{html.escape(_OPEN_IN_PERFETTO)}">open in Perfetto</button>'
            yield f"{_link(self.path)} {open_it} {format_bytes(self.size_bytes)}, for https://ui.perfetto.dev"
        for file in self.snapshots:
            yield f"{_link(file)} for https://pytorch.org/memory_viz"


def _link(file: Path) -> str:
    """A name may have characters that mean something in an address, such as ``#``."""
    return f'<a href="{quote(file.as_posix())}" download>{html.escape(str(file))}</a>'
