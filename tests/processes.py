"""Real processes for ranks, forked from one that has loaded torch: a world of four stands in a fraction of a second."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.timeouts import PROGRAM_TIMEOUT_S

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pytest", "workbench.api", "workbench.training.runs.train", "torch.testing", "torch._dynamo"]
)


class Failure:
    """What a rank sends home instead of a result."""

    def __init__(self, error: BaseException) -> None:
        self.text = "".join(traceback.format_exception(error))


class Ranks:
    """The processes of a world, each running ``program(*arguments)`` after ``wb.init()``; a context that ends them all.

    Args:
        program: a function of a module's top level; what it returns comes home.
        environment: variables for every rank, or one dict per rank.
        joins: whether the ranks call ``wb.init()`` before the program; else the program does.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        num_ranks: int,
        *arguments: Any,
        environment: dict[str, str] | Sequence[dict[str, str]] = (),
        joins: bool = True,
    ) -> None:
        per_rank = [environment or {}] * num_ranks if not environment or isinstance(environment, dict) else environment
        self._folder = tempfile.TemporaryDirectory(prefix="workbench-ranks-")
        init_method = (Path(self._folder.name) / "rendezvous").as_uri()
        self.processes: list[Any] = []
        self._ends: list[Connection] = []
        for rank, variables in enumerate(per_rank):
            ours, theirs = _context.Pipe(duplex=False)
            every = {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(num_ranks), **dict(variables)}
            call = (theirs, init_method, every, joins, program, arguments)
            process = _context.Process(target=_run, args=call, name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(ours)

    def results(self, timeout_s: float = PROGRAM_TIMEOUT_S) -> list[Any]:
        """What the programs returned, by rank; None for a rank that died without a word.

        Raises:
            AssertionError: a program raised, or a rank is not done in time.
        """
        waiting = dict(zip(self._ends, range(len(self._ends)), strict=True))
        found: list[Any] = [None] * len(self._ends)
        while waiting:
            ready = wait(list(waiting), timeout_s)
            assert ready, f"ranks {sorted(waiting.values())} are not done after {timeout_s:g} s"
            for end in ready:
                assert isinstance(end, Connection)
                rank = waiting.pop(end)
                try:
                    found[rank] = pickle.loads(end.recv_bytes())
                except EOFError:  # it has died
                    continue
        failures = [f"rank {rank}:\n{value.text}" for rank, value in enumerate(found) if isinstance(value, Failure)]
        assert not failures, "\n".join(failures)
        return found

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.join(5.0 if exc[0] is None else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()


def run_processes(
    program: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    environment: dict[str, str] | Sequence[dict[str, str]] = (),
    timeout_s: float = PROGRAM_TIMEOUT_S,
) -> list[Any]:
    """Run ``program(*arguments)`` on every rank of a world of real processes; its results by rank.

    Where the environment does not name a transport, the ranks choose one (``WORKBENCH_TRANSPORT``).
    """
    with Ranks(program, num_ranks, *arguments, environment=environment) as ranks:
        return ranks.results(timeout_s)


def _run(
    home: Connection,
    init_method: str,
    environment: dict[str, str],
    joins: bool,
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    import torch

    import workbench as wb
    from tests.transport import late_device
    from workbench.tensors.world import shutdown

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.environ["WORKBENCH_TEST_RENDEZVOUS"] = init_method
    late_device.register_if_asked()
    try:
        if joins:
            wb.init(init_method=init_method)
        result = program(*arguments)
        # Not home.send: that one would leave tensors in shared memory, which ends with this process.
        home.send_bytes(pickle.dumps(result))
        shutdown()
    except BaseException as error:  # noqa: BLE001 - it is raised again at home
        home.send_bytes(pickle.dumps(Failure(error)))
    finally:
        home.close()
