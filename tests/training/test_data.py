"""The loader: who reads what, the order under every strategy, going on in the middle of an epoch."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import workbench as wb
from workbench.errors import LayoutError, RunError
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.batches import Batch
from workbench.training.datasets import collate
from workbench.training.runs.job import Job


class Counting:
    """Pairs (row of four numbers, class); counts who reads what."""

    def __init__(self, num_samples):
        self.inputs = torch.arange(num_samples * 4.0).view(num_samples, 4)
        self.reads = {}
        self.lock = threading.Lock()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        assert isinstance(index, int)
        with self.lock:
            self.reads.setdefault(wb.rank(), []).append(index)
        return self.inputs[index], index % 3


def whole(batch):
    return [value_on_all_ranks(part).clone() for part in batch]


@pytest.mark.parametrize(("num_ranks", "batch_size"), [(1, 4), (2, 4), (3, 4), (4, 3)])
def test_batches_are_those_of_one_device_and_every_sample_is_read_once(num_ranks, batch_size):
    data = Counting(9)

    def program():
        loader = wb.GlobalDataLoader(data, batch_size, shuffle=True, seed=5)
        return [whole(batch) for _ in range(2) for batch in loader]

    results = run_ranks(program, num_ranks)
    generator = torch.Generator().manual_seed(5)
    expected = [rows for _ in range(2) for rows in torch.randperm(9, generator=generator).split(batch_size)]
    for found in results:
        assert len(found) == len(expected) == 2 * -(-9 // batch_size)
        for (inputs, classes), rows in zip(found, expected, strict=True):
            assert torch.equal(inputs, data.inputs[rows]) and torch.equal(classes, rows % 3)
    assert sorted(index for read in data.reads.values() for index in read) == sorted([*range(9)] * 2)
    most = max(len(read) for read in data.reads.values())
    assert most <= sum(-(-len(rows) // num_ranks) for rows in expected)


def test_the_order_is_that_of_the_training_runs():
    inputs, targets = torch.arange(7.0).view(7, 1), torch.arange(7)
    job = Job(nn.Identity, (inputs, targets), F.mse_loss, None, batch_size=3, num_steps=6, seed=11)
    loader = wb.GlobalDataLoader(TensorDataset(inputs, targets), 3, shuffle=True, seed=11)
    ours = [value_on_all_ranks(batch[1]).tolist() for _ in range(2) for batch in loader]
    assert ours == [batch.targets.tolist() for batch in job.batches()]


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "readers"),
    [
        ("*: data", 4, {0: 2, 1: 2, 2: 2, 3: 2}),
        ("0: model:column; 1: model:row", 2, {0: 8, 1: 8}),  # every rank needs all inputs
        ("*: model | 1x2x2", 4, {0: 4, 1: 4, 2: 4, 3: 4}),
        ("0: data@0; 1: data@1; 2: data@2", 3, {0: 8, 2: 8}),  # inputs here, targets there, nothing between
        ("0: data@0; 1: data@0; 2: data@1 | 2x2x1", 4, {0: 4, 1: 4, 2: 4, 3: 4}),
    ],
)
def test_the_strategy_says_who_reads_what(strategy, num_ranks, readers):
    data, weights = Counting(8), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)).state_dict()

    def program():
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        model.load_state_dict(weights)
        wb.parallelize(model, strategy)
        ((inputs, classes),) = wb.GlobalDataLoader(data, 8, module=model)
        loss = wb.forward_backward(model, F.cross_entropy, inputs, classes)
        assert not loss.requires_grad
        return float(value_on_all_ranks(loss) if isinstance(loss, wb.GlobalTensor) else loss)

    losses = run_ranks(program, num_ranks)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model.load_state_dict(weights)
    expected = F.cross_entropy(model(data.inputs), torch.arange(8) % 3).item()
    assert all(abs(loss - expected) < 1e-5 for loss in losses)
    assert {rank: len(read) for rank, read in data.reads.items()} == readers


class TestGoingOn:
    @pytest.mark.parametrize("stop", [1, 3, 4, 6])
    def test_from_any_batch_on_other_ranks(self, stop):
        data = Counting(10)

        def uninterrupted():
            loader = wb.GlobalDataLoader(data, 3, shuffle=True, seed=1)
            return [whole(batch)[1].tolist() for _ in range(2) for batch in loader]

        def before():
            loader, seen = wb.GlobalDataLoader(data, 3, shuffle=True, seed=1), []
            while True:
                for batch in loader:
                    seen.append(whole(batch)[1].tolist())
                    if len(seen) == stop:
                        return seen, loader.state_dict()

        seen, state = run_ranks(before, 2)[0]

        def after():
            loader = wb.GlobalDataLoader(data, 3, shuffle=True, seed=1)
            loader.load_state_dict(state)
            rest = [whole(batch)[1].tolist() for batch in loader]
            while len(seen) + len(rest) < 8:
                rest += [whole(batch)[1].tolist() for batch in loader]
            return rest

        truth = run_ranks(uninterrupted, 1)[0]
        assert seen + run_ranks(after, 3)[0] == truth

    def test_a_new_iteration_is_a_new_epoch(self):
        loader = wb.GlobalDataLoader(Counting(6), 2, shuffle=True)
        first = value_on_all_ranks(next(iter(loader))[0])
        assert loader.epoch == 0
        again = [value_on_all_ranks(batch[0]) for batch in loader]
        assert loader.epoch == 2 and len(again) == 3 and not torch.equal(first, again[0])

    def test_another_order_is_refused(self):
        state = wb.GlobalDataLoader(Counting(6), 2, shuffle=True, seed=3).state_dict()
        with pytest.raises(ValueError, match=r"seed=3, here 4; num_samples=6, here 5"):
            wb.GlobalDataLoader(Counting(5), 2, shuffle=True, seed=4).load_state_dict(state)

    def test_it_is_a_part_of_a_checkpoint(self, tmp_path):
        loader = wb.GlobalDataLoader(Counting(6), 2)
        next(iter(loader))
        wb.checkpoint.save(tmp_path / "ckpt", loader=loader)
        other = wb.GlobalDataLoader(Counting(6), 2)
        wb.checkpoint.load(tmp_path / "ckpt", loader=other)
        assert [value_on_all_ranks(batch[1]).tolist() for batch in other] == [[2, 0], [1, 2]]


class Noisy:
    """A dataset that augments, and a sample of several parts."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        others = torch.tensor([np.random.rand(), random.random()])  # noqa: NPY002
        return {"x": torch.cat([torch.randn(3), others]) + index, "labels": torch.tensor([index, index])}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_augmentation_and_torchs_generator_do_not_depend_on_the_ranks(num_ranks):
    def program():
        loader = wb.GlobalDataLoader(Noisy(), 4)
        return [(value_on_all_ranks(batch["x"]), value_on_all_ranks(batch["labels"])) for batch in loader]

    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    found = run_ranks(program, num_ranks)[0]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]  # noqa: NPY002
    for ours, theirs in zip(found, truth := program(), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert truth[0][1].shape == (4, 2)


def test_workers_read_the_same():
    loaders = [wb.GlobalDataLoader(Noisy(), 3, num_workers=number) for number in (1, 0)]
    epoch = lambda loader: torch.cat([value_on_all_ranks(batch["x"]) for batch in loader])  # noqa: E731
    found, expected = ([epoch(loader) for _ in range(2)] for loader in loaders)
    assert all(map(torch.equal, found, expected))
    assert not (found[0] == found[1]).any(), "each epoch has random numbers of its own"


class Streamed:
    """Samples without positions."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def padded_and_mixed(samples):
    """Needs the whole batch: pads to its longest sample, and adds to each sample another one."""
    words = pad_sequence([words for words, _ in samples], batch_first=True)
    return {"words": words + words[torch.randperm(len(words))]}, torch.tensor([label for _, label in samples])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [list, Streamed])
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("*: data", 4), ("*: model", 2), ("0: data@0; 1: data@1; 2: data@2", 3)],
)
def test_a_collate_fn_gets_the_whole_batch(kind, strategy, num_ranks):
    data = kind([(torch.full((1 + 5 * index % 7,), float(index)), index) for index in range(14)])
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4))

    def program(strategy, **options):
        module = wb.parallelize(copy.deepcopy(model), strategy)
        loader = wb.GlobalDataLoader(data, 6, module=module, seed=3, collate_fn=padded_and_mixed, **options)
        before = torch.get_rng_state()
        batches = [[inputs["words"], labels] for _ in range(2) for inputs, labels in loader]
        assert torch.equal(torch.get_rng_state(), before), "ranks that hold no samples draw nothing"
        return [[part.tolist() for part in whole(batch)] for batch in batches]

    (expected,) = run_ranks(lambda: program("*: data"), 1)
    assert [len(words[0]) for words, _ in expected] == [7, 7, 5] * 2
    assert expected[0] != expected[3], "each epoch has random numbers of its own"
    assert run_ranks(lambda: program("*: data", num_workers=1), 1) == [expected]
    assert run_ranks(lambda: program(strategy), num_ranks) == [expected] * num_ranks


def test_sizes_and_a_placement_of_ones_own():
    data = TensorDataset(torch.arange(7))
    assert len(wb.GlobalDataLoader(data, 3)) == 3 and len(wb.GlobalDataLoader(data, 3, drop_last=True)) == 2

    def program():
        grid = wb.placement("cpu", ranks=[[1, 0], [3, 2]])
        loader = wb.GlobalDataLoader(data, 3, placement=grid, sbp=("B", "S(0)"), drop_last=True)
        batches = [batch for (batch,) in loader]
        assert all(str(batch.layout_on_ranks.sbp) == "(B, S(0))" for batch in batches)
        assert loader.epoch == 1
        return [value_on_all_ranks(batch).tolist() for batch in batches]

    assert run_ranks(program, 4)[0] == [[0, 1, 2], [3, 4, 5]]


def sentences():
    ids = torch.arange(7 * 5).view(7, 5)
    return {"input_ids": ids, "attention_mask": (ids % 4 > 0).long(), "labels": torch.arange(7) % 3}


def as_encoding(samples):
    """A collator as of transformers: a BatchEncoding, with positions that all samples share."""
    import transformers

    positions = {"position_ids": torch.arange(5)[None], "vector": torch.arange(5), "scale": 0.5, "none": None}
    return transformers.BatchEncoding({**collate(samples), **positions})


class TestDicts:
    """Batches as dicts, from arrays, from samples with lists of numbers (``datasets``), from collators."""

    def datasets(self):
        data = sentences()
        rows = [{key: value[i].tolist() for key, value in data.items()} for i in range(7)]
        return {
            "columns": ((data,), {}),
            "arrays": (({key: value.numpy() for key, value in data.items()},), {}),
            "lists of numbers": ((rows,), {}),
            "mappings": (([UserDict(row) for row in rows],), {}),
            "an encoding": ((rows,), {"collate_fn": as_encoding}),
        }

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    @pytest.mark.parametrize("how", ["columns", "arrays", "lists of numbers", "mappings", "an encoding"])
    def test_batches_are_those_of_one_device(self, how, num_ranks):
        (data,), options = self.datasets()[how]

        def program():
            loader = wb.GlobalDataLoader(data, 3, shuffle=True, seed=2, **options)
            assert len(loader) == 3
            batches = list(loader)
            assert all(type(batch) is dict for batch in batches)
            read = lambda leaf: value_on_all_ranks(leaf) if isinstance(leaf, wb.GlobalTensor) else leaf  # noqa: E731
            return [{key: read(leaf) for key, leaf in batch.items()} for batch in batches]

        order = torch.randperm(7, generator=torch.Generator().manual_seed(2))
        for found in run_ranks(program, num_ranks):
            for batch, rows in zip(found, order.split(3), strict=True):
                assert all(torch.equal(batch[key], value[rows]) for key, value in sentences().items())
                if how == "an encoding":
                    assert batch["scale"] == 0.5 and batch["none"] is None
                    assert (batch["position_ids"] == torch.arange(5)).all()  # a row each where ranks read one sample
                    assert torch.equal(batch["vector"], torch.arange(5))

    def test_tuples_of_several_and_nested_ones(self):
        x = torch.arange(12.0).view(6, 2)
        for data in [(x, x + 1, torch.arange(6)), TensorDataset(x, x + 1, torch.arange(6))]:
            _, second, classes = next(iter(wb.GlobalDataLoader(data, 4)))
            assert torch.equal(value_on_all_ranks(second), x[:4] + 1)
            assert value_on_all_ranks(classes).tolist() == [0, 1, 2, 3]
        nested = {"pair": (x, {"deep": x * 2})}
        batch = next(iter(wb.GlobalDataLoader(nested, 4)))
        assert torch.equal(value_on_all_ranks(batch["pair"][1]["deep"]), x[:4] * 2)

    @pytest.mark.parametrize("strategy", ["*: data", "*: model", "fc*: data@0; head: data@1 | 2x1x1 mb=2 1f1b"])
    def test_a_model_with_its_own_loss_takes_them(self, strategy):
        class Classifier(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

            def forward(self, input_ids, attention_mask, labels, position_ids, **kwargs):
                assert kwargs["scale"] == 0.5 and kwargs["none"] is None
                x = (input_ids * attention_mask + position_ids).float() / 30
                logits = self.head(torch.tanh(self.fc(x)))
                return F.cross_entropy(logits, labels), logits

        rows = self.datasets()["an encoding"][0][0]
        torch.manual_seed(0)
        one = Classifier()
        order = [as_encoding(rows[start : start + 3]) for start in (0, 3, 6)]
        micro_batches = [Batch.of(batch, None).cut(2 if "mb=2" in strategy else 1) for batch in order]
        expected = [sum(part.loss(one, None).item() * part.share for part in parts) for parts in micro_batches]

        def program():
            model = Classifier()
            model.load_state_dict(one.state_dict())
            wb.parallelize(model, strategy)
            loader = wb.GlobalDataLoader(rows, 3, module=model, collate_fn=as_encoding)
            return [wb.forward_backward(model, inputs=batch).item() for batch in loader]

        assert run_ranks(program, 2) == [pytest.approx(expected, rel=1e-5)] * 2


class TestMistakes:
    def test_what_is_shared_must_be_alike(self):
        def unlike(samples):
            return {"x": torch.ones(len(samples), 5), "longest": torch.full((1,), wb.rank())}

        def program():
            with pytest.raises(LayoutError, match=r"what all samples share one value"):
                next(iter(wb.GlobalDataLoader([1] * 4, 4, collate_fn=unlike)))

        run_ranks(program, 2)

    def test_ragged_samples_and_arrays_with_a_collator(self):
        with pytest.raises(RunError, match=r"2 samples cannot form a batch.*pad them in the dataset"):
            next(iter(wb.GlobalDataLoader([{"x": [1]}, {"x": [1, 2]}], 2)))
        with pytest.raises(ValueError, match="A batch is some rows of the arrays"):
            wb.GlobalDataLoader(sentences(), 2, collate_fn=as_encoding)

    def test_sizes_and_layouts(self):
        with pytest.raises(ValueError, match="batch_size=0"):
            wb.GlobalDataLoader([1, 2], 0)
        with pytest.raises(LayoutError, match=r"S\(0\) or B"):
            wb.GlobalDataLoader([1, 2], 1, placement=wb.placement("cpu", ranks=[0]), sbp="S(1)")
        with pytest.raises(ValueError, match="2 layouts are given"):
            wb.GlobalDataLoader([1], 1, module=nn.Linear(1, 1), placement=wb.placement("cpu", ranks=[0]))

    def test_samples_that_are_no_tensors(self):
        with pytest.raises(LayoutError, match=r"made a str of 2 samples"):
            next(iter(wb.GlobalDataLoader([{"x": torch.ones(1), "name": "a"}] * 4, 2)))

    def test_parts_of_unlike_shapes(self):
        ragged = [torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(3)]

        def program():
            with pytest.raises(LayoutError, match=r"float32 \(rows, 2\) and float32 \(rows, 3\).*a collate_fn"):
                next(iter(wb.GlobalDataLoader(ragged, 4)))

        run_ranks(program, 2)


@pytest.mark.parametrize("batches_of_rank_0", [1, 3, 4])
def test_after_a_rebuild_all_ranks_go_on_with_the_same_epoch(batches_of_rank_0):
    """Rank 1 was interrupted before a batch that rank 0 has begun, perhaps that of another epoch."""

    def program(rank):
        loader = wb.GlobalDataLoader(TensorDataset(torch.arange(6.0)), 2, shuffle=True, seed=3)

        def batches(count):
            found = []
            while len(found) < count:
                found += [
                    value_on_all_ranks(batch).tolist() for (batch,) in itertools.islice(loader, count - len(found))
                ]
            return found

        batches(2)
        if rank == 0:  # as if it alone had come so far
            loader.epoch, loader._position, loader._starts_new_epoch = (*divmod(2 * batches_of_rank_0, 6), True)
        current().rejoin(2, current().transport)
        return batches(3), loader.epoch

    first, second = run_ranks(program, 2)
    assert first == second and sorted(itertools.chain(*first[0])) == [0, 1, 2, 3, 4, 5]
