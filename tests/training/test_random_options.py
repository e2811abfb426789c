"""Options that a seed puts together, on a model of transformers with attention and experts: one device's numbers."""

from __future__ import annotations

import random

import pytest

from tests.training.training_runs import Setup, assert_runs_agree, on_one_device, on_ranks, rows_of
from workbench.core.offload_kinds import CHOICES
from workbench.core.options import SCHEDULES
from workbench.core.strategy import Strategy
from workbench.training.offload import activations
from workbench.training.parallel import describe

SETUP = Setup("mixtral", "adamw", num_steps=2)
DEGREES = ["1x2x1", "1x1x2", "2x1x1", "1x4x1", "1x2x2", "1x1x4", "2x2x1", "2x1x2", "1x4x2", "2x2x2", "2x4x1"]


def strategy_of(seed: int) -> tuple[str, int]:
    """The text of a strategy, and its number of ranks."""
    chosen = random.Random(seed)
    degrees = DEGREES[seed % len(DEGREES)]
    pipeline, data, model = map(int, degrees.split("x"))
    words = [degrees, f"mb={chosen.choice([1, 2, 3])}"]
    schedule = chosen.choice([*SCHEDULES]) if pipeline > 1 else ""
    words += [schedule]
    zero = chosen.randrange(4)
    words += [f"zero={zero}"] if zero else []
    groups = [number for number in (2, 4) if data % number == 0]
    words += [f"shards={chosen.choice(groups)}"] if zero and groups and chosen.random() < 0.7 else []
    words += [f"context={chosen.choice(groups)}"] if groups and chosen.random() < 0.5 else []
    recompute = chosen.choice(["", "recompute", "recompute=cheap", "recompute=attention", "recompute=1"])
    words += [recompute]
    words += ["sequence"] if model > 1 and chosen.random() < 0.3 else []
    words += [f"offload={CHOICES[seed // 2 % 3]}"] if seed % 2 == 0 else []
    rows = chosen.choice([["data"], ["model"], ["data", "model"]])
    text = rows_of(SETUP.model(), " ".join(filter(None, words)), lambda: chosen.choice(rows))
    expert = chosen.choice(["; *: expert", "; *: expert", ""])
    before, _, options = text.partition(" | ")
    found, num_ranks = Strategy(f"{before}{expert} | {options}"), pipeline * data * model
    overlapping = found.with_options(overlap=chosen.choice([2, 3]))
    can_overlap = not overlapping.check(describe(SETUP.model()), num_ranks)
    return str(overlapping if can_overlap else found), num_ranks


@pytest.fixture(autouse=True)
def small_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a small model saves is large enough to be offloaded."""
    monkeypatch.setattr(activations, "MIN_BYTES", 64)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_training_equals_one_device(seed: int) -> None:
    text, num_ranks = strategy_of(seed)
    truth = on_one_device(SETUP, Strategy(text).options.num_micro_batches)
    for found in on_ranks(SETUP, text, num_ranks):
        assert_runs_agree(found, truth, SETUP)
