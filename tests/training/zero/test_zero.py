"""ZeRO 1 to 3: the numbers of one device, a share of the bytes, and whatever an optimizer does to parameters."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.models import batch_for, make
from tests.training.programs import training_equals_one_device
from tests.training.training_runs import Setup, assert_trains_like_one_device
from workbench.errors import LayoutError
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.diagnostics.memory import model_memory, storage_bytes
from workbench.training.gradients.optim import state_layout


def slow(*values):
    """Cases that only the long run has."""
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


STAGES = [1, 2, 3]
HYBRIDS = ["*: data | 1x2x2", "*: model | 1x2x2", "0: data; 2: model; 4: model@1; 6: data@1 | 2x2x1 mb=3 1f1b"]


CASES = list(itertools.product(["mlp", "cnn", "attention"], [2, 3], STAGES))
QUICK = [("mlp", 3, 1), ("mlp", 2, 2), ("mlp", 3, 3)]


@pytest.mark.parametrize(("kind", "num_ranks", "stage"), [*QUICK, *slow(*(c for c in CASES if c not in QUICK))])
def test_training_equals_one_device(kind, num_ranks, stage):
    strategy = f"*: data | 1x{num_ranks}x1 zero={stage}"
    for losses, weights in run_ranks(lambda: training_equals_one_device(kind, strategy, num_ranks), num_ranks):
        assert losses < 1e-5 and weights < 1e-5


@pytest.mark.parametrize(("strategy", "stage"), [(HYBRIDS[1], 2), *slow(*itertools.product(HYBRIDS, STAGES))])
def test_hybrids_equal_one_device(strategy, stage):
    for losses, weights in run_ranks(lambda: training_equals_one_device("mlp", f"{strategy} zero={stage}", 4), 4):
        assert losses < 1e-5 and weights < 1e-5


def test_wide_layers_on_ranks_with_several_stages():
    """Each large slice is a message of its own, also between stages on the same two ranks."""
    torch.manual_seed(0)
    built, inputs = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4))), torch.randn(8, 300)
    expected = built(inputs).square().mean()
    gradient = torch.autograd.grad(expected, built[0].weight)[0]

    def program(rank):
        model = wb.parallelize(copy.deepcopy(built), "pipeline | 2x2x1 mb=2 interleaved zero=3")
        loss = wb.forward_backward(model, lambda found, _: found.square().mean(), inputs, inputs)
        return loss.item(), model[0].weight.grad.full_tensor()

    for loss, grad in run_ranks(program, 4):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(grad, gradient)


def test_new_values_of_one_stage_where_ranks_have_several():
    """Only its ranks see other memory. They go on with the order of layers that all ranks know."""
    torch.manual_seed(0)
    built, inputs = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), torch.randn(8, 6)

    def train(model, backward):
        losses = []
        for _ in range(3):
            model.zero_grad()
            losses.append(backward(model).item())
            model[0].weight.data = model[0].weight.data * 0.5
        return losses, model[0].weight.grad

    def alone(model):
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    def program(rank):
        model = wb.parallelize(copy.deepcopy(built), "pipeline | 2x2x1 mb=2 interleaved zero=3")
        mean = lambda found, _: found.square().mean()  # noqa: E731
        losses, grad = train(model, lambda model: wb.forward_backward(model, mean, inputs, inputs))
        return losses, grad.full_tensor()

    expected, gradient = train(copy.deepcopy(built), alone)
    for losses, grad in run_ranks(program, 4):
        assert losses == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(grad, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_dropout_and_a_tied_weight_over_stages(stage):
    tied = f"tok: data; norm: data@0; q: data@1; head: data@1 | 2x2x1 mb=2 gpipe zero={stage}"
    for kind, strategy in (("dropping", f"*: data | 1x4x1 zero={stage}"), ("attention", tied)):
        for losses, weights in run_ranks(lambda k=kind, s=strategy: training_equals_one_device(k, s, 4), 4):
            assert losses < 1e-5 and weights < 1e-5


def steps(model, optimizer, count=3, parts=1, clip=None):
    inputs, targets = batch_for("mlp")
    for _ in range(count):
        optimizer.zero_grad()
        for part in range(parts):
            (F.cross_entropy(model(inputs[part::parts]), targets[part::parts]) / parts).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def assert_close(found, truth, tolerance=1e-10):
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


class InDoubles(nn.Module):
    """A model that takes single inputs and works in doubles, so that differences of rounding stay small."""

    def __init__(self):
        super().__init__()
        self.model = make("mlp").double()

    def forward(self, x):
        return self.model(x.double())


def on_ranks(program, strategy, num_ranks=2):
    models = [InDoubles() for _ in range(num_ranks)]
    return run_ranks(lambda rank: program(wb.parallelize(models[rank], strategy)), num_ranks)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "stage"),
    [("adamw", 1), ("adam fused", 2), ("adagrad", 1), *slow(*itertools.product(OPTIMIZERS, [0, *STAGES]))],
)
def test_optimizers(name, stage):
    model = InDoubles()
    truth = steps(model, OPTIMIZERS[name](model.parameters()), parts=2, clip=0.5)
    found = on_ranks(
        lambda m: steps(m, OPTIMIZERS[name](m.parameters()), parts=2, clip=0.5), f"*: data | 1x3x1 zero={stage}", 3
    )
    assert_close(found[2], truth)


@pytest.mark.parametrize(("stage", "foreach"), [(2, True), *slow(*itertools.product(STAGES, [False, True]))])
def test_gradients_that_are_set_to_zero_or_left_there(stage, foreach):
    def program(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=foreach)
        inputs, targets = batch_for("mlp")
        for step in range(4):
            if step % 2:
                optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]

    assert_close(on_ranks(program, f"*: data | 1x2x1 zero={stage}")[0], program(InDoubles()))


class Wide(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.tok, self.a, self.norm = nn.Embedding(257, 61), nn.Linear(61, 331), nn.LayerNorm(331)
        self.b, self.head = nn.Linear(331, 7), nn.Linear(7, 257, bias=False)

    def forward(self, ids):
        return self.head(self.b(self.norm(torch.relu(self.a(self.tok(ids))))))


GRIDS = [("1x2x1", 2, 2), ("1x3x1", 3, 3), ("1x2x2", 4, 2)]


@pytest.mark.parametrize(
    ("options", "num_ranks", "copies", "stage"),
    [(*GRIDS[1], 2), *slow(*((*grid, stage) for grid in GRIDS for stage in STAGES))],
)
def test_bytes_per_rank_follow_the_formula(options, num_ranks, copies, stage):
    """Adam has two numbers of 4 bytes per parameter; ZeRO leaves every rank its share of these, and more."""
    torch.manual_seed(0)
    models = [Wide() for _ in range(num_ranks)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    split_model = "*: data; a: model:column; b: model:row" if copies != num_ranks else "*: data"
    ids = torch.arange(12).reshape(4, 3)

    def program(rank):
        model = wb.parallelize(models[rank], f"{split_model} | {options} zero={stage}")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        total = 0
        for p in model.parameters():
            held_alike = state_layout(p).placement.shape[-1] if p.dim() else 1
            total += p.numel() * 4 / held_alike / (num_ranks // held_alike)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            grads = storage_bytes([p.grad for p in model.parameters()])
            optimizer.step()
        memory = model_memory(model, optimizer)
        return memory["optimizer"] / (2 * total), grads / total, memory["parameters"] / total

    for optimizer, grads, parameters in run_ranks(program, num_ranks):
        assert optimizer < 1.05
        if stage >= 2:
            assert grads < 1.05
        if stage == 3:
            assert parameters < 1.05


def test_what_each_stage_sends():
    """1 and 2: a reduce-scatter and an all-gather are what an all-reduce sends. 3: two gathers and a reduce-scatter."""

    def program(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        steps(model, optimizer, count=1, parts=2)
        traffic = current().traffic
        traffic.reset()
        steps(model, optimizer, count=1, parts=2)
        return traffic.by_kind

    size = 8 * sum(p.numel() for p in InDoubles().parameters())
    sent = {stage: on_ranks(program, f"*: data | 1x2x1 zero={stage}")[0] for stage in (0, *STAGES)}
    assert sent[0] == {"gradients": size}
    assert sent[1] == {"gradients": size // 2, "parameters": size // 2}
    assert sent[2] == {"gradients": size, "parameters": size // 2}  # scattered for each of the two micro-batches
    reading = size // 2  # the weights, in the end: a boxing
    assert sent[3] == {"gradients": size, "parameters": 2 * size, "all-gather": reading}


def test_saved_bytes_are_those_of_activations():
    """What autograd keeps of the weights under zero=3: nothing."""

    def program(model):
        kept = []

        def pack(tensor):
            kept.append(tuple(tensor.shape))
            return tensor

        inputs, targets = batch_for("mlp")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return kept

    weights = {(32, 16), (24, 32), (20, 24), (10, 20)}
    weights |= {shape[::-1] for shape in weights}
    assert not weights & set(on_ranks(program, "*: data | 1x2x1 zero=3")[0])
    assert weights & set(on_ranks(program, "*: data | 1x2x1")[0])


class Lamb(torch.optim.Optimizer):
    """The trust ratio of LAMB (You et al. 2020) over momentum: norms of whole parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                ratio = p.norm() / (state["m"].norm() + 1e-6)
                p.sub_(state["m"] * ratio * group["lr"])


OTHERS = {"lamb": Lamb, "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05)}


PLACES = ["*: data | 1x2x1", "*: model | 1x1x2", "model.0: data; model.4: data@1"]


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize(
    ("strategy", "name", "stage"),
    [(PLACES[1], "lamb", 0), (PLACES[0], "lamb", 2), *slow(*itertools.product(PLACES, OTHERS, [0, *STAGES]))],
)
def test_norms_of_an_optimizer_are_of_whole_parameters(strategy, name, stage):
    model = InDoubles()
    truth = steps(model, OTHERS[name](model.parameters()))

    def program(model):
        optimizer = OTHERS[name](model.parameters())
        inputs, targets = batch_for("mlp")
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        everywhere = wb.placement.all("cpu")
        return [p.detach().to_global(placement=everywhere, sbp="B").to_local() for p in model.parameters()]

    options = f" zero={stage}" if "|" in strategy else f" | zero={stage}"
    assert_close(on_ranks(program, strategy + options)[1], truth)


@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.{FallbackWarning.__name__}")
def test_lbfgs_works_on_whole_parameters_and_refuses_shards():
    def program(model):
        inputs, targets = batch_for("mlp")
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
        return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]

    assert_close(on_ranks(program, "*: data | 1x2x1")[0], program(InDoubles()), 1e-7)
    with pytest.raises(LayoutError, match=r"LBFGS.step.*several times in one step.*Leave zero="):
        on_ranks(program, "*: data | 1x2x1 zero=1")


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("mlp", "zero_bubble_v"), *slow(*(("gpt2", each) for each in ("zero_bubble_v", "interleaved", "dualpipe_v")))],
)
def test_weights_without_copies_add_up_over_micro_batches_where_ranks_have_several_stages(kind, schedule):
    """Only gradients that are scattered begin anew in the next micro-batch."""
    assert_trains_like_one_device(Setup(kind, num_steps=1), "model", f"2x1x2 mb=2 {schedule} zero=2", 4)


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("*: data | 1x2x1 zero=2", 2), ("0: data; 2: data@1 | 2x2x1 zero=2", 4),
        *slow(("*: data", 2), ("0: data; 2: data@1 | 2x2x1 zero=3", 4), ("0: data; 2: data@1 | 2x2x1 mb=2 zero=2", 4)),
    ],
)  # fmt: skip
def test_parameters_are_unfrozen_and_frozen_again(strategy, num_ranks):
    torch.manual_seed(0)
    built, inputs = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)), torch.randn(8, 8)
    built[0].requires_grad_(False)
    built[2].bias.requires_grad_(False)

    def train(model, backward):
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
        for first, last in ((False, True), (True, True), (True, True), (True, False), (False, True)):
            model[0].requires_grad_(first)
            model[2].requires_grad_(last)
            backward(model)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    def in_stages(model):
        wb.forward_backward(model, F.mse_loss, inputs, torch.zeros(8, 4))
        for parameter in model.parameters() if "zero=2" in strategy else ():
            assert parameter.grad is None or parameter.grad.sbp == state_layout(parameter).sbp

    expected = train(copy.deepcopy(built), lambda model: F.mse_loss(model(inputs), torch.zeros(8, 4)).backward())
    found = run_ranks(lambda: train(wb.parallelize(copy.deepcopy(built), strategy), in_stages), num_ranks)
    assert found == [pytest.approx(expected, rel=1e-5)] * num_ranks
