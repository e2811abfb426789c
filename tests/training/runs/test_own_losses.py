"""Models with a loss of their own, batches as dicts and nested containers: the numbers of one device."""

import functools
from collections import UserDict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.zoo import make
from workbench.core.presets import strategy_of
from workbench.errors import RunError
from workbench.testing import run_ranks
from workbench.training.batches import Batch
from workbench.training.parallel import describe
from workbench.training.runs.job import Job
from workbench.training.runs.train import run_one_device, run_strategy, warm_up

CUT = Batch.cut
STRATEGIES = ["data", "model", "pipeline | mb=2", "*: data | zero=3"]
SAMPLES, LENGTH = 10, 8


def words(seed=0):
    """Padded sentences: words, masks, and labels that leave the padding out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 37, (SAMPLES, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.arange(SAMPLES)[:, None] % 5 + 4).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class TwoInputs(nn.Module):
    """Words and positions that all samples share; returns its loss where it gets targets."""

    def __init__(self, returns="pair"):
        super().__init__()
        self.words, self.positions = nn.Embedding(37, 12), nn.Embedding(LENGTH, 12)
        self.up, self.down, self.head = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, 37)
        self.returns = returns

    def forward(self, ids, positions, weights, targets=None):
        x = self.words(ids) + self.positions(positions)
        logits = self.head(x + self.down(torch.tanh(self.up(x))))
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)
        loss = (losses * weights).mean()
        return {"scalar": loss, "pair": (logits, loss), "dict": {"logits": logits, "loss": loss}}[self.returns]


def sentences(positions):
    data = words()
    weights = torch.linspace(0.5, 1.5, SAMPLES)
    return {"ids": data["input_ids"], "positions": positions, "weights": weights, "targets": data["input_ids"]}


def sequence_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def rows_of(data, change=lambda sample: sample):
    return [change({key: value[i] for key, value in data.items()}) for i in range(SAMPLES)]


def classes():
    data = words(1)
    return {**data, "labels": torch.arange(SAMPLES) % 3}


JOBS = {
    "gpt2, columns in a dict": (functools.partial(make, "gpt2"), words(), None),
    "bert, samples as UserDicts": (functools.partial(make, "bert"), rows_of(words(), UserDict), None),
    "a scalar, shared vector of positions": (
        functools.partial(TwoInputs, "scalar"), sentences(torch.arange(LENGTH)), None),
    "a pair, shared row of positions": (TwoInputs, tuple(sentences(torch.arange(LENGTH)[None]).values()), None),
    "a dict with a loss": (functools.partial(TwoInputs, "dict"), sentences(torch.arange(LENGTH)[None]), None),
    "a dict and a loss_fn": (TwoInputs, sentences(torch.arange(LENGTH)[None]), sequence_loss),
    "four of a tuple and a loss_fn": (TwoInputs, tuple(sentences(torch.arange(LENGTH)[None]).values()), sequence_loss),
    "a nested pair": (
        TwoInputs, ({k: v for k, v in sentences(torch.arange(LENGTH)[None]).items() if k != "targets"},
                    words()["input_ids"].numpy()), sequence_loss),
}  # fmt: skip


@functools.cache
def truth(name, num_micro_batches):
    return run_one_device(job_of(name), num_micro_batches)


def job_of(name):
    model_fn, dataset, loss_fn = JOBS[name]
    return Job(model_fn, dataset, loss_fn, None, batch_size=7, num_steps=4)  # of 10 samples: 7, 3, 7, 3


@pytest.mark.sampled(24)
@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("name", JOBS)
def test_every_strategy_equals_one_device(name, text):
    job = job_of(name)
    strategy = strategy_of(text, describe(job.model()), 2)
    runs = run_ranks(lambda rank: run_strategy(job, strategy, keeps_weights=True), 2)
    expected = truth(name, strategy.options.num_micro_batches)
    assert len(expected.losses) == 4 and len(set(expected.losses)) == 4
    for run in runs:
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        for key, value in run.weights.items():
            if key in expected.weights:
                torch.testing.assert_close(value, expected.weights[key], rtol=1e-4, atol=1e-5, msg=key)


MISTAKES = {
    "no loss": ("gpt2", {"input_ids": words()["input_ids"]}, None, "no loss_fn.*CausalLM.*with logits.*'labels'"),
    "logits": (TwoInputs, {k: v for k, v in sentences(torch.arange(LENGTH)).items() if k != "targets"}, None,
               r"the model returned a tensor of shape \(2, 8, 37\) with 3 dims.*or give a loss_fn"),
    "unknown keys": (TwoInputs, {**sentences(torch.arange(LENGTH)), "qqqq": torch.ones(10), "weight": torch.ones(10)},
                     None, r"has 'qqqq', 'weight' \(nearest: weights\), but TwoInputs.forward\(ids, positions, weig"),
    "too many": (TwoInputs, (*sentences(torch.arange(LENGTH)).values(), torch.ones(SAMPLES)), None,
                 r"gives 5 arguments, but TwoInputs.forward\(ids, positions, weights, targets\) does not take them"),
    "unlike rows": ("gpt2", {**words(), "labels": torch.ones(9, LENGTH)}, None,
                    r"different numbers of samples: input_ids \(10, 8\), attention_mask \(10, 8\), labels \(9, 8\)"),
    "the old way": ("gpt2", words(), lambda output, _: output.loss, "loss_fn returned a NoneType.*leave out loss_fn"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_the_entry_and_the_signature(name):
    model, dataset, loss_fn, message = MISTAKES[name]
    model_fn = functools.partial(make, model) if isinstance(model, str) else model
    with pytest.raises(RunError, match=message):
        warm_up(Job(model_fn, dataset, loss_fn, None, batch_size=7, num_steps=4))


def test_a_mistake_in_the_models_own_code_stays_what_it_is():
    class Broken(nn.Linear):
        def forward(self, x):
            return super().forward(x) + None

    with pytest.raises(TypeError, match="unsupported operand"):
        warm_up(Job(lambda: Broken(4, 2), (torch.ones(4, 4), torch.ones(4, 2)), F.mse_loss, None, 2, 1))


def test_a_wrong_weight_of_a_micro_batch_is_noticed(monkeypatch):
    """The shares of uneven micro-batches are what makes them equal to one device: 4 and 3 of 7, 2 and 1 of 3."""
    name = "gpt2, columns in a dict"
    expected = truth(name, 2)
    monkeypatch.setattr(
        Batch, "cut", lambda batch, number, count: [replace(part, share=0.5) for part in CUT(batch, number)]
    )
    wrong = run_one_device(job_of(name), 2)
    assert wrong.losses[0] != pytest.approx(expected.losses[0], rel=1e-5)


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("strategy", ["*: data | mb=3", "pipeline"])
def test_counted_terms_make_micro_batches_the_whole_batch(strategy):
    """The loss of the whole batch in one go: its mean is over words, of which micro-batches have unlike numbers."""
    batch, one = words(), make("gpt2")
    expected = one(**batch).loss
    expected.backward()
    models = [make("gpt2") for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        by_samples = wb.forward_backward(model, inputs=batch).item()
        model.zero_grad()
        loss = wb.forward_backward(model, inputs=batch, count=lambda inputs, _: (inputs["labels"][:, 1:] != -100).sum())
        return by_samples, loss.item(), model.transformer.ln_f.weight.grad.full_tensor()

    for by_samples, loss, grad in run_ranks(program, 2):
        assert loss == pytest.approx(expected.item(), rel=1e-6) != pytest.approx(by_samples, rel=1e-4)
        torch.testing.assert_close(grad, one.transformer.ln_f.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_batch_by_itself_is_given_by_name():
    model = wb.parallelize(nn.Linear(4, 1), "data")
    with pytest.raises(RunError, match=r"loss_fn is a dict, not a function.*inputs=batch"):
        wb.forward_backward(model, {"input": torch.ones(2, 4)})
