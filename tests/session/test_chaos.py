"""Random faults in one session, with training between: control is back, the loop goes on, nothing leaks."""

import itertools
import os
import random
import signal
import sys
import threading
import time

import psutil
import pytest

from workbench.errors import CellError
from workbench.session import Session
from workbench.session.divergence import FIRST_PROBE_S, LOCAL_S
from workbench.session.output.tracebacks import Interrupted

pytestmark = [pytest.mark.engines, pytest.mark.timed]

NUM_ENGINES = 2
CERTAIN_AFTER_S = FIRST_PROBE_S + LOCAL_S
"""When it is certain that a wait in plain torch.distributed has no end: nothing has moved on this host for so long."""
BACK_WITHIN_S = 2.0
"""After the fault, not counting what a busy machine adds to a cell that does nothing (measured beside it)."""

SETUP = """
import os, tempfile, time
from pathlib import Path
p = wb.placement.all("cpu")
wb.manual_seed(0)
model = wb.parallelize(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)), "*: data")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = wb.randn(32, 8, placement=p, sbp=wb.sbp.split(0))
targets = inputs.sum(dim=1, keepdim=True)
step = 0

def train():
    global step
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    step += 1
    return loss.item()
"""
FOREVER = "while True: train()"
DIVERGED = "(inputs if wb.rank() else targets).to_global(sbp=wb.sbp.broadcast)"
PLAIN = {
    "plain collective": "if wb.rank() == {rank}: dist.all_reduce(x)",
    "plain receive": "if wb.rank() == {rank}: dist.recv(x, src=1 - {rank})",
    "plain barrier": "if wb.rank() == {rank}: dist.barrier()",
    "plain group": "if wb.rank() == {rank}: dist.new_group([0, 1])",
    "two plain calls": "dist.all_reduce(x) if wb.rank() == {rank} else dist.recv(x, src={rank})",
    "plain call and boxing": "dist.all_reduce(x) if wb.rank() == {rank} else inputs.to_global(sbp='B')",
    "backward of DDP": "loss = ddp(torch.ones(2, 8)).sum()\nif wb.rank() == {rank}: loss.backward()",
}
"""Cells of plain torch.distributed, written by somebody who does not know that all ranks must call it."""
PLAIN_SETUP = """
import torch.distributed as dist
x, ddp = torch.ones(1000), torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
"""


def raises(session, rank):
    began = time.monotonic()
    with pytest.raises(CellError, match=rf"ValueError on rank {rank}: planned"):
        session.run(f"if wb.rank() == {rank}: raise ValueError('planned')\n{FOREVER}")
    return began


def diverges(session, rank):
    began = time.monotonic()
    with pytest.raises(CellError, match=r"diverged|other ranks"):
        session.run(DIVERGED)
    return began


def diverges_in_plain_torch(code):
    def fault(session, rank):
        session.run(PLAIN_SETUP)
        began = time.monotonic()
        with pytest.raises(CellError, match="diverged"):
            session.run(code.format(rank=rank))
        return began + CERTAIN_AFTER_S

    return fault


def times_out(session, rank):
    began = time.monotonic()
    with pytest.raises(CellError, match="Timeout: the cell may take"):
        session.run(FOREVER, timeout=0.5)
    return began + 0.5


def signals(name, words):
    """A fault that comes from outside, half a second after the cell has begun."""

    def fault(session, rank):
        pid, began = session.status()[rank].pid, []

        def strike():
            began.append(time.monotonic())
            os.kill(pid, getattr(signal, name))

        timer = threading.Timer(0.5, strike)
        timer.start()
        with pytest.raises(CellError, match=words):
            session.run(FOREVER)
        timer.join()
        return began[0]

    return fault


def interrupts(session, rank):
    began = []

    def strike():
        began.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, strike)
    timer.start()
    with pytest.raises(Interrupted):
        session.run(FOREVER)
    timer.join()
    return began[0]


FAULTS = {
    "raise": raises,
    "diverge": diverges,
    **{name: diverges_in_plain_torch(code) for name, code in PLAIN.items()},
    "timeout": times_out,
    "interrupt": interrupts,
    "kill": signals("SIGKILL", "died while running"),
    "stop": signals("SIGSTOP", "is stopped|had to be killed"),
}
COSTLY = ("kill", "stop", "plain group")


@pytest.fixture
def own_session():
    with Session(engines=NUM_ENGINES, device="cpu") as session:
        yield session


def empty_cell_s(session):
    began = time.monotonic()
    session.run("pass")
    return time.monotonic() - began


def measures(session):
    """What must not grow, and by how much it may all the same (buffers that are made when first needed)."""
    here = psutil.Process()
    engines = [psutil.Process(status.pid) for status in session.status()]
    others = [process for process in here.children(recursive=True) if process not in engines]
    return {
        "processes": (len(here.children(recursive=True)), 0),
        "files": (here.num_fds(), 8),
        "threads": (here.num_threads(), 4),
        "memory, MB": (here.memory_info().rss / 1e6, 50),
        "files of engines": (sum(each.num_fds() for each in engines), 16),
        "memory of engines, MB": (sum(each.memory_info().rss for each in engines) / 1e6, 100),
        "files of controller and nannies": (sum(each.num_fds() for each in others), 16),
        "memory of controller and nannies, MB": (sum(each.memory_info().rss for each in others) / 1e6, 50),
        "names in /dev/shm": (len(os.listdir("/dev/shm")), 0),
    }


def assert_not_grown(before, after):
    grown = {name: (was, after[name][0]) for name, (was, most) in before.items() if after[name][0] > was + most}
    assert not grown, grown


def assert_endures(session, faults, seed, folder, num_first=4):
    """Each fault in turn, on a random rank, with a training loop that goes on from its newest checkpoint. Nothing grows
    after the first ones.
    """
    chance = random.Random(seed)
    late = []
    session.run(SETUP)
    save = f"wb.checkpoint.save(Path({str(folder)!r}) / 'newest', model=model, optimizer=optimizer, step=step)"
    load = f"step = wb.checkpoint.load(Path({str(folder)!r}) / 'newest', model=model, optimizer=optimizer)['step']"
    session.run(f"for _ in range(5): train()\n{save}")
    steps, before = 5, None
    for number, name in enumerate(faults):
        busy_s = empty_cell_s(session)
        began = FAULTS[name](session, chance.randrange(NUM_ENGINES))
        took = time.monotonic() - began
        if took > BACK_WITHIN_S + busy_s:
            late.append((number, name, round(took, 2)))
        if name in COSTLY:
            session.run(f"{SETUP}\n{load}")
            assert session.run("step").values == [steps] * NUM_ENGINES
        else:
            session.run(load)
        losses = session.run(f"losses = [train() for _ in range(3)]\n{save}\nlosses").values
        assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] + 1e-6, (number, name, losses)
        steps += 3
        if number == num_first - 1:
            before = measures(session)
    after = measures(session)
    assert not late, late
    figures = ", ".join(f"{name} {was:.4g} -> {after[name][0]:.4g}" for name, (was, _) in before.items())
    sys.stdout.write(f"\nafter {len(faults)} faults: {figures}\n")  # for pytest -s
    assert_not_grown(before, after)


def test_growth_is_noticed():
    before = {"files": (10, 8), "processes": (5, 0)}
    assert_not_grown(before, {"files": (18, 8), "processes": (4, 0)})
    with pytest.raises(AssertionError, match=r"'processes': \(5, 6\)"):
        assert_not_grown(before, {"files": (18, 8), "processes": (6, 0)})


def test_six_faults(session, tmp_path):
    """After the first one, as an engine may be the first with other variables of the environment."""
    faults = ["kill", "backward of DDP", "raise", "interrupt", "diverge", "kill"]
    assert_endures(session, faults, 1, tmp_path, num_first=1)


@pytest.mark.slow
def test_ten_faults(own_session, tmp_path):
    ours = ["raise", "interrupt", "diverge", "kill", "timeout", "stop"]
    plain = ["plain collective", "backward of DDP", "two plain calls", "plain call and boxing"]
    assert_endures(
        own_session, [name for pair in itertools.zip_longest(ours, plain) for name in pair if name], 1, tmp_path
    )


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.timeout(3600)
def test_two_hundred_faults(own_session, tmp_path):
    chance = random.Random(2)
    assert_endures(own_session, [chance.choice(list(FAULTS)) for _ in range(200)], 3, tmp_path)
