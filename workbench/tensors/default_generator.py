"""torch's default generator is one for the whole process. Simulated ranks, which are threads, take turns with it here.

What seeds it, puts its state back, or asks whether it was drawn from does so in one of these contexts. They may be
nested. No exchange may happen inside: the ranks that it waits for may be waiting for their turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_turn = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context that begins with this seed, and in which no other thread seeds the generator."""
    with _turn:
        torch.manual_seed(seed)
        yield


@contextmanager
def restored() -> Iterator[None]:
    """A context after which the generator goes on as if nothing had been drawn in it."""
    with _turn:
        before = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(before)


@contextmanager
def watched() -> Iterator[Callable[[], bool]]:
    """A context whose value says whether the generator was drawn from.

    >>> with watched() as has_drawn:
    ...     _ = torch.rand(1)
    ...     print(has_drawn())
    True
    """
    with _turn:
        before = torch.get_rng_state()
        yield lambda: not torch.equal(before, torch.get_rng_state())


__all__ = ["restored", "seeded", "watched"]
