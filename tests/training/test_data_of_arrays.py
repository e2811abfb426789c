"""What all samples share in data sets of arrays and batches; lists are converted once."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, Subset, TensorDataset, random_split

import workbench as wb
from workbench.errors import RunError
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.testing import run_ranks
from workbench.training import data
from workbench.training.runs.job import Job


@pytest.mark.parametrize("batch_size", [8, 6, 2])
def test_what_all_samples_share_stays_plain(batch_size):
    """Also where a rank has as many rows of the batch as it has: here 4 of 8, and 1 of 2."""
    shared = {"places": torch.arange(4), "mask": torch.eye(4), "scale": torch.full((1,), 3.0)}
    words = torch.randn(40, 4, 3)

    def program():
        batch = next(iter(wb.GlobalDataLoader({"words": words, **shared}, batch_size)))
        assert batch["words"].sbp == (wb.sbp.split(0),)
        return value_on_all_ranks(batch["words"]), {name: batch[name] for name in shared}

    for found, plain in run_ranks(program, 2):
        assert torch.equal(found, words[:batch_size])
        for name, value in plain.items():
            assert type(value) is torch.Tensor and torch.equal(value, shared[name]), name


def test_missing_values_in_what_all_samples_share_are_equal_on_all_ranks():
    """Ranks had read ``nan and nan``, an error."""
    columns = {"words": torch.ones(4, 3), "scale": torch.tensor([1.0, torch.nan, 2.0])}
    samples = {"collate_fn": lambda found: {"words": torch.stack(found), "limit": float("nan")}}

    def program():
        known = next(iter(wb.GlobalDataLoader(columns, 4)))["scale"]
        return known.nan_to_num(7.0).tolist(), next(iter(wb.GlobalDataLoader(list(columns["words"]), 4, **samples)))[
            "limit"
        ]

    assert [(known, math.isnan(limit)) for known, limit in run_ranks(program, 2)] == [([1.0, 7.0, 2.0], True)] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_last_batch_of_one_sample_may_share_a_mask(num_ranks):
    def with_mask(samples):
        return {"words": torch.stack(samples), "mask": torch.ones(3, 3).tril()}

    def program():
        batches = list(wb.GlobalDataLoader([torch.ones(3)] * 5, 4, collate_fn=with_mask))
        assert all(type(batch["mask"]) is torch.Tensor and batch["mask"].shape == (3, 3) for batch in batches)
        return [len(batch["words"]) for batch in batches]

    assert run_ranks(program, num_ranks) == [[4, 1]] * num_ranks


X = torch.arange(24.0).view(12, 2)
PARTS = {
    "arrays": lambda rank: (X[rank::2], torch.arange(6)),
    "tensors": lambda rank: TensorDataset(X[6 * rank :][:6]),
    "lists": lambda rank: list(X[rank::2]),
    "subsets": lambda rank: Subset(TensorDataset(X), range(rank, 12, 2)),
    "drawn": lambda rank: random_split(X, [6, 6], generator=torch.Generator().manual_seed(rank))[0],
    "of other lengths": lambda rank: [0] * (4 + rank),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_the_data_set_on_each_rank_is_refused(kind):
    """Each rank read its rows of its own part, so half of the samples were never seen."""

    def program(rank):
        with pytest.raises(RunError, match=r"data set of epoch 0: \d samples on rank 0.*do not split it by rank"):
            next(iter(wb.GlobalDataLoader(PARTS[kind](rank), 4)))

    run_ranks(program, 2)


@pytest.mark.parametrize("make", [tuple, lambda both: TensorDataset(*both), lambda both: list(zip(*both, strict=True))])
def test_global_tensors_in_a_data_set_are_refused(make):
    """Ranks read different rows, and an exchange for each: batches had rows of others, or ranks waited for ever."""

    def program():
        made = wb.ones(11, 3, placement=wb.placement.all(), sbp="S(0)")
        with pytest.raises(RunError, match=r"global tensor of shape .*x\.full_tensor\(\)"):
            wb.GlobalDataLoader(make((torch.ones(11, 4), made)), 4)
        wb.GlobalDataLoader(make((torch.ones(11, 4), made.full_tensor())), 4)

    run_ranks(program, 2)


def test_lists_are_converted_once_and_arrays_keep_their_memory(monkeypatch):
    converted, original = [], torch.as_tensor

    def counted(value, *args, **kwargs):
        converted.append(isinstance(value, list) and len(value) == 6)
        return original(value, *args, **kwargs)

    monkeypatch.setattr(torch, "as_tensor", counted)
    numbers, classes = np.ones((6, 2), dtype=np.float32), [0, 1] * 3
    loader = wb.GlobalDataLoader((numbers, classes), 2)
    job = Job(lambda: nn.Linear(2, 2), (numbers, classes), F.cross_entropy, None, batch_size=2, num_steps=3)
    assert any(converted)
    converted.clear()
    numbers[:] = 5
    first, *others = loader
    assert value_on_all_ranks(first[0]).tolist() == [[5, 5]] * 2 and value_on_all_ranks(first[1]).tolist() == [0, 1]
    given, *rest = job.batches()
    assert given.inputs.tolist() == [[5, 5]] * 2
    assert len(others) == len(rest) == 2 and not any(converted)


def test_tables_and_their_columns_are_arrays_by_their_rows():
    """Tables, and columns whose index does not begin at 0, were an error about the shape of an object."""
    rows = [3, 1, 4, 2]
    table = pd.DataFrame({"a": range(6), "b": range(6), "y": [0, 1] * 3}).loc[rows]

    def program():
        inputs, targets = next(iter(wb.GlobalDataLoader((table[["a", "b"]].astype("float32"), table["y"]), 4)))
        return value_on_all_ranks(inputs).tolist(), value_on_all_ranks(targets).tolist()

    assert run_ranks(program, 2) == [([[row, row] for row in rows], [1, 1, 0, 0])] * 2
    with pytest.raises(RunError, match=r"is a DataFrame of 4 rows.*positions name columns.*in a tuple"):
        wb.GlobalDataLoader(table, 4)  # it read columns as samples
    with pytest.raises(RunError, match="has a DataFrame beside its arrays"):
        wb.GlobalDataLoader((table.astype(str), table["y"]), 4)


def test_the_first_batch_does_not_wait_for_all_batches_of_the_epoch(monkeypatch):
    """Work is counted, not timed: the indices and the rows of each batch were listed before the first one."""
    listed, original = [], data._needed_rows
    monkeypatch.setattr(data, "_needed_rows", lambda *args, **given: listed.append(args) or original(*args, **given))
    batches = iter(wb.GlobalDataLoader(range(50_001), 2))
    assert value_on_all_ranks(next(batches)).tolist() == [0, 1] and len(listed) == 1
    assert value_on_all_ranks(next(batches)).tolist() == [2, 3] and len(listed) == 1


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7))


@pytest.mark.parametrize("data", [torch.arange(7), Streamed()])
def test_a_batch_size_that_a_loop_sets_is_that_of_the_next_epoch(data):
    """The sizes of an epoch's batches and their first samples went apart, and an iterable data set ended."""

    def program():
        loader, found = wb.GlobalDataLoader(data, 2), []
        for batch in loader:
            found.append(value_on_all_ranks(batch).tolist())
            loader.batch_size = 3
        return found, [value_on_all_ranks(batch).tolist() for batch in loader]

    for now, then in run_ranks(program, 2):
        assert now == [[0, 1], [2, 3], [4, 5], [6]] and then == [[0, 1, 2], [3, 4, 5], [6]]
