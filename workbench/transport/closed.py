"""The transport of a world after an error has interrupted a pipeline's step.

The ranks of a pipeline are at different micro-batches when one of them raises, even if all raise the same error. A
later step uses the same tags, so it would receive messages of the interrupted one. Hence this world exchanges nothing
any more; in a new world (``wb.rebuild``) all ranks start in the same state.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import CollectiveAborted
from workbench.transport.base import Transport

_EXCHANGES = ("exchange", "all_reduce", "all_gather", "execute", "start_", "open_channel")
"""How the names of methods begin that exchange."""
_BEGIN_AGAIN = (
    "Messages of its micro-batches are in flight, and a later step would receive them as its own. Call wb.rebuild() on "
    "every rank, or run the next cell: tensors and modules stay usable. Then start the step again, with "
    "optimizer.zero_grad()."
)


class ClosedTransport:
    """Refuses every exchange and aborts the transport below it; other attributes are those of that transport.

    Args:
        base: the transport of the world; it can still be closed and replaced.
        reason: the interrupted step and its error.
        advice: what to do.
    """

    def __init__(self, base: Transport, reason: str, advice: str = _BEGIN_AGAIN) -> None:
        self.base, self.reason, self.advice = base, reason, advice

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.base, name)
        return self._refuse if name.startswith(_EXCHANGES) else found

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        self.base.abort(self.reason)
        raise CollectiveAborted(f"nothing is exchanged any more: {self.reason}. {self.advice}")


def close_after_error(world: Any, error: BaseException, what: str) -> None:
    """Refuse all later exchanges of this rank, because ``error`` has interrupted ``what``."""
    if not is_closed(world) and not isinstance(error, CollectiveAborted):  # an aborted transport refuses by itself
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        world.transport = ClosedTransport(world.transport, f"{what} was interrupted by {text}")


def is_closed(world: Any) -> bool:
    """Whether a world must be rebuilt, because an error has interrupted a step in it."""
    return isinstance(world.transport, ClosedTransport)


def restore_transport(world: Any, transport: Transport) -> None:
    """Put ``transport`` back in place of a wrapper around it; a closed world stays closed."""
    current = world.transport
    is_refused = isinstance(current, ClosedTransport)
    world.transport = ClosedTransport(transport, current.reason) if is_refused else transport
