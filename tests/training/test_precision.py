"""Autocast by strategy, and a scaler that decides for all ranks: the losses of one device under the same autocast."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.models import batch_for, make
from workbench.testing import run_ranks

STRATEGIES = [
    ("*: data | 1x2x1", 2),
    ("*: data | 1x3x1", 3),
    ("*: model | 1x1x2", 2),
    ("*: model | 1x2x2 zero=2", 4),
    ("*: data | 1x2x1 zero=3", 2),
    ("*: data | 1x2x1 zero=1 recompute", 2),
]


def losses_of(model, kind, forward, scaler=None, steps=6):
    inputs, targets = batch_for(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(inputs).float(), targets)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses


def one_device(kind, dtype, scaled):
    model = make(kind)

    def forward(inputs):
        with torch.autocast("cpu", dtype=dtype):
            return model(inputs)

    return losses_of(model, kind, forward, torch.amp.GradScaler("cpu", init_scale=2.0**8) if scaled else None)


CASES = [(kind, *strategy) for kind in ("mlp", "cnn", "attention") for strategy in STRATEGIES]


@pytest.mark.parametrize(
    ("kind", "strategy", "num_ranks"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_losses_of_one_device_under_the_same_autocast(kind, strategy, num_ranks):
    """Products are rounded to 8 (bf16) or 11 (fp16) bits; where they are split, so is the rounding."""
    models = {word: [make(kind) for _ in range(num_ranks)] for word in ("bf16", "fp16")}
    for word, dtype, tolerance in (("bf16", torch.bfloat16, 2e-2), ("fp16", torch.float16, 2e-3)):

        def program(rank, word=word):
            model = wb.parallelize(models[word][rank], f"{strategy} {word}")
            seen = []
            model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if word == "fp16" else None
            losses = losses_of(model, kind, model, scaler)
            assert not torch.is_autocast_enabled("cpu") and len(seen) == 6
            return losses

        expected = one_device(kind, dtype, word == "fp16")
        for losses in run_ranks(program, num_ranks):
            assert losses == pytest.approx(expected, abs=tolerance)


class Two(nn.Module):
    """Two layers, for two stages."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.other(torch.tanh(self.layer(x)))


SCALED = ["*: data", "*: data | zero=1", "*: data | zero=2", "*: data | zero=3", "*: model",
          "layer: data; other: data@1 | 2x1x1"]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "fused"),
    [
        (SCALED[0], False),
        (SCALED[1], True),
        (SCALED[5], False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(SCALED, [False, True])),
    ],
)
def test_an_overflow_on_one_rank_alone_is_everybodys(strategy, fused):
    """The last row's loss counts so much that its gradient, scaled, is infinite; the last rank alone has it."""
    torch.manual_seed(0)
    models = [Two() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fatal = torch.tensor([1.0, 1.0, 1.0, 1e10])[:, None]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
        before = [p.detach().clone() for p in model.parameters()]
        found = []
        for weight in (fatal, torch.ones(4, 1), fatal):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(4, 4)) * weight).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            place = {"placement": wb.placement.all("cpu"), "sbp": "B"}
            now = [p.detach().to_global(**place).to_local() for p in model.parameters()]
            then = [p.to_global(**place).to_local() for p in before]
            found.append((all(map(torch.equal, now, then)), scaler.get_scale()))
        return found

    for found in run_ranks(program, 2):
        assert found == [(True, 2.0**99), (False, 2.0**99), (False, 2.0**98)]


@pytest.mark.parametrize("strategy", ["*: data | 1x2x1", "*: data | 1x2x1 zero=2", "*: model | 1x1x2"])
def test_a_step_without_gradients_is_an_error_as_on_one_device(strategy):
    models = [copy.deepcopy(model) for model in [nn.Linear(4, 4)] * 2]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)

    run_ranks(program, 2)


def test_the_one_device_scaler_is_as_before():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_gradients_are_those_without_a_scaler():
    models = [make("mlp") for _ in range(4)]
    inputs, targets = batch_for("mlp")

    def program(rank, scaled):
        model = wb.parallelize(models[rank + 2 * scaled], "*: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        scaler.scale(F.cross_entropy(model(inputs), targets)).backward()
        scaler.unscale_(optimizer)
        grads = [p.grad.full_tensor().clone() for p in model.parameters()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return norm, grads, [p.full_tensor().detach() for p in model.parameters()]

    scaled, plain = (run_ranks(lambda rank, s=s: program(rank, s), 2)[0] for s in (True, False))
    torch.testing.assert_close(scaled, plain, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=2", "*: model"])
def test_an_optimizer_of_plain_and_global_parameters(strategy):
    """A weight of the loss, for example; an overflow of its gradient alone is everybody's, too."""
    models = [make("mlp") for _ in range(3)]
    inputs, targets = batch_for("mlp")

    def trained(model):
        extra = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([extra, *model.parameters()], lr=0.1)
        scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
        for factor in (1.0, 2.0**120, 1.0):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets) * extra[0] + factor * extra[1]
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found += [scaler.get_scale(), *extra.tolist()]
        return found, [everywhere(parameter) for parameter in model.parameters()]

    expected = trained(models[2])
    assert expected[0][::3] == [2.0**10, 2.0**9, 2.0**9]
    for found in run_ranks(lambda rank: trained(wb.parallelize(models[rank], strategy)), 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x))
        return x


ROWS = "a: data; b: data; c: data@1; d: data@1 |"
SCHEDULED = {
    "1f1b": f"{ROWS} 2x1x1 mb=4 1f1b fp16",
    "interleaved": "a: data; b: data@1; c: data@2; d: data@3 | 2x1x1 mb=4 interleaved fp16",
    "gpipe": f"{ROWS} 2x1x1 mb=4 gpipe fp16",
    "zero_bubble": f"{ROWS} 2x1x1 mb=4 zero_bubble fp16",
    "shards of gradients": f"{ROWS} 2x2x1 mb=4 1f1b fp16 zero=2",
    "shards": f"{ROWS} 2x2x1 mb=4 1f1b fp16 zero=3",
}
WEIGHTS = [torch.tensor([*[1.0] * 7, last])[:, None] for last in (1.0, 1e10, 1.0)]


def scaled_steps(model, backward):
    """Three steps, the second of which overflows in the last micro-batch: were parameters left alone, and the end."""
    optimizer, scaler = torch.optim.Adam(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    skipped = []
    for weights in WEIGHTS:
        before = [everywhere(p).clone() for p in model.parameters()]
        optimizer.zero_grad()
        backward(lambda out, w: scaler.scale((out.float() * w).square().mean()), torch.ones(8, 4), weights)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        now = [everywhere(p) for p in model.parameters()]
        skipped.append(all(map(torch.equal, now, before)))
    return skipped, scaler.get_scale(), now


def everywhere(parameter):
    if not isinstance(parameter, wb.GlobalTensor):
        return parameter.detach()
    return parameter.detach().to_global(placement=wb.placement.all("cpu"), sbp="B").to_local()


def on_one_device(model):
    def backward(loss_fn, inputs, weights):
        for x, w in zip(inputs.chunk(4), weights.chunk(4), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x)
            (loss_fn(out, w) / 4).backward()

    return scaled_steps(model, backward)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [n if n in ("1f1b", "interleaved") else pytest.param(n, marks=pytest.mark.slow) for n in SCHEDULED]
)
def test_an_overflow_in_one_micro_batch_on_the_last_stage_skips_the_step_on_all(name):
    strategy, num_ranks = SCHEDULED[name], 4 if "2x2x1" in SCHEDULED[name] else 2
    torch.manual_seed(0)
    models = [Four() for _ in range(num_ranks + 1)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    truth = on_one_device(models[-1])
    assert truth[:2] == ([False, True, False], 2.0**9)

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        return scaled_steps(model, lambda loss_fn, x, w: wb.forward_backward(model, loss_fn, x, w))

    for skipped, scale, weights in run_ranks(program, num_ranks):
        assert (skipped, scale) == truth[:2]
        torch.testing.assert_close(weights, list(truth[2]), rtol=1e-5, atol=1e-6)


class Encoders(nn.Module):
    """With a method beside its forward."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(16, 16), nn.Linear(16, 16)

    def encode(self, x):
        return self.text(self.image(x))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.encode(x)


@pytest.mark.parametrize("options", ["bf16", pytest.param("fp8 recompute", marks=pytest.mark.slow)])
def test_a_method_in_which_the_precision_does_not_act_is_warned_of_once(options):
    torch.manual_seed(0)
    built = Encoders()

    def program():
        model, x = wb.parallelize(copy.deepcopy(built), f"*: data | {options}"), torch.ones(2, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model.encode(x).dtype == torch.bfloat16
        model(x).sum().backward()
        with pytest.warns(UserWarning, match=r": image of Encoders runs in 32 bits.*with torch.autocast"):
            model.encode(x)
        model.encode(x)

    run_ranks(program, 1)
