"""Describes the activity of a session's engines in lines of text, for the magics and the command line."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.session import protocol
from workbench.session.cluster import Session
from workbench.session.output.log import tail
from workbench.session.output.tracebacks import consequences
from workbench.session.ranks import parse_ranks
from workbench.units import format_bytes, format_count


def describe(status: protocol.RankStatus) -> str:
    """One line about a rank: ``rank 0  pid 4711  cpu  259 MB  idle``."""
    if not status.alive:
        what = f"died ({status.ended}); the next cell or run starts it again" if status.ended else "does not answer"
        return f"rank {status.rank}  {what}"
    memory = format_bytes(status.memory_bytes) if status.memory_bytes is not None else "unknown memory"
    doing = f"busy: {status.doing}" if status.busy else "idle"
    return f"rank {status.rank}  pid {status.pid}  {status.device}  {memory}  {doing}"


def ranks_of(session: Session, text: str | None) -> tuple[int, ...]:
    """The ranks that an option names; all ranks without the option."""
    return parse_ranks(text, session.num_engines) if text is not None else tuple(range(session.num_engines))


def status_lines(session: Session) -> list[str]:
    """One line about every rank, then one about the transport of each group of ranks."""
    found = session.status()
    groups = dict.fromkeys(line for each in found for line in each.transport_groups)
    return [*map(describe, found), *groups]


def dump_lines(session: Session, ranks: Sequence[int]) -> list[str]:
    """The stack of each of the ranks' main threads, from the cell inwards."""
    found = {each.rank: each for each in session.status()}
    lines = []
    for rank in ranks:
        lines.append(describe(found[rank]))
        for frame in found[rank].stack:
            lines.append(f"  {'cell' if frame.in_cell else frame.file}:{frame.line}  in {frame.function}")
            source = dict(frame.source).get(frame.line)
            lines += [f"      {source.strip()}"] if source else []
    return lines


def log_lines(session: Session, ranks: Sequence[int], num_lines: int) -> list[str]:
    """The last lines of each rank in the last cell with output, and the files with the whole output."""
    paths = session.logs.last()
    if not paths:
        return ["workbench: no cell has printed anything yet"]
    lines = []
    for rank in ranks:
        if rank not in paths:
            lines.append(f"rank {rank}  printed nothing")
            continue
        last, num_in_all = tail(paths[rank], max(0, num_lines))
        hidden = num_in_all - len(last)
        lines.append(f"rank {rank}  {format_count(num_in_all)} lines, all of them in {paths[rank]}")
        lines += [f"  ... {format_count(hidden)} lines ..."] if hidden else []
        lines += [f"  {line}" for line in last]
    return lines


def interrupt_lines(session: Session) -> list[str]:
    """Interrupt the engines' work, and describe the result for each rank."""
    outcome = session.interrupt()
    return consequences(outcome) if outcome.ranks else ["workbench: no rank runs anything"]
