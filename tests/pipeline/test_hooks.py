"""Hooks on parameters in scheduled steps: what they read and change is what they would on one device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import workbench as wb
from tests.pipeline.test_placeholder_forward import ROWS, Block, Model
from workbench.errors import StrategyError
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.testing import run_ranks

STAGES = "0: data@0; 1: data@0; 3: data@1; 4: data@1 | "
STRATEGIES = {
    "2x1x1 mb=3 1f1b": 2,
    "2x1x1 mb=3 zero_bubble": 2,
    "2x2x1 mb=3 1f1b zero=2": 4,
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)).double()


def look(model):
    """After accumulation, read the gradient so far."""
    seen = {name: [] for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append(p.grad.square().sum()))
    return seen


def clip(model):
    """After accumulation, change the gradient in place."""

    def shorten(parameter):
        parameter.grad.div_(parameter.grad.norm() + 0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(shorten)
    return {}


def scale(model):
    """Before accumulation, give another gradient, from a norm that is the whole tensor's."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / (grad.norm() + 0.1))
    return {}


def whole(tensor):
    return value_on_all_ranks(tensor).clone() if isinstance(tensor, wb.GlobalTensor) else tensor.clone()


def steps(model, hooks, run):
    found, seen = [], hooks(model)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        batch = [torch.randn(7, width, generator=generator, dtype=torch.float64) for width in (6, 4)]
        model.zero_grad()
        run(model, *batch)
        found += [whole(parameter.grad) for parameter in model.parameters()]
    return found + [whole(value) for values in seen.values() for value in values]


def micro_batches(model, inputs, targets):
    for x, y in zip(inputs.tensor_split(3), targets.tensor_split(3), strict=True):
        (F.mse_loss(model(x), y) * len(x) / len(inputs)).backward()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hooks", [look, clip, scale])
def test_hooks_see_and_change_the_gradients_of_one_device(strategy, hooks):
    truth = steps(make(), hooks, micro_batches)
    num_ranks = STRATEGIES[strategy]
    models = [make() for _ in range(num_ranks)]

    def program(rank):
        model = wb.parallelize(models[rank], STAGES + strategy)
        return steps(model, hooks, lambda model, *batch: wb.forward_backward(model, F.mse_loss, *batch))

    for found in run_ranks(program, num_ranks):
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_would_not_be_called_are_refused(kind):
    """Each stage's gradients come from its own view of a parameter, on which nobody has put the hook."""
    models = [make() for _ in range(2)]
    batch = torch.ones(7, 6, dtype=torch.float64), torch.ones(7, 4, dtype=torch.float64)
    strategy = "0: data@0; 1: data@1; 3: data@2; 4: data@3 | 2x1x1 mb=2 interleaved"

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        wb.forward_backward(model, F.mse_loss, *batch)
        handle = getattr(model[3].weight, kind)(lambda _: None)
        with pytest.raises(StrategyError, match=r"3\.weight: hooks registered: 1, called: 0.*1f1b"):
            wb.forward_backward(model, F.mse_loss, *batch)
        handle.remove()
        wb.forward_backward(model, F.mse_loss, *batch)

    run_ranks(program, 2)


def test_hooks_of_parameters_are_called_on_every_rank_for_every_micro_batch():
    torch.manual_seed(0)
    one = Model(Block)
    models = [copy.deepcopy(one) for _ in range(3)]
    inputs, targets = torch.randn(6, 8), torch.arange(6) % 4

    def program(rank):
        model, calls = wb.parallelize(models[rank], ROWS), []
        wb.forward_backward(model, F.cross_entropy, inputs, targets)
        model.b.one.weight.register_hook(lambda grad: calls.append("hook"))
        for _ in range(2):
            wb.forward_backward(model, F.cross_entropy, inputs, targets)
        return calls

    assert run_ranks(program, 3) == [["hook"] * 4] * 3


def test_hooks_of_all_modules_are_called_in_every_micro_batch():
    torch.manual_seed(0)
    one = Model(Block).eval()
    models = [copy.deepcopy(one) for _ in range(3)]
    inputs, targets = torch.randn(6, 8), torch.arange(6) % 4

    def scaled(model, run):
        """Under a hook that also halves what layers inside of blocks return; (loss, calls, gradients)."""
        names, calls = {id(part): name for name, part in model.named_modules() if isinstance(part, nn.Linear)}, []

        def halve(module, args, output):
            if id(module) not in names:  # the other ranks are threads
                return None
            calls.append(names[id(module)])
            return output / 2

        handle = register_module_forward_hook(halve)
        loss = run(model)
        handle.remove()
        return loss, calls, [whole(parameter.grad) for parameter in model.parameters()]

    def micro_batches(model):
        losses = [F.cross_entropy(model(x), y) / 2 for x, y in zip(inputs.split(3), targets.split(3), strict=True)]
        sum(losses).backward()
        return sum(losses).item()

    def program(rank):
        model = wb.parallelize(models[rank], ROWS)
        wb.forward_backward(model, F.cross_entropy, inputs, targets)  # calls of blocks are recorded
        model.zero_grad()
        return scaled(model, lambda model: wb.forward_backward(model, F.cross_entropy, inputs, targets).item())

    loss, calls, grads = scaled(one, micro_batches)
    for found_loss, found_calls, found_grads in run_ranks(program, 3):
        assert found_calls == calls and found_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(found_grads, grads, rtol=1e-4, atol=1e-6)


def test_what_a_hook_has_kept_of_several_stages_per_rank_is_no_input_after_the_step():
    """Ranks waited for each other: each has such a tensor from its last stage."""
    models = [make() for _ in range(2)]

    def program(rank):
        model, kept = wb.parallelize(models[rank], "0: data@0; 1: data@1; 3: data@2; 4: data@3 | 2x1x1 interleaved"), []
        model[3].register_forward_hook(lambda module, args, output: kept.append(output.detach()))
        with torch.no_grad():
            wb.evaluate(model, torch.ones(2, 6, dtype=torch.float64))
            model[4](kept[-1]).full_tensor()

    with pytest.raises(StrategyError, match=r"outside of the step that made the tensor.*in a hook.*1f1b"):
        run_ranks(program, 2)
