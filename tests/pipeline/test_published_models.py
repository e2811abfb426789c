"""Models on which torch tests its pipelines, under every schedule: the gradients of two steps of one device.

Written after the models and stage tests of PyTorch (test/distributed/pipelining: model_registry, test_stage,
test_schedule_multiproc, test_backward, test_unflatten, test_transformer). Not here: splits inside a forward
(``pipe_split``: stages are layers), shapes that stages declare and compare, gradients of weights by a user's function,
losses that are sums (an error, ``test_wrong_losses``), cuts along another dim than 0.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks
from workbench.training.parallel import describe

WIDTH, SIZE = 4, 8


class Step(nn.Module):
    """Two layers with an activation; takes a keyword that it does not use."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, unused=None):
        return self.two(torch.tanh(self.one(x)))


class Steps(nn.Module):
    """Several of them, the last of which gets a tensor of one number."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Step() for _ in range(4))

    def forward(self, x, unused=None):
        for layer in self.layers:
            x = layer(x, unused)
        return x


class OwnMatrices(nn.Module):
    """The model has parameters of its own beside layers, and a constant that skips a stage."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.register_buffer("constant", torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, shift=torch.zeros(SIZE, WIDTH)):  # noqa: B008 - a tensor as default is what is tested
        constant = self.constant.clone()
        x = self.layers[0](torch.mm(x, self.first) + shift)
        x = torch.mm(torch.relu(x) + constant, self.second)
        for layer in self.layers[1:]:
            x = torch.relu(layer(x))
        return x


class TwoNames(nn.Module):
    """A parameter, a constant and a layer with two names each."""

    def __init__(self):
        super().__init__()
        self.second = self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layer_again = self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("constant", torch.randn(WIDTH))
        self.register_buffer("constant_again", self.constant)

    def forward(self, x, shift):
        x = torch.relu(self.layer(torch.mm(x, self.first) + shift)) + self.constant
        return torch.relu(self.layer_again(torch.mm(x, self.second))) * self.constant_again


class Both(torch.autograd.Function):
    """Returns both operands."""

    @staticmethod
    def forward(ctx, x, weight):
        return x, weight

    @staticmethod
    def backward(ctx, grad_x, grad_weight):
        return grad_x, grad_weight


class Multiply(nn.Module):
    """Splits its input in two, and multiplies both halves and a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2, WIDTH // 2))

    def forward(self, x):
        left, right = torch.split(x, [WIDTH // 2, WIDTH // 2], dim=1)
        left, weight = Both.apply(left, self.weight)
        return torch.cat([torch.matmul(left, weight) * right, right], 1)


class Branches(nn.Sequential):
    """A function with two results between two layers."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), Multiply(), nn.Linear(WIDTH, WIDTH))


class Product(torch.autograd.Function):
    """A linear layer with a backward of its own, which asks what is needed."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t()) + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        return grad.mm(weight) if wants_x else None, grad.t().mm(x) if wants_weight else None, grad.sum(0)


class Own(nn.Linear):
    """A layer by this function, which keeps what it has computed."""

    def forward(self, x):
        self.hidden = torch.tanh(Product.apply(x, self.weight, self.bias))
        return self.hidden


class OwnFunctions(nn.Sequential):
    """Such layers one after the other."""

    def __init__(self):
        super().__init__(*(Own(WIDTH, WIDTH) for _ in range(3)))


class Same(torch.autograd.Function):
    """Returns a view."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class AtTheEdge(nn.Module):
    """What ends a stage: a view, or a tensor that the next stage writes to."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = Step(), Step(), Step()

    def forward(self, x, shift):
        x = self.two(Same.apply(self.one(x)))
        x.add_(shift)
        return self.three(x)


class Twice(nn.Module):
    """Reads one weight twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.relu(x @ self.weight) @ self.weight


class PartlyFrozen(nn.Module):
    """A stage without gradients, one with some, a weight that is read twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Step(), Twice(), Step()
        self.first.requires_grad_(False)
        self.third.one.weight.requires_grad_(False)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


class ManyEdges(nn.Module):
    """Masks, integers, a dict and None pass from stage to stage, some past one."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        first = {"hidden": self.one(x), "factor": 3, "nothing": None}
        mask, best = first["hidden"] > 0, first["hidden"].argmax(1)
        second = self.two(first["hidden"] * first["factor"]) * mask
        return self.three(second + first["hidden"]) + best[:, None] * 0.1


class Unused(nn.Module):
    """The first result of a stage is not used, another one without gradients."""

    def __init__(self):
        super().__init__()
        self.one, self.dead, self.aside, self.two = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = self.one(x)
        self.dead(x)
        with torch.no_grad():
            scale = self.aside(x).abs().mean(1, keepdim=True)
        return self.two(x) * scale


class Hooked(Steps):
    """Hooks of the user change dtypes and shapes between stages."""

    def __init__(self):
        super().__init__()
        self.layers[1].register_forward_hook(lambda module, args, result: result.to(torch.float32).flatten())
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0].double().view(-1, WIDTH), *args[1:]))


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


X, SHIFT, TARGET = {"x": drawn(SIZE, WIDTH)}, {"shift": drawn(SIZE, WIDTH) / 2}, drawn(SIZE, WIDTH) * 2
ROWS = {
    Unused: "one: data; dead: data@1; aside: data@1; two: data@1 | 2x1x1 mb={} {}",
    AtTheEdge: "one: data; two: data; three: data@1 | 2x1x1 mb={} {}",
    PartlyFrozen: "first: data; second: data@1; third: data@1 | 2x1x1 mb={} {}",
}
CASES = [
    (Steps, X),
    (Steps, {**X, "unused": torch.ones(1)}),
    (OwnMatrices, {**X, **SHIFT}),
    (TwoNames, {**X, **SHIFT}),
    (Branches, {"input": X["x"]}),
    (OwnFunctions, {"input": X["x"]}),
    (AtTheEdge, {**X, **SHIFT}),
    (PartlyFrozen, X),
    (ManyEdges, X),
    (Unused, X),
    (Hooked, X),
]
SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "interleaved")


def on_one_device(model, inputs, num_micro_batches):
    losses = []
    for _ in range(2):
        losses.append(0.0)
        for number in range(num_micro_batches):
            part = {k: v.chunk(num_micro_batches)[number] if len(v) == SIZE else v for k, v in inputs.items()}
            loss = F.mse_loss(model(**part), TARGET.chunk(num_micro_batches)[number]) / num_micro_batches
            loss.backward()
            losses[-1] += loss.item()
    return losses, {name: p.grad for name, p in model.named_parameters()}


def seeded(kind):
    torch.manual_seed(0)
    return kind().double()


def cases():
    """Every model under every schedule; in the quick part under zero bubble, and one of the others for a few."""
    quick = {(Steps, "interleaved"), (TwoNames, "gpipe"), (ManyEdges, "1f1b"), (Unused, "1f1b")}
    for (kind, inputs), schedule in itertools.product(CASES, SCHEDULES):
        if schedule == "interleaved" and len(list(describe(kind()))) < 4:
            continue
        is_quick = schedule == "zero_bubble" or ((kind, schedule) in quick and (kind is not Steps or len(inputs) > 1))
        marks = () if is_quick else pytest.mark.slow
        yield pytest.param(kind, inputs, schedule, marks=marks, id=f"{kind.__name__} {len(inputs)} {schedule}")


@pytest.mark.sampled(4, start=2)
@pytest.mark.parametrize(("kind", "inputs", "schedule"), list(cases()))
def test_two_steps_are_those_of_one_device(kind, inputs, schedule):
    num_micro_batches = 2 if schedule == "1f1b" else 4
    strategy = ROWS.get(kind, "pipeline | mb={} {}") if schedule != "interleaved" else "pipeline | mb={} {}"
    strategy = strategy.format(num_micro_batches, schedule)
    losses, grads = on_one_device(seeded(kind), inputs, num_micro_batches)
    models = [seeded(kind) for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        found = [wb.forward_backward(model, F.mse_loss, inputs, TARGET).item() for _ in range(2)]
        return found, {n: None if p.grad is None else p.grad.full_tensor() for n, p in model.named_parameters()}

    for found, found_grads in run_ranks(program, 2):
        assert found == pytest.approx(losses, rel=1e-6 if kind is Hooked else 1e-9)
        assert found_grads.keys() == grads.keys()
        for name, grad in grads.items():
            theirs = found_grads[name]
            if grad is None:
                assert theirs is None or not theirs.any(), name
            else:
                torch.testing.assert_close(theirs, grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
