"""Options of a strategy in random combinations, on a dense model and a mixture of experts, against one device."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from dataclasses import dataclass

import pytest
import torch

import workbench as wb
from tests.models.training import whole
from tests.training.small_gpt import LENGTH, PARTS, WORDS, SmallGPT
from workbench.core.offload_kinds import CHOICES
from workbench.core.options import SCHEDULES, V_SCHEDULES, VIRTUAL_SCHEDULES, Options
from workbench.core.strategy import Strategy
from workbench.errors import StrategyError
from workbench.tensors.dispatch.fallback import FallbackWarning
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.dry_run import dry_run
from workbench.training.offload import activations
from workbench.training.parallel import describe

NUM_STEPS, SAMPLES = 8, 7
QUICK = (8,)
"""Seeds of ``make test``: experts, a pipeline, ZeRO and recomputation."""
LIMIT = 1e-9
"""Of losses and weights, in 64 bits."""
MOST_REFUSED = 0.4
"""Of all draws: degrees, groups and blocks are drawn whether they fit each other or not."""
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
}


@dataclass(frozen=True)
class Combination:
    """What is trained, with what, and how it is spread."""

    with_experts: bool
    optimizer: str
    strategy: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{'experts' if self.with_experts else 'dense'} {self.optimizer} {self.strategy} on {self.num_ranks}"


def draw(chosen: random.Random) -> Combination:
    """A combination, which may be refused."""
    with_experts, num_ranks = chosen.random() < 0.5, chosen.choice([4, 4, 4, 4, 8])
    degrees, pipeline, data, model = _degrees(chosen, num_ranks)
    words = [degrees, f"mb={chosen.choice([1, 2, 3, 4])}"]
    schedule = chosen.choice(SCHEDULES) if pipeline > 1 else ""
    zero = chosen.randrange(4)
    words += [schedule, f"zero={zero}" * bool(zero)]
    words += [f"shards={chosen.choice([2, 4])}"] * (zero > 0 and data > 1 and chosen.random() < 0.4)
    words += [f"context={chosen.choice([2, 2, 4])}"] * (data > 1 and chosen.random() < 0.4)
    words += [
        chosen.choice(["", "", "recompute", "recompute=cheap", "recompute=attention", "recompute=1", "recompute=4"])
    ]
    words += [chosen.choice(["", "", *(f"offload={kind}" for kind in CHOICES)])]
    words += ["sequence"] * (model > 1 and chosen.random() < 0.4)
    words += [f"overlap={chosen.choice([2, 3])}"] * (model > 1 and chosen.random() < 0.3)
    num_stages = pipeline * (
        2 if schedule in V_SCHEDULES else chosen.choice([1, 2]) if schedule in VIRTUAL_SCHEDULES else 1
    )
    expert = chosen.choice(["", "*: expert", "*: expert:2"]) if with_experts else ""
    rows = "; ".join(filter(None, [*_rows(chosen, num_stages), expert]))
    text = f"{rows} | {' '.join(filter(None, words))}"
    return Combination(with_experts, chosen.choice(sorted(OPTIMIZERS)), text, num_ranks)


def _degrees(chosen: random.Random, num_ranks: int) -> tuple[str, int, int, int]:
    """As text, and the degrees of the pipeline, of data and of the model; those of stages may differ."""
    if num_ranks == 4 and chosen.random() < 0.1:
        return chosen.choice(["1x2+2x1", "2x1+1x2", "1x3+1x1"]), 2, 2, 2
    fitting = [number for number in (1, 2, 4, 8) if num_ranks % number == 0]
    pipeline = chosen.choice([number for number in fitting if number <= 4])
    data = chosen.choice([number for number in fitting if num_ranks // pipeline % number == 0])
    model = num_ranks // pipeline // data
    return f"{pipeline}x{data}x{model}", pipeline, data, model


def _rows(chosen: random.Random, num_stages: int) -> list[str]:
    """A choice for each part, or one for all, and stages of one part and more."""
    kinds = chosen.choice([["data"], ["model"], ["data", "model"]])
    cuts = sorted(chosen.sample(range(1, len(PARTS)), min(num_stages, len(PARTS)) - 1))
    rows = ["*: data"]
    for number, part in enumerate(PARTS):
        stage = sum(cut <= number for cut in cuts)
        rows.append(f"{part}*: {chosen.choice(kinds)}" + f"@{stage}" * (num_stages > 1))
    return rows


@functools.cache
def _built(with_experts: bool) -> SmallGPT:
    torch.manual_seed(0)
    return SmallGPT(with_experts).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return words[:, :-1], words[:, 1:]


@dataclass
class Numbers:
    """Losses of all steps, weights after the last, and the bytes that this rank sent in the first."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    sent_bytes: int = 0


def train(combination: Combination, model: torch.nn.Module) -> Numbers:
    """Every rank calls it."""
    model, world = wb.parallelize(model, combination.strategy), current()
    optimizer = OPTIMIZERS[combination.optimizer](model.parameters())
    world.context.generator = generator = torch.Generator()
    found = Numbers([], {})
    for step in range(NUM_STEPS):
        generator.manual_seed(step)
        optimizer.zero_grad()
        world.traffic.reset()
        loss = wb.forward_backward(model, inputs=batch(step))
        optimizer.step()
        found.sent_bytes = found.sent_bytes if step else world.traffic.sent_bytes
        found.losses.append(float(whole(loss)))
    found.weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return found


def on_ranks(combination: Combination) -> list[Numbers]:
    """Of every rank.

    Raises:
        StrategyError: the strategy is refused.
    """
    models = [copy.deepcopy(_built(combination.with_experts)) for _ in range(combination.num_ranks)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return run_ranks(lambda rank: train(combination, models[rank]), combination.num_ranks)


@functools.cache
def on_one_device(with_experts: bool, optimizer: str, num_micro_batches: int) -> Numbers:
    return on_ranks(Combination(with_experts, optimizer, f"*: data | mb={num_micro_batches}", 1))[0]


def assert_equal(found: Numbers, truth: Numbers) -> None:
    """Losses and weights."""
    for step, (ours, theirs) in enumerate(zip(found.losses, truth.losses, strict=True)):
        assert abs(ours - theirs) <= LIMIT * abs(theirs), f"loss of step {step}: {ours} instead of {theirs}"
    assert found.weights.keys() == truth.weights.keys()
    for name, weight in truth.weights.items():
        assert float((found.weights[name] - weight).abs().max()) <= 100 * LIMIT, name


def assert_trains_like_one_device(combination: Combination) -> None:
    """All ranks. A dense model sends the bytes of a dry run; those of experts follow the choices of routers.

    Not where blocks run again: they box their inputs again or not, as hooks of saved tensors are around them or not.

    Raises:
        StrategyError: the strategy is refused.
    """
    found = on_ranks(combination)
    options = Strategy(combination.strategy).options
    truth = on_one_device(combination.with_experts, combination.optimizer, options.num_micro_batches)
    for numbers in found:
        assert_equal(numbers, truth)
    if not combination.with_experts and not options.recompute:
        make_optimizer = OPTIMIZERS[combination.optimizer]
        make = lambda: SmallGPT(False).double()  # noqa: E731
        run = dry_run(make, combination.strategy, combination.num_ranks, batch(0), optimizer_fn=make_optimizer)
        assert [numbers.sent_bytes for numbers in found] == list(run.sent_bytes)


@pytest.fixture(autouse=True)
def small_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a small model saves is large enough to be offloaded."""
    monkeypatch.setattr(activations, "MIN_BYTES", 64)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in range(30)])
def test_training_equals_one_device(seed: int) -> None:
    """A draw that is refused is drawn again."""
    chosen, refused = random.Random(seed), list[str]()
    while len(refused) < 8:
        combination = draw(chosen)
        try:
            return assert_trains_like_one_device(combination)
        except StrategyError as error:
            refused.append(f"{combination}: {error}")
    pytest.fail("\n".join(["all are refused:", *refused]))


def test_few_draws_are_refused_and_the_others_have_every_option() -> None:
    layers = {with_experts: describe(_built(with_experts)) for with_experts in (False, True)}
    found, num_draws = list[Options](), 300
    for seed in range(num_draws):
        combination = draw(random.Random(seed))
        try:
            resolved = Strategy(combination.strategy).resolve(layers[combination.with_experts], combination.num_ranks)
        except StrategyError:
            continue
        found.append(resolved.options)
    assert len(found) >= (1 - MOST_REFUSED) * num_draws
    assert {options.schedule for options in found} >= {*SCHEDULES}
    assert {options.zero for options in found} == {0, 1, 2, 3}
    assert {options.offload for options in found} == {"", *CHOICES}
    assert {options.recompute for options in found} == {"", "full", "cheap", "attention", "1", "4"}
    assert {options.context for options in found} == {1, 2, 4} and any(options.shards for options in found)
    assert any(options.sequence for options in found) and any(options.overlap > 1 for options in found)
    assert any(options.widths for options in found)


def test_a_wrong_number_is_noticed() -> None:
    right = Numbers([2.0, 1.0], {"weight": torch.ones(2)})
    assert_equal(right, right)
    for wrong in (Numbers([2.0, 1.0 + 1e-8], right.weights), Numbers(right.losses, {"weight": torch.ones(2) + 1e-6})):
        with pytest.raises(AssertionError):
            assert_equal(wrong, right)
