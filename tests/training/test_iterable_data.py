"""``GlobalDataLoader`` of iterable data sets: the same batches on any number of ranks, and after a resume."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import workbench as wb
from workbench.errors import RunError
from workbench.testing import run_ranks


class Numbers(IterableDataset):
    """Samples with noise, in an order that depends on the epoch."""

    def __init__(self, count=11):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(self.count):
            number = (index * 3 + self.epoch) % self.count
            noise = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
            yield {"x": torch.tensor([float(number), *noise]), "label": number % 3}


class Plain:
    """Like a streamed ``datasets.IterableDataset``: no class of torch's, lists of numbers."""

    def __iter__(self):
        return iter({"input_ids": [i, i + 1], "label": i} for i in range(7))


def rows_of(loader):
    return [{key: part.full_tensor().tolist() for key, part in batch.items()} for batch in loader]


def epochs(count=11, batch_size=4, num=2, **options):
    loader = wb.GlobalDataLoader(Numbers(count), batch_size, **options)
    return [rows_of(loader) for _ in range(num)]


@pytest.mark.parametrize("count", [0, 1, 4, 8, 11])
def test_batches_are_those_of_one_rank(count):
    (expected,) = run_ranks(lambda: epochs(count), 1)
    sizes = [len(batch["label"]) for batch in expected[0]]
    assert sizes == [min(4, count - start) for start in range(0, count, 4)]
    assert count < 2 or expected[0] != expected[1]
    for num_ranks in (2, 3, 5):
        assert run_ranks(lambda: epochs(count), num_ranks) == [expected] * num_ranks


def test_workers_change_nothing():
    (expected,) = run_ranks(epochs, 1)
    assert run_ranks(lambda: epochs(num_workers=2), 1) == [expected]


def test_a_short_last_batch_may_be_left_out():
    assert [len(epoch) for epoch in run_ranks(lambda: epochs(drop_last=True), 2)[0]] == [2, 2]
    assert [len(epoch) for epoch in run_ranks(lambda: epochs(8, drop_last=True), 2)[0]] == [2, 2]


@pytest.mark.parametrize("num_read", range(5))
def test_a_loader_goes_on_where_it_was(num_read):
    def program():
        loader = wb.GlobalDataLoader(Numbers(), 4)
        batches = (batch for _ in range(2) for batch in loader)
        for _ in range(num_read):
            next(batches)
        state = loader.state_dict()
        rest = [batch["x"].full_tensor().tolist() for batch in batches]
        again = wb.GlobalDataLoader(Numbers(), 4)
        again.load_state_dict(state)
        found = [batch["x"].full_tensor().tolist() for _ in range(2) for batch in again]
        return found[: len(rest)] == rest and len(rest) == 6 - num_read

    assert run_ranks(program, 2) == [True, True]


def test_iterables_that_are_no_class_of_torch():
    (expected,) = run_ranks(lambda: rows_of(wb.GlobalDataLoader(Plain(), 3)), 1)
    assert expected[2] == {"input_ids": [[6, 7]], "label": [6]}
    assert run_ranks(lambda: rows_of(wb.GlobalDataLoader(Plain(), 3)), 2) == [expected] * 2


@pytest.mark.parametrize("shard", [lambda rank: range(rank, 8, 2), lambda rank: range(4 + rank)])
def test_a_data_set_that_is_split_by_rank_is_refused(shard):
    class Sharded(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(2) * number for number in shard(wb.rank())])

    with pytest.raises(RunError, match=r"rank 0, \d on rank 1.*has the whole.*split_dataset_by_node"):
        run_ranks(lambda: list(wb.GlobalDataLoader(Sharded(), 2)), 2)


def test_what_needs_positions_is_refused():
    with pytest.raises(RunError, match=r"Numbers, shuffle=True.*no positions.*buffer"):
        wb.GlobalDataLoader(Numbers(), 4, shuffle=True)
    with pytest.raises(RunError, match=r"an iterator gives its samples once.*list\(dataset\)"):
        wb.GlobalDataLoader(iter([torch.ones(2)]), 4)
    with pytest.raises(TypeError, match="no length"):
        len(wb.GlobalDataLoader(Numbers(), 4))
