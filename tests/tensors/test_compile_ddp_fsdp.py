"""torch.compile and torch's DataParallel, DDP and FSDP around a parallelized module: an error that says what to do."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import workbench as wb
from tests.processes import run_processes
from workbench.errors import LayoutError, StrategyError
from workbench.testing import run_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def compiled(module):
    return torch.compile(module)  # looked up in the world, which patches it


def compiled_in_place(module):
    module.compile()
    return module


REFUSED = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "fully_shard": fully_shard,
    "torch.compile": compiled,
    "torch.compile ": compiled_in_place,
    "torch.export": lambda module: torch.export.export(module, (torch.ones(2, 4),)),
    "torch.jit.trace": lambda module: torch.jit.trace(module, torch.ones(2, 4)),
    "torch.jit.script": lambda module: torch.jit.script(module),
}
INSTEAD = {
    "DataParallel": "data",
    "DistributedDataParallel": "data",
    "FullyShardedDataParallel": "zero=3",
    "fully_shard": "zero=3",
    **dict.fromkeys(["torch.export", "torch.jit.trace", "torch.jit.script"], "export_safetensors"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_parallelized_module_is_not_wrapped_again(name):
    what = name.strip()

    def program():
        module = wb.parallelize(net(), "*: data")
        message = rf"{what}\(Sequential\): 4 of its 4 parameters are global.*{INSTEAD.get(what, 'wb.capture')}"
        with pytest.raises(StrategyError, match=message):
            REFUSED[name](module)

    run_ranks(program, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [torch.compile, compiled_in_place])
def test_a_compiled_module_is_not_parallelized(wrap):
    def program():
        with pytest.raises(StrategyError, match=r"wrapped by torch.compile.*Give the module itself"):
            wb.parallelize(wrap(net()), "*: data")

    run_ranks(program, 1)


def _parallelized_when_wrapped(what):
    module = REFUSED[what](net())
    with pytest.raises(
        StrategyError, match=rf"1 module is wrapped by {what}, .*Give the module itself.*{INSTEAD[what]}"
    ):
        wb.parallelize(module, "*: data")
    return True


def test_a_module_in_data_parallel_is_not_parallelized():
    assert run_ranks(lambda: _parallelized_when_wrapped("DataParallel"), 1) == [True]


@pytest.mark.procs
@pytest.mark.parametrize("what", ["DistributedDataParallel", "fully_shard"])
def test_a_wrapped_module_is_not_parallelized(what):
    assert run_processes(_parallelized_when_wrapped, 2, what) == [True] * 2


@pytest.mark.slow
def test_plain_modules_are_wrapped_as_before():
    torch.compiler.reset()
    module = net()
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(3, 4)), module(torch.ones(3, 4)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_compiled_function_runs_global_tensors_uncompiled():
    def program():
        x = wb.tensor(torch.arange(6.0), placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        function = torch.compile(lambda x: (x * 2).sum() + 1, backend="eager")
        loss = function(x)
        loss.backward()
        return loss.item(), x.grad.full_tensor().tolist()

    assert run_ranks(program, 1) == [(31.0, [2.0] * 6)]


def gated(first, second):
    """As a user writes it beside a model, before there is a world."""
    return torch.nn.functional.gelu(first) * second + 1.0


class Gated(nn.Module):
    def __init__(self, gate):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)
        self.gate = gate

    def forward(self, x):
        return self.last(self.gate(self.first(x), self.second(x)))


def listed(first, second):
    return sum(_halves([first, second]))


def _halves(tensors):
    return [torch.tanh(tensor) / 2 for tensor in tensors]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("function", [gated, listed])
def test_functions_of_a_model_that_were_compiled_before(function, is_whole):
    torch.compiler.reset()
    compiled_calls = []

    def backend(graph, _):
        compiled_calls.append(graph)
        return graph

    gate = torch.compile(function, backend=backend, fullgraph=is_whole)
    x, alone = torch.randn(8, 8), Gated(gate)
    loss = alone(x).square().mean()
    loss.backward()
    num_compiled = len(compiled_calls)
    assert num_compiled

    def program(strategy):
        model = wb.parallelize(Gated(gate), strategy)
        for _ in range(2):
            model.zero_grad()
            found = model(x).square().mean()
            found.backward()
        plain = gate(torch.ones(2, 16), torch.ones(2, 16))
        return found.detach().full_tensor(), model.first.weight.grad.full_tensor(), plain

    for strategy in ("*: data", "*: model"):
        for found, grad, plain in run_ranks(functools.partial(program, strategy), 2):
            torch.testing.assert_close(found, loss.detach())
            torch.testing.assert_close(grad, alone.first.weight.grad)
            torch.testing.assert_close(plain, function(torch.ones(2, 16), torch.ones(2, 16)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_compiled_function_that_finds_a_global_tensor_elsewhere():
    torch.compiler.reset()
    kept = {}

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def scaled(x):
        return x * kept["scale"]

    def program():
        kept["scale"] = wb.tensor(torch.arange(4.0), placement=wb.placement.all("cpu"), sbp="B")
        return scaled(torch.ones(4)).full_tensor().tolist()

    assert run_ranks(program, 1) == [[0.0, 1.0, 2.0, 3.0]]


STRATEGIES = ("*: data | 1x2x1", "0: data@0; 2: data@1 | 2x1x1", "*: model | 1x1x2")


def average_of(model, move):
    """The average over three strategies, under which weights grow."""
    averaged = AveragedModel(model)
    for strategy in STRATEGIES:
        move(model, averaged, strategy)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        averaged.update_parameters(model)
    return averaged.module


def test_an_average_moves_with_its_model():
    models = [net() for _ in range(2)]
    expected = average_of(net(), lambda *_: None)

    def move(model, averaged, strategy):
        wb.parallelize(model, strategy)
        wb.parallelize(averaged.module, strategy)

    def program(rank):
        model = wb.parallelize(models[rank], STRATEGIES[0])
        return [parameter.full_tensor().detach() for parameter in average_of(model, move).parameters()]

    for found in run_ranks(program):
        torch.testing.assert_close(found, [parameter.detach() for parameter in expected.parameters()])


def test_an_average_that_stays_where_its_model_was_is_an_error():
    models = [net() for _ in range(2)]

    def program(rank):
        average_of(wb.parallelize(models[rank], STRATEGIES[0]), lambda model, _, s: wb.parallelize(model, s))

    asked = r"AveragedModel.update_parameters\(Sequential\): 4 of 4 parameters lie on other ranks"
    with pytest.raises(LayoutError, match=asked + r".*'0.weight', B on cpu:\[0\], .* wb.parallelize\(averaged.module"):
        run_ranks(program)


class Scaled(nn.Module):
    """A layer with a parameter of its own, and one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 8)."""
        return torch.tanh(self.inner(x)) * self.scale


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_compiled_modules_of_torchscript_with_parameters_are_refused():
    def program():
        for part, strategy in zip(compiled_parts, ("*: data", "*: data | zero=3"), strict=True):
            says = f"Scaled is a {type(part).__name__} of torch.jit with 3 parameters.* as it was before torch.jit"
            model = nn.Sequential(nn.Linear(4, 8), part)
            with pytest.raises(StrategyError, match=says):
                wb.parallelize(model, strategy)
            assert type(model[0].weight.data) is torch.Tensor

    compiled_parts = [torch.jit.script(Scaled()), torch.jit.trace(Scaled(), torch.ones(2, 8))]
    run_ranks(program, 1)
