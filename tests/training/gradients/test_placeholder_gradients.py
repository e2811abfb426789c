"""Gradients of parameters that live on other ranks: they say that the owner has one, and hold nothing."""

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.tensors.global_tensor import local_torch
from workbench.testing import run_ranks


def models(count=2):
    torch.manual_seed(0)
    states = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    found = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(count)]
    for model in found:
        model.load_state_dict(states)
    return found


def test_a_placeholders_gradient_has_the_memory_of_the_last_steps():
    """Optimizers ask every parameter in every step; as on its owner, every step has a tensor of its own."""
    ranks = models()

    def program(rank):
        model = wb.parallelize(ranks[rank], "0: data@0; 1: data@1 | 2x1x1 mb=2")
        placeholder = next(p for p in model.parameters() if p.is_placeholder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(4, 4), torch.zeros(4, 4)
        seen = []
        for _ in range(3):
            assert placeholder.grad is None
            wb.forward_backward(model, nn.functional.mse_loss, *batch)
            seen.append(placeholder.grad)
            optimizer.step()
            optimizer.zero_grad()
        assert len(set(map(id, seen))) == 3
        with local_torch():
            assert len({grad.data_ptr() for grad in seen}) == 1
        assert (
            seen[0].is_placeholder
            and seen[0].sbp == placeholder.layout_on_ranks.dual().sbp
            and seen[0].dtype == torch.float32
        )
        model.double()
        wb.forward_backward(model, nn.functional.mse_loss, *(part.double() for part in batch))
        assert placeholder.grad is not seen[0] and placeholder.grad.dtype == torch.float64

    run_ranks(program, 2)


def test_norms_of_gradients_are_those_of_this_step():
    """A norm boxes the gradient and remembers the form; a rank without a part must not remember the last step's."""
    ranks = models()

    def program(rank):
        model = wb.parallelize(ranks[rank], "0: data@0; 1: data@1 | 2x1x1 mb=2")
        inputs, targets = torch.ones(4, 4), torch.zeros(4, 4)
        seen = []
        for step in (1, 2, 3):
            model.zero_grad()
            wb.forward_backward(model, lambda out, wanted, step=step: step * (out - wanted).mean(), inputs, targets)
            seen.append([p.grad.square().sum().sqrt().item() for p in model.parameters()])
        return seen

    first, *later = run_ranks(program, 2)[0]
    assert min(first) > 0
    for step, norms in enumerate(later, 2):
        assert norms == pytest.approx([step * norm for norm in first])


def size(grad):
    """A number of a gradient, for which its terms are boxed."""
    return grad.square().sum().item()


def kept(model, step):
    """Gradients of earlier steps are read before those of this one."""
    found, before = [], []
    for number in range(3):
        model.zero_grad()
        step(number)
        now = [p.grad for p in model.parameters()]
        found += [size(grad) for grad in (*before, *now)]
        before = now
    return found


def accumulated(model, step):
    """Gradients are read, added to, and read again."""
    found = []
    for number in range(4):
        step(number)
        found += [size(p.grad) for p in model.parameters()]
        if number == 2:
            model.zero_grad(set_to_none=False)
            found += [size(p.grad) for p in model.parameters()]
    return found


def written(model, step):
    """Gradients are written to between two readings, also behind autograd's back."""
    found = []
    for number in range(2):
        step(number)
        for change in (
            lambda p: p.grad.mul_(0.5),
            lambda p: p.grad.data.mul_(0.5),
            lambda p: setattr(p, "grad", p.grad * 3),
            lambda p: p.grad.detach().data.mul_(2),
            lambda p: p.grad[0].data.zero_(),
            lambda p: p.grad.data.add_(p.detach()),
        ):
            found += [size(p.grad) for p in model.parameters()]
            for parameter in model.parameters():
                change(parameter)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        found += [size(p.grad) for p in model.parameters()]
    return found


PIPELINE = "0: data@0; 1: data@1"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("program", [kept, accumulated, written])
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("*: data | 1x2x1 mb=2", 2),
        (f"{PIPELINE} | 2x1x1 mb=2", 2),
        (f"{PIPELINE} | 2x2x1 mb=2", 4),
        (f"{PIPELINE} | 2x2x1 mb=2 zero=2", 4),
    ],
)
def test_gradients_read_between_and_within_steps_are_those_of_one_device(program, strategy, num_ranks):
    def run(model, text):
        wb.parallelize(model, text)
        inputs, targets = torch.arange(16.0).view(4, 4) / 16, torch.ones(4, 4)
        return program(
            model, lambda number: wb.forward_backward(model, nn.functional.mse_loss, inputs + number, targets)
        )

    ranks = models(num_ranks)
    [truth] = run_ranks(lambda: run(models(1)[0], "*: data | 1x1x1 mb=2"), 1)
    for found in run_ranks(lambda rank: run(ranks[rank], strategy), num_ranks):
        assert found == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("strategy", ["*: data | 1x2x1", "*: data | 1x2x1 zero=2", "*: data | 1x2x1 zero=3"])
def test_a_gradient_outlives_new_values_and_types_of_its_parameter(strategy):
    def run(model, text):
        wb.parallelize(model, text)
        inputs, targets = torch.arange(16.0).view(4, 4) / 16, torch.ones(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            wb.forward_backward(model, nn.functional.mse_loss, inputs + number, targets)
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.9
            model.double()
            model.float()
            wb.forward_backward(model, nn.functional.mse_loss, inputs - number, targets)
            optimizer.step()
            optimizer.zero_grad()
        return [size(p) for p in model.parameters()]

    ranks = models()
    [truth] = run_ranks(lambda: run(models(1)[0], "*: data | 1x1x1"), 1)
    for found in run_ranks(lambda rank: run(ranks[rank], strategy), 2):
        assert found == pytest.approx(truth, rel=1e-4)
