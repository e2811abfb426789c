"""The functions that the notebook calls on an engine: join and leave the world, run functions of `Session.submit`,
push, pull.

`publish` and `stop_requested` are found here, too: a training loop needs no more. Importing this loads neither torch
nor plotly, pandas, ipywidgets or ipyparallel's client.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.core.cores import shared_threads
from workbench.session import pickling, protocol, user_modules
from workbench.session.on_engine import awaiting_cells as engine_awaiting
from workbench.session.on_engine import completion as engine_assist
from workbench.session.on_engine import connections as engine_connections
from workbench.session.on_engine import control as engine_control
from workbench.session.on_engine import debugger as engine_debug
from workbench.session.on_engine import deferred_interrupts as engine_imports
from workbench.session.on_engine import descriptor_output as engine_output
from workbench.session.on_engine import displayed_values as engine_values
from workbench.session.on_engine import failures as engine_failures
from workbench.session.on_engine import interruptible_waits as engine_waits
from workbench.session.on_engine import last_messages as engine_messages
from workbench.session.on_engine import progress as engine_progress
from workbench.session.on_engine.shell import current_tag, publish, shell, stop_requested
from workbench.session.processes import oom_kills

__all__ = ["call", "join", "leave", "publish", "pull", "push", "stop_requested"]

_renewed_alone: set[str] = set()
"""Modules that this rank imported anew for a request that not all ranks ran."""


def join(
    rank: int,
    world_size: int,
    init_method: str,
    device: str | None,
    search_path: list[str],
    pids: list[int],
    on_host: tuple[int, int],
) -> dict[str, Any]:
    """Become ``rank`` of a new world and answer to the notebook; returns facts about this engine.

    It first leaves its earlier world, whose ranks may have diverged; variables stay. ``search_path``: the notebook's
    search path of modules, so that the engine can import what sent functions need. ``pids``: processes of this host in
    the earlier world. Calls that they still wait in would also hold up whoever frees a process group of that world.
    ``on_host``: this rank's number among the ranks of its host, and how many they are.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(on_host[0]), LOCAL_WORLD_SIZE=str(on_host[1]))
    user_modules.search(search_path)
    _install()
    engine_connections.break_to(pids)
    engine_connections.forget()
    oom_kills.raise_oom_score()

    from workbench.tensors import world
    from workbench.training.runs import user_loops
    from workbench.training.saving import store

    store.listen(_record_checkpoint)
    user_loops.listen(publish, lambda: getattr(current_tag(), "run", 0))
    _share_cores(on_host[1])
    here = world.rebuild(rank, world_size, init_method=init_method, device=device, reason="the notebook said so")
    return {"pid": os.getpid(), "device": str(here.device), "transport": here.transport_name}


def _share_cores(num_ranks: int) -> None:
    """Give torch the threads of this host that are one rank's share, if the share is another one now. A number that the
    user has set stays.
    """
    import torch

    threads = shared_threads(num_ranks)
    if any(os.environ.get(name) != number for name, number in threads.items()):
        os.environ.update(threads)
        torch.set_num_threads(int(threads["OMP_NUM_THREADS"]))


def _record_checkpoint(path: Path, parts: Mapping[str, Any]) -> None:
    from workbench.session.on_engine import recovery

    recovery.record_checkpoint(path, parts)


def leave() -> None:
    """Leave the world; variables stay. Safe to call twice."""
    world = sys.modules.get("workbench.tensors.world")
    if world is not None:
        world.shutdown()


def call(payload: bytes) -> bytes:
    """Run a pickled (function, arguments, keyword arguments) and return its pickled result."""
    from workbench.session.on_engine.torch_modes import restored_after_interrupt

    function, arguments, keywords = _unpack(payload)
    try:
        with restored_after_interrupt():
            result = protocol.dump(function(*arguments, **keywords))
            engine_messages.deliver()
            engine_progress.tell()
    except BaseException as error:
        with suppress(Exception):  # the first error counts
            _report_remaining_steps(error)
        raise
    _report_remaining_steps()
    return result


def push(payload: bytes) -> None:
    """Set pickled variables in the engine's namespace."""
    shell().user_ns.update(_unpack(payload))


def _unpack(payload: bytes) -> Any:
    value, renewed = user_modules.unpack(payload)
    tag = current_tag()
    if tag is not None and not tag.all_ranks:
        _renewed_alone.update(renewed)
    return value


def _report_renewed(*_: object) -> None:
    """The next cell says where ranks may have different versions of modules: requests show no output."""
    if _renewed_alone:
        print(
            f"workbench: a request to some of the ranks imported {', '.join(sorted(_renewed_alone))} anew, after an "
            f"edit. Other ranks keep what they have loaded until a request that uses it runs there.",
            file=sys.stderr,
        )
        _renewed_alone.clear()


def pull(name: str) -> bytes:
    """A variable of the engine's namespace, pickled; the logical tensor for a global tensor (collective)."""
    namespace = shell().user_ns
    if name not in namespace:
        raise NameError(f"pull: the engines have no variable {name!r}. Assign it in a %%global cell first.")
    tag = current_tag()
    collective = tag is not None and tag.all_ranks
    if collective and engine_values.is_global(namespace[name]):
        return protocol.dump(protocol.LogicalTensor(namespace[name].full_tensor().detach().cpu()))
    value = engine_values.portable(namespace[name], collective)
    with pickling.naming({name: value}, "pull"):
        return protocol.dump(value)


def _install() -> None:
    """Hook into the engine's shell once; joining again changes nothing."""
    from workbench.session.on_engine import torch_modes as engine_modes  # loads torch

    engine_failures.entry_points.add(call.__code__)
    here = shell()
    if getattr(here, "workbench_installed", False):
        return
    # ipyparallel's handler waits for the cell, and the batch system half a minute longer, until it kills.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    engine_imports.install(here.kernel)
    user_modules.watch()
    engine_awaiting.install(here)
    here.events.register("pre_run_cell", _report_renewed)
    here.events.register("post_run_cell", lambda result: _report_remaining_steps(result.error_in_exec))
    here.events.register("post_run_cell", engine_messages.deliver_after)
    engine_modes.install(here)  # before the hook that frees errors
    engine_values.install(here)
    engine_failures.install(here)
    engine_control.install(here)
    engine_assist.install(here)
    engine_output.install()
    engine_waits.install()
    if importlib.util.find_spec("tqdm") is not None:
        from workbench.session.on_engine import progress_bars as engine_bars

        engine_bars.install(here)
    engine_debug.install()
    here.events.register("post_run_cell", engine_progress.tell)  # the last one: others may exchange something
    here.ask_exit = sys.exit  # exit() and quit() end the cell; IPython's end the process after it
    _define_names(here.user_ns)
    here.workbench_installed = True


def _report_remaining_steps(error: BaseException | None = None) -> None:
    """Let loops of a cell or call that has ended, perhaps by an error, report their last steps."""
    user_loops = sys.modules.get("workbench.training.runs.user_loops")
    if user_loops is not None:
        user_loops.report_remaining_steps(user_loops.error_text(error))


def _define_names(namespace: dict[str, Any]) -> None:
    import torch

    import workbench

    namespace.setdefault("wb", workbench)
    namespace.setdefault("torch", torch)
