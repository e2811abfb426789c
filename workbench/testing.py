"""Simulated ranks for tests: a whole SPMD program in one process, in milliseconds.

>>> def program(rank):
...     x = wb.ones(7, 3, placement=wb.placement(ranks=[0, 1]), sbp="S(0)")
...     return tuple(x.to_local().shape)
>>> run_ranks(program, num_ranks=2)
[(4, 3), (3, 3)]
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from workbench.errors import CollectiveAborted
from workbench.tensors import patch_table
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World, finish, run_backward_in_calling_thread
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.transport.threads import ThreadHub, ThreadTransport

_SEED = 0x5EED
_Result = TypeVar("_Result")


def run_ranks(
    fn: Callable[..., _Result], num_ranks: int = 2, *, seed: int = _SEED, device: str | torch.device = "cpu"
) -> list[_Result]:
    """Run ``fn`` on ``num_ranks`` simulated ranks, threads of this process, and return its results by rank.

    ``fn`` takes the rank, or nothing (``wb.rank()`` is the rank). The shards of all ranks are on ``device``. ``seed``
    is that of the ranks' random numbers. The first rank to fail ends the waits of the others, and its exception is
    raised here with a note that names the rank. A deadlock is an error at once, not a timeout. torch's default
    generator belongs to the process, so ranks that build a model at the same time get different weights: build it
    before, and give each rank a ``copy.deepcopy``. So are plain numbers that a forward draws (``torch.rand(len(x))``);
    processes seeded alike draw the same, as do global tensors here (``torch.rand_like(x)``).

    >>> run_ranks(lambda rank: rank * 10, num_ranks=3)
    [0, 10, 20]
    """
    hub = ThreadHub(num_ranks)
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[int, BaseException]] = []
    place = torch.empty(0, device=device).device  # with its number
    grad_enabled, takes_rank = torch.is_grad_enabled(), _takes_rank(fn)

    def run(rank: int) -> None:
        world = World(rank, num_ranks, place, ThreadTransport(hub, rank, place))
        run_backward_in_calling_thread(world.device)
        world.context.generator = torch.Generator().manual_seed(seed)
        hub.begin(rank)
        try:
            with Simulated(world), torch.set_grad_enabled(grad_enabled):
                results[rank] = fn(rank) if takes_rank else fn()
                finish(world)
        except BaseException as error:  # noqa: BLE001 - raised again below; the other ranks must not wait for this one
            failures.append((rank, error))
            hub.abort(f"rank {rank} raised {type(error).__name__}: {error}")
            with suppress(Exception), Simulated(world):
                finish(world)
        finally:
            hub.end(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(num_ranks)
    ]
    with patch_table.installed():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        _raise_first_cause(failures)
    hub.check_empty()
    return results


def _takes_rank(fn: Callable[..., Any]) -> bool:
    parameters = inspect.signature(fn).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _raise_first_cause(failures: list[tuple[int, BaseException]]) -> None:
    """The first failure that is no consequence of another one."""
    rank, error = next((f for f in failures if not isinstance(f[1], CollectiveAborted)), failures[0])
    error.add_note(f"raised on simulated rank {rank}; failed ranks: {sorted(r for r, _ in failures)}")
    raise error


def assert_equal_to_one_device(actual: Any, expected: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Assert that a global tensor's logical value is ``expected``; all ranks of the world call it.

    ``run_ranks(lambda: assert_equal_to_one_device(program(), expected))`` is the shape of most tests here.
    """
    value = actual.full_tensor().detach()
    torch.testing.assert_close(value, expected.detach(), rtol=rtol, atol=atol)
