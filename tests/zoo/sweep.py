"""Runs models under strategies, each model in a process of its own, and keeps what came of them as lines of JSON."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.zoo.judge import STRATEGIES, TOLERANCE, Outcome, Subject, judge
from tests.zoo.model import Model

LIMIT = 240.0
"""Seconds for one model with all its strategies."""


def sweep(
    models: Iterable[Model], out: Path, strategies: Iterable[str] = tuple(STRATEGIES), num_processes: int = 2
) -> None:
    """Append one line per model to ``out``: its name, seconds, and its outcome per strategy."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(list(models))), {}
    total, done = len(waiting), 0
    with out.open("a") as lines:
        while waiting or running:
            while waiting and len(running) < num_processes:
                model = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(model, strategies, sender), daemon=True)
                process.start()
                sender.close()
                running[process] = (model, receiver, time.monotonic(), {})
            for process, (model, receiver, start, found) in list(running.items()):
                ended = _receive(receiver, found)
                late = time.monotonic() - start > LIMIT
                if not ended and not late and process.is_alive():
                    continue
                if not ended and (late or process.exitcode):
                    for name in strategies:
                        why = f"no result in {LIMIT:.0f} s" if late else f"exit code {process.exitcode}"
                        found.setdefault(name, asdict(Outcome("unclear", why)))
                        break
                process.kill()
                process.join()
                del running[process]
                done += 1
                seconds = round(time.monotonic() - start, 1)
                lines.write(
                    json.dumps({"name": model.name, "library": model.library, "seconds": seconds, **found}) + "\n"
                )
                lines.flush()
                kinds = " ".join(f"{k}={v['kind'] if isinstance(v, dict) else v[:90]}" for k, v in found.items())
                print(f"{done}/{total} {model.name} {seconds} s: {kinds}", flush=True)  # noqa: T201
            time.sleep(0.05)


def _receive(receiver: Any, found: dict[str, Any]) -> bool:
    """Take what has come; True at the end."""
    try:
        while receiver.poll():
            item = receiver.recv()
            if item is None:
                return True
            found.update(item)
    except EOFError:
        pass
    return False


def _run(model: Model, strategies: Iterable[str], sender: Any) -> None:
    for item in outcomes(model, strategies):
        sender.send(item)
    sender.send(None)


def outcomes(model: Model, strategies: Iterable[str] = tuple(STRATEGIES)) -> Iterator[dict[str, Any]]:
    """Of each strategy in turn; or why the model does not run on one device, under "plain"."""
    import torch

    torch.set_num_threads(1)
    try:
        subject = Subject.of(model)
        try:
            truth = {1: subject.on_one_device()}
        except RuntimeError:
            subject = Subject.of(model, torch.float32)
            truth = {1: subject.on_one_device()}
        again = subject.on_one_device()
    except Exception as error:  # noqa: BLE001 - a small configuration that does not fit, an input that it does not take
        yield {"plain": f"{type(error).__name__}: {error}"[:300]}
        return
    if truth[1].losses != again.losses or not all(map(torch.isfinite, map(torch.tensor, again.losses))):
        yield {"plain": f"not the same numbers twice, or not finite: {truth[1].losses}, {again.losses}"}
        return
    noise = {}
    for name in strategies:
        strategy, num_ranks, num_parts = STRATEGIES[name]
        try:
            if num_parts not in truth:
                truth[num_parts] = subject.on_one_device(num_parts)
            if num_parts not in noise:
                noise[num_parts] = subject.own_noise(truth[num_parts], num_parts)
        except Exception as error:  # noqa: BLE001 - too few samples, say
            yield {name: asdict(Outcome("not run", f"one device fails on {num_parts} micro-batches: {error}"[:300]))}
            continue
        if noise[num_parts] > TOLERANCE / 3:
            why = f"a rounding unit in each weight changes one device by {noise[num_parts]:.0e}"
            yield {name: asdict(Outcome("not run", why))}
            continue
        yield {name: asdict(judge(subject, strategy, num_ranks, truth[num_parts]))}
