"""Exported scripts run under torchrun, and print the losses of one device."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import workbench as wb
from tests.docs.pages import ROOT
from tests.session.scripts.jobs import (
    BATCH_SIZE,
    NUM_STEPS,
    OwnLoss,
    Pairs,
    Unused,
    drawn,
    fixed_heads,
    fused,
    losses_of_one_device,
    mean_over_words,
    mlp,
    table,
    transformer,
    with_dropout,
    words_of,
)
from tests.timeouts import PROGRAM_TIMEOUT_S
from tests.warm import executable
from workbench.testing import run_ranks
from workbench.training.runs.job import Job
from workbench.training.runs.train import run_one_device

SPLIT = "*: data; blocks: model; words: model:row; head: model:column"
CASES: list[tuple[str, int, Callable[[], Any]]] = [
    ("*: data; blocks: model | 1x1x2", 2, transformer),  # the two that always run
    ("*: data | zero=3", 2, mlp),
    ("*: data", 2, mlp),
    ("*: data; 0: model; 2: model:row | 1x1x2", 2, mlp),
    ("*: data | zero=2 recompute", 2, transformer),
    ("*: data | zero=3 bf16", 2, mlp),
    (f"{SPLIT} | 1x1x2", 2, transformer),
    (f"{SPLIT} | 1x1x2", 2, fused),
    (f"{SPLIT} | 1x1x2", 2, fixed_heads),
    (f"{SPLIT} | 1x2x2", 4, transformer),
    (f"{SPLIT} | 1x2x2 zero=3 recompute", 4, transformer),
    ("*: data | zero=3 shards=2", 4, transformer),
]


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [executable(), *arguments],
        capture_output=True, text=True, cwd=folder, timeout=PROGRAM_TIMEOUT_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def losses_printed(text: str, num_ranks: int, folder: Path) -> list[float]:
    (folder / "script.py").write_text(text, encoding="utf-8")
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    done = python(folder, *launch, "script.py")
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]


def assert_runs(
    strategy: str, num_ranks: int, make: Callable[[], Any], library: Literal["workbench", "torch"], folder: Path
) -> None:
    text = wb.planner.script(strategy, num_ranks, **words_of(make), library=library)
    rel = 1e-2 if "bf16" in strategy else 1e-5
    assert losses_printed(text, num_ranks, folder) == pytest.approx(losses_of_one_device(make), rel=rel)


def test_another_order_of_samples_has_other_losses() -> None:
    first, other = losses_of_one_device(transformer), losses_of_one_device(transformer, seed=1)
    assert all(abs(one - two) > 1e-4 * one for one, two in zip(first, other, strict=True))


@pytest.mark.procs
def test_a_script_of_torch_has_the_losses_of_one_device(tmp_path: Path) -> None:
    assert_runs(*CASES[0], "torch", tmp_path)


@pytest.mark.procs
def test_a_script_of_the_workbench_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    strategy, num_ranks, make = CASES[1]
    text = wb.planner.script(strategy, num_ranks, **words_of(make))
    *right, further = losses_of_one_device(make, NUM_STEPS + 1)
    assert losses_printed(text, num_ranks, tmp_path) == pytest.approx(right, rel=1e-5)
    longer = text.replace(f"STEPS = {NUM_STEPS}", f"STEPS = {NUM_STEPS + 1}")
    assert losses_printed(longer, num_ranks, tmp_path) == pytest.approx([further], rel=1e-5)


def losses_of_the_comparison(make: Callable[[], Any], dataset: Any, loss_fn: Any) -> list[float]:
    def program() -> list[float]:
        return run_one_device(Job(make, dataset, loss_fn, None, BATCH_SIZE, NUM_STEPS)).losses

    return run_ranks(program, 1)[0]


@pytest.mark.procs
@pytest.mark.slow
def test_dropout_is_that_of_the_comparison(tmp_path: Path) -> None:
    text = wb.planner.script("*: data", 2, with_dropout, Pairs, mean_over_words, batch_size=BATCH_SIZE, steps=NUM_STEPS)
    right = losses_of_the_comparison(with_dropout, Pairs(), mean_over_words)
    assert losses_printed(text, 2, tmp_path) == pytest.approx(right, rel=1e-5)


@pytest.mark.procs
def test_a_dict_of_arrays_is_loaded_once_for_torch(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"batch_size": BATCH_SIZE, "steps": NUM_STEPS}
    text = wb.planner.script("*: data", 2, OwnLoss, table, library="torch", **numbers)
    right = losses_of_the_comparison(OwnLoss, table(), None)
    assert losses_printed(text, 2, tmp_path) == pytest.approx(right, rel=1e-5)
    assert text.count("dataset()") == 1
    (tmp_path / "few.py").write_text(text.replace("BATCH_SIZE = 8 ", "BATCH_SIZE = 80 "))
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = python(tmp_path, "few.py", **one_rank)
    assert done.returncode != 0 and "BATCH_SIZE is 80, of 24 samples" in done.stderr


@pytest.mark.procs
@pytest.mark.parametrize("library", ["torch", pytest.param("workbench", marks=pytest.mark.slow)])
def test_ranks_draw_the_same_samples_and_parameters_may_be_unused(library: Any, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"batch_size": BATCH_SIZE, "steps": NUM_STEPS, "library": library}
    text = wb.planner.script("*: data", 2, Unused, drawn, **numbers)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    Unused()  # is made before the samples
    right = losses_of_the_comparison(Unused, drawn(), None)
    assert losses_printed(text, 2, tmp_path) == pytest.approx(right, rel=1e-5)


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_ranks", "make"), CASES[1:])
def test_scripts_of_torch(strategy: str, num_ranks: int, make: Callable[[], Any], tmp_path: Path) -> None:
    assert_runs(strategy, num_ranks, make, "torch", tmp_path)


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "make"),
    [*CASES[2:], ("pipeline | mb=4", 2, transformer), ("hybrid", 4, transformer)],
)
def test_scripts_of_the_workbench(strategy: str, num_ranks: int, make: Callable[[], Any], tmp_path: Path) -> None:
    assert_runs(strategy, num_ranks, make, "workbench", tmp_path)
