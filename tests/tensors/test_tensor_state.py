"""What a global tensor keeps beside its shard: declared in one place, in step on all ranks, not in its copies."""

import copy
import gc
import pickle
import re
from pathlib import Path

import pytest
import torch

import workbench as wb
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.specs import spec_of
from workbench.tensors.tensor_state import DECLARED
from workbench.tensors.world import current
from workbench.testing import run_ranks

VIEWS = {
    "slice": lambda x: x[1:3],
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(-1),
    "row": lambda x: x.unbind(0)[1],
    "chain": lambda x: x.view(-1).detach()[2:],
    "data": lambda x: x.data,
    "data of a view": lambda x: x[1:3].data,
    "reshape": lambda x: x.reshape(2, 8),
    "shallow copy": copy.copy,
    "shallow copy of a view": lambda x: copy.copy(x[1:3]),
}
WRITES = {
    "add_": lambda x: x.add_(1),
    "an item": lambda x: x.__setitem__(1, 5.0),
    "out=": lambda x: torch.add(x, 1, out=x),
    "another view": lambda x: x[1:3].mul_(2),
    "a detached tensor": lambda x: x.detach().add_(1),
    "data": lambda x: x.data.add_(1),
    "data of a detached tensor": lambda x: x.detach().data.add_(1),
    "data of another view": lambda x: x[1:3].data.mul_(2),
}


def _sums(make, plus_one):
    found = {}
    for view_name, view in VIEWS.items():
        for write_name, write in WRITES.items():
            x = make()
            viewed = view(x)
            before = plus_one(viewed)
            write(x)
            found[view_name, write_name] = before, plus_one(viewed), plus_one(x)
    return found


@pytest.mark.parametrize("sbp", [pytest.param("B", marks=pytest.mark.slow), "S(0)"])
def test_ranks_outside_a_placement_see_that_a_view_was_written_through_its_base(sbp):
    """Rank 2 holds nothing, and has to take part in as many boxings as the ranks that do."""

    def boxed_sums():
        here, turned = wb.placement("cpu", ranks=[0, 1]), wb.placement("cpu", ranks=[1, 0])
        x = wb.to_global(torch.arange(16.0).view(4, 4), placement=here, sbp="B").to_global(sbp=sbp)
        return _sums(x.clone, lambda t: (wb.ones(*t.shape, placement=turned, sbp="B") + t).sum().item())

    expected = _sums(torch.arange(16.0).view(4, 4).clone, lambda t: (t + 1).sum().item())
    assert run_ranks(boxed_sums, 3) == [expected] * 3


def test_ranks_outside_a_placement_know_that_a_reshape_of_moved_dims_is_a_copy():
    def sums():
        here, turned = wb.placement("cpu", ranks=[0, 1]), wb.placement("cpu", ranks=[1, 0])
        x = wb.ones(4, 4, placement=here, sbp="B")
        y, other = x.t().reshape(2, 8), wb.ones(2, 8, placement=turned, sbp="B")
        before = (other + y).sum().item()
        x.add_(1)
        return before, (other + y).sum().item()

    assert run_ranks(sums, 3) == [(32.0, 32.0)] * 3


@pytest.mark.filterwarnings("ignore:torch.save or pickle")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("sbp", ["B", "S(0)"])
@pytest.mark.parametrize("has_history", [True, False])
def test_a_view_is_copied_without_its_base(duplicate, sbp, has_history):
    def copied():
        x = wb.ones(4, 2, placement=wb.placement("cpu", ranks=[0, 1]), sbp=sbp, requires_grad=has_history) * 2
        with torch.no_grad():
            view = x[1:3]
            view.label = "mine"
            if not has_history:  # torch forbids it
                x.add_(1)
            made = duplicate(view)
            view.add_(1)
        return made.sum().item(), x.sum().item(), made.label, set(vars(made)) - {"label", "_spec"}

    assert run_ranks(copied, 3) == [(8.0, 20.0, "mine", set()) if has_history else (12.0, 28.0, "mine", set())] * 3


@pytest.mark.parametrize("replace", [lambda x, y: setattr(x, "data", y), lambda x, y: x.set_(y)])
def test_a_view_that_gets_other_memory_is_a_view_no_more(replace):
    def replaced():
        x = wb.ones(4, 2, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        view = x[1:3]
        replace(view, x[0:2] * 5)
        x.add_(1)
        return view.sum().item(), x.sum().item()

    assert run_ranks(replaced, 3) == [(20.0, 16.0)] * 3


def test_no_module_adds_an_attribute_to_a_tensor():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))

    def train():
        model = wb.parallelize(copy.deepcopy(plain), "0: data; 2: data | zero=2")
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            y = model(torch.ones(4, 4))
            y[1:3].detach().mul_(2)
            (y * y).sum().backward()
            optimizer.step()
        found = [t for t in gc.get_objects() if GlobalTensor in type(t).__mro__]
        return model, y, set().union(*(vars(t) for t in found if t._spec.world is current()))

    _, _, names = run_ranks(train, 2)[0]
    assert {"_spec", "_reducer", "_optimizer_shard", "_optimizer_part"} <= names <= DECLARED


def test_no_code_reaches_into_the_attributes_of_a_tensor():
    """``__dict__["_name"]`` is for objects of others: of a tensor, type checkers know every attribute."""
    of_others = {"_workbench_swap", "_workbench_readers", "_opt_called"}  # optimizers
    for file in Path(wb.__file__).parent.rglob("*.py"):
        text = file.read_text("utf-8")
        by_text = set(re.findall(r'__dict__(?:\[|\.\w+\()"(_[a-z_]+)"', text)) - of_others
        assert not by_text and not set(re.findall(r'"(_[a-z_]+)"', text)) & DECLARED, f"{file.name}: {by_text}"


def test_shapes_that_never_repeat_are_forgotten(monkeypatch):
    """What was learnt of their layouts stayed, a few kilobytes for each boxing: batches of other lengths in each step.
    Those of living tensors stay the same objects, which gradients go by.
    """
    monkeypatch.setattr("workbench.tensors.specs._MAX_UNUSED", 60)

    def program():
        here = wb.placement(ranks=[0, 1])
        kept, sizes = wb.ones(4, 3, placement=here, sbp="B").requires_grad_(), []
        for size in range(1, 101):
            rows = wb.ones(size, 3, placement=here, sbp="S(0)").to_global(sbp="S(1)")
            ((rows * 2).to_global(sbp="B").sum() * kept.sum()).backward()
            sizes.append(len(current().specs))
        again = wb.ones(4, 3, placement=here, sbp="B")
        assert again._spec is kept._spec and kept.grad._spec is kept._spec.dual
        return max(sizes), kept.grad.full_tensor()

    for most, gradient in run_ranks(program):
        assert most < 60 and torch.equal(gradient, torch.full((4, 3), 6.0 * sum(range(1, 101))))


@pytest.mark.parametrize("limit", ["specs._MAX_UNUSED", "dispatch.dispatcher._MAX_PLANS"])
def test_ranks_that_forget_at_other_times_go_on_alike(monkeypatch, limit):
    """A plan serves all dtypes, and the first one has decided what moves: one rank alone decided anew."""
    monkeypatch.setattr(f"workbench.tensors.{limit}", 60)

    def program():
        here = wb.placement(ranks=[0, 1])
        x, y = (wb.ones(64, 64, placement=here, sbp=sbp) for sbp in ("S(0)", "S(1)"))
        layout = x._spec.layout.broadcast()

        def fill(numbers):
            for number in numbers if current().rank == 0 else ():
                x.pow(number)
                spec_of(current(), layout, (number,))

        fill(range(40))
        layouts = [(x + y).sbp]
        fill(range(40, 70))
        return [*layouts, (x + y.bfloat16()).sbp]

    first, second = run_ranks(program)
    assert first == second and first[0] == first[1]


def test_a_mask_of_two_layers_is_boxed_once_whatever_a_rank_forgets():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, x, mask):
            for layer in self.layers:
                heads = layer(x).view(4, 5, 2, 4).transpose(1, 2)
                x = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, mask)
                x = x.transpose(1, 2).reshape(4, 5, 8)
                if current().rank == 0:
                    current().forget_decisions()
            return x

    torch.manual_seed(0)
    plain, x, mask = Net(), torch.randn(4, 5, 8), torch.ones(4, 2, 5, 5).tril().bool()

    def program():
        wb.parallelize(copy.deepcopy(plain), "data")(x, mask).sum().backward()
        return current().context.position

    first, second = run_ranks(program)
    assert first == second
