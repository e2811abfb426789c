"""Ways in for functions of users: equations, functions on shards, custom autograd functions."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

import workbench as wb
from tests.tensors.dispatch.custom_functions import Masked
from workbench.errors import LayoutError, SbpError
from workbench.testing import assert_equal_to_one_device, run_ranks


class Scaled(torch.autograd.Function):
    """x * x * weight * factor, with a backward of its own."""

    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * x * weight * factor

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * x * weight * grad * ctx.factor, (x * x * grad * ctx.factor).sum(0), None


@wb.register_rule("... d, d -> ... d")
def scaled(x, weight, *, factor=1.0):
    return Scaled.apply(x, weight, factor)


@wb.register_rule("b D -> b D, b")
def centered(x):
    mean = x.mean(-1)
    return x - mean[:, None], mean


@torch.library.custom_op("wbtests::scaled", mutates_args=())
def scaled_operator(x: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
    return x * x * weight * factor


@scaled_operator.register_fake
def _(x, weight, factor):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.factor = inputs[2]


def _by_hand(ctx, grad):
    x, weight = ctx.saved_tensors
    return 2 * x * weight * grad * ctx.factor, (x * x * grad * ctx.factor).sum(0), None


scaled_operator.register_autograd(_by_hand, setup_context=_keep)
assert wb.register_rule("wbtests::scaled", "b d, d -> b d") == "wbtests::scaled"


def overridable(x, weight, factor=1.0):
    if has_torch_function((x, weight)):
        return handle_torch_function(overridable, (x, weight), x, weight, factor)
    return x * x * weight * factor


wb.register_rule(overridable, "b d, d -> b d")
X, WEIGHT = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([1.0, -2.0, 0.5, 3.0])


def _one_device(function):
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    result = function(x, weight)
    (result * torch.arange(20.0).reshape(5, 4)).sum().backward()
    return result, x.grad, weight.grad


def _assert_like_one_device(function, x_sbp, weight_sbp, placement):
    expected, x_grad, weight_grad = _one_device(lambda x, w: x * x * w * 3.0)
    x = wb.tensor(X, placement=placement, sbp=x_sbp, requires_grad=True)
    weight = wb.tensor(WEIGHT, placement=placement, sbp=weight_sbp, requires_grad=True)
    result = function(x, weight)
    (result * torch.arange(20.0).reshape(5, 4)).sum().backward()
    for actual, wanted in zip((result.detach(), x.grad, weight.grad), (expected, x_grad, weight_grad), strict=True):
        assert_equal_to_one_device(actual, wanted)
    return result


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: scaled(x, weight=w, factor=3.0),
        lambda x, w: scaled_operator(x, w, 3.0),
        lambda x, w: torch.ops.wbtests.scaled(x, w, 3.0),
        lambda x, w: overridable(x, w, 3.0),
        lambda x, w: wb.local_map(Scaled.apply, ["S(0)", "B", None], "S(0)")(x, w, 3.0),
    ],
    ids=["decorator", "operator", "operator packet", "overridable", "local_map"],
)
def test_custom_functions_have_one_devices_numbers_and_gradients(function):
    def program(rank):
        line = wb.placement("cpu", ranks=[2, 0])  # rank 1 is outside, and follows on placeholders
        for x_sbp, weight_sbp in (("S(0)", "B"), ("S(1)", "S(0)"), ("P", "B"), ("B", "S(0)")):
            _assert_like_one_device(function, x_sbp, weight_sbp, line)

    run_ranks(program, 3)


def test_on_two_axes():
    def program(rank):
        grid = wb.placement("cpu", ranks=[[3, 0], [1, 2]])
        result = _assert_like_one_device(lambda x, w: scaled(x, w, factor=3.0), "S(0), S(1)", "B, S(0)", grid)
        assert [repr(entry) for entry in result.sbp] == ["S(0)", "S(1)"]
        mapped = wb.local_map(Scaled.apply, ["S(0), S(1)", "B, S(0)", None], "S(0), S(1)")
        _assert_like_one_device(lambda x, w: mapped(x, w, 3.0), "S(0), B", "B, B", grid)

    run_ranks(program, 4)


def test_several_results_and_plain_arguments_of_a_rule():
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        rows, mean = centered(wb.tensor(X, placement=p, sbp="S(0)"))
        assert_equal_to_one_device(rows, X - X.mean(-1, keepdim=True))
        assert_equal_to_one_device(mean, X.mean(-1))
        assert str(rows.sbp) == str(mean.sbp) == "(S(0),)"
        assert torch.equal(centered(X)[1], X.mean(-1))  # without global tensors it is the function itself
        assert scaled(wb.tensor(X, placement=p, sbp="S(0)"), WEIGHT).sbp == rows.sbp

    run_ranks(program, 2)


def test_a_function_of_ones_own_named_like_torchs_is_another_function():
    @wb.register_rule("b D -> b D")
    def softmax(x):
        return x * 0 + 7

    def program(rank):
        x = wb.tensor(X, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        assert softmax(x).full_tensor().unique().tolist() == [7.0]
        assert_equal_to_one_device(torch.softmax(x, 1), torch.softmax(X, 1))

    run_ranks(program, 2)


def test_a_function_that_needs_data_gives_its_shapes_by_meta():
    @wb.register_rule("b D -> b", meta=lambda x: x.new_empty(x.shape[:1]))
    def argument_of_largest(x):
        return torch.tensor([row.index(max(row)) for row in x.tolist()], dtype=x.dtype).reshape(len(x))

    def program(rank):
        x = wb.tensor(X, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        return argument_of_largest(x).full_tensor().tolist()

    assert run_ranks(program, 2) == [[3.0] * 5] * 2


def test_misfitting_equations_name_function_and_argument():
    with pytest.raises(LayoutError, match=r"there is no equation\. Write wb\.register_rule\("):
        wb.register_rule("name")
    with pytest.raises(LayoutError, match='has no "->"'):
        wb.register_rule("name", "ab")
    with pytest.raises(LayoutError, match=r"torch.ops.wbtests has no operator 'nothing'"):
        wb.register_rule("wbtests::nothing", "a -> a")
    with pytest.raises(LayoutError, match="a int is no function"):
        wb.register_rule(3, "a -> a")
    with pytest.raises(LayoutError, match=r"cannot be called. Give the function itself"):
        wb.register_rule("wbtests_name", "a -> a", prove=[X])

    @wb.register_rule("b D, b -> b D")
    def joined(*tensors):
        return sum(tensors[1:], tensors[0])

    def program(rank):
        x = wb.tensor(X, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        with pytest.raises(LayoutError, match=r"joined: argument 1 has 1 dims \(5,\), but 'bD'.*names 2.*one letter"):
            joined(x.sum(1))
        with pytest.raises(LayoutError, match=r"joined: called with 3 tensors, but its equation .* has 2 inputs"):
            joined(x, x, x)
        with pytest.raises(LayoutError, match=r"joined: argument 2 has 2 dims \(5, 4\), but 'b'"):
            joined(x, x)

    run_ranks(program, 2)


def test_local_map_with_several_results_keywords_and_uneven_shards():
    def halves(x, weight, power=1, *, shift=0.0):
        y = x**power @ weight + shift
        return {"rows": y, "total": y.sum(0)}

    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        mapped = wb.local_map(halves, in_sbp=["S(0)", "B", None], out_sbp=["S(0)", "P"])
        weight = torch.eye(4)[:, :3].clone().requires_grad_()
        for sbp in ("S(0)", "S(1)", "P", "B"):
            x = wb.tensor(X, placement=p, sbp=sbp, requires_grad=True)
            found = mapped(x, power=2, weight=weight, shift=1.0)
            assert_equal_to_one_device(found["rows"], X[:, :3] ** 2 + 1)
            assert_equal_to_one_device(found["total"], (X[:, :3] ** 2 + 1).sum(0))
            assert found["rows"].shape == (5, 3) and found["rows"].to_local().shape == (3 - rank, 3)
            found["total"].sum().backward()
            assert_equal_to_one_device(x.grad, F.pad(2 * X[:, :3], (0, 1)))
        torch.testing.assert_close(weight.grad, 4 * (X**2).sum(0)[:, None].expand(4, 3))
        assert torch.equal(mapped(X, torch.eye(4), 1)["rows"], X)

    run_ranks(program, 2)


def test_shapes_follow_the_shards_and_lists_share_an_entry():
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1, 2])
        x = wb.tensor(X, placement=p, sbp="S(0)")
        sums = wb.local_map(lambda x: x.sum(0, keepdim=True), "S(0)", "S(0)")(x)  # an entry alone
        assert sums.shape == (3, 4)  # one row per rank
        joined = wb.local_map(lambda parts: torch.cat(parts, 1), [["S(0)"]], "S(0)")([x, x])
        assert joined.shape == (5, 8)
        counted = wb.local_map(lambda x: torch.tensor(float(len(x.tolist()))), ["S(0)"], "P", out_shape=())(x)
        assert counted.full_tensor().item() == 5.0

    run_ranks(program, 3)


def test_plain_parameters_of_different_shapes_give_results_of_different_shapes():
    def program():
        x = wb.ones(4, 3, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        product = wb.local_map(lambda x, weight: x @ weight, ["S(0)", None], "S(0)")
        return [tuple(product(x, torch.nn.Parameter(torch.ones(3, width))).shape) for width in (2, 5)]

    assert run_ranks(program, 2) == [[(4, 2), (4, 5)]] * 2


def test_a_function_is_forgotten_with_what_it_captures():
    def captured():
        factor = torch.tensor(2.0)  # without dims: of others, torch makes no product with a tensor without data
        x = wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        assert wb.local_map(lambda x: x * factor, "S(0)", "S(0)")(x).full_tensor().tolist() == [2.0] * 4
        return weakref.ref(factor)

    def program():
        reference = captured()
        gc.collect()
        return reference() is None

    assert run_ranks(program, 2) == [True, True]


def test_a_gradient_that_is_whole_already():
    class WholeGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            whole = wb.to_global((x * grad).sum(0), placement=wb.placement("cpu", ranks=[0, 1]), sbp="P")
            return None, whole.full_tensor()

    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        x = wb.tensor(X, placement=p, sbp="S(0)")
        results = []
        for declared in (None, [None, "B"]):
            weight = wb.tensor(WEIGHT, placement=p, sbp="B", requires_grad=True)
            mapped = wb.local_map(WholeGradient.apply, ["S(0)", "B"], "S(0)", in_grad_sbp=declared)
            mapped(x, weight).sum().backward()
            assert str(weight.grad.sbp) == "(P,)"
            results.append(weight.grad.full_tensor())
        torch.testing.assert_close(results[1], X.sum(0))
        torch.testing.assert_close(results[0], 2 * X.sum(0))  # undeclared, each rank's counts as one term

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("build", "kind", "message"),
    [
        (lambda x: wb.local_map(lambda x, y: x, ["S(0)", "B"], "S(0)")(x), SbpError,
         r"local_map\(<lambda>\): called with 1 arguments, but in_sbp has 2 entries.*None for an argument"),
        (lambda x: wb.local_map(lambda x: (x, x), ["S(0)"], "S(0)")(x), SbpError,
         r"returns 2 results, but out_sbp has 1 entry.*out_sbp=\['S\(0\)', 'B'\]"),
        (lambda x: wb.local_map(lambda x: x, ["S(0), B"], "S(0)")(x), SbpError,
         r"argument 1 \(x\), in_sbp: sbp has 2 entries.*1 axis"),
        (lambda x: wb.local_map(lambda x: x, ["S(2)"], "S(0)")(x), SbpError,
         r"argument 1 \(x\), in_sbp: S\(2\) splits dim 2, but the tensor has 2 dims"),
        (lambda x: wb.local_map(lambda x: x, ["S(0)"], "S(3)")(x), SbpError, r"out_sbp: S\(3\) splits dim 3"),
        (lambda x: wb.local_map(lambda x, k: x, ["S(0)", "B"], "S(0)")(x, 2), SbpError,
         r"argument 2 \(k\) is a int, but in_sbp has 'B' there.*give None"),
        (lambda x: wb.local_map(lambda x: x, [None], "S(0)")(x), SbpError,
         r"argument 1 \(x\) is a global tensor, S\(0\) on cpu.*None there"),
        (lambda x: wb.local_map(lambda x, **k: x, ["S(0)"], "S(0)")(x, y=x), SbpError,
         r"keyword argument 'y' is a global tensor.*by position"),
        (lambda x: wb.local_map(lambda x: x, ["S(0)"], "B")(x), LayoutError,
         r"out_sbp: B on cpu:\[0, 1\] does not fit.*rank 1 returns shape \(2, 4\).*\(3, 4\).*tensor_split"),
        (lambda x: wb.local_map(lambda x: x[:1] if len(x) > 2 else x, ["S(0)"], "S(0)")(x), LayoutError,
         r"does not fit.*rank 0 returns shape \(1, 4\), but its part of the whole \(3, 4\) is \(2, 4\)"),
        (lambda x: wb.local_map(lambda x: (x, 3), ["S(0)"], ["S(0)", "B"])(x), LayoutError,
         r"returns a int \(3\) among 2 results.*torch\.tensor"),
        (lambda x: wb.local_map(lambda x: x.sum().item(), ["S(0)"], "P")(x), LayoutError,
         r"raises RuntimeError on tensors without data.*meta=.*out_shape="),
        (lambda x: wb.local_map(lambda x: x, ["B"], "B", in_grad_sbp=["S(0)"])(x), SbpError,
         r"in_sbp gives rank 0 a shard of shape \(5, 4\), in_grad_sbp S\(0\).*\(3, 4\)"),
        (lambda x: wb.local_map(lambda x: x, ["B"], "B", in_grad_sbp=[]), SbpError,
         r"in_grad_sbp has 0 entries, in_sbp 1"),
        (lambda x: wb.local_map(lambda x: x.amax(0), ["S(0)"], "P(max)")(x.clone().requires_grad_()), LayoutError,
         r"P\(max\) for a result that requires a gradient.*torch\.no_grad"),
        (lambda x: wb.local_map(torch.add, ["B", "B"], "B")(
            x, wb.ones(5, 4, placement=wb.placement("cpu", ranks=[1]), sbp="B")), LayoutError,
         r"add: operands lie on different placements.*S\(0\) on cpu:\[0, 1\].*B on cpu:\[1\]"),
    ],
)  # fmt: skip
def test_misuse_of_local_map(build, kind, message):
    def program(rank):
        x = wb.tensor(X, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        with pytest.raises(kind, match=message):
            build(x)

    run_ranks(program, 2)


def test_shards_that_are_not_what_was_declared():
    def program(rank):
        x = wb.tensor(X, placement=wb.placement("cpu", ranks=[0, 1]), sbp="B")
        with pytest.raises(LayoutError, match=rf"rank {rank} returns .*\(5, 4\).*out_shape says .*\({3 - rank}, 4\)"):
            wb.local_map(lambda x: x, ["B"], "S(0)", out_shape=(5, 4))(x)

    run_ranks(program, 2)


def test_what_a_function_keeps_of_its_results_stays_plain():
    def program():
        x = wb.tensor(X, placement=wb.placement.all(), sbp="S(0)").requires_grad_()
        table, kept = torch.ones(3), []

        def keeping(a):
            kept.append(a * 2)
            return kept[-1]

        assert wb.register_rule(lambda a: table, "b d -> D")(X) is table  # of plain tensors the result is the same
        results = [
            wb.local_map(lambda a: table, "S(0)", "B")(x),
            wb.local_map(keeping, "S(0)", "S(0)")(x),
            wb.register_rule(keeping, "b d -> b d")(x),
            wb.local_map(Masked.apply, "S(0)", ["S(0)", "S(0)"])(x)[0],
        ]
        gradient = torch.autograd.grad(results[-1].sum(), x)[0]
        return {type(tensor) for tensor in (table, *kept)}, gradient.full_tensor()

    for kinds, gradient in run_ranks(program, 2):
        assert kinds == {torch.Tensor} and torch.equal(gradient, (X > 0).to(X.dtype))


def test_a_rule_that_is_refused_changes_nothing():
    values = X.flatten()
    with pytest.raises(LayoutError, match="give other numbers than one device"):
        wb.register_rule(torch.histc, "b -> N", prove=[values, 4, 0.5, 0.5])  # equal bounds: those of the values

    def program():
        x = wb.tensor(values, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        return [torch.histc(x, 4, low, 0.5).full_tensor() for low in (-0.5, 0.5)]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [torch.histc(values, 4, low, 0.5) for low in (-0.5, 0.5)])
