"""An engine's shell: the request that runs now, the objects that it sends to the notebook, and its commands.

A training loop on an engine uses two functions of this module: `publish` sends objects, `stop_requested` is polled.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from workbench.core.run_commands import RunCommand
from workbench.errors import SessionError
from workbench.session import protocol

_sequence = itertools.count()
_commands: dict[int, list[RunCommand]] = {}
"""By the run that they are for; the control thread adds to them."""


def publish(obj: object) -> None:
    """Send a small picklable object to the notebook, where `RemoteCall.messages` returns it.

    Objects of one rank arrive in order and none is lost. May be called from any thread of the engine
    while a cell or call runs.

        publish({"step": 3, "loss": 0.25})

    Raises:
        SessionError: this process is not an engine of a session.
    """
    send(protocol.Published(protocol.dump(obj)))


def stop_requested() -> bool:
    """Whether the notebook has asked the running call to stop early (`RemoteCall.request_stop`). Cheap to poll."""
    return any(command.kind == "stop" for command in commands())


def add_command(run: int, kind: str, text: str = "") -> None:
    """Record a command for a run, also for one that has not begun. The engine's control thread calls this."""
    _commands.setdefault(run, []).append(RunCommand(kind, text))


def commands() -> list[RunCommand]:
    """All commands to the running call so far, in order. Cheap to poll."""
    tag = current_tag() if _commands else None
    return list(_commands.get(tag.run, ())) if tag is not None else []


def send(wire: object) -> None:
    """Publish one of the protocol's values under the request that is running."""
    shell().data_pub.publish_data({f"{protocol.WIRE_KEY}{next(_sequence)}": wire})


def current_tag() -> protocol.CellTag | None:
    """The tag of the request that the main thread runs; None for a request of another client."""
    parent = shell().kernel.get_parent("shell")
    return protocol.CellTag.parse(parent.get("metadata", {}).get("label"))


def joined_world() -> Any:
    """This engine's world; None before it joins one and after it leaves. Loads no torch: a cell may do without."""
    module = sys.modules.get("workbench.tensors.world")
    return module.joined() if module is not None else None


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
            "Call its functions in %%global cells, or in functions given to session.submit."
        )
    return found
