"""What is written through a view reaches its base, and what is written to the base shows in the view, in every layout.

Each program changes ``x`` and ``y`` in place through views; both are compared with one device, with gradients.
"""

import itertools
import math
import random

import pytest
import torch

import workbench as wb
from tests.tensors.dispatch.test_functions import spread
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.dispatch.aliasing import BoxedView
from workbench.tensors.world import current
from workbench.testing import run_ranks

GRIDS = [([0, 1], 2), ([0, 1, 2], 3), ([[3, 0], [1, 2]], 4), ([2, 0], 3)]
ENTRIES = ("S(0)", "S(1)", "B", "P")


def slices(x, y):
    x[1:3] = y[0:2] * 2
    x[-1] = y[0]
    x[::2, 1] = y[:3, 0]
    x[2] = 7
    x[None, 1:4, None, 2] = y[0, 0]


def narrow_and_select(x, y):
    x.narrow(0, 1, 3).fill_(3)
    x.select(0, 4).add_(y[1])
    x[3].mul_(2)


def flat(x, y):
    v = x.view(-1)
    v[3] = 9
    v[5:11] *= 2
    x.view(4, 5)[1].mul_(2)


def reshapes(x, y):
    """Views where strides allow, else copies, also of a tensor whose order only ranks with a shard know."""
    x.reshape(-1)[3:7].mul_(2)
    x.T.reshape(-1).mul_(5)
    x.flatten()[0] = 1
    x[1:3].reshape(-1).mul_(3)
    x[:, 1].contiguous().mul_(5)
    moved = x.T * 2
    copied, viewed = moved.reshape(-1), moved.T.reshape(-1)
    copied.add_(1)
    moved.mul_(2)
    viewed[2:5].mul_(3)
    y.add_(moved.T)
    y.mul_(copied.reshape(4, 5).T)
    rows = y[torch.tensor([0, 1, 1])]
    rows.mul_(2)
    x[0].add_(rows.sum(0))


def diagonal_and_transpose(x, y):
    x.diagonal().zero_()
    x.T.add_(1)
    x.t()[1] = y[:, 0]


def pieces(x, y):
    with torch.no_grad():  # torch allows it nowhere else
        a, b = x.chunk(2)
        a.zero_()
        b.mul_(3)
        c, d = x.split([2, 3], 0)
        c.add_(y[:2])
        d[1:].sub_(1)
        for i, row in enumerate(x.unbind(0)):
            row.mul_(i)


def rows(x, y):
    for i in range(x.shape[0]):
        x[i] += i


def chains(x, y):
    x[1:][1:][0].fill_(5)
    x.view(5, 2, 2)[:, 1].fill_(2)
    x.unsqueeze(0)[0, 2] = 1


def masks(x, y):
    x[x > 0] = 0.25
    x[y > 0] += 1
    x[y[:, 0] < 0] = y[0]


def index_tensors(x, y):
    x[[0, 3]] = y[1:3]
    x[torch.tensor([1, -1])] = 2.0
    x[[0, 3], [1, 2]] = y[0, :2]
    x[:, [0, 2]] = y[:, 1:3]
    x[1:4, [0, 2]] = y[2:5, 0:2]
    x.index_put_((torch.tensor([0, 4, 0]),), y[:3], accumulate=True)


def stale(x, y):
    rows_of_x, all_of_x = x[1:3], x.view(-1)
    x.mul_(2)
    y[:2].copy_(rows_of_x)
    y[4].copy_(all_of_x[:4])
    all_of_x[2] = 1


def data(x, y):
    x[1:3].data.zero_()
    x.view(-1).data[3:12].data.clamp_(min=-0.5)
    for piece in x.chunk(2):
        piece.data.mul_(3)
    x.diagonal().data.copy_(y[0])
    row, same = x[4], x[4].data
    same.add_(1)
    y[0].data.copy_(row)
    x.data[4].mul_(2)
    y[1].data.copy_(same)
    x[3][1:].detach().sub_(1)


def initializers(x, y):
    torch.nn.init.constant_(x[1:3], 2)
    torch.nn.init.normal_(tensor=x.data[3], mean=1, std=0)
    for piece in y.data.chunk(3):
        torch.nn.init.uniform_(piece, 0.5, 0.5)
    torch.nn.init.kaiming_uniform_(y[:2], a=math.inf)


def lists(x, y):
    with torch.no_grad():
        torch._foreach_mul_(x.chunk(2), 2.0)
        torch._foreach_copy_([x[0], x[3]], [y[1], y[2]])
        torch._foreach_add_([x[1:3], x[2:]], 1.0)
        torch._foreach_zero_(list(y.data.split([1, 4])))


def keywords(x, y):
    torch.neg_(input=x[1:3])
    torch.narrow(input=x[2:], dim=1, start=1, length=2).mul_(2)


def shapes_in_place(x, y):
    x.transpose_(0, 1)
    x.unsqueeze_(1)
    x[:, 0, 2] = 3
    x.squeeze_()
    x.transpose_(0, 1)


def outputs(x, y):
    rows_of_x, first = x[1:3], x[0]
    torch.mul(y, 2, out=x)
    y[:2].copy_(rows_of_x)
    torch.add(y[3], 1, out=first)


PROGRAMS = [slices, narrow_and_select, flat, diagonal_and_transpose, pieces, rows, chains, masks, index_tensors, stale]
PROGRAMS += [reshapes, data, initializers, lists, keywords, shapes_in_place]


def operands():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=generator) for _ in range(2)]


def loss_of(x, y):
    weight = torch.linspace(-1, 1, 20).view(5, 4)
    return (x * weight).sum() + (y * weight * 2).sum()


def on_one_device(program):
    leaves = [t.requires_grad_() for t in operands()]
    x, y = (leaf * 1 for leaf in leaves)
    program(x, y)
    loss_of(x, y).backward()
    return [x.detach(), y.detach(), *(leaf.grad for leaf in leaves)]


def on_ranks(program, placement, sbps, with_grad):
    def run(rank):
        leaves = [spread(t, Layout.of(placement, sbp), rank) for t, sbp in zip(operands(), sbps, strict=True)]
        leaves = [leaf.detach().requires_grad_(with_grad) for leaf in leaves]
        x, y = (leaf * 1 for leaf in leaves)
        program(x, y)
        assert x.layout_on_ranks == Layout.of(placement, sbps[0])
        if with_grad:
            loss_of(x, y).backward()
        values = [x.detach(), y.detach(), *(leaf.grad for leaf in leaves if with_grad)]
        whole = [None if v is None else v.to_global(sbp=["B"] * placement.num_axes) for v in values]
        return [None if v is None else v.to_local() for v in whole] if rank in placement else None

    return run


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("turn", range(4))
def test_writes_through_views_are_those_of_one_device(program, turn):
    """On one of the grids without gradients, and with them on another."""
    expected = on_one_device(program)
    chance = random.Random(program.__name__)
    for (place, (grid, num_ranks)), with_grad in itertools.product(enumerate(GRIDS), (False, True)):
        placement = Placement.of("cpu", grid)
        sbps = [[chance.choice(ENTRIES) for _ in range(placement.num_axes)] for _ in range(2)]
        if (place + 2 * with_grad) % 4 != turn:
            continue
        found = run_ranks(on_ranks(program, placement, sbps, with_grad), num_ranks)
        for rank in placement:
            for theirs, ours in zip(found[rank], expected, strict=False):
                if theirs is None:
                    assert not ours.any(), (program, sbps, "a gradient is missing")
                else:
                    torch.testing.assert_close(
                        theirs, ours, rtol=1e-4, atol=1e-5, msg=lambda m, s=sbps, g=grid: f"{s} on {g}: {m}"
                    )


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_made_inside", [False, True])
@pytest.mark.parametrize("program", [*PROGRAMS, outputs], ids=lambda program: program.__name__)
def test_writes_in_inference_mode_are_those_of_one_device(program, is_made_inside):
    """Rank 2 holds nothing."""

    def run(make):
        with torch.inference_mode(is_made_inside):
            x, y = make()
        with torch.inference_mode():
            program(x, y)
            return x + 0, y + 0

    def on_rank(rank):
        layout = Layout.of(wb.placement("cpu", ranks=[0, 1]), "S(0)")
        return [value.full_tensor() for value in run(lambda: [spread(t, layout, rank) * 1 for t in operands()])]

    expected = run(operands)
    for found in run_ranks(on_rank, 3):
        torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-5)


def test_views_in_inference_mode_are_fetched_again_only_after_a_write():
    def program(rank):
        traffic = current().traffic
        with torch.inference_mode():
            x = wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)") * 1
            middle, before = x[1:3], traffic.sent_bytes
            for _ in range(3):
                middle + 1
            unwritten = traffic.sent_bytes - before
            x.add_(1)
            return unwritten, (middle + 1).full_tensor().sum().item()

    assert run_ranks(program) == [(0, 24.0)] * 2


def test_a_parameter_row_is_cleared_without_gathering_the_parameter():
    def program(rank):
        placement = wb.placement("cpu", ranks=[0, 1])
        table = torch.nn.Parameter(wb.ones(8, 4, placement=placement, sbp=wb.sbp.split(0)))
        traffic = current().traffic
        before = traffic.sent_bytes
        with torch.no_grad():
            table[5].fill_(0)
        return traffic.sent_bytes - before, table.full_tensor()

    for sent, table in run_ranks(program):
        assert sent <= 4 * 4  # one row of four floats, from its owner
        assert not table[5].any() and table.sum() == 28


def test_rows_of_parameters_are_written_without_history():
    def program(rank):
        weight = torch.nn.Parameter(wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.split(0)))
        weight[0].data.fill_(2)
        weight[1][:3].detach().fill_(3)
        torch.nn.init.constant_(weight[2], 4)
        assert weight.requires_grad and weight.is_leaf
        return weight.full_tensor().sum()

    assert run_ranks(program) == [8 + 10 + 16 + 4] * 2


def test_a_boxed_view_shows_what_was_written_to_its_base():
    def program(rank):
        x = wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.split(0))
        row, all_of_x = x[3], x.view(-1, 2)[2:]
        x.mul_(5)
        return row.full_tensor(), row.to_global(sbp=wb.sbp.split(0)).full_tensor(), all_of_x.full_tensor()

    for values in run_ranks(program):
        assert all((value == 5).all() for value in values)


def test_a_new_shape_of_a_view_is_a_write_on_ranks_outside_too():
    """Rank 2 holds nothing, and keeps the boxing of ``x`` as long as the others."""

    def program():
        x = wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        first, column = x @ x, x[:, 1]
        column.unsqueeze_(0)
        return (first + x @ x).full_tensor().sum().item()

    assert run_ranks(program, 3) == [128.0] * 3


def test_views_that_need_no_boxing_are_plain_views():
    def program(rank):
        placement = wb.placement("cpu", ranks=[0, 1])
        x = wb.ones(4, 6, placement=placement, sbp=wb.sbp.split(0))
        direct = [x.view(4, 2, 3), x[:, 1:], x.t(), x.unsqueeze(0), x.chunk(2, 1)[0]]
        boxed = [x[1:3], x[0]]
        return [type(view) is BoxedView for view in direct], [type(view) is BoxedView for view in boxed]

    assert run_ranks(program) == [([False] * 5, [True] * 2)] * 2


@pytest.mark.parametrize("write", ["slice", "view", "flat"])
def test_a_write_through_a_view_on_another_stage_sends_its_gradient_back(write):
    """Rank 1 holds only placeholders of ``y``; its tensor ``z`` is written into a view of ``y`` on rank 0."""

    def program(rank):
        first, second = (wb.placement("cpu", ranks=[r]) for r in (0, 1))
        x = wb.ones(5, 4, placement=first, sbp=wb.sbp.broadcast).requires_grad_()
        z = wb.ones(2, 4, placement=second, sbp=wb.sbp.broadcast).requires_grad_()
        y = x * 2
        sent = (z * 3).to_global(placement=first, sbp=wb.sbp.broadcast)
        if write == "slice":
            y[0:2] = y[0:2] + sent
        elif write == "view":
            y[0:2].add_(sent)
        else:
            y.view(-1)[:8].add_(sent.reshape(-1))
        (y * y).sum().backward()
        everywhere = wb.placement("cpu", ranks=[0, 1])
        grads = [t.grad.to_global(placement=everywhere, sbp=wb.sbp.broadcast) for t in (x, z)]
        return [grad.to_local().sum().item() for grad in grads]

    assert run_ranks(program) == [[256.0, 240.0]] * 2
