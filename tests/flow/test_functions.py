"""Functions by the names of the older documents: what they compute, with and without layouts, in jobs and outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import workbench as wb
import workbench.flow.typing as tp
from workbench import flow
from workbench.testing import run_ranks

IMAGES = torch.randn(5, 3, 7, 6, generator=torch.Generator().manual_seed(0))
FILTERS = torch.randn(4, 3, 3, 2, generator=torch.Generator().manual_seed(1))
ROWS = torch.arange(12.0).reshape(3, 4)


def window_by_window(x: torch.Tensor, size: tuple[int, int], stride: int, lower: bool, reduce: Any) -> torch.Tensor:
    """What "SAME" means: ``ceil(n / stride)`` windows, the odd padding behind, and padding is never looked at."""
    out = []
    for dim, width in ((2, size[0]), (3, size[1])):
        n = x.shape[dim]
        number = -(-n // stride)
        total = max((number - 1) * stride + width - n, 0)
        before = total - total // 2 if lower else total // 2
        starts = [i * stride - before for i in range(number)]
        out.append([(max(start, 0), min(start + width, n), start) for start in starts])
    rows = [torch.stack([reduce(x[:, :, a:b, c:d], (a - s, c - t)) for c, d, t in out[1]], -1) for a, b, s in out[0]]
    return torch.stack(rows, -2)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER"])
def test_same_padding(stride: int, padding: str) -> None:
    lower = padding == "SAME_LOWER"

    def product(window: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
        part = FILTERS[:, :, at[0] : at[0] + window.shape[2], at[1] : at[1] + window.shape[3]]
        return torch.einsum("nihw,oihw->no", window, part)

    convolved = flow.nn.conv2d(IMAGES, FILTERS, stride, padding)
    torch.testing.assert_close(
        convolved, window_by_window(IMAGES, (3, 2), stride, lower, product), atol=1e-5, rtol=1e-5
    )
    largest = window_by_window(IMAGES, (2, 3), stride, lower, lambda window, at: window.amax((2, 3)))
    torch.testing.assert_close(flow.nn.max_pool2d(IMAGES, (2, 3), stride, padding), largest)
    mean = window_by_window(IMAGES, (2, 3), stride, lower, lambda window, at: window.mean((2, 3)))
    torch.testing.assert_close(flow.nn.avg_pool2d(IMAGES, (2, 3), stride, padding), mean)


def test_other_paddings_and_formats() -> None:
    last = IMAGES.permute(0, 2, 3, 1)
    torch.testing.assert_close(flow.nn.conv2d(IMAGES, FILTERS, 1, "VALID"), F.conv2d(IMAGES, FILTERS))
    padded = F.conv2d(F.pad(IMAGES, (2, 0, 1, 1)), FILTERS)
    torch.testing.assert_close(flow.nn.conv2d(IMAGES, FILTERS, 1, ((0, 0), (0, 0), (1, 1), (2, 0))), padded)
    torch.testing.assert_close(
        flow.nn.max_pool2d(last, 2, 2, "VALID", "NHWC"), F.max_pool2d(IMAGES, 2).permute(0, 2, 3, 1)
    )
    torch.testing.assert_close(flow.nn.bias_add(IMAGES, torch.ones(3)), IMAGES + 1)
    with pytest.raises(ValueError, match="data_format='CHWN': known are 'NCHW' and 'NHWC'"):
        flow.nn.conv2d(IMAGES, FILTERS, data_format="CHWN")


@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_pads_of_all_dims_are_in_the_order_of_the_data_format(data_format: str) -> None:
    image, order = {"NCHW": (IMAGES, (0, 1, 2, 3)), "NHWC": (IMAGES.permute(0, 2, 3, 1), (0, 2, 3, 1))}[data_format]
    pads = [[(0, 0), (0, 0), (1, 2), (3, 0)][dim] for dim in order]
    padded = F.pad(IMAGES, (3, 0, 1, 2))
    inside = F.pad(torch.ones_like(IMAGES), (3, 0, 1, 2))
    means = F.avg_pool2d(padded, 4, 1) / F.avg_pool2d(inside, 4, 1)
    largest = F.max_pool2d(F.pad(IMAGES, (3, 0, 1, 2), value=float("-inf")), 4, 1)
    for padding in (pads, [(1, 2), (3, 0)]):
        for ours, expected in [
            (flow.nn.conv2d(image, FILTERS, 1, padding, data_format), F.conv2d(padded, FILTERS)),
            (flow.nn.max_pool2d(image, 4, 1, padding, data_format), largest),
            (flow.nn.avg_pool2d(image, 4, 1, padding, data_format), means),
        ]:
            torch.testing.assert_close(ours, expected.permute(order))


@pytest.mark.parametrize(
    "padding",
    [[(1, 1), (0, 0), (0, 0), (0, 0)], [(0, 0), (0, 0), (0, 0), (2, 2)], [(0, 0), (1, 1), (1, 1)], 1, [1, 1], [(1,)]],
)
def test_pads_of_other_dims_than_height_and_width_are_refused(padding: Any) -> None:
    with pytest.raises(ValueError, match=r"in the order NHWC.*write \[\(0, 0\), \(1, 1\), \(1, 1\), \(0, 0\)\]"):
        flow.nn.max_pool2d(IMAGES.permute(0, 2, 3, 1), 2, 1, padding, "NHWC")


@pytest.mark.parametrize("sizes", [(1, 2, 2, 1), [2]])
def test_windows_have_one_size_or_two(sizes: Any) -> None:
    with pytest.raises(ValueError, match=r"(4|1) numbers for height and width. Give two, .*, or one"):
        flow.nn.max_pool2d(IMAGES, sizes, 1, "VALID")
    with pytest.raises(ValueError, match=r"(4|1) numbers for height and width"):
        flow.nn.conv2d(IMAGES, FILTERS, sizes)


def test_functions_on_plain_tensors() -> None:
    for ours, expected in [
        (flow.matmul(ROWS, ROWS, transpose_b=True), ROWS @ ROWS.T),
        (flow.matmul(ROWS, ROWS, transpose_a=True), ROWS.T @ ROWS),
        (flow.reshape(ROWS, [2, -1]), ROWS.reshape(2, 6)),
        (flow.flatten(IMAGES, 1), IMAGES.flatten(1)),
        (flow.transpose(ROWS), ROWS.T),
        (flow.transpose(IMAGES, perm=[0, 2, 3, 1]), IMAGES.permute(0, 2, 3, 1)),
        (flow.transpose(IMAGES, 1, 2), IMAGES.transpose(1, 2)),
        (flow.transpose(IMAGES, dim0=1, dim1=2), IMAGES.transpose(1, 2)),
        (flow.concat([ROWS, ROWS], axis=1, name="joined"), torch.cat([ROWS, ROWS], 1)),
        (flow.concat([ROWS, ROWS], dim=1), torch.cat([ROWS, ROWS], 1)),
        (flow.squeeze(ROWS[:, :1], axis=[1]), ROWS[:, 0]),
        (flow.squeeze(ROWS[:, :1], 1), ROWS[:, 0]),
        (flow.squeeze(ROWS[:, :1]), ROWS[:, 0]),
        (flow.expand_dims(ROWS, axis=1), ROWS[:, None]),
        (flow.slice(ROWS, [1, None], [-1, None]), ROWS[1:]),
        (flow.slice(ROWS, [None, 1], [None, 2]), ROWS[:, 1:3]),
        (flow.slice(ROWS, [-2, -3], [-1, None]), ROWS[-2:, -3:]),
        (flow.slice(ROWS, [-2, None], [1, 3]), ROWS[-2:-1, :3]),
        (flow.gather(ROWS, torch.tensor([2, 0])), ROWS[[2, 0]]),
        (flow.gather(ROWS, torch.tensor([2, 0]), axis=1), ROWS[:, [2, 0]]),
        (flow.gather(ROWS, 1, torch.tensor([[2], [0], [1]])), ROWS.gather(1, torch.tensor([[2], [0], [1]]))),
        (flow.cast(ROWS, flow.int32), ROWS.int()),
        (flow.identity(ROWS), ROWS),
        (flow.math.add(ROWS, 1, name="sum"), ROWS + 1),
        (flow.math.reduce_mean(ROWS, axis=0, keepdims=True), ROWS.mean(0, keepdim=True)),
        (flow.math.reduce_sum(ROWS), ROWS.sum()),
        (flow.math.reduce_max(ROWS, axis=[0, 1]), ROWS.max()),
        (flow.math.argmax(ROWS, axis=0), ROWS.argmax(0)),
        (flow.nn.leaky_relu(-ROWS, 0.5), -ROWS / 2),
        (flow.nn.softmax(ROWS), ROWS.softmax(-1)),
        (flow.nn.sigmoid(ROWS), ROWS.sigmoid()),
        (
            flow.nn.softmax_cross_entropy_with_logits(ROWS.softmax(-1), ROWS),
            F.cross_entropy(ROWS, ROWS.softmax(-1), reduction="none"),
        ),
        (
            flow.nn.sigmoid_cross_entropy_with_logits(torch.ones(3, 4), ROWS),
            F.binary_cross_entropy_with_logits(ROWS, torch.ones(3, 4), reduction="none"),
        ),
    ]:
        torch.testing.assert_close(ours, expected)
    with pytest.raises(AttributeError, match="has no attribute 'add_up'"):
        _ = flow.math.add_up


def test_slices_of_split_tensors_move_only_what_they_cut() -> None:
    def program() -> Any:
        x = flow.arange(24, placement=flow.placement("cpu", ranks=[0, 1]), sbp=flow.sbp.broadcast).reshape(4, 6)
        rows = x.to_global(sbp=flow.sbp.split(0))
        with wb.debug.explicit_boxing():
            columns = flow.slice(rows, [None, -2], [-1, -1])
        with pytest.raises((IndexError, RuntimeError)):
            flow.slice(rows, [-5, None], [-1, None])
        return str(columns.sbp), columns.full_tensor(), flow.slice(rows, [-3, 0], [-1, 2]).full_tensor()

    whole = torch.arange(24).reshape(4, 6)
    for sbp, columns, corner in run_ranks(program, 2):
        assert sbp == "(S(0),)" and torch.equal(columns, whole[:, -2:]) and torch.equal(corner, whole[-3:, :2])


@pytest.mark.parametrize("sizes", [(5,), (5, 4), (5, 4, 3)])
def test_gather_takes_tables_and_indices_of_any_number_of_dims(sizes: tuple[int, ...]) -> None:
    table = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    for axis in range(-1, len(sizes)):
        for ids in (torch.tensor(1), torch.tensor([2, 0, 1]), torch.tensor([[2, 0, 1], [1, 1, 0]])):
            expected = torch.tensor(np.take(table.numpy(), ids.numpy(), axis))
            torch.testing.assert_close(flow.gather(table, ids, axis), expected)

            def gathered(table: torch.Tensor = table, ids: torch.Tensor = ids, axis: int = axis) -> torch.Tensor:
                p = flow.placement("cpu", ranks=[0, 1])
                x = flow.to_global(table, p, flow.sbp.broadcast).to_global(p, flow.sbp.split(axis))
                return flow.gather(x, ids, axis).full_tensor()

            torch.testing.assert_close(run_ranks(gathered)[0], expected)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|DATA bounds)"):
            flow.gather(table, torch.tensor([-1]), axis)


def test_layers_and_casts_in_jobs_do_not_depend_on_the_layout() -> None:
    images = IMAGES.numpy()

    @flow.global_function()
    def job(x: tp.Numpy.Placeholder((5, 3, 7, 6))) -> tp.Numpy:
        normal = flow.truncated_normal(0.5)
        y = flow.layers.conv2d(x, 4, (3, 2), 2, "SAME", activation=flow.nn.relu, kernel_initializer=normal, name="a")
        y = flow.nn.avg_pool2d(y, 2, 1, "SAME")
        y = flow.nn.softmax(flow.reshape(y, [5, -1]))
        y = flow.layers.dense(y, 3, kernel_initializer=normal, use_bias=False)
        y = flow.parallel_cast(y, distribute=flow.distribute.split(axis=1))
        return flow.math.tanh(flow.concat([y, flow.math.square(y)], axis=1))

    one_device = run_ranks(lambda rank: job(images), 1)[0]
    assert one_device.shape == (5, 6) and np.isfinite(one_device).all()
    for result in run_ranks(lambda rank: job(images), 3):
        np.testing.assert_allclose(result, one_device, rtol=1e-5, atol=1e-6)
