"""Tensors and placements of eager programs: the listings of the document on parallelism, and what users get wrong."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Parameter

import workbench as wb
from tests.flow.running import run, source_of
from workbench import flow
from workbench.errors import LayoutError, PlacementError, SbpError
from workbench.flow.local_tensor import LocalTensor
from workbench.tensors.global_tensor import GlobalTensor
from workbench.testing import run_ranks

OLD = pytest.mark.filterwarnings("ignore:.*is the older spelling:DeprecationWarning")


def test_matmul_on_one_device(capsys):
    (names,) = run_ranks(lambda: run(source_of("matmul")), 1)
    assert capsys.readouterr().out == "torch.Size([4, 8])\n"
    assert not isinstance(names["out"], GlobalTensor)
    torch.testing.assert_close(names["out"].to_local(), names["x"] @ names["w"])


@pytest.mark.parametrize(("listing", "sbp", "local"), [("data", "S(0)", (2, 8)), ("model", "S(1)", (4, 4))])
def test_matmul_in_parallel(listing, sbp, local):
    def program():
        with wb.debug.explicit_boxing():  # nothing has to move for either of them
            names = run(source_of(f"matmul_{listing}"))
        x, w, out = (names[name] for name in ("x", "w", "out"))
        assert str(out.sbp) == f"({sbp},)" and out.to_local().shape == local
        return out.full_tensor(), x.full_tensor() @ w.full_tensor()

    for out, expected in run_ranks(program, 2):
        torch.testing.assert_close(out, expected)


def test_matmul_in_two_stages():
    def program(rank):
        names = run(source_of("matmul_pipeline"))
        w0, w1, out = (names[name] for name in ("w0", "w1", "out_stage1"))
        assert (w0.is_placeholder, w1.is_placeholder, out.is_placeholder) == (
            (False, True, True) if rank == 0 else (True, False, False)
        )
        everywhere = [t.to_global(flow.placement.all("cpu"), flow.sbp.broadcast).to_local() for t in (w0, w1, out)]
        return names["x"].to_local(), *everywhere

    (x, w0, w1, out), _ = run_ranks(program, 2)
    torch.testing.assert_close(out, x.as_subclass(torch.Tensor) @ w0 @ w1)  # the first rank's data counts


def test_numbers_of_global_tensors_do_not_depend_on_the_layout():
    def program():
        p, values = flow.placement("cuda", ranks=[0, 1]), []
        for sbp in (flow.sbp.split(0), flow.sbp.broadcast):
            flow.manual_seed(3)
            values.append(flow.randn(5, 3, placement=p, sbp=sbp).full_tensor())
        return values

    (split, whole), _ = run_ranks(program, 2)
    assert torch.equal(split, whole)


def test_creators_make_local_tensors_that_can_become_global():
    def program(rank):
        x = flow.full((2, 3), float(rank))
        p = flow.placement("cuda", ranks=[0, 1])
        assert (x + 1).is_local and flow.relu(x).is_local and flow.cat([x, x]).shape == (4, 3)
        joined = x.to_global(placement=p, sbp=flow.sbp.split(0))
        summed = x.to_global(p, [flow.sbp.partial_sum()])
        first = x.to_global(p, flow.sbp.broadcast, broadcast_from=0)
        return joined.full_tensor(), summed.full_tensor(), first.full_tensor()

    for joined, summed, first in run_ranks(program, 2):
        assert torch.equal(joined, torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2))
        assert torch.equal(summed, torch.ones(2, 3)) and torch.equal(first, torch.zeros(2, 3))


def test_local_and_global_tensors_meet():
    def program():
        p = flow.placement("cpu", ranks=[0, 1])
        x = flow.arange(6, dtype=flow.float, placement=p, sbp=flow.sbp.split(0))
        weight = flow.ones(6, requires_grad=True)
        (x * weight).sum().backward()
        return (weight * x).full_tensor().detach(), weight.grad

    for product, grad in run_ranks(program, 2):
        torch.testing.assert_close(product, torch.arange(6.0))
        torch.testing.assert_close(torch.Tensor(grad), torch.arange(6.0))


def test_containers_of_tensors_become_global_and_local():
    def program(rank):
        p = flow.placement("cpu", ranks=[0, 1])
        made = flow.to_global({"a": torch.full((2,), float(rank)), "b": 3}, p, flow.sbp.split(0))
        assert made["b"] == 3 and made["a"].is_global and not made["a"].is_local
        back = flow.to_local(made)["a"]
        return back.to_global(p, flow.sbp.partial_sum).full_tensor(), made["a"].full_tensor()

    for summed, joined in run_ranks(program, 2):
        assert joined.tolist() == [0, 0, 1, 1] and summed.tolist() == [1, 1]


def test_the_part_of_a_global_tensor_is_a_local_tensor():
    def program(rank):
        p = flow.placement("cpu", ranks=[0, 1])
        x = flow.arange(6.0, placement=p, sbp=flow.sbp.split(0), requires_grad=True)
        local = x.to_local()
        assert local.is_local and not local.is_global and (local + 1).is_local and local.data_ptr() == x.data.data_ptr()
        (local.to_global(p, flow.sbp.split(0)) * x).sum().backward()
        first = x.to_global(flow.placement("cpu", ranks=[0]), flow.sbp.broadcast).to_local()
        assert first.is_local and first.shape == ((6,) if rank == 0 else (0,))
        return x.grad.full_tensor(), type(x.full_tensor())

    for grad, type_of_whole in run_ranks(program, 2):
        assert torch.equal(grad, 2 * torch.arange(6.0)) and type_of_whole is torch.Tensor


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3), (2, 2, 40)])
def test_local_tensors_print_as_torchs_do(sizes):
    values = torch.linspace(-1, 1, math.prod(sizes)).reshape(sizes)
    assert repr(values.as_subclass(LocalTensor)) == str(values.as_subclass(LocalTensor)) == repr(values)
    assert (
        f"{values.as_subclass(LocalTensor)}" == f"{values}" and f"{flow.tensor(1.5, requires_grad=True):.3f}" == "1.500"
    )
    assert repr(flow.ones(2, requires_grad=True)) == "tensor([1., 1.], requires_grad=True)"


def test_programs_without_flow_have_plain_parts():
    def program():
        return type(wb.ones(4, placement=wb.placement(ranks=[0, 1]), sbp="S(0)").to_local())

    assert run_ranks(program, 2) == [torch.Tensor] * 2


def test_what_nobody_defines_is_torchs():
    assert flow.float32 is torch.float32 and flow.softmax is torch.softmax
    with pytest.raises(AttributeError, match="no_such_function"):
        _ = flow.no_such_function


@pytest.mark.parametrize("sbp", ["S(0)", "B"])
def test_an_optimizer_steps_on_global_weights(sbp):
    def program():
        p = flow.placement("cpu", ranks=[0, 1])
        layer = flow.nn.Linear(4, 3)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
        layer.to_global(p, sbp)
        sgd = flow.optim.SGD(layer.parameters(), lr=0.5)
        x = flow.arange(8, dtype=flow.float, placement=p, sbp=flow.sbp.broadcast).view(2, 4)
        layer(x).square().mean().backward()
        sgd.step()
        return [weight.full_tensor().detach() for weight in layer.parameters()]

    weight = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    bias = torch.linspace(-1, 1, 3).requires_grad_()
    F.linear(torch.arange(8.0).view(2, 4), weight, bias).square().mean().backward()
    for found in run_ranks(program, 2):
        for value, expected in zip(found, (weight, bias), strict=True):
            torch.testing.assert_close(value, (expected - 0.5 * expected.grad).detach())


def test_modules_keep_what_they_share_and_their_objects():
    def program():
        first, second = flow.placement("cpu", ranks=[0]), flow.placement("cpu", ranks=[1])
        model = flow.nn.Sequential(flow.nn.Embedding(6, 4), flow.nn.BatchNorm1d(4), flow.nn.Linear(4, 6, bias=False))
        model[2].weight = model[0].weight
        model.to_global(first, flow.sbp.broadcast)
        shared = model[0].weight
        assert model[2].weight is shared and isinstance(model[1].running_mean, GlobalTensor)
        model.to_global(second)
        assert model[2].weight is shared is model[0].weight
        return shared.placement.grid

    assert run_ranks(program, 2) == [(1,), (1,)]


def test_a_module_has_weights_and_a_config_of_its_own():
    class Scale(flow.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = {"width": 3}
            self.weight = flow.nn.Parameter(flow.ones(3))

        def forward(self, x):
            return x * self.weight

    def program():
        p, module = flow.placement("cpu", ranks=[0, 1]), Scale()
        assert isinstance(module(flow.ones(2, 3)), flow.Tensor) and module.config == {"width": 3}
        module.to_global(p, flow.sbp.split(0))
        assert [weight.sbp for weight in module.parameters()] == [(flow.sbp.split(0),)]
        module(flow.ones(2, 3, placement=p, sbp=flow.sbp.broadcast)).sum().backward()
        return module.weight.grad.full_tensor()

    for grad in run_ranks(program, 2):
        assert torch.equal(grad, torch.full((3,), 2.0))


class WithLocalTensors(flow.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = flow.nn.Parameter(flow.arange(3.0))
        self.fixed = flow.nn.Parameter(flow.ones(3), requires_grad=False)
        self.shared = self.weight
        self.register_buffer("shift", flow.ones(3))

    def forward(self, x):
        return x * self.weight + self.shift


def test_local_tensors_and_modules_with_them_can_be_copied():
    module = WithLocalTensors()
    module(flow.ones(3)).sum().backward()
    copied = copy.deepcopy(module)
    assert copied.shared is copied.weight is not module.weight
    assert [type(t) for t in (copied.weight, copied.shift)] == [LocalTensor] * 2
    assert [name for name, _ in copied.named_parameters()] == ["weight", "fixed"]
    assert copied.weight.requires_grad and not copied.fixed.requires_grad and not isinstance(copied.shift, Parameter)
    assert torch.equal(copied.weight.grad, module.weight.grad) and copied.weight.grad is not module.weight.grad
    with torch.no_grad():
        copied.weight.zero_()
    assert module.weight.tolist() == [0, 1, 2]
    assert torch.optim.swa_utils.AveragedModel(module)(flow.ones(3)).tolist() == [1, 2, 3]
    columns = copy.deepcopy(flow.ones(2, 3).t())
    assert columns.is_local and columns.stride() == (1, 3) and copy.deepcopy(flow.tensor(2)).item() == 2
    assert copy.deepcopy(flow.ones(0, 3)).is_local and copy.copy(flow.ones(3)).is_local
    with pytest.raises(RuntimeError, match="created explicitly by the user"):
        copy.deepcopy(module.weight * 2)


def test_torch_loads_what_it_has_saved_of_local_tensors(tmp_path):
    module = WithLocalTensors()
    torch.save(module.state_dict(), tmp_path / "module")
    loaded = torch.load(tmp_path / "module")
    assert loaded["weight"].is_local and loaded["weight"].tolist() == [0, 1, 2]
    module.load_state_dict(loaded)
    torch.save([module.weight, module.weight], tmp_path / "twice")
    first, second = torch.load(tmp_path / "twice")
    assert first is second and isinstance(first, Parameter) and first.is_local and first.requires_grad
    assert flow.load(tmp_path / "twice")[0].is_local


def test_saved_values_load_under_another_layout(tmp_path):
    def program():
        p = flow.placement("cpu", ranks=[0, 1])
        layer = flow.nn.Linear(4, 3)
        value = flow.randn(3, 4, placement=p, sbp=flow.sbp.split(0))
        flow.save({"weight": value, "bias": flow.zeros(3)}, tmp_path / "layer")
        layer.load_state_dict(flow.load(tmp_path / "layer"))
        layer.to_global(p, flow.sbp.split(0))
        layer.load_state_dict(flow.load(tmp_path / "layer"))
        return layer.weight.full_tensor().detach(), value.full_tensor()

    for loaded, value in run_ranks(program, 2):
        assert torch.equal(loaded, value)


def test_each_rank_may_save_a_file_of_its_own(tmp_path):
    def program(rank):
        flow.save(flow.full((2,), float(rank)), tmp_path / str(rank))
        flow.save(flow.full((2,), float(rank)), tmp_path / "last", global_dst_rank=1)
        return [flow.load(tmp_path / name)[0].item() for name in ("0", "1", "last")]

    assert run_ranks(program, 2) == [[0, 1, 1]] * 2


@pytest.mark.parametrize("holder", [0, 1])
def test_the_state_of_one_stage_is_not_saved_as_the_whole(tmp_path, holder):
    """The file had the entries of the stage of rank 0 only."""

    def program(rank):
        layer = flow.nn.Linear(4, 3).to_global(flow.placement("cpu", ranks=[holder]), flow.sbp.broadcast)
        adam = flow.optim.Adam(layer.parameters())
        layer(flow.ones(2, 4)).sum().backward()
        adam.step()
        words = rf"ranks \[{holder}\] of 2 have the state .*wb\.checkpoint\.save"
        with pytest.raises(LayoutError if rank == holder else RuntimeError, match=words):
            flow.save(adam.state_dict(), tmp_path / "adam")

    run_ranks(program, 2)


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    """The others waited for the one that writes."""

    def program(rank):
        with pytest.raises(RuntimeError, match=r"flow\.save.*failed on ranks \[0\].*none" if rank else "none"):
            flow.save(flow.ones(3), tmp_path / "none" / "ones")

    run_ranks(program, 2)


def test_values_load_on_the_device_of_the_rank(tmp_path, monkeypatch):
    asked, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: asked.append(options) or load(*args, **options))

    def program():
        flow.save(flow.ones(3), tmp_path / "ones")
        return flow.load(tmp_path / "ones").tolist()

    assert run_ranks(program, 1) == [[1, 1, 1]]
    assert asked == [{"map_location": torch.device("cpu")}]


def test_old_spellings_warn_with_the_new_one():
    def program():
        with pytest.warns(DeprecationWarning, match=r'Write placement\("cuda", ranks=\[0\]\)') as caught:
            p = flow.placement("cuda", {0: [0]})
        assert caught[0].filename == __file__
        with pytest.warns(DeprecationWarning, match=r"Write to_global\(placement=placement, sbp=sbp\)") as caught:
            x = flow.ones(2).to_consistent(p, [flow.sbp.broadcast])
        assert caught[0].filename == __file__
        for thing in (x, flow.nn.Linear(2, 2)):
            with pytest.warns(DeprecationWarning, match="to_global"):
                thing.to_consistent(placement=p, sbp=[flow.sbp.broadcast])
        return p

    assert run_ranks(program, 1) == [wb.core.placement.Placement.of("cpu", [0])]


@OLD
@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_machines_of_the_older_placement(monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")

    def program():
        assert flow.env.get_node_size() == 2 and flow.env.get_local_rank() == 1
        placements = [
            flow.placement("gpu", {0: [0, 1], 1: [1]}),
            flow.placement("cuda", {0: range(2), 1: [0, 1]}, (2, 2)),
            flow.placement(device_type="cpu", ranks=[3]),
        ]
        with pytest.raises(PlacementError, match=r"device 2 of machine 1 .* machines 0 to 1 with devices 0 to 1 each"):
            flow.placement("cuda", {1: 2})
        return [placement.ranks for placement in placements]

    assert run_ranks(program, 4)[0] == [[0, 1, 3], [[0, 1], [2, 3]], [3]]


P = 'flow.placement("cuda", ranks=[0, 1])'


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ('flow.placement("cuda", ranks=[0, 2])', PlacementError, ["rank 2 does not exist", "2 ranks (0 to 1)"]),
        ('flow.placement("tpu", ranks=[0])', PlacementError, ["'tpu'", "cpu"]),
        ('flow.placement("cuda")', PlacementError, ["ranks=None", "0 to 1"]),
        ('flow.placement("cpu", ranks=[0, 1], hierarchy=(2, 2))', PlacementError, ["4 places for 2 ranks"]),
        (f"flow.randn(4, 5, placement={P}, sbp=flow.sbp.split(2))", SbpError, ["S(2)", "2"]),
        (f"flow.ones(4, 5).to_global({P}, flow.sbp.split(-3))", SbpError, ["-3"]),
        (f"flow.ones(4, placement={P}, sbp=[flow.sbp.broadcast] * 2)", SbpError, ["2 entries", "1 axis"]),
        (f"flow.ones(4, placement={P}, sbp=flow.sbp.split)", SbpError, ["split(dim)"]),
        (f"flow.ones(4, placement={P})", LayoutError, ["flow.ones", "sbp is missing"]),
        ("flow.ones(4).to_global()", LayoutError, ["placement and sbp are missing"]),
        (f"flow.linspace(0, 1, 5, placement={P}, sbp=flow.sbp.broadcast)", LayoutError, ["flow.linspace", "local"]),
        (f"flow.nn.Linear(4, 3).to_global({P}, flow.sbp.split(1), broadcast_from=0)", SbpError, ["bias", "S(1)"]),
        ("flow.nn.Linear(4, 3).to_global(sbp=flow.sbp.broadcast)", LayoutError, ["weight", "placement is missing"]),
        ('flow.save(flow.nn.Linear(4, 3), "file")', TypeError, ["flow.save of a Linear", "model.state_dict()"]),
        ("flow.nn.Linear(4, 3).config.stage_id = -1", ValueError, ["stage_id = -1", "from 0"]),
    ],
)
def test_mistakes_are_told(line, error, words):
    with pytest.raises(error) as caught:
        run_ranks(lambda: run(line, {"flow": flow}), 2)
    for word in words:
        assert word in str(caught.value)


def test_one_process_is_told_how_to_be_several():
    with pytest.raises(PlacementError, match=r"this world has 1 rank .*%%global.*workbench\.flow\.launch"):
        run_ranks(lambda: flow.placement("cuda", ranks=[0, 1]), 1)


def test_gpus_are_cpus_where_there_are_none():
    def program():
        x, layer = flow.ones(2, 3, device="cuda:1"), flow.nn.Linear(3, 2).cuda()
        assert x.cuda().is_local and x.to("cuda", flow.float64).dtype == flow.float64
        return layer.to("cuda", flow.float64)(x.to(device="gpu", dtype=flow.float64)).device.type

    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert run_ranks(program, 1)[0] in ("cpu", expected)


def test_values_that_are_not_the_same_are_not_overwritten():
    def program(rank):
        flow.full((2,), float(rank)).to_global(flow.placement("cpu", ranks=[0, 1]), flow.sbp.broadcast)

    with pytest.raises(LayoutError, match="broadcast_from=0"):
        run_ranks(program, 2)
