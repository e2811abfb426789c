"""Functions of torch that are replaced: only while this process is in a world, and plain programs do not notice."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types

import pytest
import torch
from torch.jit import _builtins
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

import workbench as wb
from tests.timeouts import PROGRAM_TIMEOUT_S
from tests.warm import executable
from workbench.tensors import patch_table as table
from workbench.testing import run_ranks

PLACES = [entry.place for entry in table.PATCHES if not entry.is_hook]


def own(place: str) -> object:
    owner, name = table._find_owner(place)
    return None if owner is None else vars(owner).get(name)


@pytest.mark.parametrize("entry", table.PATCHES, ids=lambda entry: entry.place)
def test_every_entry_says_why(entry: table.Patch):
    assert len(entry.why) > 30


def test_no_place_is_replaced_twice():
    assert len(PLACES) == len(set(PLACES))


def test_a_search_loads_no_module(monkeypatch: pytest.MonkeyPatch):
    """``torch`` loads its compiler at the first use of ``torch._dynamo``, which takes seconds."""
    package = types.ModuleType("lazy_package")
    package.__getattr__ = lambda name: pytest.fail(f"{name} is loaded")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_package", package)
    assert table._find_owner("lazy_package.parts.function") == (None, "function")
    assert table._find_owner("lazy_package.function") == (package, "function")


@pytest.fixture
def no_world():
    """Worlds that other tests have left behind, away for the time of a test."""
    wb.shutdown()
    assert table._num_worlds == 0, "a test has left a simulated world"


def test_simulated_ranks_install_them_and_the_last_one_removes_them(no_world: None):
    before = [own(place) for place in PLACES]
    inside = run_ranks(lambda: [own(place) for place in PLACES], 2)
    assert [own(place) for place in PLACES] == before
    loaded = [i for i, place in enumerate(PLACES) if table._find_owner(place)[0] is not None]
    assert all(found[i] is not before[i] for found in inside for i in loaded)


PROGRAM_WITH_NAMES = """
from torch import Tensor, arange, full as filled, nn, tensor
from torch.autograd import grad
from torch.distributed import reduce_scatter
from torch.nn.utils import get_total_norm
number = 3
"""


def test_names_that_a_module_has_imported_before_are_replaced(no_world: None, monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("program_of_a_user")
    exec(PROGRAM_WITH_NAMES, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = dict(vars(module))

    def program() -> tuple[list[int], object, bool, list[str]]:
        x = wb.to_global(torch.arange(3), wb.placement.all("cpu"), "S(0)")
        changed = [name for name, value in before.items() if vars(module)[name] is not value]
        return module.arange(x.max()).tolist(), type(module.tensor(x)), module.filled is torch.full, changed

    changed = ["arange", "filled", "tensor", "grad", "reduce_scatter", "get_total_norm"]
    assert run_ranks(program, 2) == [([0, 1], wb.GlobalTensor, True, changed)] * 2
    assert all(vars(module)[name] is value for name, value in before.items())


def test_a_name_that_changes_in_a_world_stays(no_world: None, monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("program_of_a_user")
    module.make = torch.full
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run_ranks(lambda: setattr(module, "make", torch.ones), 1)
    assert module.make is torch.ones


def test_simulated_ranks_keep_the_patches_of_a_world(no_world: None):
    table.install()
    inside = own("torch.full")
    run_ranks(lambda: None, 2)
    assert own("torch.full") is inside
    table.remove()
    assert own("torch.full") is not inside


def test_a_hook_of_optimizers_is_gone_too(no_world: None):
    count = len(hooks)
    added = sum(entry.is_hook for entry in table.PATCHES)
    assert run_ranks(lambda: len(hooks), 1)[0] == count + added > count
    assert len(hooks) == count


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.full([3], 0.5) + torch.arange(3) + torch.tensor(1.0) + x.new_full([3], 2.0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # since torch 2.14
def test_a_lone_process_that_makes_a_global_tensor_scripts_and_pickles_as_before(no_world: None):
    x, operators = torch.ones(3), dict(_builtins._get_builtin_table())
    functions, expected = [torch.full, torch.tensor, torch.Tensor.new_full, torch.optim.Optimizer.zero_grad], shifted(x)
    wb.ones(2, placement=wb.placement("cpu", ranks=[0]), sbp="B")  # joins a world of one
    inside = [torch.full, torch.tensor, torch.Tensor.new_full, torch.optim.Optimizer.zero_grad]
    assert all(mine is not torchs for mine, torchs in zip(inside, functions, strict=True))
    assert torch.equal(torch.jit.script(shifted)(x), expected) and torch.equal(shifted(x), expected)
    sent = pickle.dumps(inside)
    assert pickle.loads(sent) == inside
    wb.shutdown()
    assert pickle.loads(sent) == functions, "another process, or this one without a world, gets torch's own"
    assert torch.equal(torch.jit.script(shifted)(x), expected) and torch.equal(
        inside[0]((2,), 3.0), torch.full((2,), 3.0)
    )
    assert _builtins._get_builtin_table() == operators


PROGRAM = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch import full
from torch.utils.checkpoint import checkpoint

def program():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 4) + full((8, 4), 0.5) + torch.arange(4)
        hidden = checkpoint(model[0], x, use_reentrant=False)
        loss = F.cross_entropy(model[2](model[1](hidden)), torch.randint(2, (8,)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in model.parameters()] + [torch.func.grad(lambda x: x.sin().sum())(torch.ones(3))]

def own():
    from workbench.tensors import patch_table as table
    found = [table._find_owner(entry.place) for entry in table.PATCHES if not entry.is_hook]
    return [vars(owner).get(name) for owner, name in found if owner]

alone = program()
import workbench as wb
import workbench.api
before, names = program(), own()
place = wb.placement("cpu", ranks=[0])
for join in (wb.init, wb.init, lambda: wb.ones(2, placement=place, sbp="B")):
    join()
    model = wb.parallelize(nn.Linear(4, 2), "*: data")
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    between, replaced = program(), own()
    wb.shutdown()
    after = program()
    assert sum(a is not b for a, b in zip(names, replaced)) > 20
    assert all(a is b for a, b in zip(names, own()))
    assert all(torch.equal(a, b) for other in (before, between, after) for a, b in zip(alone, other))
print("the same")
"""


@pytest.mark.procs
def test_a_plain_program_before_between_and_after_has_equal_bits_and_torchs_own_functions():
    found = subprocess.run(
        [executable(), "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=PROGRAM_TIMEOUT_S
    )
    assert found.stdout.strip() == "the same", found.stderr


def test_a_world_that_is_left_twice_removes_them_once(no_world: None):
    wb.init(0, 1)
    wb.shutdown()
    wb.shutdown()
    assert table._num_worlds == 0
