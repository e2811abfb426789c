"""What runs on an engine: joining the world, publishing to the notebook, and calls sent by `Session.submit`.

A training loop on an engine needs two of these: `publish` what it wants shown, and poll `stop_requested`.
Nothing here loads plotly, pandas, ipywidgets or ipyparallel's client.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

from workbench.errors import SessionError
from workbench.session import protocol

_sequence = itertools.count()
_stopped_runs: set[int] = set()


def publish(obj: object) -> None:
    """Send a small picklable object to the notebook, where `RemoteCall.messages` returns it.

    Objects of one rank arrive in order and none is lost. May be called from any thread of the engine
    while a cell or call runs.

        publish({"step": 3, "loss": 0.25})

    Raises:
        SessionError: this process is not an engine of a session.
    """
    send(protocol.Published(next(_sequence), protocol.dump(obj)))


def stop_requested() -> bool:
    """Whether the notebook asked the running call to stop early (`RemoteCall.request_stop`); cheap to poll."""
    tag = current_tag() if _stopped_runs else None
    return tag is not None and tag.run in _stopped_runs


def request_stop(run: int) -> None:
    """Make `stop_requested` true for one run; called on the engine's control thread."""
    _stopped_runs.add(run)


def join(rank: int, world_size: int, init_method: str, device: str | None, search_path: list[str]) -> dict[str, Any]:
    """Become ``rank`` of a new world and answer to the notebook; returns facts about this engine.

    Leaves the world it was in before, whose ranks may no longer agree; variables stay.
    ``search_path``: where the notebook finds its modules, so that functions it sends are found here too.
    """
    import socket

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.setdefault("LOCAL_RANK", str(rank))
    sys.path.extend(path for path in search_path if path not in sys.path)
    _install()

    from workbench.runtime import world

    here = world.rebuild(rank, world_size, init_method=init_method, device=device, reason="the notebook said so")
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "device": str(here.device),
        "transport": here.transport_name,
    }


def leave() -> None:
    """Leave the world; variables stay. Safe to call twice."""
    world = sys.modules.get("workbench.runtime.world")
    if world is not None:
        world.shutdown()


def call(payload: bytes) -> bytes:
    """Run a pickled (function, arguments, keyword arguments) and return its pickled result."""
    function, arguments, keywords = protocol.load_strictly(payload)
    result = function(*arguments, **keywords)
    return protocol.dump(result)


def push(payload: bytes) -> None:
    """Set pickled variables in the engine's namespace."""
    shell().user_ns.update(protocol.load_strictly(payload))


def pull(name: str) -> bytes:
    """A variable of the engine's namespace, pickled; the logical tensor for a global tensor (collective)."""
    from workbench.session.engine_values import is_global, portable

    namespace = shell().user_ns
    if name not in namespace:
        raise NameError(f"pull: the engines have no variable {name!r}")
    tag = current_tag()
    collective = tag is not None and tag.all_ranks
    if collective and is_global(namespace[name]):
        return protocol.dump(protocol.Logical(namespace[name].full_tensor().detach().cpu()))
    return protocol.dump(portable(namespace[name], collective))


def send(wire: object) -> None:
    """Publish one of the protocol's values under the request that is running."""
    shell().data_pub.publish_data({f"{protocol.WIRE_KEY}{next(_sequence)}": wire})


def current_tag() -> protocol.CellTag | None:
    """The tag of the request that the main thread runs; None for requests that are not ours."""
    parent = shell().kernel.get_parent("shell")
    return protocol.CellTag.parse(parent.get("metadata", {}).get("label"))


def shell() -> Any:
    """The engine's IPython shell.

    Raises:
        SessionError: this process is not an engine.
    """
    ipython = sys.modules.get("IPython")
    found = ipython.get_ipython() if ipython is not None else None
    if found is None or not hasattr(found, "data_pub"):
        raise SessionError(
            "workbench.session.engine: this process is not an engine of a session. "
            "It works inside %%global cells and functions given to session.submit."
        )
    return found


def _install() -> None:
    """Hook into the engine's shell once; joining again changes nothing."""
    from workbench.session import engine_assist, engine_control, engine_failures, engine_values, engine_waits

    here = shell()
    if getattr(here, "workbench_installed", False):
        return
    engine_values.install(here)
    engine_failures.install(here)
    engine_control.install(here)
    engine_assist.install(here)
    engine_waits.install()
    _offer_names(here.user_ns)
    here.workbench_installed = True


def _offer_names(namespace: dict[str, Any]) -> None:
    import torch

    import workbench

    namespace.setdefault("wb", workbench)
    namespace.setdefault("torch", torch)
