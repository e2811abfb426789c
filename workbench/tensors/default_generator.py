"""torch's default generators are those of the whole process: the CPU's, and one for each GPU. Simulated ranks, which
are threads, take turns with them here.

What seeds them, puts their state back, or asks whether they were drawn from does so in one of these contexts. They may
be nested. No exchange may happen inside: the ranks that it waits for may be waiting for their turn.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from workbench.tensors.patch_table import patch

_turn = threading.RLock()
_WITHOUT_GENERATOR = ("cpu", "meta")
"""Devices with no generator beside the CPU's."""


def _present(device: torch.device | None) -> torch.device | None:
    """The device, or else the present GPU of a process that uses one: ``torch.manual_seed`` seeds it too."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if device is None and torch.cuda.is_initialized() else device
    )


def states(device: torch.device | None = None) -> list[torch.Tensor]:
    """The states of the CPU's generator, and of this device's if it has one of its own; all on the CPU. Without a
    device, that of the present GPU belongs to them.
    """
    device = _present(device)
    found = [torch.get_rng_state()]
    if device is not None and device.type not in _WITHOUT_GENERATOR:
        found.append(torch.get_device_module(device).get_rng_state(device))
    return found


def set_states(values: list[torch.Tensor], device: torch.device | None = None) -> None:
    """Go on from what ``states`` has returned for the same kind of device."""
    torch.set_rng_state(values[0])
    device = _present(device)
    if len(values) > 1:
        assert device is not None
        torch.get_device_module(device).set_rng_state(values[1], device)


def source_of(rank: int, known: Mapping[int, torch.Tensor]) -> int:
    """The rank from whose states this rank goes on: the first of those with its seed, so that they draw the same
    numbers. A program may also seed each rank differently; these ranks go on from their own states.

    Args:
        known: the states of the CPU's generators, of one rank or more. Ranks that are not in it are new: they go on
            from the first one if all of these have one seed, else from their own states.
    """
    seeds = {each: _seed_of(state) for each, state in known.items()}
    if rank not in seeds:
        return min(seeds) if len(set(seeds.values())) == 1 else rank
    return min(each for each, seed in seeds.items() if seed == seeds[rank])


def _seed_of(state: torch.Tensor) -> int:
    generator = torch.Generator()
    generator.set_state(state)
    return generator.initial_seed()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context that begins with this seed, and in which no other thread seeds the generators."""
    with _turn:
        torch.manual_seed(seed)
        yield


@contextmanager
def restored(device: torch.device | None = None) -> Iterator[None]:
    """A context after which the generators of the CPU and of this device go on as if nothing had been drawn in it."""
    with _turn:
        before = states(device)
        try:
            yield
        finally:
            set_states(before, device)


@contextmanager
def all_restored() -> Iterator[None]:
    """A context as ``restored``, also for the default generators of Python and numpy."""
    with restored():
        of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def reseed(*key: int) -> None:
    """Let what torch draws on the CPU, Python and numpy depend on these numbers only. Call it in ``all_restored``.

    Python's hash of whole numbers is the same in every process.
    """
    number = hash(key) & 0x7FFFFFFFFFFFFFFF
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002


@contextmanager
def watched(device: torch.device | None = None) -> Iterator[Callable[[], bool]]:
    """A context whose value says whether the generator of the CPU, or of this device, was drawn from.

    >>> with watched() as has_drawn:
    ...     _ = torch.rand(1)
    ...     print(has_drawn())
    True
    """
    with _turn:
        before = states(device)
        yield lambda: not all(map(torch.equal, before, states(device)))


def _in_turn(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def in_turn(*args: Any, **options: Any) -> Any:
        with _turn:
            return original(*args, **options)

    return in_turn


for _place in ("torch.get_rng_state", "torch.set_rng_state"):
    patch(
        _place,
        "torch locks the generator while it makes the tensor of the state, and a collection of garbage meanwhile runs "
        "Python code: another simulated rank would wait for the generator, and this one for the interpreter",
        _in_turn,
    )
