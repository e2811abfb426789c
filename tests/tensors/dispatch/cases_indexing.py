"""Reading and writing by index, for the sweep over layouts."""

from __future__ import annotations

import torch

from tests.tensors.dispatch.cases import Case


def _case(name, function, *shapes):
    return Case(name, function, shapes)


def _rows(generator):
    return [torch.randn(7, 4, generator=generator), torch.randint(-7, 7, (3, 2), generator=generator)]


def _places(generator):
    return [torch.randn(7, 4, generator=generator), torch.randint(0, 7, (5, 4), generator=generator)]


def _scattered(generator):
    x, index = _places(generator)
    return [x, index, torch.randn(5, 4, generator=generator)]


def _narrow(generator):
    return [tensor[:, :3] if number else tensor for number, tensor in enumerate(_scattered(generator))]


def _listed(generator):
    return [
        torch.randn(7, 4, generator=generator),
        torch.tensor([5, 0, 2]),
        torch.randn(3, 4, generator=generator),
    ]


def _masked(generator):
    return [torch.randn(5, 4, generator=generator), torch.rand(5, 4, generator=generator) > 0.5]


def _assigned(x, y):
    z = x * 2
    z[1:4] = y[:3] * 3
    z[-1, ::2] = 0.5
    z[:, 3] += z[:, 0]
    z[[0, 2], [1, 1]] = y[3, :2]
    return z


def _at_tuples(x, index):
    rows, columns = zip(*torch.stack([index[:, 0], index[:, 0] % 4], 1), strict=True)
    z = x * 2
    z[rows, columns] = 0.5
    return z + x[rows, (1, *columns[1:])].sum()


def _put_rows(x, index, y):
    z = x.clone()
    z[index] = y
    z[..., index] = z[..., index] + 1
    return z.index_put((index, index), y[:, 0], accumulate=True)


def _counted(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(0, 6, (7,), generator=generator), torch.randn(7, generator=generator)]


CASES = [
    _case("slice of rows", lambda x: x[2:6] * 2, (7, 4)),
    _case("slices with steps", lambda x: x[1::2, :-1:2], (7, 6)),
    _case("one row", lambda x: x[-2], (5, 4)),
    _case("narrow and select", lambda x: x.narrow(0, 1, 3).select(1, 2), (5, 4, 3)),
    Case("index tensor", lambda x, i: x[i], (), _rows),
    Case("index tensor inside", lambda x, i: x.t()[:, None, i % 7].sum(1), (), _rows),
    Case("two index tensors", lambda x, i: x[i, (i % 4)[:, :1]], (), _rows),
    Case("tuples of numbers", _at_tuples, (), _rows),
    _case("index number and list", lambda x: x[2, [0, 3, 3]], (5, 4)),
    Case("mask", lambda x, m: x[m], (), _masked),
    Case("mask of rows", lambda x, m: x[m[:, 0], 1:], (), _masked),
    Case("repeats by row", lambda x, m: x.repeat_interleave(m.sum(1), 0) * 2, (), _masked),
    Case("index_select", lambda x, i: x.index_select(0, i[:, 0] % 7), (), _rows),
    Case("gather", lambda x, i: x.gather(0, i), (), _places),
    Case("take_along_dim", lambda x, i: torch.take_along_dim(x, i[:, :1], 0), (), _places),
    Case("take", lambda x, i: x.take(i), (), _places),
    Case("scatter", lambda x, i, y: x.scatter(1, i % 4, 2.5).scatter(0, i.sort(0)[0], y * 0), (), _scattered),
    Case("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), (), _scattered),
    Case("scatter_add to a larger target", lambda x, i, y: x.scatter_add(1, i % 4, y), (), _scattered),
    Case("scatter to a larger target", lambda x, i, y: x.scatter(0, i.argsort(0), y), (), _narrow),
    Case("scatter_reduce to a larger target", lambda x, i, y: x.scatter_reduce(1, i % 4, y, "amax"), (), _narrow),
    Case("gather from a larger source", lambda x, i, y: x.gather(1, i % 4) + y, (), _narrow),
    Case("scatter_reduce", lambda x, i, y: x.scatter_reduce(0, i, y, "amax", include_self=False), (), _scattered),
    Case("index_add", lambda x, i, y: x.index_add(0, i, y, alpha=2), (), _listed),
    Case("bincount", lambda i, w: torch.bincount(i, w, 9) + i.int().bincount(minlength=2)[-1], (), _counted),
    Case("index_copy", lambda x, i, y: x.index_copy(0, i, y), (), _listed),
    Case("index_fill", lambda x, i, y: x.index_fill(0, i, 1.5) + y.sum(), (), _listed),
    Case("index_put", _put_rows, (), lambda g: [torch.randn(7, 7, generator=g), torch.tensor([5, 0, 2]),
                                                torch.randn(3, 7, generator=g)]),
    Case("masked_scatter", lambda x, m: x.masked_scatter(m, x.flip(0)), (), _masked),
    Case("where of a mask", lambda x, m: torch.stack(torch.where(m)).double() * x.sum(), (), _masked),
    _case("assigned", _assigned, (5, 4), (5, 4)),
    _case("select_scatter", lambda x, y: x.select_scatter(y[:, 0], 1, 2).slice_scatter(y[:2], 0, 1, 3), (5, 4), (5, 4)),
]  # fmt: skip
