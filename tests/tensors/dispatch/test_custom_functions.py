"""Custom autograd functions on global tensors: the numbers of one device, on shards or on gathered operands."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import workbench as wb
from tests.tensors.dispatch import custom_functions as fns
from tests.training.classifier_steps import assert_steps_equal_one_device
from workbench.errors import ExplicitBoxingError, LayoutError
from workbench.tensors.dispatch.custom_function import PlainApply
from workbench.tensors.dispatch.custom_function import _warned as function_warnings
from workbench.tensors.dispatch.fallback import FallbackWarning, _warned
from workbench.tensors.dispatch.registry import USER_FUNCTION_NAMES
from workbench.testing import run_ranks

GATHERS = pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")


def add_to(x, y):
    target = (x * y).sin()
    result = fns.AddTo.apply(x, target, 2.0)
    assert result is target
    return target


PROGRAMS = {
    "gelu": lambda x, y: fns.Gelu.apply(x * y),
    "norm": lambda x, y: fns.Norm.apply(x, y, 1e-6),
    "two": lambda x, y: fns.Two.apply(x, y)[0] + fns.Two.apply(x, y, True)[1],
    "named": lambda x, y: fns.Two.apply(x, y=y)[0],
    "in_place": add_to,
    "clamped": lambda x, y: fns.ClampedGradient.apply(x * y).sin(),
    "normed": lambda x, y: fns.NormedGradient.apply(x * y).exp(),
    "in_numpy": lambda x, y: fns.InNumpy.apply(x) * y,
    "rows": lambda x, y: fns.Norm.apply(x.view(5, 2, 3), y[:3], 0.1).flatten(1),
}
ON_ONE_DEVICE = {**PROGRAMS, "named": lambda x, y: fns.Two.apply(x, y)[0]}
"""torch before 2.13 takes no argument of a custom function by name."""
ELEMENTWISE = {"gelu", "two", "named", "in_place", "clamped"}


@pytest.mark.sampled(12)
@GATHERS
@pytest.mark.parametrize("ranks", [[0, 1], [1], [1, 2]], ids=str)
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_one_device(name, sbp, ranks):
    generator = torch.Generator().manual_seed(0)
    x, y, seed = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((5, 6), (6,), (5, 6)))
    leaves = [tensor.clone().requires_grad_() for tensor in (x, y)]
    expected = ON_ONE_DEVICE[name](*leaves)
    expected_grads = torch.autograd.grad((expected * seed).sum(), leaves)

    def program():
        placement = wb.placement("cpu", ranks=ranks)
        a = wb.to_global(x.clone(), placement=placement, sbp="B").to_global(sbp=sbp).detach().requires_grad_()
        b = wb.to_global(y.clone(), placement=placement, sbp="B").requires_grad_()
        result = PROGRAMS[name](a, b)
        grads = torch.autograd.grad((result * wb.to_global(seed, placement=placement, sbp="B")).sum(), [a, b])
        if name in ELEMENTWISE and sbp.startswith("S") and name != "in_place":
            assert str(result.sbp[0]) == sbp
        return [result.detach().full_tensor(), *(grad.full_tensor() for grad in grads)]

    for found in run_ranks(program, max(ranks) + 1):
        for ours, theirs in zip(found, [expected.detach(), *expected_grads], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_elementwise_functions_send_nothing_and_do_not_warn():
    def program():
        x = wb.ones(4, 6, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        before = x._spec.world.traffic.sent_bytes
        with wb.debug.explicit_boxing():
            y = fns.Gelu.apply(x)
        y.backward(torch.ones(4, 6))
        return x._spec.world.traffic.sent_bytes - before

    assert run_ranks(program, 2) == [0, 0]


def test_others_warn_once_and_name_the_fix_and_are_errors_under_explicit_boxing():
    _warned.discard(f"{fns.Norm.__module__}.Norm.apply")

    def program():
        x = wb.ones(4, 6, placement=wb.placement.all("cpu"), sbp="S(0)")
        w = wb.ones(6, placement=wb.placement.all("cpu"), sbp="B")
        fns.Norm.apply(x, w, 1e-6)
        with wb.debug.explicit_boxing(), pytest.raises(ExplicitBoxingError, match=r"Norm.apply.*argument 1 \(x\)"):
            fns.Norm.apply(x.clone(), w, 1e-6)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        run_ranks(program, 2)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "wb.local_map(Norm.apply" in str(caught[0].message) and "wb.register_rule" in str(caught[0].message)


def test_a_rule_for_a_custom_function_keeps_it_on_shards():
    class RowNorm(fns.Norm):
        pass

    wb.register_rule(RowNorm.apply, "... D, D -> ... D", prove=[torch.randn(5, 4), torch.randn(4), 1e-6])
    with pytest.raises(LayoutError, match="give other numbers"):
        wb.register_rule(RowNorm.apply, "... d, d -> ... d", prove=[torch.randn(5, 4), torch.randn(4), 1e-6])

    def program():
        x = wb.ones(4, 6, placement=wb.placement.all("cpu"), sbp="S(0)")
        with wb.debug.explicit_boxing():
            return str(RowNorm.apply(x, wb.ones(6, placement=x.placement, sbp="B"), 1e-6).sbp[0])

    assert run_ranks(program, 2) == ["S(0)"] * 2


def test_gradients_of_gradients():
    x = torch.linspace(-1, 2, 6, dtype=torch.float64)

    def second(leaf):
        first = torch.autograd.grad(fns.Cube.apply(leaf).sum(), leaf, create_graph=True)[0]
        return torch.autograd.grad((first * first).sum(), leaf)[0]

    expected = second(x.clone().requires_grad_())

    def program():
        placed = wb.to_global(x.clone(), placement=wb.placement.all("cpu"), sbp="B")
        return second(placed.to_global(sbp="S(0)").requires_grad_()).full_tensor()

    assert all(torch.equal(found, expected) for found in run_ranks(program, 2))


def test_a_backward_that_is_not_differentiable_says_so():
    def program():
        x = wb.ones(4, 6, placement=wb.placement.all("cpu"), sbp="B", requires_grad=True)
        result = fns.Norm.apply(x * x, wb.ones(6, placement=x.placement, sbp="B"), 1e-6).exp().sum()
        (grad,) = torch.autograd.grad(result, x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    run_ranks(program, 1)


@GATHERS
def test_random_functions_draw_the_same_on_all_ranks():
    """Ranks outside the placement do not run it; all go on with the same generator."""

    def program():
        x = wb.ones(20, 6, placement=wb.placement("cpu", ranks=[1, 2]), sbp="S(0)")
        first, second = fns.Noisy.apply(x), fns.Noisy.apply(x)
        everywhere = wb.rand(3, placement=wb.placement.all("cpu"), sbp="B")
        return [first.to_local(), second.to_local(), everywhere.to_local()]

    nothing, one, two = run_ranks(program, 3)
    assert nothing[0].numel() == 0 and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], one[1]) and torch.equal(nothing[2], one[2])


def test_writes_that_are_not_marked_are_refused():
    def program():
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")
        with pytest.raises(LayoutError, match=r"Unmarked.apply: writes into operand 1 .*ctx.mark_dirty"):
            fns.Unmarked.apply(x)

    run_ranks(program, 2)


def test_a_leaf_is_not_written():
    def program():
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            fns.AddTo.apply(x, x, 2.0)

    run_ranks(program, 2)


@pytest.mark.parametrize("sbp", ["B", "P"])  # the ranks would add their terms
def test_a_captured_global_tensor_is_refused(sbp: str):
    def program():
        layer = nn.Module()
        layer.weight = wb.ones(4, placement=wb.placement.all("cpu"), sbp=sbp)
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")
        with pytest.raises(LayoutError, match=r"Capturing.apply.*not among its arguments.*as an argument"):
            fns.Capturing.apply(x, layer)

    run_ranks(program, 2)


@GATHERS
@pytest.mark.parametrize("sbp", ["S(0)", "B"])
def test_an_exchange_is_refused_on_all_ranks(sbp: str):
    """It would join copies, and wait on ranks without a part."""
    message = r"^tests.*{0}.apply: .*calls torch.distributed.{1}\. .*Leave the function.*wb.local_map\({0}.apply, in"

    def program():
        x = wb.ones(5, placement=wb.placement("cpu", ranks=[1, 2]), sbp=sbp, requires_grad=True)
        with pytest.raises(LayoutError, match=message.format("GatherLayer", "all_gather")):
            fns.GatherLayer.apply(x)
        with pytest.raises(LayoutError, match=message.format("SumOfGradients", "all_reduce")):
            fns.SumOfGradients.apply(x, 0.0)
        y = fns.SumOfGradients.apply(x.to_global(placement=wb.placement.all("cpu")), 1.0).sum()
        with pytest.raises(LayoutError, match=message.format("SumOfGradients", "all_reduce")):
            torch.autograd.grad(y, x)

    run_ranks(program, 3)


class KeepsRange(nn.Module):
    def __init__(self, reads_value):
        super().__init__()
        self.largest, self.range, self.counts, self.reads_value = torch.ones(()), 1.0, {"calls": 0}, reads_value

    def forward(self, x):
        return fns.Ranged.apply(x, self, self.counts, self.reads_value)


@GATHERS
@pytest.mark.filterwarnings("ignore:Ranged.apply. it changes what the program keeps:UserWarning")
@pytest.mark.parametrize("reads_value", [False, True])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_trial_runs_change_nothing_that_a_function_keeps(ranks, reads_value):
    x = torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3)

    def steps(x):
        layer = KeepsRange(reads_value).double()
        results = [torch.autograd.grad(layer(x).sum(), x)[0] for _ in range(2)]
        return results, [layer.range, layer.counts["calls"], layer.largest.item()]

    def program():
        placement = wb.placement("cpu", ranks=ranks)
        grads, kept = steps(wb.to_global(x, placement=placement, sbp="B").to_global(sbp="S(0)").requires_grad_())
        return [grad.full_tensor() for grad in grads], kept

    grads, kept = steps(x.clone().requires_grad_())
    for rank, (found, found_kept) in enumerate(run_ranks(program, 2)):
        torch.testing.assert_close(found, grads)
        assert found_kept == pytest.approx(kept if rank in ranks else [1.0, 0, 1.0])


@GATHERS
def test_a_function_that_changes_the_program_warns_of_ranks_that_do_not_run_it():
    def program():
        x = wb.ones(4, placement=wb.placement("cpu", ranks=[1]), sbp="B")
        KeepsRange(False)(x)

    function_warnings.clear()
    with pytest.warns(UserWarning, match=r"Ranged.apply: it changes .*Ranks \[0\] hold no part.* on ranks \[1\]"):
        run_ranks(program, 2)


@GATHERS
def test_a_function_that_changes_the_program_runs_on_a_grid_of_all_ranks():
    def program():
        x = wb.ones(4, placement=wb.placement("cpu", ranks=[[0, 1]]), sbp="B, S(0)")
        return KeepsRange(False)(x).tolist()

    function_warnings.clear()
    assert run_ranks(program, 2) == [[1.0] * 4] * 2


def test_a_module_among_the_arguments_is_refused_with_a_way_out():
    def program():
        module = wb.parallelize(nn.Linear(4, 4), "*: data")
        x = wb.ones(2, 4, placement=wb.placement.all("cpu"), sbp="S(0)")
        with pytest.raises(LayoutError, match=r"module computes with its own parameters.*odeint"):
            fns.WithModule.apply(x, module, *module.parameters())

    run_ranks(program, 1)


class Block(nn.Module):
    """What bloom, recurrent models and mixtures of experts call in the middle of a block."""

    def __init__(self):
        super().__init__()
        self.weight, self.fc1, self.fc2 = nn.Parameter(torch.rand(8)), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        inner = fns.Gelu.apply(self.fc1(fns.Norm.apply(x, self.weight, 1e-6)))
        return x + fns.ClampedGradient.apply(self.fc2(inner))


BLOCKS = "0: data; 1: data@1"


@pytest.mark.sampled(4)
@GATHERS
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("*: data", 3), ("*: model", 2), ("*: model | 1x2x2", 4), ("*: data | zero=3", 2), ("*: data | recompute", 2),
        ("pipeline", 2), (f"{BLOCKS} | 2x1x1 mb=2 1f1b", 2), (f"{BLOCKS} | 2x1x1 mb=2 zero_bubble", 2),
    ],
)  # fmt: skip
def test_training_equals_one_device(strategy, num_ranks):
    torch.manual_seed(0)
    one = nn.Sequential(Block(), Block()).double()
    inputs, targets = torch.randn(6, 8, dtype=torch.float64), torch.arange(6)
    assert_steps_equal_one_device(one, inputs, targets, strategy, num_ranks, num_steps=3)


KEEPING = {
    "saved": fns.Masked.apply,
    "an attribute": lambda x: fns.Masked.apply(x, "attribute"),
    "indices": fns.Largest.apply,
    "a constant": fns.Constant.apply,
}


@GATHERS
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("name", KEEPING)
def test_a_function_may_keep_a_result_that_has_no_gradient(name, sbp):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = torch.autograd.grad(KEEPING[name](x)[0].sum(), x)[0]

    def program():
        a = wb.to_global(x.detach(), placement=wb.placement.all(), sbp="B").to_global(sbp=sbp).requires_grad_()
        result, _ = KEEPING[name](a)
        return torch.autograd.grad(result.sum(), a)[0].full_tensor(), type(fns.Constant.table)

    for found, kind in run_ranks(program, 2):
        assert torch.equal(found, expected) and kind is torch.Tensor


@dataclass
class Factor:
    """Equal to others by its value, and so without a hash."""

    value: float


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor.value
        return x * factor.value

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def test_calls_with_arguments_without_a_hash_share_a_function():
    """So do those on tensors that have other attributes of the user's at each call."""

    def program():
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")
        found = []
        for x.origin in ("first", "second", "third"):
            found.append(Scaled.apply(x, Factor(2.0)).sum().item())
        return found

    assert run_ranks(program, 1) == [[8.0] * 3]
    assert sum(isinstance(function, PlainApply) and function.cls is Scaled for function in USER_FUNCTION_NAMES) == 1


class Switch:
    """Says how ``Switched`` computes."""

    observes = False


class Switched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, switch):
        return x / x.abs().max() if switch.observes else x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


@GATHERS
@pytest.mark.parametrize("of_class", [False, True])
def test_an_argument_or_class_that_says_how_to_compute_may_change_its_mind(of_class):
    def program():
        class Own(Switched):
            observes = False

        function = Own if of_class else Switched
        x = wb.arange(1, 5, placement=wb.placement.all("cpu"), sbp="S(0)").float()
        switch = Own if of_class else Switch()
        results = []
        for switch.observes in (False, True, False):
            results.append(function.apply(x, switch).tolist())
        return results

    double, scaled = [2.0, 4.0, 6.0, 8.0], [0.25, 0.5, 0.75, 1.0]
    assert run_ranks(program, 2) == [[double, scaled, double]] * 2
