"""``context=``: slices of the sequence through whole blocks of unmodified models train like one device."""

import copy
import functools

import pytest
import torch

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from tests.models.training import whole
from tests.training.training_runs import Setup, assert_trains_like_one_device, rows_of
from workbench.core.strategy import Strategy
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.parallel import describe

WORDS = torch.randint(0, 48, (4, 26), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = WORDS[:, :-1], WORDS[:, 1:]


@functools.cache
def gpt():
    torch.manual_seed(0)
    return GPT(96, 2, 48, 32)


def step(model, loss_fn=next_word_loss, inputs=INPUTS, targets=TARGETS):
    """The loss and the gradients of a step, whole."""
    current().context.generator = torch.Generator().manual_seed(0)
    loss = wb.forward_backward(model, loss_fn, inputs, targets)
    return [whole(loss), *(whole(parameter.grad) for parameter in model.parameters())]


def test_activations_are_slices_of_the_sequence():
    """Parameters stay whole. Positions that the model counts itself are logical."""
    layouts = {}

    def program():
        model = wb.parallelize(copy.deepcopy(gpt()), "*: data | context=2")
        for name, layer in model.named_modules():
            if wb.rank() == 0 and name:
                layer.register_forward_hook(lambda _, __, out, name=name: layouts.update({name: out}))
        assert {tuple(map(str, parameter.sbp)) for parameter in model.parameters()} == {("B",)}
        found = step(model, inputs=INPUTS[:3], targets=TARGETS[:3])
        return found, {name: (str(out.sbp[0]), out.to_local().shape[1]) for name, out in layouts.items()}

    truth = run_ranks(
        lambda: step(wb.parallelize(copy.deepcopy(gpt()), "*: data"), inputs=INPUTS[:3], targets=TARGETS[:3]), 1
    )[0]
    (found, split), _ = run_ranks(program, 2)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    positions = split.pop("positions")
    assert positions[0] == "B"
    assert set(split.values()) == {("S(1)", 13)}


CASES = [
    ("gpt2", "data", "1x2x1 context=2", 2),
    ("gpt2", "data", "1x4x1 context=4 mb=2", 4),
    ("llama", "data", "1x4x1 context=2 zero=3 recompute", 4),
    ("llama", "model", "1x2x2 context=2 sequence", 4),
    ("gpt2", "data", "2x2x1 mb=3 1f1b context=2", 4),
    ("gpt2", "data", "2x2x1 mb=3 zero_bubble context=2 zero=1", 4),
    ("cnn", "data", "1x2x1 context=2", 2),
    ("mlp", "model", "1x2x2 context=2", 4),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("kind", "parallel", "options", "num_ranks"), CASES)
def test_a_few_steps_are_those_of_one_device(kind, parallel, options, num_ranks):
    """With dropout, shifted labels, an odd number of samples, and models without a sequence."""
    assert_trains_like_one_device(Setup(kind, num_steps=2), parallel, options, num_ranks)


def test_blocks_pass_ranks_of_several_stages_in_16_bits():
    """Results of blocks in 16 bits, and in 32 the sums by which they are joined, in one exchange."""

    def on_ranks(strategy, num_ranks):
        return run_ranks(lambda: step(wb.parallelize(copy.deepcopy(gpt()), strategy)), num_ranks)

    staged = rows_of(gpt(), "2x2x1 mb=2 interleaved context=2 bf16", lambda: "data")
    truth = on_ranks("*: data | 1x2x1 mb=2 context=2 bf16", 2)[0]
    for found in on_ranks(staged, 4):
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)


def test_activations_take_a_quarter_on_four_ranks():
    """One text, several texts that all ranks can have, and too few for that."""
    held, made = {}, GPT(64, 2, 48, 128)
    words = torch.randint(0, 48, (4, 129), generator=torch.Generator().manual_seed(0))

    def program():
        for count in (1, 2, 4):
            model = wb.parallelize(copy.deepcopy(made), f"*: data{' | context=4' * (wb.world_size() > 1)}")
            with wb.debug.memory_report(model) as report:
                step(model, inputs=words[:count, :-1], targets=words[:count, 1:])
            held[wb.world_size(), count] = max(kinds["activations"] for kinds in report.to_dict().values())

    for num_ranks in (1, 4):
        run_ranks(program, num_ranks)
    for count in (1, 2, 4):
        assert held[4, count] <= 0.30 * held[1, count], count


def test_mistakes_are_named_together():
    layers = describe(gpt())
    with pytest.raises(wb.errors.StrategyError) as raised:
        Strategy("*: data; blok: data | 1x6x1 context=4").resolve(layers, 8)
    text = str(raised.value)
    assert "no layer matches 'blok'" in text and "= 6, but there are 8 ranks" in text
    assert "context=4, but a data degree of 6" in text and "use context=2" in text
    for word in ("context=0", "context=x"):
        with pytest.raises(wb.errors.StrategyError, match="context="):
            Strategy(f"*: data | {word}")
    assert str(Strategy("*: data | context=2 zero=1").options) == "zero=1 context=2"
    assert Strategy("*: data").with_options(context=2) == Strategy("*: data | context=2")
    assert Strategy("*: model | context=2").resolve(layers, 8).degrees == (1, 2, 4)
