"""Reads and writes by index: sizes unlike those of the tensor that is read or written, and indices on other ranks."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.errors import LayoutError
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


BEHIND = {
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "index_select": lambda x, i: x.index_select(0, i),
    "scatter": lambda x, i: x.scatter(0, i[:, None], 2.0),
    "scatter_": lambda x, i: x.scatter_(0, i[:, None], x[:2] * 2),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None], x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i[:, None], x, "amax"),
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:2]),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:2], "amax"),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_put": lambda x, i: x.index_put((i,), x[:2]),
    "getitem": lambda x, i: x[i],
    "take": lambda x, i: x.take(i),
    "take_along_dim": lambda x, i: x.take_along_dim(i[:, None], 0),
}  # fmt: skip


LOOKUPS = {
    **{name: BEHIND[name] for name in ("gather", "index_select", "getitem", "take", "take_along_dim")},
    "mask": lambda x, i: x[torch.arange(4) > 0],
    "two indices": lambda x, i: x[i, i % 2],
    "embedding": lambda x, i: F.embedding(i, x),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_zeros_that_are_looked_up_keep_their_sign(name):
    start, index = torch.tensor([[-0.0, 2.0], [-0.0, -0.0], [0.0, -0.0], [-0.0, 1.0]]), torch.tensor([0, 1, 3, 2])
    expected = LOOKUPS[name](start, index)

    def program(placement):
        return LOOKUPS[name](wb.tensor(start, placement=placement, sbp="S(0)"), index).full_tensor()

    for num_ranks in (2, 6):
        for found in run_ranks(lambda: program(wb.placement.all()), num_ranks):
            assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


def _found(call, x, index):
    try:
        return call(x, index)
    except (IndexError, RuntimeError):
        return None


@pytest.mark.parametrize("name", BEHIND)
def test_numbers_outside_of_a_split_dim_are_taken_or_refused_as_on_one_device(name):
    start = torch.arange(12.0).view(4, 3)

    def program(index):
        found = _found(BEHIND[name], wb.tensor(start, placement=wb.placement.all(), sbp="S(0)"), index)
        return None if found is None else found.full_tensor()

    for index in (torch.tensor([0, -1]), torch.tensor([-4, 2]), torch.tensor([-13, 0]), torch.tensor([3, 12])):
        expected = _found(BEHIND[name], start.clone(), index)
        for found in run_ranks(lambda index=index: program(index), 2):
            assert found is expected is None or torch.equal(found, expected)


def _assign(x, index, value):
    x[index] = value


WRONG = {
    "all": lambda x, ones: _assign(x, slice(None), ones(2, 4)),
    "a column": lambda x, ones: _assign(x, (slice(None), 0), ones(2)),
    "a row": lambda x, ones: _assign(x, 0, ones(2)),
    "global values": lambda x, ones: _assign(x, 0, wb.to_global(ones(2), placement=wb.placement.all(), sbp="B")),
    "columns": lambda x, ones: _assign(x, (slice(None), [0, 2]), ones(2, 2)),
    "a mask of columns": lambda x, ones: _assign(x, (slice(None), torch.tensor([True, False] * 2)), ones(2, 2)),
    "rows": lambda x, ones: _assign(x, [0, 2], ones(2, 2)),
    "an empty slice": lambda x, ones: _assign(x, slice(0, 0), ones(2, 4)),
    "index_put": lambda x, ones: x.index_put((torch.tensor([0, 2]),), ones(2, 2)),
    "index_put, accumulated": lambda x, ones: x.index_put_((torch.tensor([0, 2]),), ones(2, 2), accumulate=True),
    "select_scatter": lambda x, ones: x.select_scatter(ones(2), 0, 0) + x.select_scatter(ones(2), 1, 0),
    "slice_scatter": lambda x, ones: x.slice_scatter(ones(3, 2)),
}
"""Writes of values into (3, 4) that have the shape of a shard's place, on some rank."""


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("name", WRONG)
def test_values_that_fit_a_shard_alone_are_refused_on_all_ranks(name):
    def program(sbp):
        with pytest.raises(RuntimeError, match=r"must match|mismatch|to have a size equal|cannot be broadcast"):
            WRONG[name](wb.zeros(3, 4, placement=wb.placement.all(), sbp=sbp), torch.ones)

    if name != "global values":
        with pytest.raises(RuntimeError):
            WRONG[name](torch.zeros(3, 4), torch.ones)
    for sbp in ("S(0)", "S(1)"):
        run_ranks(lambda sbp=sbp: program(sbp), 2)


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


NUMBER, PAIR, SOME = torch.tensor(2), torch.tensor([0, 1]), torch.tensor([False, True, True, False])
LISTS = {
    "tensors": lambda put: [put(PAIR), put(PAIR + 1)],
    "plain tensors": lambda put: [PAIR, PAIR + 1],
    "where": lambda put: list(torch.where(put(torch.arange(12).view(4, 3)) > 6)),
    "a number and a tensor": lambda put: [1, NUMBER],
    "tensors of numbers": lambda put: [put(NUMBER - 1), put(NUMBER)],
    "lists": lambda put: [[0, 1], (1, 2)],
    "arrays": lambda put: [PAIR.numpy(), PAIR.numpy() + 1],
    "one list": lambda put: [[0, 2]],
    "a list of lists": lambda put: [[[0, 1], [1, 2]]],
    "a number and a slice": lambda put: [0, slice(1, 3)],
    "None": lambda put: [None, 1],
    "dots": lambda put: [..., 1],
    "a mask": lambda put: [put(SOME)],
    "numbers alone": lambda put: [1, 0],
    "33 lists": lambda put: [[0, 1]] * 33,
    "a list in a tuple": lambda put: ([put(NUMBER), NUMBER - 1], 0),
    "a number in a tensor": lambda put: (NUMBER, slice(None), [0, 2]),
    "a number in a global tensor": lambda put: (put(NUMBER), slice(None), PAIR),
    "a byte": lambda put: torch.tensor(1, dtype=torch.uint8),
    "a list of tensors in a tuple": lambda put: ([put(PAIR), put(PAIR)],),
    "too many": lambda put: [0, 1, 1, put(PAIR), 2],
}
"""Indices of (4, 3) and (4, 3, 4), of which torch takes some lists as tuples."""


def _by_index(x, index):
    """What is read and written, or the kind of error."""

    def written(value):
        y = x.clone()
        y[index] = y[index] * value
        y[index] += 1
        return y

    found = []
    for call in (lambda: x[index], lambda: written(3), lambda: written(x.new_ones(1))):
        try:
            found.append(call())
        except (TypeError, IndexError) as error:
            found.append(type(error))
    return [each.full_tensor() if isinstance(each, wb.GlobalTensor) else each for each in found]


@pytest.mark.filterwarnings("ignore:.*(non-tuple sequence|dtype torch.uint8):UserWarning")
@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_a_tuple_of_indices_where_torch_takes_it_as_one(name):
    for start in (torch.arange(12.0).view(4, 3), torch.arange(48.0).view(4, 3, 4)):
        expected = _by_index(start, LISTS[name](torch.clone))

        def program(start=start):
            def put(tensor, sbp="B"):
                return wb.to_global(tensor.clone(), placement=wb.placement.all(), sbp="B").to_global(sbp=sbp)

            return [_by_index(put(start, sbp), LISTS[name](put)) for sbp in ("S(0)", "S(1)")]

        for found in [each for layouts in run_ranks(program, 2) for each in layouts]:
            for value, wanted in zip(found, expected, strict=True):
                assert value is wanted if isinstance(wanted, type) else torch.equal(value, wanted)


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


def _count(x, index, mask):
    counts = torch.zeros_like(x)
    counts[index, index] += 1
    counts[mask] *= 2
    return counts


READS = {
    "getitem": lambda x, index, mask: x[:, index] * x[mask].sum(),
    "counts": _count,
    "index_select": lambda x, index, mask: x.index_select(1, index) + torch.index_select(x, dim=1, index=index),
    "gather": lambda x, index, mask: x.gather(0, index[:, None]) + torch.take_along_dim(x, index[None], 1).sum(),
    "take": lambda x, index, mask: x.take(index),
    "masked_select": lambda x, index, mask: x.masked_select(mask[:, None]),
    "masked_fill": lambda x, index, mask: x.masked_fill(mask[:, None], 2.0),
    "where": lambda x, index, mask: torch.where(mask[:, None], x, -x),
    "scatter": lambda x, index, mask: x.scatter(1, index[:, None], 2.0).index_fill(0, index, 3.0),
    "index_add": lambda x, index, mask: x.index_add(0, index, x[:2]),
    "embedding": lambda x, index, mask: F.embedding(index, x) + torch.embedding(x, index),
    "embedding of more": lambda x, index, mask: F.embedding(mask.long(), weight=x),
    "bags": lambda x, index, mask: F.embedding_bag(index, x, index * 0 + torch.arange(2), mode="sum"),
    "plain": lambda x, index, mask: torch.arange(4.0)[index].sum() * x[index, index] * mask[0],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("name", READS)
def test_indices_and_masks_go_where_the_data_lie(name):
    data = torch.arange(1.0, 17).view(4, 4)
    others = torch.tensor([3, 1]), torch.tensor([True, False, True, True])
    x = data.clone().requires_grad_()
    expected = READS[name](x, *others)
    expected.square().sum().backward() if expected.requires_grad else None

    def program():
        here, there = wb.placement(ranks=[0, 1]), wb.placement(ranks=[2])
        x = wb.tensor(data, placement=here, sbp="S(0)").requires_grad_()
        found = READS[name](x, *[wb.tensor(each, placement=there, sbp="B") for each in others])
        found.square().sum().backward() if found.requires_grad else None
        return found.placement == here, found.full_tensor(), x.grad is not None and x.grad.full_tensor()

    for stays, found, grad in run_ranks(program, 3):
        assert stays and torch.equal(found, expected)
        assert x.grad is None or torch.equal(grad, x.grad)


def test_an_unnamed_operand_on_another_placement_is_told_by_its_argument():
    def program():
        x, y = (wb.ones(2, placement=wb.placement(ranks=[rank]), sbp="B") for rank in (0, 1))
        with pytest.raises(LayoutError, match=r"Write x\.to_global\(.*\) first, where x is the tensor of argument 1"):
            (x + 0) * y

    run_ranks(program, 2)


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
@pytest.mark.parametrize("is_true", [True, False])
def test_a_mask_without_dims_is_written_on_some_of_the_ranks(is_true, sbp):
    def program():
        last = wb.placement(ranks=[1])
        loss = wb.to_global(torch.tensor(float("nan") if is_true else 2.0), last, "B")
        loss[torch.isnan(loss)] = 0.0
        x = wb.ones(3, 2, placement=wb.placement(ranks=[1, 2]), sbp=sbp)
        x[torch.tensor(is_true)] = 3.0
        return loss.item(), x.full_tensor().tolist()

    assert run_ranks(program, 3) == [(0.0 if is_true else 2.0, [[3.0 if is_true else 1.0] * 2] * 3)] * 3


LOOK_UPS = {
    "rows": lambda x, ids: x[ids],
    "selected rows": lambda x, ids: x.index_select(0, ids),
    "elements": lambda x, ids: x.gather(0, ids[:, None].expand(3, 4)),
    "written": lambda x, ids: x.index_fill(0, ids, 7.0),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_captured_step_goes_by_rows_of_a_split_dim(name):
    table = torch.arange(20.0).view(5, 4)

    def program():
        x = wb.tensor(table, placement=wb.placement.all(), sbp="S(0)")
        step = wb.capture(LOOK_UPS[name])
        for first in range(3):
            ids = torch.tensor([first, 4, 3])
            assert torch.equal(step(x, ids).full_tensor(), LOOK_UPS[name](table, ids))

    run_ranks(program, 2)
