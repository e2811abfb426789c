"""Many tensors in one exchange, and exchanges that are waited for later: the numbers of boxing one by one."""

import pytest
import torch

import workbench as wb
from tests.processes import run_processes
from workbench.errors import LayoutError
from workbench.tensors.world import current
from workbench.testing import run_ranks

SHAPES = [(5, 7), (1, 6), (0, 4), (8, 4), (2, 3), ()]
CHANGES = [("S(0)", "B"), ("P", "B"), ("P", "S(0)"), ("S(0)", "S(1)"), ("B", "S(1)"), ("B", "P"), ("S(0)", "S(0)")]


def make(shape, sbp, ranks, requires_grad=False):
    """The same logical tensor on every rank; terms of sums differ by rank."""
    sbp = sbp if len(shape) == 2 or not sbp.startswith("S") else "B"
    full = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    x = wb.tensor(full, placement=wb.placement("cpu", ranks=ranks), sbp="B").to_global(sbp=sbp)
    return x.detach().requires_grad_(requires_grad)


def messages_of(action):
    """To whom this rank sends while ``action`` runs, and what it returns."""
    transport, sent = current().transport, []
    plain = transport.start_exchange

    def start(sends, receives, tag, header):
        sent.extend(destination for destination, _ in sends)
        return plain(sends, receives, tag, header)

    transport.start_exchange = start
    try:
        return sent, action()
    finally:
        del transport.start_exchange


def assert_fused_equals_single(source, target, ranks, target_ranks):
    placement = wb.placement("cpu", ranks=target_ranks)
    alone = [make(shape, source, ranks, True) for shape in SHAPES]
    fused = [make(shape, source, ranks, True) for shape in SHAPES]
    to = [target if x.dim() == 2 or not target.startswith("S") else "B" for x in alone]
    expected = [x.to_global(placement=placement, sbp=sbp) for x, sbp in zip(alone, to, strict=True)]
    two = [i for i, x in enumerate(fused) if x.dim() == 2]
    sent, some = messages_of(lambda: wb.to_global([fused[i] for i in two], placement=placement, sbp=target))
    assert len(sent) == len(set(sent))  # one message for each rank, however many tensors
    assert some[0].layout_on_ranks == expected[two[0]].layout_on_ranks
    for result, i in zip(some, two, strict=True):
        assert result.sbp == expected[i].sbp and result.placement == expected[i].placement
        assert result.to_local().equal(expected[i].to_local())
    weights = [torch.full(expected[i].shape, i + 1.0) for i in two]
    sum((x * w).sum() for x, w in zip(some, weights, strict=True)).backward()
    sum((expected[i] * w).sum() for i, w in zip(two, weights, strict=True)).backward()
    for i in two:
        ours, theirs = fused[i].grad, alone[i].grad
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.to_local().equal(theirs.to_local()) and ours.sbp == theirs.sbp


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_fused_boxings_equal_single_ones_with_one_message_per_pair(source, target):
    run_ranks(lambda: assert_fused_equals_single(source, target, [0, 1, 2], [0, 1, 2]), 3)
    run_ranks(lambda: assert_fused_equals_single(source, target, [0, 1], [2, 1]), 3)


def test_results_wait_until_they_are_asked_for():
    def program():
        p = wb.placement("cpu", ranks=[0, 1])
        x = wb.randn(6, 4, placement=p, sbp="S(0)", requires_grad=True)
        y = x * 2
        handle = y.to_global_async(sbp="B")
        with torch.no_grad():
            y.zero_()  # what was sent is as it was
        other = (x * 3).to_global(sbp="B")
        late = handle.wait()
        assert handle.wait() is late and torch.equal(late.to_local() * 1.5, other.to_local())
        late.sum().backward()
        assert x.grad.full_tensor().eq(2).all()
        many = wb.to_global([x, x], sbp="B", async_op=True)
        assert all(torch.equal(z.to_local() * 2, late.to_local()) for z in many.wait())

    run_ranks(program, 2)


def test_double_backward():
    def program():
        p = wb.placement("cpu", ranks=[0, 1])
        x = wb.tensor([[1.0, 2.0], [3.0, 4.0]], placement=p, sbp="S(0)").requires_grad_()
        (boxed,) = wb.to_global([x], sbp="B")
        (grad,) = torch.autograd.grad((boxed**3).sum(), x, create_graph=True)
        grad.sum().backward()
        return (x.grad.to_global(sbp="B").to_local() - 6 * x.detach().to_global(sbp="B").to_local()).abs().max()

    assert max(run_ranks(program, 2)) < 1e-6


def test_what_cannot_be_is_refused():
    def program():
        p = wb.placement("cpu", ranks=[0, 1])
        with pytest.raises(LayoutError, match=r"to_global: 0 tensors .* 1 or more"):
            wb.to_global([], placement=p, sbp="B")
        with pytest.raises(LayoutError, match=r"to_global: tensor 1 of 2 is a Tensor.*wb.to_global"):
            wb.to_global([wb.ones(2, placement=p, sbp="B"), torch.ones(2)], sbp="B")
        with pytest.raises(LayoutError, match=r"a Linear is neither .* wb.parallelize\(module"):
            wb.to_global(torch.nn.Linear(2, 2), placement=p, sbp="B")
        x = wb.ones(2, placement=p, sbp="P(max)", requires_grad=True)
        with pytest.raises(LayoutError, match="not differentiable"):
            wb.to_global([x], sbp="B")

    run_ranks(program, 2)


def on_processes():
    assert_fused_equals_single("P", "B", [0, 1], [0, 1])
    assert_fused_equals_single("S(0)", "S(1)", [0, 1], [1, 0])
    return current().transport_name


@pytest.mark.procs
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_fused_boxings_on_processes(transport):
    assert run_processes(on_processes, 2, environment={"WORKBENCH_TRANSPORT": transport}) == [transport] * 2


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_only_a_result_in_its_own_layout_shows_what_is_written_meanwhile(ranks):
    def program():
        for source, target in CHANGES:
            x = make((4, 6), source, ranks)
            before, alone = make((4, 6), source, ranks), x.to_global(sbp=target)
            handle = x.to_global_async(sbp=target)
            x.mul_(2)
            later = handle.wait()
            is_same = alone is x
            assert (later is x) == is_same == (str(x.sbp) == str(alone.sbp))
            for found in (alone, later):
                torch.testing.assert_close(found.full_tensor(), before.full_tensor() * (2 if is_same else 1))

    run_ranks(program)


def test_sums_and_moves_of_one_fused_boxing_do_not_take_each_others_messages():
    def program():
        placement, layouts = wb.placement.all("cpu"), ("S(0)", "P", "P", "S(1)", "B", "P", "S(1)")
        shapes = ((6, 4), (6, 4), (8, 2), (5, 5), (5, 5), (40, 1000), (40, 1000))
        given = [wb.randn(*shape, placement=placement, sbp=sbp) for shape, sbp in zip(shapes, layouts, strict=True)]
        for order in (given, given[::-1]):
            for whole, one in zip(wb.to_global(order, placement=placement, sbp="B"), order, strict=True):
                assert torch.allclose(whole.to_local(), one.to_global(sbp="B").to_local())

    run_ranks(program, 2)
    run_ranks(program, 3)


@pytest.mark.parametrize("async_op", [False, True])
def test_only_what_requires_a_gradient_gets_one(async_op):
    def program():
        weight, buffer, other = (make(shape, "S(0)", [0, 1], shape == (5, 7)) for shape in ((5, 7), (8, 4), (2, 3)))
        found = wb.to_global([weight, buffer, other], sbp="B", async_op=async_op)
        w, b, o = found.wait() if async_op else found
        assert (w.requires_grad, b.requires_grad, o.requires_grad) == (True, False, False)
        (w.sum() + b.sum()).backward()
        assert buffer.grad is None and weight.grad.full_tensor().eq(1).all()
        with torch.no_grad():
            sent, _ = messages_of(lambda: wb.to_global([weight, buffer, other], sbp="B"))
        assert len(sent) == len(set(sent))
        for result in (w, b, o):
            expected = torch.arange(1.0, 1.0 + result.numel()).view(result.shape)
            assert torch.equal(result.detach().full_tensor(), expected)

    run_ranks(program, 3)
