"""A job as a newcomer gives it: samples of unlike sizes, counted losses, orders of data, and mistakes of every kind."""

import re
from collections import namedtuple
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from workbench.core.presets import strategy_of
from workbench.errors import RunError
from workbench.testing import run_ranks
from workbench.training.parallel import describe
from workbench.training.runs.job import Job
from workbench.training.runs.job_checks import shown
from workbench.training.runs.train import run_one_device, run_strategy, warm_up

SAMPLES = 13
Pair = namedtuple("Pair", "words label")


class Tagger(nn.Module):
    """A class for each word; padding is recognised by its words."""

    def __init__(self):
        super().__init__()
        self.words, self.up, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, words):
        return self.head(torch.tanh(self.up(self.words(words)))).transpose(1, 2)


def sentences():
    """Sentences of unlike lengths, and a class for each of their words."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(1, 20, (3 + 5 * index % 7,), generator=generator) for index in range(SAMPLES)]
    return [(words, words % 5) for words in found]


def padded(samples):
    words, classes = zip(*samples, strict=True)
    padding = {"batch_first": True}
    return (
        nn.utils.rnn.pad_sequence(words, **padding),
        nn.utils.rnn.pad_sequence(classes, padding_value=-100, **padding),
    )


def num_words(inputs, targets):
    return (targets != -100).sum()


def tagging(**options):
    """Batches of 5, 5 and 3 sentences, each padded to its longest."""
    options = {"batch_size": 5, "num_steps": 4, "collate_fn": padded, **options}
    return Job(Tagger, sentences(), F.cross_entropy, None, **options)


def features(rows=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator), torch.arange(rows) % 4


def perceptron():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["data", "model", "pipeline | mb=2", "*: data | zero=3 mb=3"])
def test_batches_of_a_collate_fn_train_as_on_one_device(strategy):
    job = tagging()
    strategy = strategy_of(strategy, describe(job.model()), 2)
    expected = run_one_device(job, strategy.options.num_micro_batches)
    for run in run_ranks(lambda: run_strategy(job, strategy), 2):
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert len(set(expected.losses)) == 4


@pytest.mark.parametrize("strategy", ["data | mb=3", "pipeline"])
def test_with_a_count_micro_batches_make_the_loss_of_the_batch(strategy):
    """Its mean is over words, of which micro-batches have unlike numbers."""
    whole = run_one_device(tagging())
    for run in run_ranks(lambda: run_strategy(tagging(count=num_words), strategy), 2):
        assert run.losses == pytest.approx(whole.losses, rel=1e-5)
    by_samples = run_one_device(tagging(), 3)
    assert by_samples.losses[0] != pytest.approx(whole.losses[0], rel=1e-4), "else this test says nothing"


def test_a_micro_batch_without_terms_adds_nothing_on_one_device_either():
    """Its own loss is a mean of nothing, which is nan. The second step has no term at all."""
    inputs, classes = features(16)
    classes[4:] = torch.where(torch.arange(12) < 4, classes[4:], -100)
    classes[:4] = -100
    job = Job(perceptron, (inputs, classes), F.cross_entropy, None, 8, 2, shuffle=False, count=num_words)
    expected = run_one_device(job, 2)
    for run in run_ranks(lambda: run_strategy(job, "*: data | mb=2", keeps_weights=True), 2):
        assert run.losses == pytest.approx(expected.losses) and run.losses[0] > 0 and run.losses[1] == 0
        for name, weight in expected.weights.items():
            torch.testing.assert_close(run.weights[name], weight)


def test_shuffle_and_drop_last():
    inputs, classes = torch.arange(7.0)[:, None], torch.zeros(7)

    def command(**options):
        job = Job(perceptron, (inputs, classes), F.mse_loss, None, 3, 5, **options)
        return [batch.inputs[:, 0].int().tolist() for batch in job.batches()]

    assert command(shuffle=False) == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2], [3, 4, 5]]
    assert command(shuffle=False, drop_last=True) == [[0, 1, 2], [3, 4, 5]] * 2 + [[0, 1, 2]]
    shuffled = command()
    assert shuffled == command() != command(seed=1) and sorted(chain.from_iterable(shuffled[:3])) == list(range(7))
    assert [len(batch) for batch in command(drop_last=True)] == [3] * 5


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_batches_that_ranks_do_not_divide(batch_size):
    job = Job(perceptron, features(), F.cross_entropy, None, batch_size, 5)
    expected = run_one_device(job)
    for strategy in ("data", "model"):
        for run in run_ranks(lambda strategy=strategy: run_strategy(job, strategy), 2):
            assert run.losses == pytest.approx(expected.losses, rel=1e-5)


def test_samples_and_arrays_may_be_named_tuples():
    inputs, classes = features()
    whole = run_one_device(Job(perceptron, (inputs, classes), F.cross_entropy, None, 5, 3)).losses
    for dataset in (Pair(inputs, classes), list(map(Pair, inputs, classes))):
        assert run_one_device(Job(perceptron, dataset, F.cross_entropy, None, 5, 3)).losses == whole
    batches = Job(perceptron, list(map(Pair, inputs, classes)), F.cross_entropy, None, 5, 3, collate_fn=as_pair)
    for run in run_ranks(lambda: run_strategy(batches, "data"), 2):
        assert run.losses == pytest.approx(whole, rel=1e-5)


def as_pair(samples):
    return Pair(torch.stack([sample.words for sample in samples]), torch.stack([sample.label for sample in samples]))


# ---- mistakes -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*features(), strict=True))


class Endless(Dataset):
    def __getitem__(self, index):
        return features()[0][0]


def on_meta():
    with torch.device("meta"):
        return perceptron()


def loader():
    return DataLoader(TensorDataset(*features()), batch_size=4, collate_fn=padded)


BEFORE = {
    "a generator": ({"dataset": (sample for sample in [1, 2])}, r"is a generator, which has no positions.*list\(data"),
    "a function": ({"dataset": features}, r"is a function, which has no positions.*call it, and give what it returns"),
    "a stream": ({"dataset": Stream()}, r"is a Stream, which has no positions.*__getitem__ and __len__"),
    "no length": ({"dataset": Endless()}, r"is a Endless, which has no positions"),
    "nothing": ({"dataset": None}, r"is a NoneType, which has no positions"),
    "a loader": ({"dataset": loader()}, r"DataLoader of 13 samples in batches of 4.*give loader.dataset.*=4, c"),
    "a loader of a stream": ({"dataset": DataLoader(Stream(), 4)}, r"is a DataLoader in batches of 4.*loader.dataset"),
    "a list of arrays": ({"dataset": list(features())}, r"=5, but the data set has 2 samples.*stand in a tuple"),
    "too few samples": ({"dataset": features(4)}, r"batch_size=5, but the data set has 4 samples.*=4 is the largest"),
    "unlike rows": (
        {"dataset": (features(6)[0], features(9)[1])}, r"different numbers of samples: 0 \(6, 8\), 1 \(9,\).*one row"),
    "words": ({"dataset": (features()[0], ["a"] * 13)}, r"has a list beside its arrays.*collate_fn that makes batches"),
    "arrays and a collate_fn": ({"collate_fn": padded}, r"collate_fn= with a tuple of 2 arrays.*or a TensorDataset"),
    "half a sample": ({"batch_size": 2.5}, r"batch_size=2.5: a whole number"),
    "a class of losses": ({"loss_fn": nn.CrossEntropyLoss}, r"loss_fn is the class.*an instance: CrossEntropyLoss\("),
    "a name of a loss": ({"loss_fn": "mse"}, r"loss_fn is a str: 'mse'.*give a function"),
    "an optimizer": (
        {"optimizer_fn": torch.optim.Adam(perceptron().parameters())}, r"optimizer_fn is a Adam.*optim.Adam\(param"),
    "a model": ({"model_fn": perceptron()}, r"model_fn is a Sequential.*without calling it"),
}  # fmt: skip
MADE = {
    "several optimizers": ({"optimizer_fn": lambda p: [torch.optim.SGD(p, 0.1)] * 2}, r"a list of 2; .*groups"),
    "a closure": ({"optimizer_fn": torch.optim.LBFGS}, r"a LBFGS, whose step.*several times, by a closure.*own"),
    "no optimizer": ({"optimizer_fn": lambda p: None}, r"returned a NoneType; a run has 1 torch.optim.Optimizer"),
    "another model's": (
        {"optimizer_fn": lambda p: torch.optim.SGD([*p, *perceptron().parameters()], 0.1)},
        r"a SGD over 8 tensors, 4 of which are not among the model's 4"),
    "a model on meta": ({"model_fn": on_meta}, r"with 4 of 4 tensors on meta, 0.weight first.*outside of torch.device"),
    "a class of models": ({"model_fn": lambda: nn.Linear}, r"returned the class Linear, not an nn.Module"),
    "no model": ({"model_fn": lambda: None}, r"returned a NoneType, not an nn.Module"),
    "a vector": (
        {"loss_fn": lambda out, y: F.cross_entropy(out, y, reduction="none")}, r"\(2,\) with 1 dims, but a loss has"),
    "a number": ({"loss_fn": lambda out, y: 0.5}, r"loss_fn returned a float, but a step needs one scalar tensor"),
}  # fmt: skip
RECORDED = {
    "a pair of outputs": (
        {"model_fn": lambda: Twice()}, TypeError,
        r"output is a tuple of \(float32 \(2, 4\), float32 \(2,\)\); targets is int64 \(2,\)\. .*output\[0\]"),
    "other shapes": (
        {"loss_fn": lambda out, y: F.cross_entropy(out.T, y)}, ValueError, r"is float32 \(2, 4\); targets is int64"),
    "no targets": ({"dataset": features()[0]}, TypeError, r"targets is None"),
    "other features": (
        {"dataset": (torch.ones(9, 7), torch.ones(9))}, RuntimeError, r"inputs is float32 \(2, 7\).*in plain torch"),
}  # fmt: skip


class Twice(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)

    def forward(self, x):
        return super().forward(x), x.sum(1)


def job_with(**mistake):
    asked = {"model_fn": perceptron, "dataset": features(), "loss_fn": F.cross_entropy, "optimizer_fn": None}
    return Job(**{**asked, "batch_size": 5, "num_steps": 3, **mistake})


@pytest.mark.parametrize("name", BEFORE)
def test_what_cannot_be_trained_is_told_before_anything_is_made(name):
    mistake, message = BEFORE[name]
    with pytest.raises(RunError, match=message):
        job_with(**mistake)


@pytest.mark.parametrize("name", MADE)
def test_what_a_function_makes_is_looked_at(name):
    mistake, message = MADE[name]
    with pytest.raises(RunError, match=message):
        warm_up(job_with(**mistake))


@pytest.mark.parametrize("name", RECORDED)
def test_errors_of_the_users_own_code_say_what_it_was_called_with(name):
    mistake, kind, message = RECORDED[name]
    with pytest.raises(kind) as caught:
        warm_up(job_with(**mistake))
    (note,) = caught.value.__notes__
    assert "the first samples of the data set" in note
    assert re.search(message, note), note


def test_a_batch_is_shown_by_its_shapes():
    batch = {"x": torch.ones(2, 4, dtype=torch.bfloat16), "rest": [torch.ones(2), None, 3]}
    assert shown(batch) == "a dict of {x: bfloat16 (2, 4), rest: a list of (float32 (2,), None, a int)}"


def scaled(output, targets):
    return 100 * F.cross_entropy(output, targets)


def dropped(output, targets):
    return F.cross_entropy(F.dropout(output), targets)


def only_two(output, targets):
    return F.cross_entropy(output.view(2, 4), targets)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss(torch.rand(4)), scaled, dropped, only_two])
def test_means_are_taken_over_micro_batches(loss_fn):
    assert warm_up(job_with(loss_fn=loss_fn)) == ""


def test_a_sum_is_no_mean_of_micro_batches():
    problem = warm_up(job_with(loss_fn=nn.CrossEntropyLoss(reduction="sum")))
    assert "for 2 samples" in problem and "where each of them comes twice, so it is no mean" in problem
