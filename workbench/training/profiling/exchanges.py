"""The exchanges of a rank with their times, for as long as a profile needs them.

The methods of the world's transport are replaced on this one object, so that nothing is asked where nothing is
recorded, and a replay of a captured step, which calls the transport too, is seen like any other step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from workbench.tensors.world import World
from workbench.training.capture.recorded_transport import RecordedTransport
from workbench.transport.traffic import Time


@dataclass(slots=True, eq=False)
class RecordedExchange:
    """One exchange. Its result was there at ``ended``; from ``finishing`` on the rank waited for it.

    ``call`` names the exchange, with its layouts. An exchange without a second part has no ``finishing`` and ``ended``.
    """

    call: str
    kind: str
    sent_bytes: int
    started: Time
    stopped: Time
    finishing: Time | None = None
    ended: Time | None = None


def _of_messages(sends: Sequence[tuple[int, torch.Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in sends)


def _of_ring(size_bytes: int, num_ranks: int) -> int:
    """What a rank sends in an all-reduce of a ring."""
    return 2 * (num_ranks - 1) * size_bytes // num_ranks


def _of_sum(size_bytes: int, num_ranks: int, world: World) -> int:
    """The same for a boxing, as its plan counts it: a small term goes to all other ranks."""
    is_one_shot = num_ranks == 2 or size_bytes <= world.transport.cost.one_shot_bytes
    return (num_ranks - 1) * size_bytes if is_one_shot else _of_ring(size_bytes, num_ranks)


_Sizes = dict[str, Callable[..., int]]


def _sizes(world: World) -> _Sizes:
    """By method of a transport, the bytes that this rank sends, from the arguments."""
    return {
        "start_exchange": lambda sends, *_: _of_messages(sends),
        "exchange": lambda sends, *_: _of_messages(sends),
        "start_exchange_in_place": lambda sends, *_: _of_messages(sends),
        "start_all_reduce": lambda tensors, group, *_: _of_ring(sum(t.nbytes for t in tensors), len(group)),
        "all_reduce": lambda tensor, group, *_: _of_sum(tensor.nbytes, len(group), world),
        "start_all_gather": lambda part, _sizes, group, *_: part.nbytes * (len(group) - 1),
        "start_reduce_scatter": lambda terms, *_: sum(t.nbytes for t in terms) * (len(terms) - 1) // len(terms),
        "all_gather": lambda tensor, *_: tensor.nbytes * (world.world_size - 1),
        "execute": lambda plan, *_: sum(size for *_, size in plan.sends),
        "start_shared_all_gather": lambda group, _shapes, _regions, parts, *_: (
            sum(part.nbytes for part in parts) * (len(group) - 1)
        ),
    }


@contextmanager
def _unseen_by_torch() -> Iterator[None]:
    """Without events of torch's profiler. A send of torch.distributed ends its event when it has ended itself, in a
    thread of its own: after the end of the profiler that would write to memory which is no longer the event's.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


class ExchangeRecorder:
    """Records the exchanges of one rank inside ``recording``.

    Args:
        world: of the rank. A rebuilt world has another transport, whose exchanges are not recorded.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.exchanges: list[RecordedExchange] = []
        self._inside = threading.local()  # transports call their own methods

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which exchanges are recorded."""
        transport: Any = self.world.transport
        if isinstance(transport, RecordedTransport):  # the step that begins the profile is being captured
            transport = transport.recorded
        timed = {
            name: self._timed(name, getattr(transport, name), size)
            for name, size in _sizes(self.world).items()
            if hasattr(transport, name)
        }
        for name, method in timed.items():
            setattr(transport, name, method)
        try:
            yield
        finally:
            for name in timed:
                delattr(transport, name)

    def _timed(self, name: str, method: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "any", False):
                return method(*args, **kwargs)
            self._inside.any, now = True, self.world.traffic.now
            try:
                with _unseen_by_torch():
                    started = now()
                    made = method(*args, **kwargs)
                    stopped = now()
            finally:
                self._inside.any = False
            what = next(a for a in (*args[::-1], *kwargs.values()) if type(a) is str)
            found = RecordedExchange(what, name.removeprefix("start_"), size(*args, **kwargs), started, stopped)
            self.exchanges.append(found)
            return self._ending(found, made)

        return call

    def _ending(self, exchange: RecordedExchange, made: Any) -> Any:
        """What a call has returned; a function among it ends the exchange, and that is recorded too."""
        if isinstance(made, tuple):
            return tuple(self._ending(exchange, part) for part in made)
        if isinstance(made, torch.Tensor) or not callable(made):
            return made

        def finish(*args: Any, **kwargs: Any) -> Any:
            now = self.world.traffic.now
            with _unseen_by_torch():
                exchange.finishing = now()
                result = made(*args, **kwargs)
                exchange.ended = now()
            return result

        return finish
