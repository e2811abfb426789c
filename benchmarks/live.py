"""What it costs to watch: the live view of 8 ranks at 100 steps/s in a real page, and training with and without it.

``python -m benchmarks.live [--minutes 0.5] [--part training]``: three numbers against
their targets, kept in ``results``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.reporting import Comparison, Target, publish

RANKS, STEPS_PER_S = 8, 100
CPU, HEAP, SLOWDOWN = Target(15, unit="% of a core"), Target(50, unit="MB"), Target(2, unit="%")
_WARM_UP_S = 10.0
ROUNDS, STEPS = 100, 50
_WARM_STRETCHES = 4

CELLS = (
    f"%load_ext workbench\n%workbench start --engines {RANKS}",
    "import workbench as wb\nwb.LiveView()",
)
LOOP = """%%global
import math, time
started = time.perf_counter()
for step in range({steps}):
    wb.log(loss=math.exp(-step / 3000) + 0.01 * math.sin(step), samples=64)
    time.sleep(max(0.0, started + (step + 1) / {rate} - time.perf_counter()))"""


def train(rounds: int, steps: int) -> list[list[float]]:
    """On an engine: one run, watched for ``steps`` steps and unwatched for as many in turn. Seconds from one step to
    the next, means of every stretch: unwatched, watched.

    Stretches of one run that follow each other differ by what watching costs; whole runs, by far more than that.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn

    from workbench.core.strategy import Strategy
    from workbench.session.on_engine import shell as engine_shell
    from workbench.training.batches import Batch
    from workbench.training.runs.job import Job
    from workbench.training.runs.live_run import LiveRun

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    class WatchedInTurn(LiveRun):
        def _step(self, step: int, batch: Batch) -> None:
            is_watched = _is_watched(step // steps)
            self._listen = engine_shell.publish if is_watched else None
            self._commands = engine_shell.commands if is_watched else list
            self._has_listener = is_watched
            super()._step(step, batch)

    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(1024, 256, generator=generator), torch.randint(0, 10, (1024,), generator=generator))
    moments: list[float] = []

    def loss(output: Any, target: Any) -> torch.Tensor:
        moments.append(time.perf_counter())  # reporting happens between two steps, so no step's own time has it
        return F.cross_entropy(output, target)

    stretches = range(_WARM_STRETCHES, _WARM_STRETCHES + 2 * rounds)
    job = Job(make, data, loss, None, batch_size=128, num_steps=stretches.stop * steps + 1)
    WatchedInTurn(job, Strategy("*: data"), engine_shell.publish, engine_shell.commands).train()
    found: list[list[float]] = [[], []]
    for stretch in stretches:
        found[_is_watched(stretch)].append((moments[(stretch + 1) * steps] - moments[stretch * steps]) / steps)
    return found


def _is_watched(stretch: int) -> bool:
    return stretch % 4 in (1, 2)  # in both orders alike


def slowdown(rounds: int = ROUNDS, steps: int = STEPS) -> tuple[float, float, list[float]]:
    """Milliseconds of a step that nobody watches, the ratio of watched to unwatched, and it by pair of stretches."""
    from workbench.session.cluster import Session

    with Session(engines=2) as session:
        call = session.submit(train, rounds, steps)
        while not call.done():  # as the panel's poller does
            call.messages()
            time.sleep(0.1)
        unwatched, watched = call.result()[0]
    pairs = [a / b for a, b in zip(watched, unwatched, strict=True)]
    return statistics.median(unwatched) * 1e3, statistics.median(pairs), pairs


def watch_a_page(minutes: float) -> dict[str, float]:
    """The live view in a real JupyterLab: the kernel's share of a core, megabytes that the page's heap grows."""
    from playwright.sync_api import sync_playwright

    from tests.browser.page import IDLE
    from tests.browser.server import CHROMIUM_OPTIONS, running_lab, write_notebook

    steps = int((minutes * 60 + _WARM_UP_S) * STEPS_PER_S)
    cells = [*CELLS, LOOP.format(steps=steps, rate=STEPS_PER_S), "print('the loop is over')"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, sync_playwright() as playwright:
        folder = Path(name)
        write_notebook(folder / "live.ipynb", cells)
        with running_lab(folder, {"WORKBENCH_RUNS": str(folder / "runs")}) as server:
            browser = playwright.chromium.launch(executable_path=_chromium(), args=CHROMIUM_OPTIONS)
            page = browser.new_page(viewport={"width": 1680, "height": 1400})
            page.goto(server.notebook_url("live.ipynb"))
            page.wait_for_function(IDLE, timeout=90_000)
            page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); return 1 }")
            page.wait_for_function(_HAS_POINTS, timeout=180_000)
            return _measure(page, server.process, minutes)


def _measure(page: Any, server: subprocess.Popen[bytes], minutes: float) -> dict[str, float]:
    kernel = _kernel_of(server)
    session = page.context.new_cdp_session(page)

    def heap_mb() -> float:
        session.send("HeapProfiler.collectGarbage")
        return float(session.send("Runtime.getHeapUsage")["usedSize"]) / 1e6

    page.wait_for_timeout(_WARM_UP_S * 1000)
    heap, cpu, started = heap_mb(), _cpu_s(kernel), time.monotonic()
    page.wait_for_timeout((minutes * 60 - 1) * 1000)
    elapsed = time.monotonic() - started
    share = (_cpu_s(kernel) - cpu) / elapsed
    text = page.locator(".wb-live-view .wb-state").first.inner_text()
    reached = int("".join(c for c in text if c.isdigit()) or 0)
    return {"cpu": share, "heap_mb": heap_mb() - heap, "elapsed_s": elapsed, "steps": reached}


_HAS_POINTS = """() => [...document.querySelectorAll('.wb-live-view .js-plotly-plot')]
    .some(plot => plot.data?.some(trace => trace.name === 'this run, newest' && trace.x?.length > 5))"""


def _kernel_of(server: subprocess.Popen[bytes]) -> Any:
    import psutil

    children = psutil.Process(server.pid).children()
    return next(child for child in children if any("ipykernel" in word for word in child.cmdline()))


def _cpu_s(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _chromium() -> str:
    from tests.browser.server import find_chromium

    found = find_chromium()
    if found is None:
        raise SystemExit("benchmarks.live: no chromium found; --part training needs none")
    return found


def judge_training(rounds: int) -> None:
    """Measure what watching costs the training, and keep it."""
    step_ms, ratio, pairs = slowdown(rounds)
    low, _, high = statistics.quantiles(pairs)
    body = (
        f"2 engines, steps of {step_ms:.1f} ms, {len(pairs)} pairs of stretches of {STEPS} steps of one run, watched "
        f"and not, in turns, no browser: half of the pairs lie between {low:.3f} and {high:.3f}."
    )
    judged = Comparison("training slowed by collecting and publishing", 100 * (ratio - 1), SLOWDOWN)
    publish("live-training", "Training that is watched", body, [judged])


def judge_page(minutes: float) -> None:
    """Measure what watching costs kernel and page, and keep it."""
    page = watch_a_page(minutes)
    body = (
        f"{RANKS} engines report {STEPS_PER_S} steps/s with wb.log for {page['elapsed_s']:.0f} s, up to step "
        f"{page['steps']:.0f}. Heap after a forced collection, at the end against {_WARM_UP_S:.0f} s in."
    )
    cpu, heap = (
        Comparison("kernel", 100 * page["cpu"], CPU),
        Comparison("growth of the page's heap", page["heap_mb"], HEAP),
    )
    publish("live-page", "A page that watches a run", body, [cpu, heap])


def main() -> None:
    """Measure and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=0.5, help="how long the page is watched (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="pairs of stretches (default: %(default)s)")
    parser.add_argument("--part", choices=("training", "page"), help="only this part (default: both)")
    options = parser.parse_args()
    if options.part != "page":
        judge_training(options.rounds)
    if options.part != "training":
        judge_page(options.minutes)


if __name__ == "__main__":
    main()
