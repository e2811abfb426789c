"""``%load_ext workbench``: cells and lines that run on all engines, and the commands of a session.

Each magic parses its line, makes one call on the session, and shows the result.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import Namespace
from collections import deque
from dataclasses import replace
from typing import Any

from ipyparallel.client.magics import output_args
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import clear_output, display

from workbench.session import cluster, completion, profiles
from workbench.session.magic_commands import COMMANDS, check_options, describe_times
from workbench.session.output.kept_messages import keep_messages
from workbench.session.output.merging import Block, as_text, display_id
from workbench.session.output.progress_bars import MergedBar
from workbench.session.output.progress_bars import as_html as bars_as_html
from workbench.session.output.progress_bars import as_text as bars_as_text
from workbench.session.ranks import parse_ranks

_WIDGET = "application/vnd.jupyter.widget-view+json"
"""ipyparallel relays widgets of engines to a notebook; a terminal gets their text."""
_MAX_SHOWN_AGAIN = 1000
"""So many of the last lines and displays of a cell remain where another rank clears its output."""
_ASKS_FOR_HELP = ("", "help", "-h", "--help")
_COMMENT_SPELLING = re.compile(r"^#\s*(%%global\b.*)$")


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics and the ``# %%global`` spelling. An engine, which has no session, gets neither."""
    if type(getattr(ipython, "kernel", None)).__module__.startswith("ipyparallel."):
        return
    keep_messages()
    ipython.register_magics(SessionMagics(ipython))
    if not hasattr(ipython, "kernel"):
        ipython.kernel = None  # ipyparallel reads it when an engine shows a widget; shells in terminals have none
    if read_comment_spelling not in ipython.input_transformers_cleanup:
        ipython.input_transformers_cleanup.append(read_comment_spelling)
    completion.install(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove the ``# %%global`` spelling. The session stays, for ``%reload_ext`` too; it ends with the notebook."""
    if read_comment_spelling in ipython.input_transformers_cleanup:
        ipython.input_transformers_cleanup.remove(read_comment_spelling)
    completion.uninstall(ipython)
    if (session := cluster.find_current()) is not None:
        print(f"workbench: {session!r} stays; %workbench stop ends it")


def read_comment_spelling(lines: list[str]) -> list[str]:
    """``# %%global ...`` as a cell's first line means ``%%global ...``; linters and editors then see plain Python."""
    found = _COMMENT_SPELLING.match(lines[0]) if lines else None
    return [f"{found.group(1)}\n", *lines[1:]] if found else lines


@magics_class
class SessionMagics(Magics):
    """The magics of the workbench. They act on the session that was started last."""

    shell: Any

    @magic_arguments("%global")
    @output_args
    @argument("--ranks", help="run on these ranks only, e.g. 0,2-3; collectives of all ranks are then not possible")
    @argument("--timeout", type=float, metavar="S", help="stop the cell on all ranks after S seconds")
    @argument("--quiet", action="store_true", help="show no output, only errors")
    @argument("--no-stream", action="store_true", help="show output when the cell is done, not while it runs")
    @argument("--label", default="", help="a name for this cell, shown by %%workbench status")
    @argument("--time", action="store_true", help="print the seconds of the cell and the slowest rank")
    @argument(
        "--setup", action="store_true", help="the cell makes what training needs: %%workbench recover runs it again"
    )
    @no_var_expand
    @cell_magic("global")  # type: ignore[arg-type]
    def cell_global(self, line: str, cell: str) -> None:
        """Run the cell on all engines as one program.

        Output appears while the cell runs. A line that all ranks print appears once, under [all]. If a rank fails, the
        others are stopped, and the notebook's cell fails with one error, the cause first.
        """
        options = _parse(self.cell_global, line)
        # The magic's own line stays in front as a comment, so that line numbers are those of the notebook's cell.
        code = cell if cell.lstrip().startswith("%%") else f"# %%global {line}".rstrip() + f"\n{cell}"
        _run(self.shell, code, options)

    @magic_arguments("global")
    @argument("code", nargs="*", help="one line of Python")
    @no_var_expand
    @line_magic("global")  # type: ignore[arg-type]
    def line_global(self, line: str) -> None:
        """Run one line on all engines: ``%global x = wb.rank()``."""
        if not line.strip():
            raise UsageError("%global needs a line of Python, e.g. %global x = wb.rank()")
        _run(self.shell, line, _parse(self.cell_global, ""))

    @magic_arguments("workbench")
    @argument("action", choices=list(COMMANDS), help="what to do")
    @argument("number", nargs="?", type=int, metavar="N", help="resize: the new number of engines")
    @argument("--engines", type=int, metavar="N", help="start: number of engines (default: one per GPU, or 2)")
    @argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="start: where tensors live")
    @argument("--keep", action="store_true", help="start: engines outlive this notebook, for another one to attach to")
    @argument("--new", action="store_true", help="start: new engines, although an earlier notebook has left some")
    @argument("--name", help="attach: the session, if there are several")
    @argument("--profile", help="start: an ipyparallel profile, for engines on other hosts")
    @argument("--hosts", metavar="A,B", help="start: engines on these hosts, over SSH")
    @argument("--python", metavar="PATH", help="start --hosts: the Python there (default: the path of the one here)")
    @argument("--slurm", metavar="OPTIONS", help='start: engines in a Slurm job, e.g. "nodes=2 gpus-per-node=8"')
    @argument("--ranks", help="restart, log, dump, debug: these ranks only, e.g. 1 or 0,2-3")
    @argument("--lines", type=int, default=20, metavar="N", help="log: how many lines of each rank (default: 20)")
    @argument("--steps", type=int, metavar="N", help="profile: how many steps (default: 3)")
    @argument("--warmup", type=int, metavar="N", help="profile: how many steps come before them (default: 4)")
    @argument("--any-size", action="store_true", help="profile: more than 20 steps, however large the file becomes")
    @argument("--to", metavar="FILE", help="profile: the file for Perfetto (default: profile-<time>.json.gz)")
    @line_magic("workbench")  # type: ignore[arg-type]
    def line_workbench(self, line: str) -> Any:
        """Start, inspect, stop or restart the session: ``%workbench start --engines 2``.

        Engines started with ``--keep`` outlive the notebook: ``detach`` leaves them, ``attach`` in another notebook
        takes them over with their variables, ``clean`` ends those that no notebook uses. While a notebook uses its
        engines, ``attach`` in another one observes them: ``status``, ``dump``, ``log`` and ``interrupt`` work there.

        ``log`` shows the last lines that each rank printed in the last cell, and the file with all of them. ``dump``
        shows the Python stack of each rank, also while a cell runs. ``interrupt`` stops the running cell.
        ``debug --ranks 1`` opens a debugger on loopback. ``recover`` brings back what a replaced rank has lost.
        ``resize 6`` adds engines or gives some back; the others keep their variables.

        ``profile --steps 3`` profiles steps of the next cell that trains, on all ranks, for Perfetto and as a table;
        ``profile`` alone returns the last profile.

        ``start --hosts a,b --engines 8`` writes an ipyparallel profile and starts engines by it, after it has asked the
        hosts whether they can run some; ``start --slurm "partition=gpu nodes=2 gpus-per-node=8"`` does so in a job.
        """
        if line.strip() in _ASKS_FOR_HELP:
            print(_help(self.line_workbench.parser.format_help()))
            return None
        options = _parse(self.line_workbench, line)
        if options.number is not None and options.action != "resize":
            raise UsageError(f"%workbench {line.strip()}: a number stands behind resize only: %workbench resize 6")
        check_options(line, options.action)
        return COMMANDS[options.action](options)

    @line_magic("push")  # type: ignore[arg-type]
    def line_push(self, line: str) -> None:
        """Copy variables of the notebook to all engines: ``%push x y``."""
        names = _names("%push", line)
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(
                f"%push {line}: the notebook has no variable {missing[0]!r}. Assign it, or check its name."
            )
        cluster.current().push(**{name: self.shell.user_ns[name] for name in names})

    @line_magic("pull")  # type: ignore[arg-type]
    def line_pull(self, line: str) -> None:
        """Copy variables of the engines to the notebook: a list by rank, or the logical value of a global tensor."""
        for name in _names("%pull", line):
            self.shell.user_ns[name] = cluster.current().pull(name)


class OutputDisplay:
    """Shows merged output in the notebook or terminal.

    A cell of a notebook has one output. So when some ranks clear theirs, the output of the others is shown again.
    """

    def __init__(self, num_ranks: int, in_notebook: bool) -> None:
        self._num_ranks, self._in_notebook = num_ranks, in_notebook
        self._shown: deque[tuple[str, Block]] = deque(maxlen=_MAX_SHOWN_AGAIN)
        self._is_cleared = False  # what ranks have cleared goes before the next output
        self._hidden = () if in_notebook else (_WIDGET,)
        self._unfinished: Any = None
        self._bars: Any = None
        self.collected: list[tuple[str, Block]] = []

    def show(self, stream: str, block: Block) -> None:
        if block.kind == "clear":
            self._clear(block)
            return
        if self._is_cleared:
            self._show_again(wait=True)
        if block.kind == "update":
            self._keep_update(block)
        elif self._in_notebook:
            self._shown.append((stream, block))
        self._draw(stream, block)

    def _draw(self, stream: str, block: Block) -> None:
        if block.kind == "note":
            block = replace(block, content=f"{block.content}; %workbench log has them")
        bundle = block.content if isinstance(block.content, dict) else {}
        data = {kind: content for kind, content in bundle.get("data", {}).items() if kind not in self._hidden}
        is_rich = bool(set(data) - {"text/plain"})
        if self._in_notebook and (place := display_id(block.ranks[0], bundle)):
            is_update = block.kind == "update"
            if is_rich and not is_update:
                print(as_text(Block("line", block.ranks, ""), self._num_ranks))
            data = data if is_rich else {"text/plain": as_text(block, self._num_ranks)}
            display(data, metadata=bundle.get("metadata", {}), raw=True, display_id=place, update=is_update)
        elif is_rich:
            print(as_text(Block("line", block.ranks, ""), self._num_ranks))
            display(data, metadata=bundle.get("metadata", {}), raw=True)
        else:
            print(as_text(block, self._num_ranks), file=sys.stderr if stream == "stderr" else sys.stdout)

    def _keep_update(self, update: Block) -> None:
        """The display with its new content, for the case that it is shown again."""
        place = display_id(update.ranks[0], update.content)
        for number, (stream, block) in enumerate(self._shown):
            if isinstance(block.content, dict) and display_id(block.ranks[0], block.content) == place:
                self._shown[number] = stream, replace(block, content=update.content)

    def _clear(self, cleared: Block) -> None:
        """Remove what these ranks have shown in this cell. A terminal keeps it."""
        if not self._in_notebook:
            return
        remaining = [(stream, set(block.ranks) - set(cleared.ranks), block) for stream, block in self._shown]
        self._shown.clear()
        self._shown.extend(
            (stream, replace(block, ranks=tuple(sorted(ranks)))) for stream, ranks, block in remaining if ranks
        )
        self._is_cleared = True
        if not cleared.content["wait"]:
            self._show_again(wait=False)

    def _show_again(self, wait: bool) -> None:
        """Clear the cell's output, and show what is left of it."""
        self._is_cleared = False
        self._unfinished = self._bars = None
        clear_output(wait)
        for stream, block in self._shown:
            self._draw(stream, block)

    def show_unfinished(self, text: str) -> None:
        """Show lines that are overwritten, in one place of the cell's output."""
        self._unfinished = self._put(self._unfinished, {"text/plain": text, **({} if text else {"text/html": ""})})

    def show_bars(self, bars: list[MergedBar]) -> None:
        """Show the progress bars of all ranks, in one place of the cell's output."""
        self._bars = self._put(self._bars, {"text/plain": bars_as_text(bars), "text/html": bars_as_html(bars)})

    @staticmethod
    def _put(place: Any, bundle: dict[str, str]) -> Any:
        """Show a value, or replace the one shown in its place; returns the place."""
        if place is None:
            return display(bundle, raw=True, display_id=True)
        place.update(bundle, raw=True)
        return place

    def collect(self, stream: str, block: Block) -> None:
        self.collected.append((stream, block))

    def show_collected(self, by_rank: bool) -> None:
        if by_rank:
            self.collected.sort(key=lambda item: item[1].ranks)
        for stream, block in self.collected:
            self.show(stream, block)


def _run(shell: Any, code: str, options: Namespace) -> None:
    here = cluster.current()
    ranks = parse_ranks(options.ranks, here.num_engines) if options.ranks is not None else None
    by_rank = options.groupby == "engine"
    in_notebook = getattr(shell, "kernel", None) is not None
    output_display = OutputDisplay(here.num_engines, in_notebook)
    show = None if options.quiet else output_display.collect if options.no_stream or by_rank else output_display.show
    try:
        with profiles.around_cell(here):
            result = here.run_cell(
                code,
                ranks=ranks,
                timeout=options.timeout,
                show=show,
                merge=not by_rank,
                values=options.save_name is not None,
                label=options.label,
                setup=options.setup,
                cell=_cell_name(shell),
                show_unfinished=output_display.show_unfinished if show == output_display.show and in_notebook else None,
                show_bars=output_display.show_bars if show == output_display.show and in_notebook else None,
            )
    finally:
        output_display.show_collected(by_rank)
    if options.save_name:
        shell.user_ns[options.save_name] = result
    if options.time:
        print(describe_times(result, ranks or range(here.num_engines)))
    if ranks is None and (found := profiles.finish(here)) is not None:
        print(found) if isinstance(found, str) else display(found)


def _cell_name(shell: Any) -> str:
    """The notebook's id of the present cell; empty where cells have no ids."""
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    return str(parent.get("metadata", {}).get("cellId", ""))


def _parse(magic: Any, line: str) -> Namespace:
    try:
        return magic.parser.parse_args(shlex.split(line))
    except UsageError as error:
        usage, name = _help(magic.parser.format_usage()), f"%{magic.parser.prog}"
        raise UsageError(f"{name} {line.strip()}: {error}\n{usage}\n{name}? explains every option.") from None
    except ValueError as error:  # an open quote
        raise UsageError(f"{line!r}: {error}") from None


def _help(text: str) -> str:
    """IPython's help of a magic's options, without its markup for Sphinx."""
    return text.removeprefix("::\n\n  ").rstrip()


def _names(magic: str, line: str) -> list[str]:
    names = shlex.split(line.replace(",", " "))
    wrong = [name for name in names if not name.isidentifier()]
    if wrong or not names:
        what = f"{wrong[0]!r} is not a name" if wrong else "no variable is named"
        raise UsageError(f"{magic} {line}: {what}. Name variables, separated by spaces: {magic} x y")
    return names
