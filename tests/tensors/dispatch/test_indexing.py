"""Reads and writes by index whose sizes differ from those of the tensor that is read or written."""

import pytest
import torch

import workbench as wb
from workbench.testing import run_ranks


def test_split_rows_add_to_the_first_rows_of_a_larger_target():
    labels = torch.tensor([[0, 1], [2, 3], [1, 1], [4, 0]])

    def program():
        rows = wb.tensor(labels, placement=wb.placement.all(), sbp="S(0)")
        return torch.zeros(6, 5).scatter_add(1, rows, torch.ones(4, 2)).full_tensor()

    for found in run_ranks(program, 2):
        assert torch.equal(found, torch.zeros(6, 5).scatter_add(1, labels, torch.ones(4, 2)))


ASSIGNED = {
    "rows": (torch.tensor([0, 2]), (1, 2, 3)),
    "one row": (torch.tensor(1), (1, 3)),
    "rows and columns": ((torch.tensor([0, 3]), torch.tensor([2, 0])), (1, 1, 2)),
    "columns": ((slice(None), torch.tensor([2, 0])), (1, 1, 4, 2)),
    "a row of columns": ((2, torch.tensor([2, 0])), (1, 2)),
    "a mask of rows": (torch.tensor([True, False, True, False]), (1, 2, 3)),
    "one number": (torch.tensor([0, 2]), (1, 1, 1)),
    "a list": ([1, 3], (1, 1, 2, 3)),
}
"""Indices of a (4, 3), and shapes of values that have leading dims of size one more than the place has."""


@pytest.mark.parametrize("name", ASSIGNED)
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
def test_assigned_values_may_have_leading_dims_of_size_one(name, sbp):
    index, shape = ASSIGNED[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(4, 3)
    expected[index] = values

    def program():
        x = wb.zeros(4, 3, placement=wb.placement.all(), sbp=sbp)
        x[index] = values
        return x.full_tensor()

    for found in run_ranks(program, 2):
        assert torch.equal(found, expected)


def test_index_put_refuses_values_with_more_dims_as_torch_does():
    def program():
        x = wb.zeros(4, 3, placement=wb.placement.all(), sbp="S(0)")
        x.index_put_((torch.tensor([0, 2]),), torch.ones(1, 2, 3))

    with pytest.raises(RuntimeError):
        torch.zeros(4, 3).index_put_((torch.tensor([0, 2]),), torch.ones(1, 2, 3))
    with pytest.raises(RuntimeError):
        run_ranks(program, 2)


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
def test_a_part_of_a_tensor_may_be_assigned_to_itself(sbp):
    def write(x):
        x[1, 1] += 1e-3
        x[0, 1:2] += 1
        x[2, torch.tensor(1)] *= 2
        x[:, 2:3, None] -= 1
        x[1, 2] = x[1, 2]
        x[3] = x[2]
        x[torch.tensor([0, 2])] = x[torch.tensor([2, 0])]
        x[1:3] = x[:1]
        return x

    start = torch.arange(12.0).view(4, 3)

    def program():
        whole = wb.to_global(start.clone(), placement=wb.placement.all(), sbp="B")
        return write(whole.to_global(sbp=sbp)).full_tensor()

    for found in run_ranks(program, 2):
        assert torch.equal(found, write(start.clone()))


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("sbp", ["P", "P(max)", "P(min)"])
def test_what_is_added_by_index_reaches_every_term(sbp):
    ids, ones = torch.tensor([0, 0, 2]), torch.ones((), dtype=torch.long)

    def added(x):
        return x.index_put_((ids,), ones, accumulate=True)

    start = torch.tensor([3, -1, 5, 0])
    found = run_ranks(
        lambda: added(wb.tensor(start, placement=wb.placement.all(), sbp="B").to_global(sbp=sbp)).tolist()
    )
    assert found == [added(start.clone()).tolist()] * 2


ROWS, MASK = torch.tensor([0, 2]), torch.tensor([True, False, True, False])
UNLIKE = {
    "rows": (ROWS, torch.ones(2, 3)),
    "rows, one number": (ROWS, torch.tensor(2.5)),
    "rows, a complex number": (ROWS, 2j),
    "a row of columns": ((0, ROWS), torch.ones(2)),
    "a list": ([0, 1], torch.ones(3, dtype=torch.bool)),
    "a mask": (MASK, torch.ones(2, 3)),
    "a mask, one number": (MASK, torch.tensor(2.5)),
    "a mask of a slice, one number": ((slice(0, 4), MASK[:3]), torch.tensor([2.5])),
    "a row": (1, torch.ones(3)),
    "a row, its number in a tensor": ((torch.tensor(1), slice(0, 2)), torch.ones(2)),
}
"""Indices of a (4, 3) of integers, and values of other dtypes."""


@pytest.mark.parametrize("name", UNLIKE)
def test_values_of_another_dtype_are_converted_or_refused_as_on_one_device(name):
    index, value = UNLIKE[name]

    def assigned(x):
        try:
            x[index] = value
        except RuntimeError as error:
            return str(error)
        return x.tolist()

    start = torch.arange(12).reshape(4, 3)
    found = run_ranks(lambda: assigned(wb.tensor(start, placement=wb.placement.all(), sbp="S(0)")))
    assert found == [assigned(start.clone())] * 2
