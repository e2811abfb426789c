"""The commands of ``%workbench``: each makes one call on the session and shows what it answers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from IPython.core.error import UsageError

from workbench.session import cluster, protocol
from workbench.session.output.log import tail
from workbench.session.processes import kept
from workbench.session.ranks import parse_ranks
from workbench.session.run import CellResult
from workbench.units import counted, format_bytes, format_count, format_seconds

_DEBUGGER_START_S = 15.0


def start(options: Namespace) -> None:
    """Start a session, unless the same one runs."""
    running = cluster.find_current()
    if running is not None and options.engines in (None, running.num_engines):
        print(f"workbench: a session with {counted(running.num_engines, 'engine')} is running already")
        return
    if running is not None:
        raise UsageError(
            f"%workbench start --engines {options.engines}: a session with {counted(running.num_engines, 'engine')} is "
            f"running. Use it, or end it with %workbench stop."
        )
    found = [] if options.new else kept.free_sessions()
    if found:
        raise UsageError(
            "%workbench start: engines of an earlier notebook are still there, with their variables:\n"
            + "".join(f"    {session}\n" for session in found)
            + "Go on with them: %workbench attach. End them: %workbench clean. "
            "Leave them alone and start others: %workbench start --new"
        )
    cluster.Session(engines=options.engines, profile=options.profile, device=options.device, keep=options.keep)


def attach(options: Namespace) -> None:
    """Go on with the engines that an earlier notebook has left."""
    if cluster.find_current() is not None:
        raise UsageError(
            "%workbench attach: a session runs here already. End it (%workbench stop), or leave it (detach)."
        )
    session = cluster.Session.attach(options.name)
    found = session.status()
    busy = [each for each in found if each.busy]
    engines = counted(session.num_engines, "engine")
    print(f"workbench: attached to {engines} on {session.device}, with the variables held there")
    for each in busy:
        print(describe(each))
    if busy:
        print("What an earlier notebook has started still runs; the next cell waits for it, and an interrupt ends it.")


def detach(options: Namespace) -> None:
    """Leave the engines to another notebook."""
    here = cluster.current()
    here.detach()
    left = counted(here.num_engines, "engine")
    print(f"workbench: left {left}; a notebook of yours goes on there by %workbench attach")


def clean(options: Namespace) -> None:
    """End engines that earlier notebooks have left."""
    print(f"workbench: ended {counted(kept.clean(), 'session')} of earlier notebooks")


def stop(options: Namespace) -> None:
    """End the session and its engines."""
    cluster.current().close()
    print("workbench: stopped")


def restart(options: Namespace) -> None:
    """Replace engines; all of them, or those named."""
    here = cluster.current()
    here.restart(parse_ranks(options.ranks, here.num_engines) if options.ranks is not None else None)


def status(options: Namespace) -> None:
    """One line about every rank, and how they exchange."""
    found = cluster.current().status()
    for each in found:
        print(describe(each))
    for line in dict.fromkeys(line for each in found for line in each.transport_groups):
        print(line)


def describe_times(result: CellResult, ranks: Sequence[int]) -> str:
    """``2.31 s; rank 1 was slowest, rank 0 was done after 1.02 s``."""
    total = format_seconds(result.elapsed_s)
    if len(ranks) == 1:
        return f"{total}"
    times = dict(zip(ranks, result.rank_elapsed_s, strict=True))
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    return f"{total}; rank {last} was slowest, rank {first} was done after {format_seconds(times[first])}"


def describe(status: protocol.RankStatus) -> str:
    """One line about a rank: ``rank 0  pid 4711  cpu  259 MB  idle``."""
    if not status.alive:
        return f"rank {status.rank}  does not answer"
    memory = format_bytes(status.memory_bytes) if status.memory_bytes is not None else "unknown memory"
    doing = f"busy: {status.doing}" if status.busy else "idle"
    return f"rank {status.rank}  pid {status.pid}  {status.device}  {memory}  {doing}"


def _ranks_of(options: Namespace) -> tuple[int, ...]:
    num_ranks = cluster.current().num_engines
    return parse_ranks(options.ranks, num_ranks) if options.ranks is not None else tuple(range(num_ranks))


def log(options: Namespace) -> None:
    """The end of what each rank printed in the last cell that printed, and the files that have all of it."""
    output = cluster.current().logs.last()
    if output is None:
        print("workbench: no cell has printed anything yet")
        return
    output.flush()
    paths = output.paths
    for rank in _ranks_of(options):
        if rank not in paths:
            print(f"rank {rank}  printed nothing")
            continue
        lines, num_lines = tail(paths[rank], max(0, options.lines))
        hidden = num_lines - len(lines)
        print(f"rank {rank}  {format_count(num_lines)} lines, all of them in {paths[rank]}")
        print("\n".join([*([f"  ... {format_count(hidden)} lines ..."] if hidden else []), *(f"  {s}" for s in lines)]))


def dump(options: Namespace) -> None:
    """The stack of every rank's main thread, from the cell inwards."""
    found = {each.rank: each for each in cluster.current().status()}
    for rank in _ranks_of(options):
        print(describe(found[rank]))
        for frame in found[rank].stack:
            print(f"  {'cell' if frame.in_cell else frame.file}:{frame.line}  in {frame.function}")
            source = dict(frame.source).get(frame.line)
            if source:
                print(f"      {source.strip()}")


def debug(options: Namespace) -> None:
    """Have debugpy listen on loopback on the ranks named."""
    here = cluster.current()
    ranks = _ranks_of(options)
    if options.ranks is None:
        raise UsageError(
            f"%workbench debug: name the ranks, of 0 to {here.num_engines - 1}, e.g. %workbench debug --ranks 1"
        )
    for rank in ranks:
        port = here.ask(rank, "debug", _DEBUGGER_START_S)
        if port is None:
            print(f"rank {rank}  no debugger started within {_DEBUGGER_START_S:.0f} s; is debugpy installed there?")
            continue
        where = f'{{"type": "debugpy", "request": "attach", "connect": {{"host": "127.0.0.1", "port": {port}}}}}'
        print(f"rank {rank}  debugger listens on 127.0.0.1:{port}; attach with {where}")
    print("Then breakpoint() in a %%global cell stops there. Anybody who may connect to this port may run code.")


COMMANDS = {
    command.__name__: command for command in (start, status, stop, restart, attach, detach, clean, log, dump, debug)
}
