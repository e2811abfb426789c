"""The commands of ``%workbench``: each makes one call on the session and shows the answer."""

from __future__ import annotations

import shlex
import socket
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError

from workbench.core.profile import DEFAULT_STEPS, DEFAULT_WARMUP, Profile
from workbench.session import cluster, profiles, text_reports
from workbench.session.observed_session import ObservedSession, observe
from workbench.session.outcome import CellResult
from workbench.session.processes import discovery, make_profile
from workbench.units import counted, format_seconds

_DEBUGGER_START_S = 15.0
OPTIONS = {
    "start": "--engines --device --keep --new --profile --hosts --python --slurm",
    "attach": "--name",
    "restart": "--ranks",
    "log": "--ranks --lines",
    "dump": "--ranks",
    "debug": "--ranks",
    "profile": "--steps --warmup --any-size --to",
}
"""The options of each command that takes some."""
_WAYS = ("profile", "hosts", "python", "slurm")


def check_options(line: str, command: str) -> None:
    """Raise `UsageError` if a line has an option twice, or one that its command does not take."""
    known = sorted({option for options in OPTIONS.values() for option in options.split()})
    words = [word.partition("=")[0] for word in shlex.split(line) if word.startswith("--")]
    given = [next((option for option in known if option.startswith(word)), word) for word in words]
    if twice := sorted({option for option in given if given.count(option) > 1}):
        raise UsageError(f"%workbench {line.strip()}: {', '.join(twice)} is there twice. Give each option once.")
    for option in given:
        takers = [name for name, options in OPTIONS.items() if option in options.split()]
        if command not in takers:
            raise UsageError(
                f"%workbench {line.strip()}: {command} takes no {option}, so nothing was done. It is an option of "
                f"{', '.join(takers)}. %workbench? explains every option."
            )


def start(options: Namespace) -> None:
    """Start a session, unless the same one runs."""
    running = cluster.find_current()
    if isinstance(running, ObservedSession):
        raise UsageError(
            f"%workbench start: this notebook observes engines that serve {running.user}, so it cannot start others. "
            "First: %workbench detach"
        )
    if running is not None:
        others = _disagreements(running, options)
        what = f"a session with {counted(running.num_engines, 'engine')} on {running.device}"
        if others:
            raise UsageError(
                f"%workbench start {' '.join(others)}: {what} is running, which was not started so. Use it, change its "
                f"number of engines (%workbench resize), or end it first (%workbench stop)."
            )
        print(f"workbench: {what} is running already")
        return
    found = [] if options.new else discovery.unused_sessions()
    if found:
        raise UsageError(
            "%workbench start: engines of an earlier notebook are still there, with their variables:\n"
            f"{discovery.format_sessions(found)}\n"
            "Go on with them: %workbench attach. End them: %workbench clean. "
            "Leave them alone and start others: %workbench start --new"
        )
    session = cluster.Session(options.engines, _profile(options), device=options.device, keep=options.keep)
    session.places = {way: getattr(options, way) for way in _WAYS} | session.places


def _disagreements(running: cluster.Session, options: Namespace) -> list[str]:
    """The options with which the session that runs does not agree."""
    asked: dict[str, tuple[Any, Any]] = {way: (getattr(options, way), running.places.get(way)) for way in _WAYS}
    asked["engines"] = (options.engines, running.num_engines)
    asked["device"] = (None if options.device == "auto" else options.device, running.device)
    others = [f"--{name} {wanted}" for name, (wanted, has) in asked.items() if wanted not in (None, has)]
    return others + (["--keep"] if options.keep and not running.keep else [])


def _profile(options: Namespace) -> str | None:
    """The profile that was named, or that is written for ``--hosts`` or ``--slurm``."""
    ways = {"--profile": options.profile, "--hosts": options.hosts, "--slurm": options.slurm}
    given = [name for name, value in ways.items() if value is not None]
    mistakes = [f"{' and '.join(given)} exclude each other"] if len(given) > 1 else []
    mistakes += ["--keep is for engines on this machine"] if options.keep and given else []
    mistakes += ["--python goes with --hosts"] if options.python and options.hosts is None else []
    if mistakes:
        raise UsageError(f"%workbench start: {'; '.join(mistakes)}.")
    if not set(given) & {"--hosts", "--slurm"}:
        return options.profile
    made = (
        make_profile.ssh_profile(options.hosts, options.engines, options.python or "")
        if options.hosts is not None
        else make_profile.slurm_profile(options.slurm, options.engines)
    )
    print(made)
    return made.name


def attach(options: Namespace) -> None:
    """Take over the engines that an earlier notebook has left, or observe those that serve another one."""
    if cluster.find_current() is not None:
        raise UsageError(
            "%workbench attach: this notebook has a session already. First end it (%workbench stop), or leave it "
            "(%workbench detach)."
        )
    if not any(options.name in (None, free.name) for free in discovery.unused_sessions()):
        looked_at = observe(options.name, "%workbench attach", "--name")
        engines = f"{counted(looked_at.num_engines, 'engine')} on {looked_at.device}"
        print(f"workbench: looks at {engines} that serve {looked_at.user}")
        print("%workbench status, dump, log and interrupt work here; cells run only there.")
        return
    session = cluster.Session.attach(options.name)
    found = session.status()
    busy = [each for each in found if each.busy]
    engines = counted(session.num_engines, "engine")
    print(f"workbench: attached to {engines} on {session.device}, with the variables held there")
    for each in busy:
        print(text_reports.describe(each))
    if busy:
        print("What an earlier notebook has started still runs; the next cell waits for it, and an interrupt ends it.")


def detach(options: Namespace) -> None:
    """Leave the engines to another notebook."""
    here = cluster.current()
    here.detach()
    if isinstance(here, ObservedSession):
        print(f"workbench: no longer looks at the engines that serve {here.user}")
        return
    left = counted(here.num_engines, "engine")
    print(f"workbench: left {left}; a notebook of yours goes on there by %workbench attach")


def clean(options: Namespace) -> None:
    """End engines that earlier notebooks have left."""
    print(f"workbench: ended {counted(discovery.clean(), 'session')} of earlier notebooks")


def stop(options: Namespace) -> None:
    """End the session and its engines."""
    here = cluster.current()
    if isinstance(here, ObservedSession):
        raise UsageError(f"%workbench stop: these engines serve {here.user}. To look no longer: %workbench detach")
    here.close()
    print("workbench: stopped")


def restart(options: Namespace) -> None:
    """Replace all engines, or those of ``--ranks``."""
    here = cluster.current()
    here.restart(text_reports.ranks_of(here, options.ranks))


def recover(options: Namespace) -> None:
    """Bring back what replaced ranks have lost."""
    print(cluster.current().recover())


def resize(options: Namespace) -> None:
    """Add engines, or give some back."""
    here = cluster.current()
    if options.number is None:
        raise UsageError(f"%workbench resize: how many? There are {here.num_engines}. E.g. %workbench resize 6")
    print(here.resize(options.number))


def status(options: Namespace) -> None:
    """One line about every rank, and how they exchange."""
    _print(text_reports.status_lines(cluster.current()))


def describe_times(result: CellResult, ranks: Sequence[int]) -> str:
    """``2.31 s; rank 1 was slowest, rank 0 was done after 1.02 s``."""
    total = format_seconds(result.elapsed_s)
    if len(ranks) == 1:
        return f"{total}"
    times = dict(zip(ranks, result.rank_elapsed_s, strict=True))
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    return f"{total}; rank {last} was slowest, rank {first} was done after {format_seconds(times[first])}"


def log(options: Namespace) -> None:
    """The last lines that each rank printed in the last cell with output, and the files with all lines."""
    here = cluster.current()
    if options.lines < 1:
        raise UsageError(f"%workbench log --lines {options.lines}: show at least 1 line of each rank")
    _print(text_reports.log_lines(here, text_reports.ranks_of(here, options.ranks), options.lines))


def dump(options: Namespace) -> None:
    """The stack of every rank's main thread, from the cell inwards."""
    here = cluster.current()
    _print(text_reports.dump_lines(here, text_reports.ranks_of(here, options.ranks)))


def interrupt(options: Namespace) -> None:
    """Stop the engines' cell, of this notebook or of the one that they serve."""
    _print(text_reports.interrupt_lines(cluster.current()))


def debug(options: Namespace) -> None:
    """Let debugpy listen on loopback on the ranks of ``--ranks``."""
    here = cluster.current()
    ranks = text_reports.ranks_of(here, options.ranks)
    if options.ranks is None:
        raise UsageError(
            f"%workbench debug: name the ranks, from 0 to {here.num_engines - 1}, e.g. %workbench debug --ranks 1"
        )
    for rank in ranks:
        port = here.ask(rank, "debug", _DEBUGGER_START_S)
        if port is None:
            print(f"rank {rank}  no debugger started within {_DEBUGGER_START_S:.0f} s; is debugpy installed there?")
            continue
        where = f'{{"type": "debugpy", "request": "attach", "connect": {{"host": "127.0.0.1", "port": {port}}}}}'
        print(f"rank {rank}  debugger listens on 127.0.0.1:{port}; attach with {where}")
        activity = here.ask(rank, "activity")
        if activity is not None and activity.host != socket.gethostname():
            forward = f"ssh -N -L {port}:127.0.0.1:{port} {activity.host}"
            print(f"rank {rank}  is on {activity.host}: forward the port before, {forward}")
    print("Then breakpoint() in a %%global cell stops there. Anybody who may connect to this port may run code.")


def profile(options: Namespace) -> Profile | None:
    """Profile the next steps; without options, the profile that was made last."""
    here = cluster.current()
    if here.is_busy:
        raise UsageError(
            "%workbench profile: the engines train or run a cell now, and a profile begins before. Ask for it when "
            "they are done; it then takes steps of the next run or cell."
        )
    given = (options.steps, options.warmup, options.to, options.any_size or None)
    if given == (None,) * len(given):
        found = profiles.finish(here) or profiles.last(here)
        if isinstance(found, str):
            print(found)
            return None
        if found is not None:
            return found
    steps = DEFAULT_STEPS if options.steps is None else options.steps
    warmup = DEFAULT_WARMUP if options.warmup is None else options.warmup
    if steps < 1 or warmup < 0:
        raise UsageError(
            f"%workbench profile --steps {steps} --warmup {warmup}: a profile has at least 1 step, after 0 or more "
            "others. E.g. %workbench profile --steps 3"
        )
    print(profiles.begin(here, steps, warmup, options.any_size, options.to))
    return None


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines))


COMMANDS = {
    command.__name__: command
    for command in (
        start,
        status,
        stop,
        restart,
        recover,
        resize,
        interrupt,
        attach,
        detach,
        clean,
        log,
        dump,
        debug,
        profile,
    )
}
