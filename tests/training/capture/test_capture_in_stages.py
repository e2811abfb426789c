"""A captured step under a pipeline schedule leaves what the uncaptured one leaves, bit for bit, on every rank."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole
from tests.models.zoo import make
from tests.processes import run_processes
from workbench.core.options import VIRTUAL_SCHEDULES
from workbench.testing import run_ranks


def filled(module):
    """A module with the same weights on all ranks, which as threads share torch's generator."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return module


STAGES_OF_TWO = "0: data@0; 2: data@1 | 2x1x1"
STAGES = {False: "[0-1]: data@0; [2-3]: data@1", True: "0: data@0; 1: data@1; 2: data@2; 3: data@3"}


def is_virtual(options):
    """Whether ranks have two stages."""
    return any(word in VIRTUAL_SCHEDULES for word in options.split())


def parallel_blocks(options):
    """Four blocks with dropout, on stages."""
    drop = partial(nn.Dropout, 0.3)
    blocks = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), drop(), nn.Linear(6, 4)) for _ in range(4)]
    return wb.parallelize(filled(nn.Sequential(*blocks)), f"{STAGES[is_virtual(options)]} | {options}")


def everywhere(values):
    """Whole, on every rank."""
    placement = wb.placement.all("cpu")
    return [value.detach().to_global(placement=placement, sbp="B").full_tensor() for value in values]


def train_in_stages(options, capture, num_steps=5):
    """Losses, weights and gradients of a network with dropout on both stages, from micro-batches of unlike sizes."""
    module = parallel_blocks(options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def step(x, y):
        optimizer.zero_grad()
        loss = wb.forward_backward(module, F.mse_loss, x, y)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        return loss

    run, generator = wb.capture(step) if capture else step, torch.Generator().manual_seed(0)
    found = [run(*torch.randn(2, 5, 4, generator=generator)) for _ in range(num_steps)]
    if capture:
        assert (run.num_recordings, run.num_replays) == (1, num_steps - 2)
        listing = str(run.traces[0])
        assert listing.count("aten.as_strided_") <= listing.count(
            "transport."
        )  # of placeholders, only what an exchange is given
    return everywhere([*found, *(value for p in module.parameters() for value in (p, p.grad))])


def add_up_in_stages(options, capture, num_steps=8):
    """Losses, gradients and weights where gradients add up over two steps; in the middle, parameters move."""
    module = parallel_blocks(options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(x, y):
        return wb.forward_backward(module, F.mse_loss, x, y)

    run, generator, found = wb.capture(step) if capture else step, torch.Generator().manual_seed(0), []
    for number in range(num_steps):
        found.append(run(*torch.randn(2, 5, 4, generator=generator)))
        found += [p.grad.clone() for p in module.parameters()]  # every rank asks for it
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        if number == num_steps // 2:
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()
    assert not capture or run.num_replays
    return everywhere([*found, *module.parameters()])


def assert_captured_in_stages(options, num_ranks=2, run=run_ranks, train=train_in_stages):
    plain, captured = (run(partial(train, options, capture), num_ranks) for capture in (False, True))
    for one, other in zip(plain, captured, strict=True):
        assert len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.sampled(5, start=2)
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "zero_bubble", "interleaved", "zero_bubble_v", pytest.param("gpipe", marks=pytest.mark.slow)],
)
def test_a_scheduled_step_is_captured(schedule):
    assert_captured_in_stages(f"2x1x1 mb=3 {schedule}")


def steps_between_which_gradients_go(habit, capture):
    """Losses where gradients of one stage come or go between the steps, or only some steps leave them."""
    freezes = habit == "a layer is frozen"
    module = wb.parallelize(filled(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))), STAGES_OF_TWO)
    scale = wb.ones(1, placement=module[2].weight.placement, sbp="B").requires_grad_()
    optimizer = torch.optim.SGD([*module.parameters(), scale], lr=0.1)

    def forward_backward(x, y):
        loss = F.mse_loss(module(x) * scale, y)
        loss.backward()
        return loss.detach()

    def step(x, y):
        if freezes:
            optimizer.zero_grad()
        loss = forward_backward(x, y)
        optimizer.step()
        if not freezes:
            optimizer.zero_grad()
        return loss

    run, accumulate = (wb.capture(step), wb.capture(forward_backward)) if capture else (step, forward_backward)
    generator, losses = torch.Generator().manual_seed(0), []
    for number in range(7):
        if number in (3, 5) and freezes:
            module[0].requires_grad_(number == 5)
        if not freezes:
            losses.append(accumulate(*torch.randn(2, 5, 4, generator=generator)))
            if number in (3, 5):
                module[0].zero_grad()
            if number == 4:
                scale.grad = None
        losses.append(run(*torch.randn(2, 5, 4, generator=generator)))
    assert not capture or run.num_replays >= 2
    assert freezes or all(parameter.grad is None for parameter in (*module.parameters(), scale))
    return everywhere([*losses, *module.parameters(), scale])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("habit", ["a layer is frozen", "gradients are left"])
def test_ranks_replay_or_record_together_whichever_stage_has_gradients(habit):
    plain, captured = (run_ranks(lambda how=how: steps_between_which_gradients_go(habit, how)) for how in (False, True))
    assert all(torch.equal(a, b) for ranks in zip(plain, captured, strict=True) for a, b in zip(*ranks, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_gradients_of_captured_steps_add_up_on_every_rank(schedule):
    assert_captured_in_stages(f"2x1x1 mb=3 {schedule}", train=add_up_in_stages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "2x2x1 mb=2 1f1b",
        "2x2x1 mb=2 1f1b zero=2",
        "2x2x1 mb=2 1f1b zero=3",
        "2x1x1 mb=2 1f1b bf16",
        "2x1x1 mb=2 1f1b recompute",
        "2x1x1 mb=3 zero_bubble recompute",
        "2x1x1 mb=5 zero_bubble_v recompute=cheap",
        "2x1x1 mb=5 dualpipe_v",
        "2x2x1 mb=3 dualpipe_v zero=3",
        "2x2x1 mb=2 interleaved zero=2",
        "2x2x1 mb=2 interleaved zero=3",
    ],
)
def test_options_of_a_scheduled_step_are_captured(options):
    assert_captured_in_stages(options, num_ranks=4 if "2x2" in options else 2)


def words_on_two_stages(models, capture):
    """Losses of steps of a model of transformers that gives its blocks a cache, which recomputation leaves out."""

    def program(rank):
        model = wb.parallelize(models[rank], "*: data; transformer.h.1: data@1 | 2x1x1 mb=2 1f1b recompute")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(words):
            optimizer.zero_grad()
            loss = wb.forward_backward(model, lambda out, targets: out.logits.logsumexp(-1).mean(), words, words)
            optimizer.step()
            return loss

        run = wb.capture(step) if capture else step
        words = torch.arange(24).view(4, 6)
        return [float(whole(run(words))) for _ in range(4)]

    return run_ranks(program, 2)


@pytest.mark.slow
def test_a_scheduled_step_of_transformers_that_recomputes_is_captured():
    plain, captured = (words_on_two_stages([make("gpt2", "sdpa") for _ in range(2)], how) for how in (False, True))
    assert plain == captured


@pytest.mark.slow
@pytest.mark.procs
def test_real_processes_capture_a_scheduled_step():
    assert_captured_in_stages("2x1x1 mb=3 1f1b", run=run_processes)
