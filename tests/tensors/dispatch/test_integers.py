"""Sizes, dims, counts and factors may be 0-dim tensors, plain or global, or numbers of numpy, as torch takes them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.testing import run_ranks

PLAIN = torch.arange(12.0).reshape(3, 4)
CALLS = {
    "new_zeros": lambda x, n: x.new_zeros((n, 2)),
    "new_zeros, written out": lambda x, n: x.new_zeros(n, 2),
    "new_ones, by keyword": lambda x, n: x.new_ones(size=(n, 2)),
    "new_full": lambda x, n: x.new_full((n,), 1.5),
    "view": lambda x, n: x.view(n, 4),
    "view of a tuple": lambda x, n: x.view((n, 4)),
    "reshape": lambda x, n: x.reshape(-1, n + 1),
    "expand": lambda x, n: x.unsqueeze(0).expand(n, -1, -1),
    "repeat": lambda x, n: x.repeat(n, 1),
    "tile": lambda x, n: torch.tile(x, (n, 1)),
    "sum": lambda x, n: x.sum(n - 2),
    "narrow": lambda x, n: x.narrow(0, n - 2, 1),
    "split": lambda x, n: x.split(n - 2)[0],
    "chunk": lambda x, n: x.chunk(n)[1],
    "roll": lambda x, n: x.roll(n, 0),
    "index": lambda x, n: x[n - 1],
    "slice": lambda x, n: x[:, 1:n],
    "select": lambda x, n: x.select(0, n - 1),
    "permute": lambda x, n: x.permute(n - 2, n - 3),
    "transpose": lambda x, n: x.transpose(n - 3, n - 2),
    "flatten": lambda x, n: x.flatten(n - 3),
    "unflatten": lambda x, n: x.unflatten(1, (n - 1, 2)),
    "unfold": lambda x, n: x.unfold(1, n - 1, 1),
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, 0),
    "diagonal": lambda x, n: x.diagonal(n - 2),
    "tril": lambda x, n: x.tril(n - 3),
    "topk": lambda x, n: x.topk(n - 1).values,
    "topk of split rows": lambda x, n: x.topk(n - 1, 0).indices,
    "rot90": lambda x, n: x.rot90(n),
    "cat": lambda x, n: torch.cat([x, x], n - 2),
    "pad": lambda x, n: F.pad(x, (n, 0)),
    "interpolate": lambda x, n: F.interpolate(x[None, None], size=(n, n)),
    "pool": lambda x, n: F.adaptive_avg_pool2d(x[None], (n, n)),
    "one_hot": lambda x, n: F.one_hot(x.long() % 3, n),
    "a plain tensor of this size": lambda x, n: x + torch.arange(n)[:, None],
    "alpha": lambda x, n: torch.add(x, x, alpha=n / 4).sub_(x, alpha=n),
    "alpha and beta": lambda x, n: torch.addmm(x[:, :3], x, x.T, beta=n, alpha=n / 2),
    "factor": lambda x, n: torch.addcmul(x, x, x, value=n * 0.5),
    "alpha of a list": lambda x, n: torch._foreach_add([x, x], [x, x], alpha=n)[1],
    "order of a norm": lambda x, n: torch.norm(x, n) + torch.linalg.vector_norm(x, n) + torch.dist(x, 2 * x, p=n),
    "slope": lambda x, n: F.leaky_relu(x - 5, n) + F.elu(x - 5, n) + F.threshold(x, n, n - 7),
    "bound": lambda x, n: F.softshrink(x, n) + torch.renorm(x, n, 0, n) + F.hardtanh(x, n - 2, n),
}


TENSORS = {
    "sum of integers": lambda x, n: x.int() + n,
    "product of a tensor and its reciprocal": lambda x, n: x * n / n,
    "product on the left": lambda x, n: n * x,
    "remainder": lambda x, n: x.long() % n,
    "maximum": lambda x, n: torch.max(x.long(), n),
    "booleans": lambda x, n: (x.sum() > 0) + (n > 2),
    "bits": lambda x, n: (x.sum() > 0) & (n > 2),
    "shift": lambda x, n: x.long() << n,
    "comparison": lambda x, n: x[0].long().sum() == n,
    "mask without dims": lambda x, n: x[n > 2],
}
"""Calls in which a 0-dim tensor is a tensor: it is not read, and its dtype counts."""


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_where_torch_takes_tensors_stays_one(name, monkeypatch):
    expected = TENSORS[name](PLAIN, torch.tensor(3))
    monkeypatch.setattr(wb.GlobalTensor, "__int__", None)

    def program():
        placement = wb.placement.all("cpu")
        x, count = (wb.to_global(t, placement=placement, sbp="B") for t in (PLAIN, torch.tensor(3)))
        return TENSORS[name](x, count).full_tensor()

    for result in run_ranks(program, 2):
        assert result.dtype == expected.dtype and torch.equal(result, expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_as_on_one_device_and_without_a_fallback(name, is_global):
    expected = CALLS[name](PLAIN, torch.tensor(3))

    def program():
        placement = wb.placement.all("cpu")
        x = wb.to_global(PLAIN, placement=placement, sbp="B").to_global(sbp="S(0)")
        count = torch.tensor(3)
        if is_global:
            count = (x > 8).sum()  # a sum of terms
        return [CALLS[name](x, count).full_tensor() for _ in range(2)]

    for results in run_ranks(program, 2):
        assert all(torch.equal(result, expected) for result in results)


def _written(x, n):
    y = x * 1
    y[n - 1] = torch.ones(4, dtype=torch.float64)
    return y


DIMS = {
    "roll along a dim": lambda x, n: torch.roll(x, n, n - 3),
    "roll of all": lambda x, n: torch.roll(x, n),
    "softmax": lambda x, n: x.softmax(n - 2),
    "normalize": lambda x, n: F.normalize(x, dim=n - 3),
    "sum of an axis": lambda x, n: x.sum(axis=n - 3),
    "largest of dims": lambda x, n: x.amax((n - 3, n - 2)),
    "rows": lambda x, n: x[n - 2 : n],
    "assignment": _written,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CALLS | DIMS)
def test_numbers_of_numpy_are_numbers(name):
    call, n = (CALLS | DIMS)[name], np.int64(3)
    expected = call(PLAIN, 3)

    def program():
        placement = wb.placement.all("cpu")
        x = wb.to_global(PLAIN, placement=placement, sbp="B").to_global(sbp="S(0)")
        assert wb.randint(0, n, (n, 2), placement=placement, sbp="S(0)").shape == (3, 2)
        assert int(wb.randint(n, (n,), placement=placement, sbp="B").max()) < 3
        return [call(x, n).full_tensor() for _ in range(2)]

    for results in run_ranks(program, 2):
        for result in results:
            torch.testing.assert_close(result, expected)


def test_shapes_of_new_global_tensors():
    def program():
        placement, count = wb.placement.all("cpu"), torch.tensor(3)
        shapes = [tuple(make(count, 2, placement=placement, sbp="S(0)").shape) for make in (wb.zeros, wb.ones, wb.rand)]
        with pytest.raises(TypeError):
            wb.zeros(2.5, placement=placement, sbp="B")
        return shapes

    assert run_ranks(program, 2) == [[(3, 2)] * 3] * 2


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_ends_of_a_slice_are_read_on_all_ranks(ranks):
    """Where the tensor is a sum of terms, a maximum of shards, or on another stage."""

    def write(x, n):
        y = x * 1
        y[: n - 2, n:] = 7
        return y

    rows = torch.tensor([2, 0])
    calls = [lambda x, n: x[:, :n], lambda x, n: x[n - 2 :], lambda x, n: x[..., 0 : n + 1 : n - 1], write]
    calls += [lambda x, n: x[rows, :n], lambda x, n: x[rows, 1 : n : n - 2]]
    expected = [call(PLAIN, 3) for call in calls]

    def program():
        placement = wb.placement("cpu", ranks=ranks)
        x = wb.to_global(PLAIN, placement=placement, sbp="B").to_global(sbp="S(0)")
        counts = (x > 8).sum(), (x > 7).sum(0).max() + 2
        return [[value_on_all_ranks(call(x, n)) for call in calls] for n in counts]

    for of_counts in run_ranks(program, 2):
        for results in of_counts:
            assert all(map(torch.equal, results, expected))


ON_PLAIN = {
    "index": lambda x, n: x[n - 2],
    "indices": lambda x, n: x[n - 2, n],
    "slice": lambda x, n: x[: n - 1],
    "write": lambda x, n: x.clone().index_put_((n - 1,), torch.tensor(7.0)),
    "narrow": lambda x, n: x.narrow(0, n - 2, 2),
    "view": lambda x, n: x.view(n, -1),
    "repeat": lambda x, n: x.repeat(n, 1),
    "new_zeros": lambda x, n: x.new_zeros(n),
    "new_full": lambda x, n: x.new_full((n,), 1.5),
    "flip": lambda x, n: x.flip(n - 2),
    "pad": lambda x, n: F.pad(x, (0, n)),
    "as_strided": lambda x, n: x.as_strided((n, 2), (1, n)),
    "interpolate": lambda x, n: F.interpolate(x[None], size=n),
}
"""Calls in which the only global tensor is a number."""


def test_a_global_number_for_a_plain_tensor():
    expected = {name: call(PLAIN, torch.tensor(3)) for name, call in ON_PLAIN.items()}
    rows, columns = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 3, 3, 0])

    def program():
        placement = wb.placement("cpu", ranks=[0, 1])
        n = wb.to_global(torch.tensor([1, 2]), placement=placement, sbp="B").to_global(sbp="S(0)").sum()  # terms
        for name, call in ON_PLAIN.items():
            result = call(PLAIN, n)
            assert type(result) is torch.Tensor and torch.equal(result, expected[name]), name
        predicted = wb.to_global(columns, placement=placement, sbp="B")
        confusion = torch.zeros(3, 4)
        for row, column in zip(rows, predicted, strict=True):
            confusion[row, column] += 1
        with pytest.raises(TypeError, match=r"(?i)slice|int"):
            PLAIN[: n * 0.5]
        with pytest.raises(TypeError, match="must be Number"):  # a number has no gradient
            F.leaky_relu(predicted, wb.ones((), placement=placement, sbp="B", requires_grad=True))
        return confusion.tolist(), [row.tolist() for row in map(PLAIN[0].__getitem__, predicted)]

    assert run_ranks(program, 3) == [([[0, 1, 0, 0], [0, 0, 0, 2], [1, 0, 0, 0]], [1, 3, 3, 0])] * 3
