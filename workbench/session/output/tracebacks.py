"""Describes the failures of several ranks in one text: equal failures appear once, the first cause comes first."""

from __future__ import annotations

import ast
import linecache
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from IPython.core.inputtransformer2 import TransformerManager

from workbench.errors import CellError, SessionError
from workbench.session import protocol
from workbench.session.outcome import Outcome
from workbench.session.ranks import describe_ranks, rank_label
from workbench.session.recovery import COMMAND
from workbench.units import format_seconds

_MAX_SHOWN = 4
_RED, _BOLD, _DIM, _PLAIN = "\x1b[31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
_COLOURS = re.compile(r"\x1b\[\d+m")
#: Python files of the session and of the launcher. Their frames say nothing about the user's cell.
_INTERNAL = tuple(f"{os.sep}{name}{os.sep}" for name in ("ipyparallel", "ipykernel", "IPython"))


class Interrupted(KeyboardInterrupt):
    """The notebook was interrupted. The text is what a notebook shows of it."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        super().__init__("\n".join(lines))

    @classmethod
    def during(cls, outcome: Outcome) -> Interrupted:
        """Says where each rank was and whether it kept its variables."""
        return cls(f"Interrupted after {format_seconds(outcome.elapsed_s)}.", *consequences(outcome))

    def _render_traceback_(self) -> list[str]:
        return [_paint(self.lines[0], _RED, _BOLD), *self.lines[1:]]


@contextmanager
def explained_interrupt(text: str) -> Iterator[None]:
    """A context that gives a text to an interrupt that has none."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(text) from None


def cell_error(outcome: Outcome, what: str = "cell", timeout_s: float | None = None) -> CellError:
    """The exception for a run that failed on some ranks.

    Its text is plain. `CellError._render_traceback_` returns the coloured lines that IPython shows.
    """
    lines = render(outcome, what, timeout_s)
    return CellError(_COLOURS.sub("", "\n".join(lines)), failures=outcome.failures, rendered=lines)


def raise_unless_ok(outcome: Outcome, what: str, timeout_s: float | None = None) -> None:
    """Raise the error of a run that failed.

    Raises:
        CellError: the run failed on a rank, or ran out of time.
        KeyboardInterrupt: the caller was interrupted.
    """
    if outcome.stop_reason == "interrupt":
        raise Interrupted.during(outcome)
    if not outcome.ok:
        raise cell_error(outcome, what, timeout_s) from None


def syntax_error(error: SyntaxError, code: str) -> CellError:
    """The exception for code that does not parse. No rank has got it."""
    number, lines = error.lineno or 1, code.splitlines()  # some errors come without their line, or its number
    line = (error.text or "".join(lines[number - 1 : number])).rstrip("\n")
    indent = len(line) - len(line.lstrip())
    column = max(0, (error.offset or 1) - 1 - indent)
    width = (error.end_offset or 0) - (error.offset or 1) if error.end_lineno == error.lineno else 1
    lines = [
        f"{type(error).__name__}: {error.msg} (cell line {number}). Nothing ran on any rank.",
        f"  ▶ {number:>4}  {line.strip()}",
        f"          {' ' * column}{'^' * max(1, width)}",
    ]
    head = f"{_RED}{_BOLD}{lines[0]}{_PLAIN}"
    return CellError("\n".join(lines), rendered=[head, *lines[1:]])


def render(outcome: Outcome, what: str, timeout_s: float | None = None) -> list[str]:
    """The coloured lines of the description: causes with their tracebacks, then one line per consequence."""
    lines: list[str] = []
    if outcome.stop_reason == "timeout":
        lines.append(_paint(_timeout_line(outcome, what, timeout_s), _RED, _BOLD))
    if outcome.stop_reason == "closed":
        told = f"The session was closed, or left to another notebook, while {describe_ranks(outcome.ranks)} ran this"
        lines.append(_paint(f"{told} {what}.", _RED, _BOLD))
    if outcome.stop_reason in ("divergence", "deadlock"):
        lines.append(_paint(_divergence_line(outcome, what), _RED, _BOLD))
        lines += _awaited_calls(outcome)
    if outcome.unlike_counts:
        lines.append(_paint(outcome.unlike_counts, _RED, _BOLD))
    for how, dead in _died_together(outcome).items():
        its = "its" if len(dead) == 1 else "their"
        died = f"{describe_ranks(dead)} died while running this {what} ({how}): {its} variables are lost. "
        lines.append(_paint(died, _RED, _BOLD) + restart_hint(dead))
    groups = group(outcome)
    for ranks, failure in groups[:_MAX_SHOWN]:
        lines += _render_failure(ranks, failure)
    for ranks, failure in groups[_MAX_SHOWN:]:
        lines.append(f"{headline(ranks, failure)}")
    return lines + consequences(outcome)


def group(outcome: Outcome) -> list[tuple[list[int], protocol.Failure]]:
    """(ranks, failure) of every cause, the earliest one first. Leaves out ranks that were only stopped."""
    groups: dict[tuple, tuple[list[int], protocol.Failure]] = {}
    stopped = _only_stopped(outcome)
    for rank, failure in sorted(outcome.failures.items(), key=lambda item: (item[1].time_s, item[0])):
        if rank in stopped:
            continue
        places = tuple((frame.file, frame.line, frame.function) for frame in failure.frames)
        key = (failure.kind, failure.message, places)
        groups.setdefault(key, ([], failure))[0].append(rank)
    return list(groups.values())


def consequences(outcome: Outcome) -> list[str]:
    """What happened to ranks without a failure of their own: one line per place where they were stopped."""
    stopped = _only_stopped(outcome)
    causes = {"interrupt": "", "timeout": "", "restart": ", because engines were restarted"}
    cause = causes.get(outcome.stop_reason, " because of it")
    alive = [rank for rank in stopped if rank not in outcome.killed]
    replaced, others = set(alive) & set(outcome.replaced), set(alive) - set(outcome.replaced)
    lines = []
    for is_kept, chosen in ((False, replaced), (True, others)):
        for place, ranks in _by_place(outcome, sorted(chosen)).items():
            at = f" {place}" if place else ""
            kept = f"; {'its' if len(ranks) == 1 else 'their'} variables are kept" if is_kept else ""
            lines.append(f"{_subject(ranks)} running{at} and stopped{cause}{kept}.")
    for unended in dict.fromkeys(outcome.unended.get(rank, "") for rank in outcome.killed):
        killed = [rank for rank in outcome.killed if outcome.unended.get(rank, "") == unended]
        reason = f"did not end {unended} after" if unended else "did not react to"
        for place, ranks in _by_place(outcome, killed).items():
            at = f" (it was {place})" if place else ""
            lines.append(
                f"{describe_ranks(ranks)} {reason} an interrupt{at} and had to be killed: "
                f"{'its' if len(ranks) == 1 else 'their'} variables are lost. {restart_hint(ranks)}"
            )
    hidden = "in an except or finally clause that handled the interrupt"
    return lines + [
        headline([rank], failure) + f" ({hidden})" * failure.in_handler
        for rank, failure in sorted(outcome.failures.items())
        if (failure.in_handler if failure.was_stopped else outcome.stop_reason == "interrupt")
    ]


def headline(ranks: Sequence[int], failure: protocol.Failure) -> str:
    """``ValueError on rank 1: message``."""
    message = f": {failure.message}" if failure.message else ""
    return f"{failure.kind} on {describe_ranks(ranks)}{message}"


def restart_hint(ranks: Sequence[int]) -> str:
    """A sentence about how ended ranks start again, and get their variables back."""
    them = "it" if len(ranks) == 1 else "them"
    return f"The next cell or run starts {them} again; {COMMAND} also brings variables back."


def _render_failure(ranks: list[int], failure: protocol.Failure) -> list[str]:
    lines = [_paint(headline(ranks, failure), _RED, _BOLD)]
    if failure.syntax:
        return [*lines, *(f"  {line}" for line in failure.syntax.splitlines())]
    for frame, num_skipped in _frames_to_show(failure.frames):
        if num_skipped:
            lines.append(_paint(f"  {num_skipped} frame{'s' if num_skipped > 1 else ''} not shown", _DIM))
        lines += _render_frame(frame)
    lines += [_paint(f"  after {led}", _DIM) for led in failure.chain]
    return lines


def _frames_to_show(frames: Sequence[protocol.Frame]) -> Iterable[tuple[protocol.Frame, int]]:
    """The frames to show, each with the number of frames left out before it.

    They are the frames of the user's code, and the innermost one.
    """
    num_skipped = 0
    for frame in frames:
        is_wanted = frame.in_cell or frame.is_users or frame is frames[-1]
        if is_wanted and not any(part in frame.file for part in _INTERNAL):
            yield frame, num_skipped
            num_skipped = 0
        else:
            num_skipped += 1


def _render_frame(frame: protocol.Frame) -> list[str]:
    inside = "" if frame.function == "<module>" else f", in {frame.function}"
    place = f"{frame.file} line {frame.line}{inside}" if frame.in_cell else f"{frame.file}:{frame.line}{inside}"
    lines = [_paint(f"  {place}", _DIM)]
    for number, text in frame.source or _own_source(frame):
        here = number == frame.line
        if here or frame.in_cell:
            line = f"  {'▶' if here else ' '} {number:>4}  {text}"
            lines.append(_paint(line, _BOLD) if here else line)
    return lines


def _own_source(frame: protocol.Frame) -> list[tuple[int, str]]:
    """The line of a notebook's own cell. Engines cannot read it, and it may define a model's class."""
    text = "" if frame.in_cell else linecache.getline(frame.file, frame.line)
    return [(frame.line, text.rstrip("\n"))] if text else []


def _only_stopped(outcome: Outcome) -> list[int]:
    """Ranks that the notebook stopped, or whose wait for a failed rank was ended."""
    waited = {rank for rank, failure in outcome.failures.items() if failure.was_stopped}
    others_failed = len(waited) < len(outcome.failures) or bool(_died(outcome))
    ended = set(outcome.killed) | (waited if others_failed else waited & set(outcome.stopped))
    return sorted(ended)


def _died(outcome: Outcome) -> list[int]:
    """Ranks whose process ended by itself, and was not killed by the session."""
    return [] if outcome.stop_reason == "closed" else sorted(set(outcome.dead) - set(outcome.killed))


def _died_together(outcome: Outcome) -> dict[str, list[int]]:
    """The same ranks by how they ended, such as those of a cancelled job."""
    found: dict[str, list[int]] = {}
    for rank in _died(outcome):
        found.setdefault(outcome.dead[rank], []).append(rank)
    return found


def _by_place(outcome: Outcome, ranks: Iterable[int]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(_place_of(outcome, rank), []).append(rank)
    return places


def _place_of(outcome: Outcome, rank: int) -> str:
    """Where a rank was when it was stopped, or where its own wait ran out: as it said when asked, else by its error."""
    failure = outcome.failures.get(rank)
    return outcome.places.get(rank, "") or protocol.describe_place(failure.frames if failure is not None else ())


def _subject(ranks: Sequence[int]) -> str:
    return f"{describe_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'}"


def _timeout_line(outcome: Outcome, what: str, timeout_s: float | None) -> str:
    allowed = format_seconds(timeout_s) if timeout_s is not None else "its time"
    return (
        f"Timeout: the {what} may take {allowed}, but {describe_ranks(outcome.stopped)} of "
        f"{rank_label(outcome.ranks)} still ran after that."
    )


def _divergence_line(outcome: Outcome, what: str) -> str:
    """Which ranks wait for which others, why these do not come, and the fix."""
    done = sorted(set(outcome.replies) - set(outcome.stopped))
    if outcome.stop_reason == "deadlock":
        return (
            f"The ranks have diverged in this {what}: all of them wait for one another, in different calls. All ranks "
            f"must run the same calls that move data, in the same order."
        )
    waiting = f"{describe_ranks(outcome.stopped)} wait{'s' if len(outcome.stopped) == 1 else ''} for other ranks"
    them = f"{describe_ranks(done)} {'has' if len(done) == 1 else 'have'} finished it" if done else "they do not run it"
    return (
        f"The ranks have diverged in this {what}: {waiting}, but {them}. All ranks must run the same calls that move "
        f"data. Look for a condition on the rank, or a loop of another length, around such a call."
    )


def _awaited_calls(outcome: Outcome) -> list[str]:
    """One line for each exchange that ranks wait for: it says which call the others did not make."""
    calls: dict[str, list[int]] = {}
    for rank, call in sorted(outcome.calls.items()):
        calls.setdefault(call, []).append(rank)
    return [
        f"{describe_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} for {call}"
        for call, ranks in list(calls.items())[:_MAX_SHOWN]
    ]


def _paint(text: str, *codes: str) -> str:
    return f"{''.join(codes)}{text}{_PLAIN}"


def check_cell(code: str, timeout_s: float | None = None) -> None:
    """Raise `CellError` with the marked line if engines could not run the code, or `SessionError` about its timeout.

    IPython's own syntax (``%magic``, ``!command``) and top-level ``await`` are fine.
    """
    if timeout_s is not None and not timeout_s > 0:  # a NaN is not, either
        raise SessionError(f"timeout {timeout_s:g}: a cell may take more than 0 seconds. No limit: leave it out")
    plain = code
    try:
        plain = TransformerManager().transform_cell(code)
        compile(plain, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise syntax_error(error, plain) from None
    except ValueError as error:  # null characters
        raise syntax_error(SyntaxError(str(error)), plain) from None
