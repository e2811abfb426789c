"""Plain tensors that a forward makes and stages write to in place."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.pipeline.test_steps import whole
from workbench.errors import StrategyError
from workbench.testing import run_ranks
from workbench.training.pipelining.running_step import ValueReadWarning


class Slots(nn.Module):
    """Fills a tensor of its own, as recurrent layers keep their states."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write

    def forward(self, x):
        slots = torch.zeros(len(x), 2, 4)
        self.write(slots, self.layer(x))
        return slots.sum(1)


def by_index(slots, h):
    slots[:, 0] = h
    slots[:, 1] = h.tanh()


def one_after_the_other(slots, h):
    slots += h[:, None]
    slots[:, 0] = slots[:, 1].clone() * h
    slots.mul_(h[:, None].sigmoid())


WRITES = [by_index, one_after_the_other]


def trained(model, strategy, x, y):
    model = wb.parallelize(copy.deepcopy(model), strategy)
    losses = [wb.forward_backward(model, F.mse_loss, x, y).item() for _ in range(2)]
    return losses, [whole(p.grad) for p in model.parameters()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_stage_fills_a_plain_tensor(write, schedule):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(Slots(write), Slots(write)), torch.randn(8, 4), torch.randn(8, 4)
    truth = copy.deepcopy(model)
    losses = []
    for _ in range(2):
        loss = F.mse_loss(truth(x), y)
        loss.backward()
        losses.append(loss.item())
    strategy = f"0: data@0; 1: data@1 | mb=4 {schedule}"
    for found, grads in run_ranks(lambda: trained(model, strategy, x, y), num_ranks=2):
        assert found == pytest.approx(losses, rel=1e-6)
        for grad, parameter in zip(grads, truth.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


def through_a_view(slots, h):
    slots[:, 0].copy_(h)


def beside_a_view(slots, h):
    first = slots[:, 0]
    slots[:, 1] = h
    slots[:, 1] += first


@pytest.mark.parametrize("write", [through_a_view, beside_a_view])
def test_a_write_that_others_would_miss_is_refused(write):
    model = nn.Sequential(Slots(write), Slots(write))
    with pytest.raises(StrategyError, match=r"plain tensor \(4, .*is a view, has views.*by index.*new_zeros"):
        run_ranks(lambda: trained(model, "0: data@0; 1: data@1 | mb=2 1f1b", torch.ones(8, 4), torch.ones(8, 4)), 2)


class Mixture(nn.Module):
    """Adds what two experts make of the rows that chose them to a plain leaf of its own."""

    def __init__(self, scale, reads):
        super().__init__()
        self.gate, self.experts, self.reads = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), reads
        self.scale = [scale]  # a plain leaf outside, which no module owns

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros(len(x), 4, requires_grad=True)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten() if self.reads else torch.arange(len(x))
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out * self.scale[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "schedule", ["mb=2 gpipe", "mb=3 1f1b", "mb=3 zero_bubble", "mb=4 interleaved", "mb=4 zero_bubble_v"]
)
def test_plain_leaves_of_forwards_have_their_gradients_after_the_step(schedule):
    reads = "4" not in schedule  # several stages on a rank cannot read values
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.randn(12, 4)

    def trained(strategy):
        torch.manual_seed(1)
        scale = torch.tensor(1.5, requires_grad=True)
        model = nn.Sequential(*(Mixture(scale, reads) for _ in range(4)))
        if strategy:
            model = wb.parallelize(model, strategy)
        for _ in range(2):
            loss = wb.forward_backward(model, F.mse_loss, x, y) if strategy else F.mse_loss(model(x), y)
            if not strategy:
                loss.backward()
        return loss.item(), scale.grad, [whole(p.grad) if strategy else p.grad for p in model.parameters()]

    loss, of_scale, grads = trained(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValueReadWarning)
        results = run_ranks(lambda: trained(f"pipeline | {schedule}"), num_ranks=2)
    for found, found_of_scale, found_grads in results:
        assert found == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(found_of_scale, of_scale)
        for grad, expected in zip(found_grads, grads, strict=True):
            torch.testing.assert_close(grad, expected)


class Penalized(nn.Module):
    """A generator, and a critic with the penalty R1: the square of its gradient at its input."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        real = x.detach().requires_grad_()
        score = self.critic(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        return F.mse_loss(self.generator(x), x) + score.mean() + slope.square().sum(1).mean()


@pytest.mark.parametrize("stages", ["generator: data; critic: data@1", "critic: data@0; generator: data@1"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_at_a_plain_tensor_are_right_or_refused(stages, schedule):
    torch.manual_seed(0)
    model, x = Penalized(), torch.randn(8, 4)
    truth = copy.deepcopy(model)
    truth(x).backward()

    def program():
        parallel = wb.parallelize(copy.deepcopy(model), f"{stages} | 2x1x1 mb=2 {schedule}")
        loss = wb.forward_backward(parallel, inputs=x)
        return loss.item(), [whole(p.grad) for p in parallel.parameters()]

    if schedule == "1f1b" and stages.endswith("critic: data@1"):
        with pytest.raises(StrategyError, match=r"of a plain tensor.* from stage 1 back to .*1f1b.* on stage 0, or"):
            run_ranks(program, 2)
        return
    for loss, grads in run_ranks(program, 2):
        assert loss == pytest.approx(truth(x).item(), rel=1e-6)
        for grad, parameter in zip(grads, truth.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


class Attacked(Penalized):
    """Learns beside inputs that are moved along the critic's gradient; no backward passes this gradient again."""

    def forward(self, x):
        real = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(self.generator(real)).sum(), real)
        return self.critic(self.generator(x + 0.1 * slope.sign())).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved", "zero_bubble_v"])
def test_gradients_without_a_history_run_where_a_rank_has_one_stage(schedule):
    torch.manual_seed(0)
    model, x = Attacked(), torch.randn(8, 4)
    truth = copy.deepcopy(model)
    truth(x).backward()

    several = schedule in ("interleaved", "zero_bubble_v")

    def program():
        stages = "generator.0: data; generator.2: data@1; critic.0: data@2; critic.2: data@3"
        stages = stages if several else "generator: data; critic: data@1"
        parallel = wb.parallelize(copy.deepcopy(model), f"{stages} | 2x1x1 mb=2 {schedule}")
        wb.forward_backward(parallel, inputs=x)
        return [whole(p.grad) for p in parallel.parameters()]

    if several:
        with pytest.raises(StrategyError, match=r"itself computes .*grad.* from stage 3 back to stage 2: under"):
            run_ranks(program, 2)
        return
    for grads in run_ranks(program, 2):
        for grad, parameter in zip(grads, truth.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


@pytest.mark.parametrize(
    ("replace", "lies"),
    [
        (lambda model: nn.Parameter(torch.ones(4, 4)), "a plain tensor"),
        (lambda model: nn.Parameter(model[0].weight.detach().clone()), r"B on cpu:\[0\]"),  # unties it
    ],
)
def test_a_parameter_that_came_after_the_strategy_is_named(replace, lies):
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    rows = "0: data; 1: data@1; 2: data@2; 3: data@3 | 2x1x1 mb=2 interleaved"

    def program():
        model = wb.parallelize(copy.deepcopy(layers), rows)
        model[3].weight = replace(model)
        with pytest.raises(
            StrategyError, match=rf"^3\.weight: its layer is in stage 3, on ranks \[1\].*lies as {lies}"
        ):
            wb.forward_backward(model, F.mse_loss, torch.ones(4, 4), torch.ones(4, 4))
        wb.parallelize(model, rows)
        wb.forward_backward(model, F.mse_loss, torch.ones(4, 4), torch.ones(4, 4))

    run_ranks(program)
