"""Verdicts on runs: false alarms over forty models, planted mistakes that are found, and what checking costs.

    python -m benchmarks.equality
    python -m benchmarks.equality --only resnet llama

Every model trains 20 steps under four strategies, in 32 bits and in bf16, on two engines with a thread each. None of
these runs is wrong, so each mark ✗ is a false alarm. Then twenty mistakes are planted in what a strategy's run does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from benchmarks.equality_models import Subject, images, resnet, subjects, words
from benchmarks.reporting import Comparison, Target, publish, table
from workbench.core.metrics import RunRecord
from workbench.session.comparison.checker import Checker

STRATEGIES = ("*: data", "*: model", "*: data | zero=3", "pipeline")
ENGINES, STEPS, BATCH = 2, 20, 16
NO_FALSE_ALARM = Target(0, unit="false alarms")
COST = Target(10, unit="%")


class Clock:
    """Seconds spent on verdicts."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this runs, verdicts are timed."""
        original = Checker.verdict

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args)
            finally:
                self.seconds += time.perf_counter() - started

        Checker.verdict = timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Checker.verdict = original  # type: ignore[method-assign]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """As ``wb.compare`` takes by default."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """As most transformers are trained."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def compared(session: Any, subject: Subject, strategies: Any, optimizer_fn: Any) -> list[RunRecord]:
    """The runs of a comparison."""
    result = wb.compare(
        subject.make, subject.data, subject.loss_fn, strategies, optimizer_fn=optimizer_fn, batch_size=BATCH,
        steps=STEPS, session=session, progress=False, keep=False,
    )  # fmt: skip
    return result.runs


def in_both_precisions() -> dict[str, str]:
    """The strategies, each in 32 bits and in bf16."""
    return {text: text for text in STRATEGIES} | {
        f"{text}, bf16": f"{text} bf16" if "|" in text else f"{text} | bf16" for text in STRATEGIES
    }


# ---- planted mistakes ---------------------------------------------------------------------------------------------


def is_spread(value: Any) -> bool:
    """Whether this is a strategy's run; one device may be a world of one rank."""
    return isinstance(value, wb.GlobalTensor) and wb.world_size() > 1


def wrong_optimizer(
    kind: type[torch.optim.Optimizer], right: dict[str, Any], wrong: dict[str, Any], parameters: Any
) -> Any:
    """An optimizer that has other options where parameters are spread."""
    parameters = list(parameters)
    return kind(parameters, **(right | (wrong if is_spread(parameters[0]) else {})))


class Language(nn.Module):
    """A small language model that does one thing otherwise where it is spread."""

    def __init__(self, mistake: str = "", rate: float = 0.0) -> None:
        super().__init__()
        self.mistake = mistake
        self.words, self.attention = nn.Embedding(64, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.mix, self.norm, self.dropout = nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(rate)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words to classes."""
        mistake = self.mistake if is_spread(self.words.weight) else ""
        hidden = self.words(x)
        hidden = hidden.detach() + 0 * hidden if mistake == "no gradient of an embedding" else hidden
        if mistake == "dropout drawn twice":
            self.dropout(hidden)
        hidden = self.dropout(hidden)
        attended = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = hidden + attended * (1.01 if mistake == "attention scaled by 1.01" else 1)
        eps = 1e-3 if mistake == "another eps in a norm" else 1e-5
        hidden = F.layer_norm(hidden, (16,), self.norm.weight, self.norm.bias, eps)
        inner = F.gelu(self.mix(hidden), approximate="tanh" if mistake == "another gelu" else "none")
        if mistake == "a gradient halved":
            inner = (inner + inner.detach()) / 2
        if mistake == "a product in bfloat16":
            inner = inner.bfloat16().float()
        return self.head(inner[:, :-1] if mistake == "a word forgotten" else inner).mean(1)


def wrong_loss(kind: str, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A cross entropy that is another one where it is spread."""
    kind = kind if is_spread(output) else ""
    loss = F.cross_entropy(output, targets, label_smoothing=0.01 if kind == "labels smoothed" else 0.0)
    return loss * (2 if kind == "a loss counted twice" else 1)


class Norms(nn.Module):
    """Batch norm whose statistics are wrong where it is spread."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to classes."""
        x = self.conv(x)
        mistake = self.mistake if is_spread(x) else ""
        self.norm.momentum = 0.11 if mistake == "running statistics, momentum 0.11" else 0.1
        if mistake == "batch norm over halves of the batch":
            half = x.shape[0] // 2
            x = torch.cat([self.norm(x[:half]), self.norm(x[half:])])
        else:
            x = self.norm(x)
        return self.head(F.relu(x).mean((2, 3)))


class LeavesOneOut(torch.optim.SGD):
    """Leaves out the fifth step where parameters are spread."""

    def step(self, closure: Any = None) -> Any:
        """All steps but one."""
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 5 and is_spread(self.param_groups[0]["params"][0]):
            return None
        return super().step(closure)


SGD, ADAMW = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}, {"lr": 1e-3, "betas": (0.9, 0.999)}


def mistakes() -> dict[str, tuple[Subject, Any]]:
    """Twenty of them: what is trained, and the optimizer."""
    language = Subject(Language, words(), F.cross_entropy)
    pictures = Subject(resnet, images(), F.cross_entropy)
    found: dict[str, tuple[Subject, Any]] = {}
    for name, subject in (("language model", language), ("resnet", pictures)):
        found[f"learning rate off by 1%, {name}"] = (
            subject,
            partial(wrong_optimizer, torch.optim.SGD, SGD, {"lr": 0.101}),
        )
        found[f"no weight decay, {name}"] = (
            subject,
            partial(wrong_optimizer, torch.optim.SGD, SGD, {"weight_decay": 0.0}),
        )
        found[f"momentum 0.89, {name}"] = subject, partial(wrong_optimizer, torch.optim.SGD, SGD, {"momentum": 0.89})
        found[f"AdamW, learning rate off by 1%, {name}"] = (
            subject,
            partial(wrong_optimizer, torch.optim.AdamW, ADAMW, {"lr": 1.01e-3}),
        )
        found[f"a step left out, {name}"] = subject, partial(LeavesOneOut, lr=0.1, momentum=0.9)
    for name in (
        "no gradient of an embedding", "dropout drawn twice", "attention scaled by 1.01", "another eps in a norm",
        "another gelu", "a gradient halved", "a product in bfloat16",
    ):  # fmt: skip
        rate = 0.1 if "dropout" in name else 0.0
        found[name] = Subject(partial(Language, name, rate), words(), F.cross_entropy), sgd
    found["a loss counted twice"] = Subject(Language, words(), partial(wrong_loss, "a loss counted twice")), sgd
    for name in ("running statistics, momentum 0.11", "batch norm over halves of the batch"):
        found[name] = Subject(partial(Norms, name), images(), F.cross_entropy), sgd
    return found


# ---- the benchmark --------------------------------------------------------------------------------------------------


def main() -> int:
    """Run and publish; the exit code says whether the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="names of models, without planted mistakes")
    args = parser.parse_args()
    chosen = {name: subject for name, subject in subjects().items() if not args.only or name in args.only}
    clock, rows, alarms, by = Clock(), [], [], Counter[str]()
    num_runs, not_run, spent_s = 0, [], 0.0
    with wb.Session(ENGINES) as session, clock.running():
        for name, subject in chosen.items():
            started, checked = time.perf_counter(), clock.seconds
            runs = compared(session, subject, in_both_precisions(), adamw if subject.loss_fn is None else sgd)
            total = time.perf_counter() - started
            spent_s += total
            done = [run for run in runs if run.error is None]
            num_runs += len(done)
            not_run += [f"{name}, {run.name}: {run.error.splitlines()[0]}" for run in runs if run.error is not None]
            alarms += [f"{name}, {run.name}: {run.verdict.text}" for run in done if not run.equal]
            by.update(run.verdict.by for run in done)
            largest = max((run.loss_difference or 0.0 for run in done), default=0.0)
            counts = ", ".join(f"{what} {count}" for what, count in Counter(run.verdict.by for run in done).items())
            share = (clock.seconds - checked) / total
            rows.append(
                [
                    name,
                    str(len(done)),
                    str(sum(not run.equal for run in done)),
                    f"{largest:.0e}",
                    counts,
                    f"{share:.0%}",
                ]
            )
            print(rows[-1], flush=True)
        missed = [] if args.only else planted(session)
    if args.only:
        print(*alarms, *not_run, sep="\n")
        return 1 if alarms else 0
    return report(rows, num_runs, alarms, not_run, missed, by, clock.seconds, spent_s)


def planted(session: Any) -> list[str]:
    """The mistakes that no verdict has found."""
    missed = []
    for name, (subject, optimizer_fn) in mistakes().items():
        (run,) = compared(session, subject, ["*: data"], optimizer_fn)
        print(name, run.equal, run.verdict.text, flush=True)
        if run.equal is not False:
            missed.append(f"{name}: {run.error or run.verdict.text}")
    return missed


def report(
    rows: list[list[str]], num_runs: int, alarms: list[str], not_run: list[str], missed: list[str], by: Counter[str],
    checked_s: float, spent_s: float,
) -> int:  # fmt: skip
    """Publish the figures."""
    num_planted = len(mistakes())
    counts = ", ".join(f"{count} by {what}" for what, count in by.most_common())
    notes = [f"* {line}" for line in (*alarms, *missed, *not_run)]
    head = (
        f"{len(rows)} models, {len(STRATEGIES)} strategies, 32 bits and bf16: {num_runs} runs of {STEPS} steps on "
        f"{ENGINES} engines. Verdicts: {counts}."
    )
    header = ["model", "runs", "false alarms", "largest loss difference", "decided by", "time on verdicts"]
    body = "\n\n".join([head, table(header, rows, 1), *(["\n".join(notes)] if notes else [])])
    judged = [
        Comparison(f"false alarms in {num_runs} runs", len(alarms), NO_FALSE_ALARM),
        Comparison(
            "planted mistakes that are found",
            num_planted - len(missed),
            Target(num_planted, at_least=True, unit=f"of {num_planted}"),
        ),
        Comparison("time on verdicts, of a comparison", 100 * checked_s / spent_s, COST),
    ]
    return 0 if publish("equality", "Verdicts on runs", body, judged) else 1


if __name__ == "__main__":
    sys.exit(main())
