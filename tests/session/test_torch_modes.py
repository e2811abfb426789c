"""What holds before a cell holds again after one that was interrupted between the halves of a `with`."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import CellError
from workbench.session.on_engine.torch_modes import Modes, restored_after_interrupt, was_interrupted


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Below(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


ENTERED = {
    "grad": lambda: torch.no_grad(),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast twice": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "function mode": Passing,
    "dispatch mode": Below,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


@pytest.mark.parametrize("name", ENTERED)
def test_what_was_entered_and_never_left_is_undone(name):
    before = Modes.now()
    ENTERED[name]().__enter__()
    assert Modes.now() != before
    before.restore()
    assert Modes.now() == before


def test_what_a_cell_had_entered_before_stays():
    with torch.no_grad(), Passing():
        outer = Modes.now()
        Passing().__enter__()
        torch._C._set_grad_enabled(True)
        outer.restore()
        assert Modes.now() == outer
    assert torch.is_grad_enabled()


def test_only_an_interrupt_undoes():
    before = Modes.now()
    for error, restored in ((KeyboardInterrupt, True), (ValueError, False)):
        with pytest.raises(error):
            _fail_without_gradients(error)
        assert torch.is_grad_enabled() is restored
    before.restore()


@restored_after_interrupt()
def _fail_without_gradients(error):
    torch._C._set_grad_enabled(False)
    raise error


def test_an_interrupt_is_found_behind_the_error_it_led_to():
    error = RuntimeError("the wait was ended")
    error.__context__ = KeyboardInterrupt()
    assert was_interrupted(error)
    error.__cause__ = error  # `raise error from error`: a circle, and what came before
    assert was_interrupted(error)
    assert not was_interrupted(RuntimeError()) and not was_interrupted(None)


@pytest.mark.engines
def test_the_next_cell_computes_gradients_again(session):
    for code in (
        "torch._C._set_grad_enabled(False)\nraise KeyboardInterrupt",
        "with torch.no_grad(): raise KeyboardInterrupt",
    ):
        with pytest.raises(CellError):
            session.run(code)
        assert session.run("torch.is_grad_enabled()").values == [True, True]
    with pytest.raises(CellError):
        session.submit(_interrupted).result()
    assert session.run("torch.is_grad_enabled()").values == [True, True]


@pytest.mark.engines
def test_a_step_that_was_interrupted_gives_the_optimizer_its_parameters_back(session):
    session.run("torch.optim.SGD([torch.zeros(1)])", ranks=[0])  # as where rank 1 was replaced: its process is new
    session.run("""
class Interrupted(torch.optim.SGD):
    is_due, elementwise = False, True
    def step(self, closure=None):
        if self.is_due and wb.rank() == 1:
            raise KeyboardInterrupt
        super().step()
model = wb.parallelize(torch.nn.Linear(4, 3), "*: data")
optimizer = Interrupted(model.parameters(), lr=0.1)
inputs = wb.ones(4, 4, placement=wb.placement.all("cpu"), sbp=wb.sbp.split(0))
def backward():
    optimizer.zero_grad()
    model(inputs).sum().backward()
    return model.weight.grad.full_tensor().sum().item()
first = backward()
optimizer.step()
optimizer.is_due = True
""")
    with pytest.raises(CellError):
        session.run("optimizer.step()\nwb.barrier()")
    own = "[a is b for a, b in zip(optimizer.param_groups[0]['params'], model.parameters(), strict=True)]"
    assert session.run(own).values == [[True, True]] * 2
    assert session.run("backward() == first").values == [True, True]  # zero_grad has reached the parameters


def _interrupted():
    torch._C._set_grad_enabled(False)
    raise KeyboardInterrupt
