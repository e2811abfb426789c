"""Functions of torch that would read a shard without asking: wrapped, or refused; and the list of them, once more."""

import copy
import functools
import re
import subprocess
import warnings
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import _AllReduce

import workbench as wb
from tests.tensors.dispatch.custom_functions import Cube
from tests.warm import executable
from workbench.errors import LayoutError
from workbench.tensors.torch_patches import torch_function_bypasses as bypasses
from workbench.tensors.torch_patches import whole_values
from workbench.testing import run_ranks


def test_a_custom_function_runs_on_shards_that_are_declared():
    def program():
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        (wb.local_map(Cube.apply, in_sbp=["S(0)"], out_sbp="S(0)")(x) * 2).sum().backward()
        return x.grad.full_tensor().tolist()

    assert run_ranks(program, 2) == [[6.0] * 4] * 2


cube = Cube.apply


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
def test_a_custom_function_bound_before_the_world_is_dispatched():
    def program(call):
        x = wb.to_global(torch.arange(4.0), wb.placement.all("cpu"), "B").to_global(sbp="P").detach().requires_grad_()
        call(x).sum().backward()
        return x.grad.full_tensor().tolist()

    found = run_ranks(lambda: program(cube), 2)
    before = {"key": Cube.apply}  # since torch 2.14 such a method looks up nothing
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        found += run_ranks(lambda: program(before["key"]), 2)
    assert all(each == [0.0, 3.0, 12.0, 27.0] for each in found)


def softmax(x, scale: float = 1.0):
    return torch.tanh(x * scale) / (1.0 + x * x).sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=str)
def test_compiled_functions_of_torchscript_take_the_whole(sbp, ranks):
    """Also one that has the name of a function of torch."""
    data = torch.arange(5.0) / 4
    scripted, traced = torch.jit.script(softmax), torch.jit.trace(softmax, data)

    def gradient(x):
        result = scripted(x, scale=2.0) + traced(x)
        (result**2).sum().backward()
        return result.detach(), x.grad

    def program():
        x = wb.to_global(data, placement=wb.placement("cpu", ranks=ranks), sbp="B").to_global(sbp=sbp)
        return [each.full_tensor() for each in gradient(x.detach().requires_grad_())]

    expected = gradient(data.clone().requires_grad_())
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, list(expected))
    assert torch.equal(scripted(data), softmax(data))


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_rule_for_a_compiled_function_is_its_own():
    compiled = [torch.jit.trace(lambda x, n=n: x.tanh() * n, torch.ones(4)) for n in (2, 3)]
    wb.register_rule(compiled[0], "... -> ...")

    def program():
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")
        return [str(function(x).sbp[0]) for function in compiled]

    assert run_ranks(program, 2) == [["S(0)", "B"]] * 2


EXCHANGES = {
    "torch.distributed.all_reduce: argument 1": lambda loss: dist.all_reduce(loss),
    "torch.distributed.all_gather: ": lambda loss: dist.all_gather([torch.ones(4), torch.ones(4)], loss),
    "torch.distributed.broadcast: ": lambda loss: dist.broadcast(loss, 0),
    "torch.distributed.reduce: ": lambda loss: dist.reduce(loss, 0),
    "torch.distributed.scatter: argument 2": lambda loss: dist.scatter(torch.ones(4), [loss, loss]),
    "torch.distributed.reduce_scatter: argument 2": lambda loss: dist.reduce_scatter(torch.ones(4), [loss, loss]),
    "torch.distributed.all_to_all: argument 2": lambda loss: dist.all_to_all([torch.ones(4)] * 2, [loss, loss]),
    "torch.distributed.all_to_all_single: argument 2": lambda loss: dist.all_to_all_single(torch.ones(4), loss),
    "torch.ops._c10d_functional.all_reduce: ": lambda loss: torch.ops._c10d_functional.all_reduce(loss, "sum", "0"),
    "torch.ops._c10d_functional.wait_tensor: ": lambda loss: torch.ops._c10d_functional.wait_tensor.default(loss),
    "torch.distributed.nn.functional._AllReduce.apply: argument 4": lambda loss: _AllReduce.apply(None, None, loss),
}


def test_functions_that_exchange_plain_tensors_are_refused():
    """They would add or join what is one tensor already, or on ranks without a part wait for ever."""

    def program():
        for sbp, ranks in (("S(0)", [0, 1]), ("P", [0, 1]), ("B", [0, 1]), ("B", [1])):
            loss = wb.ones(4, placement=wb.placement("cpu", ranks=ranks), sbp=sbp, requires_grad=True)
            where = re.escape(str(loss.layout_on_ranks))
            for call, make in EXCHANGES.items():
                says = rf"^{call}.*\(4,\), {where}.*Leave the call out.*loss.full_tensor\(\)"
                with pytest.raises(LayoutError, match=says):
                    make(loss)

    run_ranks(program, 2)


OBJECTS = {
    "all_gather_object": lambda log: dist.all_gather_object([None, None], log),
    "gather_object": lambda log: dist.gather_object(log),
    "broadcast_object_list": lambda log: dist.broadcast_object_list([log], 0),
    "scatter_object_list": lambda log: dist.scatter_object_list([None], [log, log]),
    "send_object_list": lambda log: dist.send_object_list([log], 1),
}


def test_objects_with_shards_are_not_sent():
    """A tensor that is whole everywhere becomes a plain one; simulated ranks have no process group to send it with."""

    def program():
        whole = wb.ones(4, placement=wb.placement.all(), sbp="B")
        for name, send in OBJECTS.items():
            for loss in (whole.to_global(sbp="P"), wb.ones(4, placement=wb.placement(ranks=[1]), sbp="B")):
                with pytest.raises(LayoutError, match=rf"^torch.distributed.{name}: .*Leave the call out"):
                    send({"step": 1, "log": [whole, loss]})
            with pytest.raises(ValueError, match="process group has not been initialized"):
                send({"step": 1, "log": [whole]})

    run_ranks(program, 2)


def test_plain_custom_functions_are_unchanged():
    x = torch.full((2,), 2.0, requires_grad=True)
    Cube.apply(x).sum().backward()
    assert x.grad.tolist() == [12.0, 12.0]


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (lambda x: torch.func.grad(lambda y: (y * y).sum())(x), "torch.func.grad"),
        (lambda x: torch.vmap(lambda y: y * 2)(x), "torch.vmap"),
        (lambda x: torch.func.jvp(lambda y: y * 2, (x,), (x,)), "forward-mode"),
        (lambda x: torch.vmap(lambda y: y * x)(torch.ones(3)), "function transform"),
        (lambda x: torch.func.grad(lambda y: (y * x).sum())(torch.ones(4)), "function transform"),
    ],
)
def test_function_transforms_are_refused(transform, name):
    def program():
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")
        with pytest.raises(LayoutError, match=f"{name}.*wb.local_map"):
            transform(x)
        return (x * 2).sum().item()

    assert run_ranks(program, 2) == [8.0, 8.0]


def test_function_transforms_are_refused_before_the_workbench_boxes_inside():
    """Parameters of ``zero=3`` are gathered before the model sees its input, and a plain input may stay outside."""
    linear = torch.nn.Linear(4, 4)

    def program():
        x = torch.ones(3, 4)
        model = wb.parallelize(copy.deepcopy(linear), "*: data | zero=3")
        compared = wb.parallelize(copy.deepcopy(linear), "*: data")  # the ranks compare its first batch
        split = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        for transform in (torch.vmap, torch.func.jacrev):
            for function in (model, compared, lambda y: y * split.to_global(sbp="B")):
                with pytest.raises(LayoutError, match=r"function transform .*torch.autograd.grad.*wb.local_map"):
                    transform(function)(x)
        model(x).sum().backward()
        return model.bias.grad.full_tensor().tolist()

    assert run_ranks(program, 2) == [[3.0] * 4] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_is_refused_where_a_plain_input_has_a_tangent():
    """The tangent was lost, and ``jacobian`` took it for zeros. torch has one level of forward mode for all threads."""
    linear, x = torch.nn.Linear(4, 4), torch.ones(3, 4)

    def program():
        model = wb.parallelize(copy.deepcopy(linear), "*: data")
        for _ in range(2):  # the first call compares the inputs of all ranks
            with pytest.raises(LayoutError, match=r"function transform .*forward mode.*wb.local_map"):
                torch.autograd.functional.jacobian(model, x, strategy="forward-mode", vectorize=True)
            model(x)

    run_ranks(program, 1)


class Recorder(torch.Tensor):
    """Notes which functions of torch ask it."""

    asked: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


WITH_A_SCALAR = {
    "arange": lambda t: torch.arange(t),
    "eye": lambda t: torch.eye(t),
    "full": lambda t: torch.full((2,), t),
    "full_like": lambda t: torch.full_like(torch.ones(2), t),
    "linspace": lambda t: torch.linspace(0, t, 2),
    "logspace": lambda t: torch.logspace(0, t, 2),
    "randint": lambda t: torch.randint(t, (2,)),
    "randperm": lambda t: torch.randperm(t),
    "range": lambda t: torch.range(0, t),
    "scalar_tensor": lambda t: torch.scalar_tensor(t),
    "tensor": lambda t: torch.tensor(t),
    "as_tensor": lambda t: torch.as_tensor(t, dtype=torch.float32),
    "asarray": lambda t: torch.asarray(t, dtype=torch.float32),
    "new_full": lambda t: torch.ones(2).new_full((2,), t),
    "new_tensor": lambda t: torch.ones(2).new_tensor(t),
    "zeros": lambda t: torch.zeros(t),
    "ones": lambda t: torch.ones(2, t),
    "empty": lambda t: torch.empty(t, 2),
    "rand": lambda t: torch.rand(t),
    "normal": lambda t: torch.normal(0.0, t.double(), (2,)),
    "tril_indices": lambda t: torch.tril_indices(t, t),
    "hann_window": lambda t: torch.hann_window(t),
    "topk": lambda t: torch.arange(9.0).topk(t).values,
    "kthvalue": lambda t: torch.kthvalue(torch.arange(9.0), k=t).values,
    "roll": lambda t: torch.arange(9).roll(t),
    "select": lambda t: torch.ones(2, 9).cumsum(1).select(1, t),
    "bincount": lambda t: torch.bincount(torch.tensor([1]), minlength=t),
    "triu": lambda t: torch.ones(6, 6).triu(t),
    "tril": lambda t: torch.tril(torch.ones(6, 6), t),
    "narrow": lambda t: torch.arange(9).narrow(0, t, 1),
    "repeat": lambda t: torch.arange(9).repeat(t),
    "diagonal": lambda t: torch.ones(6, 6).diagonal(t),
}
"""How to give each function that makes tensors, or takes a count, a scalar tensor to read."""


def assigned(name, value):
    tensor = torch.ones(3, dtype=torch.complex64 if name in ("real", "imag") else torch.float32)
    setattr(tensor, name, value)
    return getattr(tensor, name)


ROWS, COLUMNS, OFFSETS = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 3])
WITH_TENSORS = {
    "torch.stack": lambda t: torch.stack([t, t]),
    "torch.cartesian_prod": lambda t: torch.cartesian_prod(t, t),
    "torch.where": lambda t: torch.where(torch.ones(3) > 0, 1.0, t),
    "torch.from_dlpack": lambda t: torch.from_dlpack(t),
    "torch.Tensor.copy_": lambda t: torch.zeros(3).copy_(t),
    "torch.Tensor.index_put": lambda t: torch.zeros(3).index_put((torch.arange(3),), t),
    "torch._foreach_add": lambda t: torch._foreach_add([torch.ones(3)], [t]),
    "torch.nn.utils.rnn.pad_sequence": lambda t: torch.nn.utils.rnn.pad_sequence([t, t]),
    "torch.sparse_coo_tensor": lambda t: torch.sparse_coo_tensor(torch.stack([COLUMNS, ROWS]), t, (4, 4)).to_dense(),
    "torch.sparse_csr_tensor": lambda t: torch.sparse_csr_tensor(ROWS, COLUMNS, t, (2, 2)).to_dense(),
    "torch.sparse_csc_tensor": lambda t: torch.sparse_csc_tensor(ROWS, COLUMNS, t, (2, 2)).to_dense(),
    "torch.sparse_bsr_tensor": lambda t: torch.sparse_bsr_tensor(ROWS, COLUMNS, t, (2, 2)).to_dense(),
    "torch.sparse_bsc_tensor": lambda t: torch.sparse_bsc_tensor(ROWS, COLUMNS, t, (2, 2)).to_dense(),
    "torch.sparse_compressed_tensor": lambda t: torch.sparse_compressed_tensor(
        ROWS, COLUMNS, t, (2, 2), layout=torch.sparse_csr
    ).to_dense(),
    "torch.nested.nested_tensor": lambda t: torch.nested.nested_tensor([t, t]).to_padded_tensor(0.0),
    "torch.nested.as_nested_tensor": lambda t: torch.nested.as_nested_tensor([t, t[:2]]).to_padded_tensor(0.0),
    "torch.nested.nested_tensor_from_jagged": lambda t: torch.nested.nested_tensor_from_jagged(t, OFFSETS).values(),
    "torch.to_dlpack": lambda t: torch.from_dlpack(torch.to_dlpack(t)),
    "torch.utils.dlpack.to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    **{f"torch.Tensor.{name}": functools.partial(assigned, name) for name in whole_values.SETTERS},
}
"""How to give functions a tensor of three numbers, alone or in a list, and how to assign one to an attribute."""


def numbers_for(name):
    numbers = torch.tensor([1.0, 2.0, 3.0])
    return numbers[:, None, None] if name in ("torch.sparse_bsr_tensor", "torch.sparse_bsc_tensor") else numbers


TAKE_WHOLE = sorted(WITH_TENSORS.keys() & {*whole_values.MAKERS, *(f"torch.Tensor.{s}" for s in whole_values.SETTERS)})


WRAPPED = (*bypasses.MAKERS, *bypasses.LIKE_MAKERS, *bypasses.METHODS, *bypasses.COUNTING)


def test_the_list_is_complete_for_this_torch():
    """Every function here either asks its scalar tensor, or is one of those that the guards wrap."""
    unseen = set()
    for name, call in WITH_A_SCALAR.items():
        scalar = torch.tensor(3).as_subclass(Recorder)
        Recorder.asked.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(scalar)
        if not Recorder.asked:
            unseen.add(name)
    assert unseen == {*WRAPPED, *bypasses.CONVERSIONS}


@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:Sparse", "ignore:.*nested")
def test_the_list_of_what_takes_whole_values_is_complete_for_this_torch():
    unseen = set()
    for name, call in WITH_TENSORS.items():
        given = numbers_for(name).as_subclass(Recorder)
        Recorder.asked.clear()
        call(given)
        if not Recorder.asked:
            unseen.add(name)
    ask_for_parts = {"torch.nested.as_nested_tensor", "torch.nested.nested_tensor_from_jagged"}
    assert unseen | ask_for_parts == set(TAKE_WHOLE)


@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:Sparse", "ignore:.*nested")
def test_plain_tensors_of_other_kinds_are_made_of_whole_values():
    def result(name, x):
        made = WITH_TENSORS[name](x)
        if made.requires_grad:
            (made * torch.arange(made.numel()).view_as(made)).sum().backward()
        return made.detach(), x.grad

    def program(name, ranks, sbp):
        x = wb.to_global(numbers_for(name), wb.placement("cpu", ranks=ranks), "B").to_global(sbp=sbp).detach()
        made, grad = result(name, x.requires_grad_("dlpack" not in name))
        assert not isinstance(made, wb.GlobalTensor), name
        return made, grad if grad is None else grad.full_tensor()

    for name in TAKE_WHOLE:
        expected = result(name, numbers_for(name).requires_grad_("dlpack" not in name))
        for ranks, sbp in (([0, 1], "S(0)"), ([0, 1], "P"), ([1], "B")):
            for found in run_ranks(functools.partial(program, name, ranks, sbp), 2):
                torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}: {m}")


def test_every_wrapped_function_takes_the_logical_value_on_every_rank():
    def program():
        n = wb.to_global(torch.tensor(2), placement=wb.placement("cpu", ranks=[0, 1]), sbp="P")  # 2 + 2
        made = [WITH_A_SCALAR[name](n) for name in WRAPPED]
        assert not any(isinstance(tensor, wb.GlobalTensor) for tensor in made)
        for name in bypasses.COUNTING:
            assert WITH_A_SCALAR[name](n).equal(WITH_A_SCALAR[name](torch.tensor(4))), name
        return torch.arange(n).tolist(), torch.full((2,), n).tolist(), [tuple(tensor.shape) for tensor in made]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = run_ranks(program, 3)
    assert found[0] == found[1] == found[2] and found[0][:2] == ([0, 1, 2, 3], [4, 4])


def test_conversions_take_their_data_by_the_names_of_torch():
    def program():
        given = wb.to_global(torch.tensor(2), placement=wb.placement("cpu", ranks=[0, 1]), sbp="P")
        for convert, name in ((torch.tensor, "data"), (torch.as_tensor, "data"), (torch.asarray, "obj")):
            assert convert(**{name: [1.5]}, dtype=torch.float64).tolist() == [1.5]
            made = convert(**{name: given}, dtype=torch.float64)
            assert isinstance(made, wb.GlobalTensor) and made.dtype == torch.float64 and made.item() == 4
        with pytest.raises(TypeError, match="asarray"):
            torch.asarray()

    run_ranks(program, 2)


UNDER_A_DEVICE = """
import torch, workbench.tensors.install
with torch.device("meta"):
    made = [torch.arange(3), torch.eye(2), torch.full((2,), 1), torch.randint(3, (2,)), torch.randperm(3)]
    made += [torch.tensor([1]), torch.as_tensor([1]), torch.asarray([1]), torch.scalar_tensor(1)]
print(*{tensor.device.type for tensor in made})
"""


def test_wrapped_functions_heed_the_device_in_force():
    """Torch tells them by identity, from the first use on: in a process where that comes after they were wrapped."""
    done = subprocess.run([executable(), "-c", UNDER_A_DEVICE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["meta"]
