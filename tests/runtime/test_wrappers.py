"""torch.compile, DistributedDataParallel and FSDP around a parallelized module: an error that says what to do."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from tests.processes import run_processes
from workbench.errors import StrategyError
from workbench.testing import run_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def compiled_in_place(module):
    module.compile()
    return module


WRAPPERS = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "fully_shard": fully_shard,
    "torch.compile": torch.compile,
    "torch.compile ": compiled_in_place,
}
INSTEAD = {"DistributedDataParallel": "data", "FullyShardedDataParallel": "zero=3", "fully_shard": "zero=3"}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_parallelized_module_is_not_wrapped_again(name):
    what = name.strip()

    def program():
        module = wb.parallelize(net(), "*: data")
        message = rf"{what}\(Sequential\): 4 of its 4 parameters are global.*{INSTEAD.get(what, 'wb.capture')}"
        with pytest.raises(StrategyError, match=message):
            WRAPPERS[name](module)

    run_ranks(program, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [torch.compile, compiled_in_place])
def test_a_compiled_module_is_not_parallelized(wrap):
    def program():
        with pytest.raises(StrategyError, match=r"wrapped by torch.compile.*Give the module itself"):
            wb.parallelize(wrap(net()), "*: data")

    run_ranks(program, 1)


def _parallelized_when_wrapped(what):
    module = WRAPPERS[what](net())
    with pytest.raises(
        StrategyError, match=rf"1 module is wrapped by {what}, .*Give the module itself.*{INSTEAD[what]}"
    ):
        wb.parallelize(module, "*: data")
    return True


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
