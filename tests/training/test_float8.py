"""``fp8``: scales of logical tensors, so 8 bits that depend on no layout, and the losses of one device in fp8."""

import functools
import importlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import workbench as wb
from workbench.core.sbp import broadcast
from workbench.core.strategy import Strategy
from workbench.core.verdict import TOLERANCES
from workbench.errors import StrategyError
from workbench.kernels import float8
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training import precision
from workbench.training.parallel import describe
from workbench.training.pipelining.running_step import RunningStep
from workbench.training.pipelining.split_backward import backward_of_inputs
from workbench.training.precision import compute_in

CPU = torch.device("cpu")
ROWS = 9
"""Samples: they do not divide by the ranks."""


@pytest.fixture
def rounded(monkeypatch):
    """All tensors that this thread has rounded to 8 bits: (scale, as numbers)."""
    here, original = threading.local(), float8.quantize

    def quantize(x, scale, dtype):
        found = original(x, scale, dtype)
        if x.numel() and not x.is_meta and type(found) is torch.Tensor:
            here.__dict__.setdefault("seen", []).append((float(scale), found.float()))
        return found

    monkeypatch.setattr(float8, "quantize", quantize)

    def read():
        seen, here.seen = getattr(here, "seen", []), []
        return seen

    return read


def layer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48, bias=False))


class Gathered(nn.Module):
    """A layer on the first stage, and one on the second that gets its input unrounded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 48, bias=False)

    def forward(self, x):
        y = self.first(x)
        return self.second(y - y.detach() + x)


def values():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 32, generator=generator) * torch.arange(1, ROWS + 1)[:, None]
    factors = torch.randn(ROWS, 48, generator=generator) * torch.arange(1, 49)
    return x, factors


def one_step(model, read):
    """The tensors that a step rounds: the input and the weight, then the gradient, and the weight again."""
    x, factors = values()
    (model(x).float() * factors).sum().backward()
    return read()


LAYOUTS = {
    "*: data": 2,
    "*: data | 1x3x1": 3,
    "*: model": 2,
    "*: model:row": 2,
    "*: model | 1x2x2": 4,
    "*: model:row | 1x2x2": 4,
    "*: data | 1x4x1 zero=3": 4,
    "*: data | 1x4x1 zero=3 shards=2": 4,
}


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_scales_and_8_bits_are_those_of_one_device(strategy, rounded):
    """Each rank's 8 bits are a slice of one device's, bit for bit: input, weight, gradient, and the weight again."""
    num_ranks = LAYOUTS[strategy]
    alone = layer()
    compute_in(alone, "fp8", CPU, "cpu")
    truth = one_step(alone, rounded)
    assert [tuple(bits.shape) for _, bits in truth[:3]] == [(ROWS, 32), (48, 32), (ROWS, 48)]
    models = [layer() for _ in range(num_ranks)]
    options = " fp8" if "|" in strategy else " | fp8"

    def program(rank):
        return one_step(wb.parallelize(models[rank], strategy + options), rounded)

    whole = 0
    for found in run_ranks(program, num_ranks):
        assert [scale for scale, _ in found] == [scale for scale, _ in truth]
        for (_, bits), (_, all_bits) in zip(found, truth, strict=True):
            assert is_slice(bits, all_bits)
            whole += bits.shape == all_bits.shape
    assert whole < len(truth) * num_ranks  # something was split


def is_slice(part, whole):
    rows, columns = (a - b for a, b in zip(whole.shape, part.shape, strict=True))
    return any(
        torch.equal(part, whole[i : i + part.shape[0], j : j + part.shape[1]])
        for i in range(rows + 1)
        for j in range(columns + 1)
    )


def test_a_slice_that_is_none():
    whole = torch.arange(12.0).view(3, 4)
    assert is_slice(whole[1:, 2:], whole) and not is_slice(whole[1:, 2:] + 1, whole)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_stages_round_as_one_device(schedule, rounded):
    """Micro-batches have their own scales."""
    _, factors = values()

    def loss(output, targets):
        return (output.float() * targets).mean()

    def program(rank, model, strategy):
        x, _ = values()
        wb.forward_backward(wb.parallelize(model, f"{strategy} mb=3 fp8"), loss, x, factors)
        return sorted((scale, tuple(bits.flatten().tolist())) for scale, bits in rounded())

    alone = run_ranks(lambda rank: program(rank, Gathered(), "*: data |"), 1)[0]
    found = run_ranks(lambda rank: program(rank, Gathered(), f"first: data; second: data@1 | 2x1x1 {schedule}"), 2)
    assert len(alone) == 3 * (3 + 4)  # micro-batches, tensors of both layers: the first has no gradient of its input
    assert sorted([*found[0], *found[1]]) == alone


def test_a_local_scale_would_be_another(rounded, monkeypatch):
    """The oracle: where ranks take the largest value of their own rows, the scales differ."""
    monkeypatch.setattr(importlib.import_module("workbench.tensors.rules.matmul.float8"), "partial_max", broadcast)
    models = [layer() for _ in range(2)]
    found = run_ranks(lambda rank: one_step(wb.parallelize(models[rank], "*: data | fp8"), rounded), 2)
    assert found[0][0][0] != found[1][0][0]


class Net(nn.Module):
    """Layers with dropout between them, of sizes that fit but for the last one's."""

    def __init__(self, rate=0.2):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 10)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        x = self.drop(F.gelu(self.inp(x)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return self.head(x)


RUNS = [
    ("*: data | 1x2x1", 2),
    ("*: data | 1x3x1 mb=2", 3),
    ("*: model | 1x1x2", 2),
    ("*: model | 1x2x2 sequence", 4),
    ("*: data | 1x2x1 zero=3", 2),
    ("*: data | 1x4x1 zero=2 shards=2 mb=2", 4),
    ("*: data | 1x2x1 zero=1 recompute", 2),
    ("*: model | 1x1x2 recompute=cheap", 2),
    ("*: data | 1x2x1 zero=3 recompute=cheap", 2),
    ("*: data | 1x2x1 offload=optimizer+activations", 2),
    ("*: data; up: data@1; down: data@1; head: data@1 | 2x1x1 mb=3 1f1b", 2),
    ("*: model; up: model@1; down: model@1; head: data@1 | 2x1x2 mb=2 zero_bubble", 4),
]
STEPS = 20


def loss_of(output, targets):
    return F.cross_entropy(output.float(), targets)


def train(model, strategy, steps=STEPS):
    model = wb.parallelize(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        current().context.generator.manual_seed(step)
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(24, 32, generator=generator)
        optimizer.zero_grad()
        loss = wb.forward_backward(model, loss_of, x, x[:, :10].argmax(1))
        losses.append(loss.full_tensor().item())
        optimizer.step()
    return losses


@functools.cache
def on_one_rank(precision, num_micro_batches=1):
    model = Net()
    return run_ranks(lambda: train(model, f"*: data | mb={num_micro_batches} {precision}"), 1)[0]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("strategy", "num_ranks"), RUNS)
def test_losses_of_one_device_in_fp8(strategy, num_ranks):
    truth = on_one_rank("fp8", Strategy(strategy).options.num_micro_batches)
    models = [Net() for _ in range(num_ranks)]
    for losses in run_ranks(lambda rank: train(models[rank], f"{strategy} fp8"), num_ranks):
        assert losses == pytest.approx(truth, abs=TOLERANCES["fp8"].loss, rel=TOLERANCES["fp8"].loss)


def test_fp8_is_neither_bf16_nor_nonsense():
    fp8, bf16 = on_one_rank("fp8"), on_one_rank("bf16")
    assert 1e-4 < max(abs(a - b) for a, b in zip(fp8, bf16, strict=True)) < 0.2


def test_plain_torch_has_the_losses_of_one_rank():
    """Without dropout, of which plain torch draws other numbers."""
    alone, model = Net(rate=0.0), Net(rate=0.0)
    handles, _ = compute_in(alone, "fp8", CPU, "cpu")
    optimizer = torch.optim.AdamW(alone.parameters(), lr=3e-3)
    losses = []
    for step in range(4):
        x = torch.randn(24, 32, generator=torch.Generator().manual_seed(100 + step))
        optimizer.zero_grad()
        loss = loss_of(alone(x), x[:, :10].argmax(1))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert run_ranks(lambda: train(model, "*: data | fp8", 4), 1)[0] == pytest.approx(losses, abs=1e-6)
    for handle in handles:
        handle.remove()
    assert "forward" not in alone.up.__dict__


def test_layers_of_other_sizes_stay_in_bf16(rounded):
    """The plan says which; another strategy gives every layer its own forward back."""
    model = Net()

    def program():
        wb.parallelize(model, "*: data | fp8")
        model(torch.ones(2, 32))
        shapes, text = {tuple(bits.shape) for _, bits in rounded()}, str(model.plan)
        wb.parallelize(model, "*: data | bf16")
        model(torch.ones(2, 32))
        return shapes, text, rounded(), str(model.plan)

    shapes, text, later, later_text = run_ranks(program, 1)[0]
    assert (64, 32) in shapes and (10, 64) not in shapes
    assert "multiples of 16 stay in bf16: head (10 x 64)" in text
    assert later == [] and "bf16:" not in later_text


def test_a_device_without_8_bits_is_an_error(monkeypatch):
    monkeypatch.setattr(precision, "lacks_float8", lambda device: "cuda:0 is an NVIDIA A100 of compute capability 8.0")
    model = layer()
    with pytest.raises(StrategyError, match=r"option fp8: cuda:0 is an NVIDIA A100 .*8\.0\. Use bf16"):
        run_ranks(lambda: wb.parallelize(model, "*: data | fp8"), 1)
    with pytest.raises(StrategyError, match="option fp8"):
        compute_in(model, "fp8", CPU, "cpu")
    assert model(torch.ones(2, 32)).dtype == torch.float32, "nor is it in 16 bits from then on"


def test_all_ranks_refuse_8_bits_that_one_of_them_lacks(monkeypatch):
    monkeypatch.setattr(precision, "lacks_float8", lambda device: "an A100" if wb.rank() else "")
    models = [layer() for _ in range(2)]

    def program(rank):
        with pytest.raises(StrategyError) as caught:
            wb.parallelize(models[rank], "*: data | fp8")
        return str(caught.value)

    assert run_ranks(program) == ["option fp8: on rank 1, an A100. Use bf16.", "option fp8: an A100. Use bf16."]


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_backward_in_two_parts_has_the_gradients_of_weights_in_its_second(recomputes, monkeypatch):
    """Each product once, and the bits of a whole backward."""
    calls = []

    def multiply(a, a_scale, b, b_scale, dtype):
        calls.append(dtype)  # gradients of weights have 32 bits
        return float8.emulated_product(a, a_scale, b, b_scale, dtype)

    monkeypatch.setattr(float8, "product_for", lambda device: multiply)
    models, x = [Net(rate=0.0) for _ in range(2)], torch.randn(8, 32)

    def program():
        whole, in_parts = (wb.parallelize(model, "*: data | fp8") for model in models)
        given = wb.to_global(x, placement=wb.placement.all("cpu"), sbp="B").requires_grad_()
        loss_of(whole(given), torch.arange(8)).backward()
        running = RunningStep((), "zero_bubble", [], 1, splits_backward=True)
        with current().context.temporarily(running=running):
            output = checkpoint(in_parts, given, use_reentrant=False) if recomputes else in_parts(given)
            loss = loss_of(output, torch.arange(8))
            calls.clear()
            later = backward_of_inputs(loss, running)
            first = calls.copy()
            calls.clear()
            later.accumulate()
        pairs = zip(whole.parameters(), in_parts.parameters(), strict=True)
        return first, calls.copy(), [torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs]

    first, second, are_equal = run_ranks(program, 1)[0]
    again = 3 if recomputes else 0
    assert first == [torch.bfloat16] * (3 + again)
    assert second == [torch.float32] * 3
    assert all(are_equal)


def test_a_plain_checkpoint_in_a_world_of_one_rank():
    models, x = [Net(rate=0.0) for _ in range(2)], torch.randn(8, 32)

    def program():
        found = []
        for model, option in zip(models, ("", "recompute"), strict=True):
            loss_of(wb.parallelize(model, f"*: data | {option} fp8")(x), torch.arange(8)).backward()
            found.append([p.grad.full_tensor() for p in model.parameters()])
        return found

    whole, again = run_ranks(program, 1)[0]
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_pieces_of_rows_would_have_other_scales():
    model = Net()
    with pytest.raises(StrategyError, match="overlap=2 cuts rows into pieces, and fp8 has one scale"):
        Strategy("*: model | 1x1x2 overlap=2 fp8").resolve(describe(model), 2)


@pytest.mark.parametrize("strategy", ["*: data | 1x2x1", "*: model | 1x1x2"])
def test_scales_take_two_small_exchanges(strategy):
    """One of two numbers in forward, one of a number in backward."""
    models = [layer() for _ in range(2)]

    def program(rank):
        model, (x, _) = wb.parallelize(models[rank], f"{strategy} fp8"), values()
        with wb.debug.trace() as trace:
            model(x).float().sum().backward()
        return [(r.direction, r.kind, r.shape) for r in trace.records if r.function == "float8_linear"]

    found = run_ranks(program, 2)[0]
    assert found == [("forward", "all-reduce", (2,)), ("backward", "all-reduce", ())]


def test_weights_under_another_strategy_and_precision(tmp_path):
    """A checkpoint holds weights of 32 bits."""
    models = [Net() for _ in range(4)]

    def write(rank):
        train(models[rank], "*: model | 1x1x2 fp8", 2)
        wb.checkpoint.save(tmp_path / "step", model=models[rank])
        return {name: p.full_tensor() for name, p in models[rank].named_parameters()}

    def read(rank):
        model = wb.parallelize(models[2 + rank], "*: data | zero=3 fp8")
        wb.checkpoint.load(tmp_path / "step", model=model)
        return {name: p.full_tensor() for name, p in model.named_parameters()}

    written, found = run_ranks(write, 2)[0], run_ranks(read, 2)[0]
    assert all(torch.equal(found[name], value) and value.dtype == torch.float32 for name, value in written.items())
