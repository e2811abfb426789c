"""``%load_ext workbench``: cells and lines that run on all engines, and the commands of a session.

Each magic parses its line, makes one call on the session, and shows what comes back.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ipyparallel.client.magics import output_args
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from workbench.errors import NotStartedError
from workbench.session import assist, cluster, protocol
from workbench.session.output import Block, as_text
from workbench.session.output_log import tail
from workbench.session.ranks import parse_ranks
from workbench.session.run import CellResult
from workbench.units import format_bytes, format_count, format_seconds

_COMMENT_SPELLING = re.compile(r"^#\s*(%%global\b.*)$")


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics and the ``# %%global`` spelling."""
    ipython.register_magics(SessionMagics(ipython))
    if read_comment_spelling not in ipython.input_transformers_cleanup:
        ipython.input_transformers_cleanup.append(read_comment_spelling)
    assist.install(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Forget the ``# %%global`` spelling and end the session."""
    if read_comment_spelling in ipython.input_transformers_cleanup:
        ipython.input_transformers_cleanup.remove(read_comment_spelling)
    assist.uninstall(ipython)
    session = cluster.current()
    if session is not None:
        session.close()


def read_comment_spelling(lines: list[str]) -> list[str]:
    """``# %%global ...`` as a cell's first line means ``%%global ...``; linters and editors then see plain Python."""
    found = _COMMENT_SPELLING.match(lines[0]) if lines else None
    return [f"{found.group(1)}\n", *lines[1:]] if found else lines


@magics_class
class SessionMagics(Magics):
    """The magics of the workbench; they act on the session that was started last."""

    shell: Any

    @magic_arguments()
    @output_args
    @argument("--ranks", help="run on these ranks only, e.g. 0,2-3; collectives of all ranks are then not possible")
    @argument("--timeout", type=float, metavar="S", help="stop the cell on all ranks after S seconds")
    @argument("--quiet", action="store_true", help="show no output, only errors")
    @argument("--no-stream", action="store_true", help="show output when the cell is done, not while it runs")
    @argument("--label", default="", help="a name for this cell, shown by %%workbench status")
    @argument("--time", action="store_true", help="say how long the cell took, and which rank was slowest")
    @no_var_expand
    @cell_magic("global")  # type: ignore[arg-type]
    def cell_global(self, line: str, cell: str) -> None:
        """Run the cell on all engines as one program.

        Output appears while the cell runs, alike lines once under [all]. When a rank fails the others
        are stopped, and the notebook's cell fails with one account of what happened.
        """
        options = _parse(self.cell_global, line)
        # The magic's own line stays in front as a comment, so that line numbers are those of the notebook's cell.
        code = cell if cell.lstrip().startswith("%%") else f"# %%global {line}".rstrip() + f"\n{cell}"
        _run(self.shell, code, options)

    @magic_arguments()
    @argument("code", nargs="*", help="one line of Python")
    @no_var_expand
    @line_magic("global")  # type: ignore[arg-type]
    def line_global(self, line: str) -> None:
        """Run one line on all engines: ``%global x = wb.rank()``."""
        if not line.strip():
            raise UsageError("%global needs a line of Python, e.g. %global x = wb.rank()")
        _run(self.shell, line, _DEFAULTS)

    @magic_arguments()
    @argument("action", choices=["start", "status", "stop", "restart", "log", "dump"], help="what to do")
    @argument("--engines", type=int, metavar="N", help="start: number of engines (default: one per GPU, or 2)")
    @argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="start: where tensors live")
    @argument("--profile", help="start: an ipyparallel profile, for engines on other hosts")
    @argument("--ranks", help="restart, log, dump: these ranks only, e.g. 1 or 0,2-3")
    @argument("--lines", type=int, default=20, metavar="N", help="log: how many lines of each rank (default: 20)")
    @line_magic("workbench")  # type: ignore[arg-type]
    def line_workbench(self, line: str) -> None:
        """Start, look at, stop or restart the session: ``%workbench start --engines 2``.

        ``log`` shows the end of what each rank printed in the last cell, and the file that has all of it; ``dump``
        shows where each rank is now, also while a cell runs.
        """
        options = _parse(self.line_workbench, line)
        _COMMANDS[options.action](options)

    @line_magic("push")  # type: ignore[arg-type]
    def line_push(self, line: str) -> None:
        """Copy variables of the notebook to all engines: ``%push x y``."""
        names = _names("%push", line)
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"%push {line}: the notebook has no variable {missing[0]!r}")
        session().push(**{name: self.shell.user_ns[name] for name in names})

    @line_magic("pull")  # type: ignore[arg-type]
    def line_pull(self, line: str) -> None:
        """Copy variables of the engines here: a list by rank, or the logical tensor of a global one."""
        for name in _names("%pull", line):
            self.shell.user_ns[name] = session().pull(name)


def session() -> cluster.Session:
    """The session that magics act on.

    Raises:
        NotStartedError: there is none.
    """
    found = cluster.current()
    if found is None:
        raise NotStartedError(
            "No engines are running, so there is nothing to run this on. Start them with: %workbench start --engines 2"
        )
    return found


class Shower:
    """Shows merged output in the notebook or terminal."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.held: list[tuple[str, Block]] = []

    def show(self, stream: str, block: Block) -> None:
        if block.kind == "note":
            block = replace(block, content=f"{block.content}; %workbench log has them")
        bundle = block.content if isinstance(block.content, dict) else {}
        data = bundle.get("data", {})
        if set(data) - {"text/plain"}:
            print(as_text(Block("line", block.ranks, ""), self._num_ranks))
            display(data, metadata=bundle.get("metadata", {}), raw=True)
        else:
            print(as_text(block, self._num_ranks), file=sys.stderr if stream == "stderr" else sys.stdout)

    def hold(self, stream: str, block: Block) -> None:
        self.held.append((stream, block))

    def show_held(self, by_rank: bool) -> None:
        if by_rank:
            self.held.sort(key=lambda item: item[1].ranks)
        for stream, block in self.held:
            self.show(stream, block)


_DEFAULTS = Namespace(
    ranks=None, timeout=None, quiet=False, no_stream=False, label="", groupby="type", save_name=None, time=False
)


def _run(shell: Any, code: str, options: Namespace) -> None:
    here = session()
    ranks = parse_ranks(options.ranks, here.num_engines) if options.ranks is not None else None
    by_rank = options.groupby == "engine"
    shower = Shower(here.num_engines)
    show = None if options.quiet else shower.hold if options.no_stream or by_rank else shower.show
    try:
        result = here.run_cell(
            code,
            ranks=ranks,
            timeout=options.timeout,
            show=show,
            merge=not by_rank,
            values=options.save_name is not None,
            label=options.label,
        )
    finally:
        shower.show_held(by_rank)
    if options.save_name:
        shell.user_ns[options.save_name] = result
    if options.time:
        print(describe_times(result, ranks or range(here.num_engines)))


def _parse(magic: Any, line: str) -> Namespace:
    try:
        return parse_argstring(magic, line)
    except UsageError as error:
        raise UsageError(f"{error}\n\n{magic.parser.format_help()}") from None
    except ValueError as error:  # an open quote
        raise UsageError(f"{line!r}: {error}") from None


def _names(magic: str, line: str) -> list[str]:
    names = shlex.split(line.replace(",", " "))
    wrong = [name for name in names if not name.isidentifier()]
    if wrong or not names:
        what = f"{wrong[0]!r} is not a name" if wrong else "no variable is named"
        raise UsageError(f"{magic} {line}: {what}. Name variables, separated by spaces: {magic} x y")
    return names


def _start(options: Namespace) -> None:
    running = cluster.current()
    if running is not None and options.engines in (None, running.num_engines):
        print(f"workbench: {running.num_engines} engines are running already")
        return
    if running is not None:
        raise UsageError(
            f"%workbench start --engines {options.engines}: a session with {running.num_engines} engines is running. "
            f"Use it, or end it with %workbench stop."
        )
    cluster.Session(engines=options.engines, profile=options.profile, device=options.device)


def _stop(options: Namespace) -> None:
    session().close()
    print("workbench: stopped")


def _restart(options: Namespace) -> None:
    here = session()
    here.restart(parse_ranks(options.ranks, here.num_engines) if options.ranks is not None else None)


def _status(options: Namespace) -> None:
    statuses = session().status()
    for status in statuses:
        print(describe(status))
    for line in dict.fromkeys(line for status in statuses for line in status.transport_groups):
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
    num_ranks = session().num_engines
    return parse_ranks(options.ranks, num_ranks) if options.ranks is not None else tuple(range(num_ranks))


def _log(options: Namespace) -> None:
    log = session().logs.last()
    if log is None:
        print("workbench: no cell has printed anything yet")
        return
    log.flush()
    paths = log.paths
    for rank in _ranks_of(options):
        if rank not in paths:
            print(f"rank {rank}  printed nothing")
            continue
        lines, num_lines = tail(paths[rank], max(0, options.lines))
        hidden = num_lines - len(lines)
        print(f"rank {rank}  {format_count(num_lines)} lines, all of them in {paths[rank]}")
        print("\n".join([*([f"  ... {format_count(hidden)} lines ..."] if hidden else []), *(f"  {s}" for s in lines)]))


def _dump(options: Namespace) -> None:
    statuses = {status.rank: status for status in session().status()}
    for rank in _ranks_of(options):
        status = statuses[rank]
        print(describe(status))
        for frame in status.stack:
            print(f"  {'cell' if frame.in_cell else frame.file}:{frame.line}  in {frame.function}")
            source = dict(frame.source).get(frame.line)
            if source:
                print(f"      {source.strip()}")


_COMMANDS = {"start": _start, "status": _status, "stop": _stop, "restart": _restart, "log": _log, "dump": _dump}
