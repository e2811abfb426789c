"""What ends a transport over letters: whatever breaks off one of its calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from workbench.errors import CollectiveAborted
from workbench.runtime.transport.letters.waits import Waiter


class _Transport(Protocol):
    rank: int

    @property
    def _waiter(self) -> Waiter: ...

    def _give_up(self, error: BaseException | None) -> None: ...


T = TypeVar("T", bound=_Transport)
P = ParamSpec("P")
R = TypeVar("R")


def ends_the_transport(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """An exchange that was broken off leaves letters behind: neither this rank nor its peers may go on with them."""

    @wraps(method)
    def run(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._waiter.abort_reason is not None:
            self._give_up(None)
            raise CollectiveAborted(f"rank {self.rank}: this world has ended: {self._waiter.abort_reason}")
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._give_up(error)
            raise

    return run
