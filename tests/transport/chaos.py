"""Real processes that run random exchanges, in rounds; in each round one rank does something wrong at a random point.

The processes stay between rounds: after a fault they rebuild their world in place, and a killed rank is replaced.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch

import workbench as wb
from tests.processes import _context
from tests.transport import late_device
from workbench.errors import CollectiveAborted
from workbench.tensors import world

NUM_CALLS = 8
HARMLESS = ("none", "late")
DIVERGED = ("another layout", "another shape", "a call more", "a call less")
FAULTS = (*HARMLESS, "killed", "killed soon", "stopped", "stopped soon", "raises", "interrupted", "aborted", *DIVERGED)
TIMEOUT_S = 15.0
"""Timeout of every wait. A receive that was interrupted in the middle of a message blocks gloo's thread for so long."""
_has_joined: list[bool] = []
SOON_S = 0.004
"""A fault that comes "soon" strikes somewhere in the calls of the next milliseconds, not between two calls."""


class OwnError(Exception):
    """A mistake in the program of one rank."""


@dataclass(frozen=True)
class Round:
    """The program of all ranks, and the fault of one of them before one of the calls."""

    seed: int
    fault: str
    victim: int
    moment: int

    @classmethod
    def drawn(cls, seed: int, num_ranks: int) -> Round:
        chance = random.Random(seed)
        fault = FAULTS[seed % len(FAULTS)]
        return cls(seed, fault, chance.randrange(num_ranks), chance.randrange(NUM_CALLS))

    def calls(self, num_ranks: int) -> list[tuple[Any, ...]]:
        """Kind and arguments of each call; equal on all ranks."""
        chance = random.Random(self.seed + 1000)
        return [draw_call(chance, num_ranks) for _ in range(NUM_CALLS)]


def draw_call(chance: random.Random, num_ranks: int) -> tuple[Any, ...]:
    kind = chance.choice(["boxing", "boxing", "sum", "pipeline", "barrier"])
    group = tuple(chance.sample(range(num_ranks), chance.randint(2, num_ranks)))
    numel = chance.choice([1, 50, 90_000, 900_000])
    if kind == "boxing":
        layouts = tuple(
            (tuple(sorted(group)), chance.choice(["S(0)", "S(1)", "B", "P"])) for group in (group, group[::-1])
        )
        return kind, layouts, chance.choice([(5, 7), (300, 41), (900, 300)])
    return kind, group, numel


def perform(call: tuple[Any, ...]) -> None:
    """One call; asserts that the result is right."""
    here, (kind, *arguments) = world.current(), call
    if kind == "barrier":
        world.barrier()
    elif kind == "boxing":
        box(*arguments)
    elif here.rank in arguments[0]:
        {"sum": add_up, "pipeline": send_round}[kind](here, *arguments)


def box(layouts: Any, shape: tuple[int, int]) -> None:
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    everybody = wb.placement("cpu", ranks=list(range(wb.world_size())))
    tensor = wb.tensor(full, placement=everybody, sbp="B")
    for ranks, sbp in layouts:
        tensor = tensor.to_global(placement=wb.placement("cpu", ranks=list(ranks)), sbp=sbp)
    assert tensor.to_global(placement=everybody, sbp="B").to_local().equal(full)


def add_up(here: world.World, group: tuple[int, ...], numel: int) -> None:
    tag = here.context.next_sum_tag(group)
    total = here.transport.all_reduce(torch.full((numel,), here.rank + 1.0), group, "sum", tag, f"sum of {numel}")
    assert total.eq(sum(group) + len(group)).all()


def send_round(here: world.World, group: tuple[int, ...], numel: int) -> None:
    """Two micro-batches from each rank to the next one, received in the other order than sent."""
    index = group.index(here.rank)
    before, after = group[index - 1], group[(index + 1) % len(group)]
    for tag in (2, 4):
        here.transport.exchange([(after, torch.full((numel,), here.rank + float(tag)))], [], tag, f"mb {tag}, {numel}")
    for tag in (4, 2):
        out = torch.empty(numel)
        here.transport.exchange([], [(before, out)], tag, f"mb {tag}, {numel}")
        assert out.eq(before + float(tag)).all()
    here.transport.flush()


def serve(home: Any, rank: int, num_ranks: int, environment: dict[str, str]) -> None:
    """A rank's process: executes commands and answers."""
    os.environ.update(environment)
    late_device.register_if_asked()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    while True:
        name, *arguments = home.recv()
        if name == "leave":
            world.shutdown()
            home.send("left")
            return
        try:
            command = {"rebuild": rebuild, "run": run, "open_resources": open_resources}[name]
            answer = command(home, rank, num_ranks, *arguments)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            answer = error
        home.send(("answer", answer))


def rebuild(home: Any, rank: int, num_ranks: int, init_method: str) -> str:
    if not _has_joined:
        _has_joined.append(True)
        return world.init(rank, num_ranks, init_method=init_method, device="cpu", timeout_s=TIMEOUT_S).transport_name
    return world.rebuild(rank, num_ranks, init_method=init_method, device="cpu").transport_name


def open_resources(home: Any, rank: int, num_ranks: int) -> dict[str, Counter[str]]:
    """The open resources of this process, by kind. Helper threads start on demand, so one of each name is free."""
    gc.collect()
    threads = Counter(nameless(thread.name) for thread in threading.enumerate())
    with open("/proc/self/maps") as file:
        num_maps = sum("memfd" in line for line in file)
    return {
        "files": Counter(nameless(target) for target in open_files()),
        "doubled threads": threads - Counter(set(threads)),
        "shared maps": Counter({"memfd": num_maps}),
    }


def open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            yield os.readlink(f"/proc/self/fd/{number}")


def nameless(text: str) -> str:
    return re.sub(r"\d+", "", text)


def added_resources(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Resources that were added, of kinds whose total has grown: a file may have replaced another of its kind."""
    return {key: after[key] - before[key] for key in before if after[key].total() > before[key].total()}


def run(home: Any, rank: int, num_ranks: int, round_: Round) -> tuple[str, str, float]:
    """The round's calls; how it ended, the error's text, and when."""
    try:
        for number, call in enumerate(round_.calls(num_ranks)):
            if rank == round_.victim and number == round_.moment:
                home.send(("fault", time.monotonic()))
                if not go_wrong(round_.fault, call, num_ranks):
                    continue
            perform(call)
        for timer in (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)):
            timer.join()  # the fault strikes before the last exchange, so that everybody meets it
        world.current().transport.all_gather(torch.zeros(1), f"end of round {round_.seed}")
    except CollectiveAborted as error:
        return "aborted", str(error), time.monotonic()
    except (OwnError, KeyboardInterrupt) as error:
        world.current().abort(f"{type(error).__name__} in its program")
        world.shutdown()
        return "own error", type(error).__name__, time.monotonic()
    return "right", "", time.monotonic()


def go_wrong(fault: str, call: tuple[Any, ...], num_ranks: int) -> bool:
    """Cause the fault; returns whether the call is still to be made."""
    soon_s = random.random() * SOON_S
    signals = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "interrupted": signal.SIGINT}
    if fault == "late":
        time.sleep(0.3)
    elif fault == "raises":
        raise OwnError
    elif fault == "aborted":
        threading.Timer(soon_s, world.current().abort, ["the test said so"]).start()
    elif fault.removesuffix(" soon") in signals:
        number = signals[fault.removesuffix(" soon")]
        if fault in ("killed", "stopped"):
            os.kill(os.getpid(), number)
        else:
            threading.Timer(soon_s, os.kill, [os.getpid(), number]).start()
    elif fault == "another layout":
        box([((0, 1), "S(1)"), (tuple(range(num_ranks)), "S(0)")], (11, 3))
    elif fault == "another shape":
        perform(("boxing", ((tuple(range(num_ranks)), "S(0)"),), (8, 9)))
    elif fault == "a call more":
        world.barrier()
    return fault != "a call less"


class Chaos:
    """The processes of one world, as the test sees them; a context that ends them."""

    def __init__(self, folder: Any, num_ranks: int, environments: list[dict[str, str]]) -> None:
        self.folder, self.num_ranks, self.environments = folder, num_ranks, environments
        self._numbers = itertools.count()
        self.pipes: list[Any] = [None] * num_ranks
        self.processes: list[Any] = [None] * num_ranks
        for rank in range(num_ranks):
            self.start(rank)

    def start(self, rank: int) -> None:
        self.pipes[rank], theirs = _context.Pipe()
        self.processes[rank] = _context.Process(
            target=serve, args=(theirs, rank, self.num_ranks, self.environments[rank]), daemon=True
        )
        self.processes[rank].start()
        theirs.close()

    def rebuild(self) -> list[str]:
        """All ranks join a new world; returns the names of their transports."""
        return self.ask("rebuild", f"file://{self.folder}/{next(self._numbers)}")

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((name, *arguments))
        return [self.answer(rank) for rank in range(self.num_ranks)]

    def answer(self, rank: int, within_s: float = 20.0) -> Any:
        if not self.pipes[rank].poll(within_s):
            for process in self.processes:
                os.kill(process.pid, signal.SIGUSR1)  # tell where it is
            time.sleep(0.5)
            raise AssertionError(f"rank {rank} has not answered within {within_s:g} s")
        kind, value = self.pipes[rank].recv()
        assert kind == "answer"
        if isinstance(value, BaseException):
            raise value
        return value

    def play(self, round_: Round) -> dict[int, tuple[str, str, float]]:
        """Run a round; returns for each surviving rank how it ended, why, and how long after the fault."""
        for pipe in self.pipes:
            pipe.send(("run", round_))
        victim = self.pipes[round_.victim]
        assert victim.poll(20.0)
        _, moment_s = victim.recv()
        word = round_.fault.removesuffix(" soon")
        survivors = [
            rank for rank in range(self.num_ranks) if rank != round_.victim or word not in ("killed", "stopped")
        ]
        answers = {rank: self.answer(rank) for rank in survivors}
        if word == "stopped":
            self.resume(self.processes[round_.victim].pid)
            answers[round_.victim] = (*self.answer(round_.victim)[:2], moment_s)
        if word == "killed":
            self.processes[round_.victim].join(10)
            self.start(round_.victim)
        return {rank: (how, text, end_s - moment_s) for rank, (how, text, end_s) in answers.items()}

    def resume(self, pid: int) -> None:
        """Continue a process that is stopped, or about to be."""
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            time.sleep(1e-3)
        os.kill(pid, signal.SIGCONT)

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *exc: object) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            if exc[0] is None:
                pipe.send(("leave",))
                process.join(5)
            process.kill()
            process.join()
            pipe.close()
