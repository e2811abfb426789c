"""The workbench as people use it: the README's script, compared strategies on engines, an interrupt, a lost engine."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.nn.functional import cross_entropy

from benchmarks.gpu.place import ROOT, Finding, Found, Place, run_command
from workbench.cli.demo import digits, make_cnn, make_mlp
from workbench.core.metrics import RunRecord
from workbench.errors import CellError
from workbench.session.cluster import Session
from workbench.session.comparison.compare import compare
from workbench.units import format_bytes

STRATEGIES = {"data": "data", "model": "model", "1f1b": "pipeline | mb=4 1f1b", "zero 3": "*: data | zero=3"}


def script(place: Place) -> Iterator[Found]:
    """The README's script, alone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "wb.init()" in block)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(code if place.is_gpu else code.replace("1792", "128"), encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        yield from run_command("README's script: rank, last loss", [*launcher, str(path)], {"PYTHONPATH": str(ROOT)})


def compared_on_1(place: Place) -> Iterator[Found]:
    """One engine."""
    return compared(place, 1)


def compared_on_2(place: Place) -> Iterator[Found]:
    """Two engines on one device."""
    return compared(place, 2)


def compared_on_4(place: Place) -> Iterator[Found]:
    """Four engines on one device."""
    return compared(place, 4)


def compared(place: Place, num_engines: int) -> Iterator[Found]:
    """Strategies against one device, from the same weights on the same batches.

    Raises:
        AssertionError: a strategy does not have the numbers of one device.
    """
    steps, make = (20, make_cnn) if place.is_gpu else (3, make_mlp)
    with start(place, num_engines) as session:
        result = compare(
            make, digits(), cross_entropy, STRATEGIES, batch_size=128, steps=steps, session=session,
            keep=False, progress=False,
        )  # fmt: skip
    for run in result.runs:
        yield Finding(run.name, _in_words(run))
    unequal = [run.name for run in result.runs if not run.equal]
    assert not unequal, f"unlike one device: {', '.join(unequal)}"


def start(place: Place, num_engines: int) -> Session:
    """Engines on the place's kind of device."""
    return Session(num_engines, device="cuda" if place.is_gpu else "cpu")


def _in_words(run: RunRecord) -> str:
    if run.error is not None:
        return f"FAILED: {run.error.strip().splitlines()[-1]}"
    apart = f"losses differ by {run.loss_difference or 0:.1e}, weights by {run.weight_difference or 0:.1e}"
    speed = f"{run.samples_per_s:.0f} samples/s, {run.speedup or 0:.2f} of one device"
    peak = format_bytes(max(run.peak_memory_bytes, default=0))
    return f"{'equal' if run.equal else 'UNLIKE ONE DEVICE'}, {apart}; {speed}; peak {peak}"


def interrupt_and_kill(place: Place) -> Iterator[Found]:
    """A cell that never ends is interrupted; an engine is killed in one; the other engine keeps its variables.

    Raises:
        AssertionError: a variable is lost, or an engine does not answer.
    """
    with start(place, 2) as session:
        ones = f"wb.ones(256, 256, placement=wb.placement.all({session.device!r}), sbp='S(0)')"
        session.run(f"x = {ones}\ndef spin():\n    while True:\n        (x @ x.t()).to_global(sbp='B')")
        yield _stopped(session, "interrupted", session.interrupt)
        assert session.run("x.sum().item()").values == [65536.0] * 2
        [pid] = session.run("import os; os.getpid()", ranks=[1]).values
        yield _stopped(session, "killed", lambda: os.kill(pid, signal.SIGKILL))
        kept = session.run("'x' in globals()").values
        assert kept == [True, False], f"whether the engines have their variables after the kill: {kept}"
        assert session.run(f"{ones}.sum().item()").values == [65536.0] * 2
        yield Finding("afterwards", "rank 0 has its variables, and both ranks exchange")


def _stopped(session: Session, what: str, action: Callable[[], object]) -> Finding:
    """How a cell that never ends is stopped by something that happens half a second after its start."""
    began: list[float] = []

    def strike() -> None:
        began.append(time.monotonic())
        action()

    threading.Timer(0.5, strike).start()
    try:
        session.run("spin()")
    except (CellError, KeyboardInterrupt) as error:
        after_s = time.monotonic() - began[0]
        return Finding(what, f"after {after_s:.1f} s: {str(error).strip().splitlines()[0]}")
    raise AssertionError(f"{what}: the cell has ended by itself")
