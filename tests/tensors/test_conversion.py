"""Conversions between plain and global tensors: values, gradients, disagreement."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.errors import LayoutError, StrategyError
from workbench.testing import run_ranks
from workbench.training.saving.plain_copies import checksum


def test_shards_concatenate_and_uneven_ones_are_rebalanced():
    def program(rank):
        local = torch.full((rank + 1, 2), float(rank))
        x = wb.to_global(local, placement=wb.placement.all("cpu"), sbp=wb.sbp.split(0))
        assert x.shape == (6, 2) and x.to_local().shape == (2, 2)
        return x.full_tensor()[:, 0].tolist()

    assert run_ranks(program, 3)[1] == [0, 1, 1, 2, 2, 2]


def test_terms_add_up():
    def program(rank):
        x = wb.to_global(torch.ones(3) * rank, placement=wb.placement.all("cpu"), sbp=wb.sbp.partial_sum)
        return x.full_tensor().tolist()

    assert run_ranks(program, 3)[0] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
def test_what_has_no_history_is_written_with_one(sbp, mode):
    """A sum that begins with plain zeros."""

    def program():
        placement = wb.placement("cpu", ranks=[0, 1])
        with mode():
            total = wb.to_global(torch.zeros(2), placement, sbp)
        weight = wb.ones(*total.shape, placement=placement, sbp="B").requires_grad_()
        total += weight * 3
        total[1:] *= weight[1:]
        total.sum().backward()
        return weight.grad.full_tensor().tolist()

    expected = [3.0] + [6.0] * (3 if sbp == "S(0)" else 1)
    assert run_ranks(program) == [expected] * 2


def test_an_array_without_elements_may_have_a_stride_of_its_own():
    def program():
        empty = torch.empty(4).as_strided((0,), (0,))
        return wb.to_global(empty, wb.placement("cpu", ranks=[0, 1]), "B").shape, checksum(empty) is None

    assert run_ranks(program) == [((0,), False)] * 2


def test_copies_that_differ_are_refused_and_nobody_is_overwritten():
    def program(rank):
        local = torch.ones(3) * rank
        with pytest.raises(LayoutError, match=r"ranks 0 and 1 hold different values.*broadcast_from=0"):
            wb.to_global(local, placement=wb.placement.all("cpu"), sbp="B")
        x = wb.to_global(local, placement=wb.placement.all("cpu"), sbp="B", broadcast_from=1)
        assert local.tolist() == [rank] * 3
        return x.to_local().tolist()

    assert run_ranks(program, 2) == [[1.0] * 3] * 2


def test_unlike_dtypes_and_sizes_are_refused():
    def program(rank):
        p = wb.placement.all("cpu")
        with pytest.raises(LayoutError, match="same dtype"):
            wb.to_global(torch.ones(2, dtype=torch.float64 if rank else torch.float32), placement=p, sbp="S(0)")
        with pytest.raises(LayoutError, match="Only split dims may differ"):
            wb.to_global(torch.ones(2, 3 + rank), placement=p, sbp="S(0)")

    run_ranks(program, 2)


def test_a_plain_learnable_tensor_gets_its_whole_gradient():
    def program(rank):
        x = wb.ones(6, 2, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        scale = torch.tensor([2.0, 3.0], requires_grad=True)
        (x * scale).sum().backward()
        return scale.grad.tolist()

    assert run_ranks(program, 3) == [[6.0, 6.0]] * 3


@pytest.mark.parametrize("sbp", ["B", "S(0)"])
def test_a_plain_loss_on_full_tensor_gives_one_devices_gradient(sbp):
    def program(rank):
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp=sbp, requires_grad=True)
        (x.full_tensor() ** 2).sum().backward()
        return x.grad.full_tensor().tolist()

    assert run_ranks(program, 2) == [[2.0] * 4] * 2


def test_outside_the_placement():
    def program(rank):
        x = wb.ones(4, 2, placement=wb.placement("cpu", ranks=[0]), sbp="B")
        if rank == 1:
            assert x.to_local().numel() == 0 and "not on this rank" in repr(x)
        assert torch.equal(x.full_tensor(), torch.ones(4, 2)), "on every rank"
        assert x.sum().item() == 8.0 and bool(x.sum() > 7) and x.tolist() == [[1.0, 1.0]] * 4
        return str(x), f"{x.sum():.1f}"

    texts = run_ranks(program, 2)
    assert texts[0] == texts[1] and "8.0" in texts[0]


def test_repr_never_communicates():
    def program(rank):
        x = wb.ones(4, 2, placement=wb.placement.all("cpu"), sbp="S(0)")
        return repr(x) if rank == 0 else None

    assert run_ranks(program, 2)[0] == "GlobalTensor((4, 2), float32, S(0) on cpu:[0, 1])"


def test_check_mode_finds_plain_tensors_that_differ(monkeypatch):
    monkeypatch.setenv("WORKBENCH_CHECK", "1")

    def program(rank):
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")
        with pytest.raises(LayoutError, match="ranks 0 and 1 hold different values"):
            x * torch.ones(4).mul(rank + 1)
        return (x * torch.ones(4)).sum().item()

    assert run_ranks(program, 2) == [4.0, 4.0]


def test_a_dtensor_of_torch_is_refused_where_it_would_become_global():
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh

    def made_by_torch():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            return distribute_tensor(torch.ones(3, 3), mesh, [Shard(0)]), distribute_module(nn.Linear(3, 3), mesh)
        finally:
            torch.distributed.destroy_process_group()

    # For each thread torch keeps what it has found out about a mesh. A process that another thread forks later, such as
    # a worker of a DataLoader, would free it, and end in the destructor of the process group.
    with ThreadPoolExecutor(1) as pool:
        other, module = pool.submit(made_by_torch).result()

    def program():
        everywhere = wb.placement("cpu", ranks=[0])
        x = wb.ones(3, 3, placement=everywhere, sbp="B")
        calls = [
            lambda: wb.to_global(other, everywhere, "S(0)"),
            lambda: wb.tensor(other, placement=everywhere, sbp="S(0)"),
            lambda: nn.functional.linear(other, x),
            lambda: torch.cat([x, other]),
            lambda: x + other,
            lambda: x.copy_(other),
        ]
        for call in calls:
            with pytest.raises(LayoutError, match=r"\(3, 3\) is a DTensor.*\[0\].*wb.to_global\(x.to_local\(\)"):
                call()
        with pytest.raises(StrategyError, match=r"parallelize\(Linear\): .*'the whole' are DTensors.*'weight'"):
            wb.parallelize(module, "*: data")

    run_ranks(program, 1)


@pytest.mark.parametrize("sbp", ["S(0), B", "B, S(0)", "S(0), S(1)", "S(0), S(0)", "P, S(1)"])
def test_uneven_shards_on_a_grid_are_rebalanced(sbp):
    whole = torch.arange(42.0).view(6, 7)
    rows = {"S(0)": [1, 5], "S(1)": [2, 5]}

    def program(rank):
        placement = wb.placement(ranks=[[0, 1], [2, 3]])
        local, seed = whole.clone(), 1 + whole
        for entry, place in zip(sbp.split(", "), divmod(rank, 2), strict=True):
            if entry == "S(0)" and sbp == "S(0), S(0)":
                local = local.split([1, 5] if len(local) == 6 else [0, 1] if len(local) == 1 else [4, 1])[place]
            elif entry != "B" and entry != "P":
                local = local.split(rows[entry], int(entry[2]))[place]
        local = local.clone().requires_grad_()
        x = wb.to_global(local, placement, sbp)
        (x * seed).sum().backward()
        return x.full_tensor().detach(), local.detach(), local.grad

    for full, local, grad in run_ranks(program, 4):
        assert torch.equal(full, whole * (2 if "P" in sbp else 1))
        assert torch.equal(grad, 1 + local)


def test_blocks_that_form_no_grid_are_refused():
    def program(rank):
        with pytest.raises(LayoutError, match=r"dim 0 has 1 rows on rank 0 and 5 on rank 1.*same rows"):
            wb.to_global(torch.ones(5 if rank in (1, 2) else 1, 2), wb.placement(ranks=[[0, 1], [2, 3]]), "S(0), S(1)")

    run_ranks(program, 4)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("is_global", [False, True])
def test_a_tensor_of_data_is_a_copy_without_history(is_global, requires_grad):
    parameter = nn.Parameter(torch.arange(5.0))

    def program():
        placement, data = wb.placement("cpu", ranks=[0, 2]), parameter
        if is_global:
            data = wb.to_global(parameter.detach(), placement, "B").to_global(sbp="S(0)").requires_grad_()
        for sbp in ("S(0)", "B", "P"):
            for source in (data, data * 1):
                x = wb.tensor(source, placement=placement, sbp=sbp, requires_grad=requires_grad)
                assert x.is_leaf and x.requires_grad == requires_grad and str(x.sbp) == f"({sbp},)"
                if requires_grad:
                    (2 * x).sum().backward()
                    assert torch.equal(x.grad.full_tensor(), torch.full((5,), 2.0))
                assert data.grad is None
                with torch.no_grad():
                    x += 1
                assert torch.equal(x.detach().full_tensor(), torch.arange(5.0) + 1)
        whole = data.detach().full_tensor() if is_global else data.detach()
        return whole, wb.tensor(data, placement=placement, sbp="B", dtype=torch.int64).full_tensor()

    for whole, cast in run_ranks(program, 3):
        assert torch.equal(whole, torch.arange(5.0)) and torch.equal(cast, torch.arange(5))
