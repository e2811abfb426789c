"""Boxing executed on simulated ranks: shards, gradients, bytes; reduced precision, integers, explicit mode, errors."""

import os

import pytest
import torch

import workbench as wb
from tests.processes import run_processes
from tests.training.programs import boxing_forward_and_backward
from workbench.errors import CollectiveAborted, ExplicitBoxingError, LayoutError, PlacementError, SbpError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.transport import threads


@pytest.mark.sampled(3, start=1)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_sampled_pairs_of_layouts(num_ranks):
    assert (
        run_ranks(lambda: boxing_forward_and_backward(num_ranks, count=40, seed=num_ranks), num_ranks)
        == [40] * num_ranks
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes(dtype):
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1, 2])
        full = torch.arange(20).reshape(5, 4).to(dtype)
        x = wb.tensor(full, placement=p, sbp="S(0)")
        for sbp in ("S(1)", "B", "P", "S(0)"):
            x = x.to_global(sbp=sbp)
            assert torch.equal(x.full_tensor(), full), sbp

    run_ranks(program, 3)


def test_low_precision_sums_are_accumulated_in_32_bits():
    def program(rank):
        p = wb.placement.all("cpu")
        term = torch.full((4,), 1.0 if rank == 0 else 2**-9, dtype=torch.bfloat16)
        return wb.to_global(term, placement=p, sbp="P").full_tensor()

    expected = torch.tensor(1 + 7 * 2**-9).to(torch.bfloat16)
    assert all(torch.equal(value, expected.expand(4)) for value in run_ranks(program, 8))


def test_every_rank_gets_the_same_bits_of_a_sum():
    def program(rank):
        term = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        return wb.to_global(term, placement=wb.placement.all("cpu"), sbp="P").full_tensor()

    values = run_ranks(program, 4)
    assert all(torch.equal(value, values[0]) for value in values)


def test_a_boxing_owns_its_storage():
    def program(rank):
        x = wb.zeros(4, 2, placement=wb.placement("cpu", ranks=[0, 1]), sbp="B")
        x.to_global(sbp="S(0)").add_(1)
        assert not x.full_tensor().any()

    run_ranks(program, 2)


def test_non_contiguous_shards():
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        full = torch.arange(12.0).reshape(3, 4)
        x = wb.tensor(full, placement=p, sbp="S(0)").t()
        assert torch.equal(x.to_global(sbp="S(0)").full_tensor(), full.t())

    run_ranks(program, 2)


def test_double_backward_through_boxings():
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        x = wb.tensor(torch.tensor([1.0, 2.0, 3.0]), placement=p, sbp="S(0)").requires_grad_()
        y = (x.to_global(sbp="B") ** 3).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        torch.testing.assert_close(first.full_tensor().detach(), torch.tensor([3.0, 12.0, 27.0]))
        torch.testing.assert_close(second.full_tensor(), torch.tensor([36.0, 288.0, 972.0]))

    run_ranks(program, 2)


def test_explicit_boxing_names_the_call_to_write():
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        x, w = wb.ones(4, 4, placement=p, sbp="S(1)"), wb.ones(4, 4, placement=p, sbp="B")
        with wb.debug.explicit_boxing():
            x.to_global(sbp="B")
            with pytest.raises(ExplicitBoxingError, match=r"softmax: needs a boxing .*S\(1\).*x.to_global\("):
                torch.softmax(x, dim=1)
        return (x @ w).sum().item()

    assert run_ranks(program, 2) == [64.0, 64.0]


def test_two_placements_in_one_operation():
    def program(rank):
        x = wb.ones(2, placement=wb.placement("cpu", ranks=[0]), sbp="B")
        y = wb.ones(2, placement=wb.placement("cpu", ranks=[1]), sbp="B")
        with pytest.raises(LayoutError, match=r"add: operands lie on different placements.*to_global\(placement="):
            x + y

    run_ranks(program, 2)


@pytest.mark.parametrize("sbp", ["B", "S(0)", "P"])
@pytest.mark.parametrize("ranks", [[1], [0, 2]], ids=str)
def test_what_every_rank_holds_whole_is_taken_where_the_other_operand_is(ranks, sbp):
    values, table = torch.arange(8.0).view(4, 2), torch.linspace(0.5, 1, 12).view(6, 2)

    def program():
        there, everywhere = wb.placement("cpu", ranks=ranks), wb.placement.all()
        x = wb.to_global(values, placement=there, sbp="B").to_global(sbp=sbp).detach().requires_grad_()
        whole = wb.to_global(table, placement=everywhere, sbp="B").detach().requires_grad_()
        result = x * whole[: x.shape[0]]
        result.sum().backward()
        return result.placement == there, result.full_tensor(), x.grad.full_tensor(), whole.grad.full_tensor()

    for is_there, result, own, whole in run_ranks(program, 3):
        assert is_there
        torch.testing.assert_close(result, values * table[:4])
        torch.testing.assert_close(own, table[:4])
        torch.testing.assert_close(whole, torch.cat([values, torch.zeros(2, 2)]))


def of_numbers(a, b):
    """What people write with parameters of all stages: parts of a loss, norms, a scale that another stage has."""
    loss = (a * a).mean() + 0.5 * (b * b).sum()
    norm = torch.stack([a.norm(), b.norm()]).norm()
    total = 0
    for x in (a, b):
        total = total + x.abs().sum()
    total += b.sum()
    scaled = a * b[0].exp() + torch.where(b[1] > 0, a, -a)
    return loss + norm + total + scaled.sum() + torch.maximum(b.max(), a.max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sbp", ["B", "S(0)"])
@pytest.mark.parametrize(
    ("here", "there"), [([0, 1], [2, 3]), ([2, 3], [0]), ([0, 1, 2, 3], [[0, 1], [2, 3]]), ([[0, 2], [1, 3]], [0, 3])]
)
def test_numbers_go_where_the_other_operands_are(here, there, sbp):
    values = torch.linspace(-1, 2, 8, dtype=torch.float64), torch.tensor([0.3, -0.2, 0.1, 0.9], dtype=torch.float64)
    leaves = [value.clone().requires_grad_() for value in values]
    of_numbers(*leaves).backward()

    def program():
        placements = [wb.placement("cpu", ranks=ranks) for ranks in (here, there)]
        a, b = (
            wb.to_global(value, placement, [sbp] * placement.num_axes, broadcast_from=0).detach().requires_grad_()
            if sbp == "B"
            else wb.tensor(value, placement=placement, sbp=[sbp] * placement.num_axes).requires_grad_()
            for value, placement in zip(values, placements, strict=True)
        )
        found = of_numbers(a, b)
        found.backward()
        if there == [0]:
            with wb.debug.explicit_boxing(), pytest.raises(ExplicitBoxingError, match="numbers or indices on other"):
                a.mean() + b.mean()
        return found.item(), a.grad.full_tensor(), b.grad.full_tensor()

    for value, *grads in run_ranks(program, 4):
        assert value == pytest.approx(of_numbers(*values).item())
        torch.testing.assert_close(grads, [leaf.grad for leaf in leaves])


@pytest.mark.parametrize(("left", "right"), [("S(0)", "S(0)"), ("P", "P"), ("B", "S(1)"), ("S(1)", "P")])
def test_grids_of_the_same_ranks_meet(left, right):
    """Under ZeRO with groups of shards, and with model ranks, parameters lie on grids of different shapes."""
    a, b = torch.arange(12.0).reshape(4, 3), torch.arange(12.0).reshape(4, 3).flip(0)

    def program():
        line, grid = wb.placement("cpu", ranks=[0, 1, 2, 3]), wb.placement("cpu", ranks=[[0, 2], [1, 3]])
        x = wb.tensor(a, placement=line, sbp=left)
        y = wb.tensor(b, placement=grid, sbp=[right, "B" if right == "S(1)" else right])
        return (x * y).full_tensor(), torch.cat([y, x]).full_tensor()

    for product, joined in run_ranks(program, 4):
        assert torch.equal(product, a * b) and torch.equal(joined, torch.cat([b, a]))


@pytest.mark.parametrize(("left", "right"), [("B", "P"), ("S(0)", "S(1)"), ("P", "S(0)"), ("P", "P")])
def test_the_same_ranks_in_another_order_meet_in_the_order_of_the_first(left, right):
    """Parameters under ZeRO 3 whose rows do not divide begin at different ranks, and users sum their norms."""
    x = torch.arange(35, dtype=torch.float64).reshape(7, 5)

    def program(rank):
        here, there = (wb.placement("cpu", ranks=ranks) for ranks in ([0, 1, 2], [2, 0, 1]))
        a = wb.to_global(x, placement=here, sbp="B").to_global(sbp=left).requires_grad_()
        b = wb.to_global(x, placement=there, sbp="B").to_global(sbp=right).requires_grad_()
        total = sum(t.square().sum() for t in (a, b)) + (2 * a + b).square().sum()
        total.backward()
        assert (2 * a + b).placement == here and b.grad.placement == there
        return total.item(), a.grad.full_tensor(), b.grad.full_tensor()

    for total, of_a, of_b in run_ranks(program, 3):
        assert total == pytest.approx(float(11 * x.square().sum()))
        torch.testing.assert_close((of_a, of_b), (14 * x, 8 * x))


def test_bad_layouts_are_refused_before_anything_moves():
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        x = wb.ones(4, 4, placement=p, sbp="S(0)")
        with pytest.raises(SbpError, match="2 entries"):
            x.to_global(sbp="B, B")
        with pytest.raises(SbpError, match="splits dim 2"):
            x.to_global(sbp="S(2)")
        with pytest.raises(PlacementError, match="rank 2 does not exist"):
            wb.placement("cpu", ranks=[0, 2])
        with pytest.raises(LayoutError, match="works on cpu"):
            wb.ones(4, placement=wb.placement("cuda", ranks=[0, 1]), sbp="B")
        with pytest.raises(LayoutError, match="not differentiable"):
            wb.ones((), placement=p, sbp="P(max)", requires_grad=True).backward()

    run_ranks(program, 2)


def test_ranks_that_run_different_programs_are_told_apart():
    def program(rank):
        x = wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        return x.to_global(sbp="B" if rank else "S(1)")

    with pytest.raises(CollectiveAborted, match="diverged") as caught:
        run_ranks(program, 2)
    assert "S(1)" in str(caught.value) and "-> B" in str(caught.value)


def test_a_rank_that_leaves_is_a_deadlock_at_once():
    def program(rank):
        x = wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        if rank == 0:
            x.to_global(sbp="B")

    with pytest.raises(CollectiveAborted, match=r"rank 0 waits for rank 1 .*ranks \[1\] have ended"):
        run_ranks(program, 2)


def test_a_global_tensor_read_after_its_simulated_ranks_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(threads, "_ANSWER_S", 0.1)
    x = run_ranks(lambda: wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)"), 2)[0]
    with pytest.raises(CollectiveAborted, match=r"simulated ranks have ended.*inside run_ranks"):
        str(x)


def test_the_first_cause_is_raised_not_its_consequences():
    def program(rank):
        if rank == 1:
            raise KeyError("mine")
        wb.barrier()

    with pytest.raises(KeyError, match="mine") as caught:
        run_ranks(program, 3)
    assert "simulated rank 1" in caught.value.__notes__[0]


def box_before_and_after_another_transport():
    p = wb.placement.all("cpu")
    x = wb.to_global(torch.ones(300, 300), placement=p, sbp="P")
    assert x.to_global(sbp="B").sum().item() == 180_000 and current().transport_name == "shared"
    assert x._spec.exchanges and x._spec.plans
    before, os.environ["WORKBENCH_TRANSPORT"] = dict(x._spec.plans), "gloo"
    assert wb.rebuild().transport_name == "gloo"
    assert not x._spec.exchanges and not x._spec.plans and before
    return x.to_global(sbp="B").sum().item()


@pytest.mark.procs
@pytest.mark.slow
def test_another_transport_decides_anew():
    """What costs decide has to be the same on all ranks, those that have taken the place of a dead one included."""
    assert run_processes(box_before_and_after_another_transport, 2) == [180_000.0] * 2


def test_a_path_is_traced_and_counted_as_what_it_sends():
    def program(rank):
        a, b = wb.placement("cpu", ranks=[0, 1]), wb.placement("cpu", ranks=[2, 3, 0])
        x = wb.to_global(torch.full((300, 200), 1.0 + rank), placement=a, sbp="P").requires_grad_()
        plan, sent = x.boxing_plan(placement=b, sbp="B"), current().transport.sent_bytes
        with wb.debug.trace() as trace:
            y = x.to_global(placement=b, sbp="B")
        assert plan.kind == "path" and "in 2 steps" in str(plan) and trace.records[0].kind == "path"
        assert current().transport.sent_bytes - sent == trace.sent_bytes == plan.bytes_sent.get(rank, 0)
        y.sum().backward()
        return x.grad.to_local()

    grads = run_ranks(program, 4)
    assert all(torch.equal(grads[rank], torch.ones(300, 200)) for rank in (0, 1))


def test_after_a_rebuild_no_rank_uses_an_implicit_boxing_that_others_may_not_have():
    """Rank 1 was interrupted in the boxing that rank 0 remembers."""

    def program(rank):
        p = wb.placement.all("cpu")
        x, w = wb.ones(8, 4, placement=p, sbp="S(0)"), wb.ones(4, 2, placement=p, sbp="S(0)")
        products = [x @ w]
        assert w._boxings is not None
        if rank == 1:
            w._boxings = None
        current().rejoin(2, current().transport)
        products += [x @ w, x @ w]
        return [product.full_tensor().sum().item() for product in products]

    assert run_ranks(program) == [[64.0] * 3] * 2


def test_a_layout_that_was_asked_for_on_more_ranks_is_looked_up_in_the_present_world():
    def program():
        world, wide = current(), wb.placement.all("cpu")
        x = wb.arange(2, placement=wb.placement("cpu", ranks=[0, 1]), sbp="B")
        x.to_global(placement=wide)
        if world.rank == 2:
            return
        world.rejoin(2, world.transport)
        with pytest.raises(PlacementError, match="rank 2 does not exist; this world has 2 ranks"):
            x.to_global(placement=wide)

    run_ranks(program, 3)
