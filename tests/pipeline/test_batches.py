"""Batches of every kind: keywords of transformers with labels among them, a loader's global tensors, bad cuts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.zoo import batch_for
from tests.models.zoo import make as make_transformer
from tests.training.models import make
from workbench.core.presets import stage_cuts
from workbench.errors import RunError
from workbench.testing import run_ranks
from workbench.training.batches import Batch
from workbench.training.parallel import describe
from workbench.training.sample_rows import count_samples

STAGES = {"1f1b": 2, "zero_bubble": 2, "interleaved": 4}


def strategy_of(model, schedule):
    layers = describe(model)
    cuts = stage_cuts(layers, STAGES[schedule])
    rows = "; ".join(f"{layer.name}: data@{stage}" for layer, stage in zip(layers, cuts, strict=True))
    return f"{rows} | 2x1x1 mb=2 {schedule}"


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param("gpt2", "interleaved", marks=pytest.mark.slow),
        ("gpt2", "1f1b"),
        *(
            pytest.param(name, schedule, marks=pytest.mark.slow)
            for name in ("llama", "bert", "vit", "t5")
            for schedule in STAGES
        ),
    ],
)
def test_transformers_are_called_with_keywords_and_have_their_own_loss(name, schedule):
    models, one = [make_transformer(name) for _ in range(2)], make_transformer(name)
    batch = batch_for(name, size=4)
    halves = [{key: value[start : start + 2] for key, value in batch.items()} for start in (0, 2)]
    losses = [one(**half).loss for half in halves]
    mean = sum(losses) / 2
    mean.backward()
    gradient = next(p for p in reversed(list(one.parameters())) if p.grad is not None).grad
    with torch.no_grad():
        logits = torch.cat([one.eval()(**half).logits for half in halves])

    def program(rank):
        model = wb.parallelize(models[rank], strategy_of(models[rank], schedule))
        loss = wb.forward_backward(model, inputs=batch).item()
        found = next(p for p in reversed(list(model.parameters())) if p.grad is not None).grad
        everywhere = wb.placement.all("cpu")
        output = wb.evaluate(model, batch)
        whole = [t.to_global(placement=everywhere, sbp="B").full_tensor() for t in (found, output.logits)]
        return loss, output.loss.item(), *whole

    for loss, evaluated, found, output in run_ranks(program, 2):
        assert loss == pytest.approx(mean.item(), rel=1e-5) == evaluated
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(output, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_loaders_batches_are_cut_too(schedule):
    dataset = torch.utils.data.TensorDataset(torch.randn(6, 16), torch.arange(6))
    models, one = [make("mlp") for _ in range(2)], make("mlp")
    truth = F.cross_entropy(one(dataset.tensors[0]), dataset.tensors[1]).item()

    def program(rank):
        model = wb.parallelize(models[rank], strategy_of(models[rank], schedule))
        loader = wb.GlobalDataLoader(dataset, batch_size=6, module=model)
        inputs, targets = next(iter(loader))
        return wb.forward_backward(model, F.cross_entropy, inputs, targets).item()

    assert run_ranks(program, 2) == [pytest.approx(truth, rel=1e-5)] * 2


def test_how_a_batch_is_cut():
    inputs = {"x": torch.arange(10).view(5, 2), "mask": torch.ones(1, 2), "scale": torch.tensor(2.0), "name": "a"}
    parts = Batch(inputs, (torch.arange(5),)).cut(2)
    assert [part.inputs["x"].shape[0] for part in parts] == [3, 2] and [part.share for part in parts] == [0.6, 0.4]
    assert all(part.inputs["mask"] is inputs["mask"] and part.inputs["scale"] is inputs["scale"] for part in parts)
    assert torch.equal(torch.cat([part.targets[0] for part in parts]), torch.arange(5))
    assert len(Batch(torch.ones(2, 3)).cut(8)) == 2 and len(Batch(torch.ones(1, 3), torch.ones(1)).cut(4)) == 1
    counted = Batch(torch.ones(4), torch.tensor([1, 0, 0, 0])).cut(2, lambda inputs, targets: targets.sum())
    assert [part.share for part in counted] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(8, 32), (32,), (1, 32), (32, 32), (8,)], 8),  # words, positions, masks, weights
        ([(8, 8), (1, 8), (8,)], 8),  # as many words as samples
        ([(1, 32), (32,)], 1),  # the last sample of an epoch beside positions
        ([(8, 16), (8, 12), (16,), (12,)], 8),  # encoder and decoder
        ([(32, 4), (1, 32)], 32),
        ([(4, 2), (3,)], None),
        ([(4, 6), (6, 4)], None),
        ([(6, 4), (4, 2)], None),
        ([()], 1),
    ],
)
def test_which_rows_are_samples(shapes, expected):
    assert count_samples([torch.empty(shape) for shape in shapes]) == expected


class WritesLabels(nn.Module):
    """Replaces the words that count for nothing in the labels themselves, and looks these up."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, labels):
        labels.masked_fill_(labels == -100, 0)
        return F.cross_entropy(self.head(self.words(labels)).flatten(0, 1), labels.flatten())


def test_a_forward_may_write_into_its_part_of_the_labels():
    torch.manual_seed(0)
    model, labels = WritesLabels(), torch.tensor([[1, -100, 3], [4, 5, -100], [1, 1, 2], [-100, 6, 7]])
    expected = copy.deepcopy(model)(labels.clone()).item()

    def program():
        spread = wb.parallelize(copy.deepcopy(model), "words: data; head: data@1 | 2x1x1 mb=2 gpipe")
        return wb.forward_backward(spread, inputs={"labels": labels.clone()}).item()

    assert run_ranks(program, 2) == [pytest.approx(expected)] * 2


def test_what_goes_to_the_model_and_what_to_the_loss():
    def parts(values, loss_fn):
        batch = Batch.of(values, loss_fn)
        return batch.inputs, batch.targets  # in a tuple, a tensor equals itself

    x, y, z = torch.ones(2, 3), torch.zeros(2), torch.ones(2)
    assert parts((x, y), F.mse_loss) == (x, y) and parts([x, z, y], F.mse_loss) == ((x, z), y)
    assert parts((x, y), None) == ((x, y), None) and parts(x, F.mse_loss) == (x, None)
    whole = {"x": x, "labels": y}
    assert parts(whole, None) == (whole, None) and parts(whole, F.mse_loss) == ({"x": x}, y)
    assert parts({**whole, "target": z}, F.mse_loss)[1] == {"labels": y, "target": z}
    of_arguments = Batch.of_arguments(whole, z, F.mse_loss)
    assert of_arguments.inputs["x"] is x and of_arguments.targets is z
    assert Batch.of((x.numpy(), y), F.mse_loss).inputs.equal(x)
    assert Batch({"positions": torch.ones(1, 7), "x": x}).sample_shape == (3,)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.ones(4, 2), torch.ones(3), r"inputs \(4, 2\), targets \(3,\).*dim of 1"),
        (torch.ones(0, 2), torch.ones(0), "0 samples.*at least 1"),
        (torch.tensor(1.0), None, "0 samples"),
    ],
)
def test_what_cannot_be_cut_says_why(inputs, targets, message):
    with pytest.raises(RunError, match=message):
        Batch(inputs, targets).cut(2)


class Auxiliary(nn.Module):
    """Results of two heads, on different stages."""

    def __init__(self):
        super().__init__()
        self.a, self.first, self.b, self.second = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        x = torch.tanh(self.a(x))
        return self.first(x), self.second(torch.tanh(self.b(x)))


def auxiliary_loss(outputs, targets):
    early, late = outputs
    return 0.3 * F.mse_loss(early, targets) + F.mse_loss(late, targets) + 0.1 * (early * late).mean()


@pytest.mark.parametrize("schedule", STAGES)
def test_a_loss_is_made_of_results_on_several_stages(schedule):
    torch.manual_seed(0)
    one, inputs, targets = Auxiliary(), torch.randn(7, 6), torch.randn(7, 6)
    models = [copy.deepcopy(one) for _ in range(2)]
    expected = auxiliary_loss(one(inputs), targets)
    expected.backward()

    def program(rank):
        model = wb.parallelize(models[rank], strategy_of(models[rank], schedule))
        loss = wb.forward_backward(model, auxiliary_loss, inputs, targets)
        everywhere = wb.placement.all("cpu")
        grads = [p.grad.to_global(placement=everywhere, sbp="B").to_local() for p in model.parameters()]
        return loss.item(), grads

    for loss, grads in run_ranks(program, 2):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(grads, [p.grad for p in one.parameters()], rtol=1e-5, atol=1e-6)


def test_a_pipeline_trains_on_what_its_last_stage_has_made():
    """Tokens that a model has sampled lie where its logits do, and go back to the first stage before the step."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))
    models = [copy.deepcopy(one) for _ in range(2)]

    def step(model, run):
        with torch.no_grad():
            tokens = model(torch.arange(5)).argmax(-1)
            tokens = model(tokens).argmax(-1)
        return run(model, tokens).item(), tokens.tolist()

    def run_plain(model, tokens):
        loss = F.cross_entropy(model(tokens), tokens)
        loss.backward()
        return loss

    expected = step(one, run_plain)

    def program(rank):
        model = wb.parallelize(models[rank], strategy_of(models[rank], "1f1b"))
        found = step(model, lambda model, tokens: wb.forward_backward(model, F.cross_entropy, tokens, tokens))
        everywhere = wb.placement.all("cpu")
        return found, [p.grad.to_global(placement=everywhere, sbp="B").to_local() for p in model.parameters()]

    for (loss, tokens), grads in run_ranks(program, 2):
        assert (loss, tokens) == (pytest.approx(expected[0], rel=1e-6), expected[1])
        torch.testing.assert_close(grads, [p.grad for p in one.parameters()], rtol=1e-5, atol=1e-6)
