"""Where a world's transport was, once a step was broken off in the middle of a schedule.

The ranks of a pipeline are at different micro-batches when one of them raises, also where all of them raise the same
error: what was sent and not received would be taken for the next step's, whose tags are the same. So nothing is
exchanged in this world any more; in a new one (``wb.rebuild``) all ranks begin alike.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import CollectiveAborted
from workbench.transport.base import Transport

_EXCHANGES = frozenset({"exchange", "borrow", "all_reduce", "start_all_reduce", "all_gather", "start", "pull", "among"})


class EndedTransport:
    """Refuses every exchange, and tells the ranks that wait for this one; all else is as it was.

    Args:
        base: the transport that was there; it is closed and replaced as ever.
        reason: what has broken off, and that messages of it may be under way.
    """

    def __init__(self, base: Transport, reason: str) -> None:
        self.base, self.reason = base, reason

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.base, name)
        return self._refuse if name in _EXCHANGES else found

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        self.base.abort(self.reason)
        raise CollectiveAborted(
            f"nothing is exchanged any more: {self.reason}. Messages of its micro-batches are under way, and a later "
            f"step would take them for its own. Call wb.rebuild() on every rank, or run the next cell: tensors and "
            f"modules stay usable. Then begin the step anew, with optimizer.zero_grad()."
        )


def end_exchanges(world: Any, error: BaseException, what: str) -> None:
    """Refuse what this rank would exchange next, since ``error`` has broken off ``what``."""
    if not has_ended(world) and not isinstance(error, CollectiveAborted):  # after which nobody can go on anyway
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        world.transport = EndedTransport(world.transport, f"{what} was broken off by {said}")


def has_ended(world: Any) -> bool:
    """Whether a world only waits to be rebuilt, because a step in it was broken off."""
    return isinstance(world.transport, EndedTransport)


def put_back(world: Any, transport: Transport) -> None:
    """Let a world have its own transport again, after one that watched it; what has ended stays so."""
    ended = world.transport
    world.transport = EndedTransport(transport, ended.reason) if isinstance(ended, EndedTransport) else transport
