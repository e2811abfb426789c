"""Strides, offsets and views by strides: those of one device, or an error."""

import pytest
import torch

import workbench as wb
from tests.tensors.dispatch.against_one_device import assert_as_one_device
from workbench.errors import LayoutError
from workbench.testing import run_ranks

LAYOUTS = [
    (2, [0, 1], ["S(0)"]),
    (2, [0, 1], ["S(1)"]),
    (3, [2, 0, 1], ["S(1)"]),
    (2, [1, 0], ["B"]),
    (2, [0, 1], ["P"]),
    (4, [[0, 1], [2, 3]], [("S(0)", "S(1)")]),
    (4, [[0, 1], [2, 3]], [("S(1)", "S(1)")]),
]
VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "computed from a transposed": lambda x: x.T * 2,
    "viewed": lambda x: x.view(5, 8, 1).transpose(1, 2),
    "flattened": lambda x: x.view(-1),
    "unsqueezed": lambda x: x.unsqueeze(1),
    "expanded": lambda x: x.unsqueeze(1).expand(5, 4, 8),
    "summed": lambda x: x.sum(0),
    "moved rows": lambda x: x[1:4],
    "columns": lambda x: x[:, 1:],
    "a view of moved rows": lambda x: x[1:4].unsqueeze(0),
    "a boxed view of a transposed": lambda x: x.T.reshape(2, 4, 5),
    "a copy of a transposed, boxed": lambda x: x.T.reshape(40),
    "dims joined, boxed": lambda x: x.view(5, 4, 2).permute(1, 2, 0).reshape(8, 5).T,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("turn", range(4))
def test_strides_are_those_of_one_device(name, turn):
    def strides(make):
        x = VIEWS[name](make("c"))
        return list(x.stride()), x.stride(0), x.storage_offset(), x.is_contiguous(), list(x.dim_order()), x.nbytes

    assert_as_one_device(strides, LAYOUTS[turn::4])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in VIEWS if not {"rows", "columns", "view"} & set(name.split())])
@pytest.mark.parametrize("turn", range(4))
def test_views_by_the_own_strides(name, turn):
    def chunks(make):
        whole = make("c")
        x = VIEWS[name](whole)
        y = x.as_strided(x.size(), x.stride())
        z = x.as_strided((2, *x.shape[1:]), (2 * x.stride(0), *x.stride()[1:]), x.storage_offset())
        (y.square().sum() + (z * 3).square().sum()).backward()
        return y, z, whole.grad

    assert_as_one_device(chunks, LAYOUTS[turn::4])


def test_overlapping_windows_of_a_long_dim():
    """As models of long texts cut their windows: half of each overlaps the next."""

    def windows(make):
        x = make("c").view(1, 5, 8)
        size, stride = list(x.size()), list(x.stride())
        return x.as_strided((1, 4, 2, 8), (stride[0], stride[1], stride[1], stride[2])), size

    assert_as_one_device(windows, LAYOUTS)


def test_overlapping_windows_of_heads_that_were_boxed():
    """The heads of samples lie side by side: on one device the windows are a view of the projection."""

    def windows(make):
        size = torch.tensor(4)
        x = make("c").view(5, 2, 2, 2).permute(1, 2, 0, 3).reshape(size, 5, 2)
        stride = x.stride()
        return x.as_strided((4, 4, 2, 2), (stride[0], stride[1], stride[1], stride[2])), list(stride)

    assert_as_one_device(windows, [layout for layout in LAYOUTS if layout[0] == 2])


def test_a_view_by_strides_is_written_through():
    def written(make):
        x = make("c", grad=False)
        x.T.as_strided((8,), (x.T.stride(0),)).mul_(0)
        return x

    assert_as_one_device(written, LAYOUTS)


def test_scatter_by_strides():
    def scattered(make):
        x = make("c")
        return x.as_strided_scatter(make("v"), (3,), (8,), 1), x.detach().T.as_strided_scatter(make("v"), (3,), (1,))

    assert_as_one_device(scattered, LAYOUTS)


def test_what_a_shard_does_not_tell_is_an_error():
    def program():
        x = wb.ones(4, 6, placement=wb.placement.all("cpu"), sbp="S(1)")
        with pytest.raises(LayoutError, match=r"part of a larger.*Write .contiguous\(\)"):
            x[:, 2:5].as_strided((2, 2), (6, 1))
        with pytest.raises(LayoutError, match=r"tensor \(3, 8\).*one device torch refuses it.*Write .reshape"):
            x.T.view(3, 8).stride()
        return x[:, 2:5].contiguous().as_strided((2, 2), (3, 1)).shape

    assert run_ranks(program, 2) == [(2, 2)] * 2


@pytest.mark.parametrize("write", [
    lambda x: x.resize_(3, 3), lambda x: x.resize_as_(torch.ones(2)), lambda x: x.set_(torch.ones(2)),
    lambda x: torch.ones(2).set_(x), lambda x: x.as_strided_((2,), (1,)),
])  # fmt: skip
def test_other_storage_is_refused(write):
    def program():
        x = wb.ones(4, 6, placement=wb.placement.all("cpu"), sbp="S(1)")
        with pytest.raises(LayoutError, match=r"set_|resize_|as_strided_"):
            write(x)
        return x.to_local().shape

    assert run_ranks(program, 2) == [(4, 3)] * 2
