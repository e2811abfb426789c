"""Functions under every combination of layouts of their operands: values and gradients of one device.

Operands lie as every S, B and P on two and three simulated ranks (uneven sizes), on a 2 x 2 grid, and as placeholders.
"""

import importlib
import itertools
import math
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.oracle import shard
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.dispatch import registry
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.tensors.global_tensor import GlobalTensor, spec_of, wrap
from workbench.tensors.world import current
from workbench.testing import run_ranks

QUICK, MANY = 2, 12
"""How many combinations of layouts a function is run under."""
TABLES = sorted(path.stem for path in Path(__file__).parent.glob("cases*.py"))
CASES = [case for table in TABLES for case in importlib.import_module(f"tests.tensors.dispatch.{table}").CASES]


def entries_for(tensor):
    splits = [f"S({dim})" for dim in range(tensor.dim())]
    return [*splits, "B", "P"] if tensor.is_floating_point() else [*splits, "B"]


def combinations(operands, num_axes, seed, count):
    """Some of all combinations of layouts, without making them all: seven operands have millions."""
    per_operand = [list(itertools.product(entries_for(t), repeat=num_axes)) for t in operands]
    total = math.prod(map(len, per_operand))
    chosen = random.Random(seed).sample(range(total), min(count, total))
    return [_combination(per_operand, number) for number in chosen]


def _combination(per_operand, number):
    found = []
    for choices in per_operand:
        number, index = divmod(number, len(choices))
        found.append(choices[index])
    return tuple(found)


def spread(full, layout, rank):
    """This rank's part of a plain tensor, as a leaf; ranks outside get a placeholder through boxing."""
    world = current()
    if rank in layout.placement:
        local = torch.from_numpy(np.array(shard(full.numpy(), layout)[rank]))
        tensor = wrap(local, spec_of(world, layout, tuple(full.shape)))
    else:
        tensor = wb.empty(
            *full.shape, placement=layout.placement, sbp=["B"] * layout.placement.num_axes, dtype=full.dtype
        )
        tensor = wrap(tensor.as_subclass(torch.Tensor), spec_of(world, layout, tuple(full.shape)))
    return tensor.requires_grad_() if full.is_floating_point() else tensor


def run_case(case, placement, sbps, num_ranks):
    """(value, gradients) of one device and of every rank of the placement."""
    operands = case.operands()
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in operands]
    expected = case.function(*leaves)
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    differentiable = expected.requires_grad
    if differentiable:
        try:
            (expected * weight).sum().backward()
        except RuntimeError as error:  # torch 2.11 has no derivative of aminmax
            if "derivative for" not in str(error):
                raise
            differentiable = False

    def program(rank):
        tensors = [spread(t, Layout.of(placement, sbp), rank) for t, sbp in zip(operands, sbps, strict=True)]
        result = case.function(*tensors)
        assert isinstance(result, GlobalTensor) and result.shape == expected.shape
        if differentiable:
            (result * weight).sum().backward()
        grads = [t.grad for t in tensors] if differentiable else []
        whole = [None if t is None else t.to_global(sbp=["B"] * placement.num_axes) for t in (result.detach(), *grads)]
        return [None if t is None else t.to_local() for t in whole] if rank in placement else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = run_ranks(program, num_ranks)
    return expected, [leaf.grad if leaf.requires_grad else None for leaf in leaves] if differentiable else [], found


def assert_case(case, placement, num_ranks, seed, count=QUICK):
    for sbps in combinations(case.operands(), placement.num_axes, seed, count):
        expected, grads, found = run_case(case, placement, sbps, num_ranks)
        for rank in placement:
            value, *their_grads = found[rank]
            where = f"{case.name} of {sbps} on {placement}, rank {rank}"
            torch.testing.assert_close(
                value, expected.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, w=where: f"{w}: {m}"
            )
            for grad, theirs in zip(grads, their_grads, strict=True):
                if grad is None:
                    assert theirs is None or not theirs.any(), where
                else:
                    assert theirs is not None, f"{where}: a gradient is missing"
                    torch.testing.assert_close(
                        theirs, grad, rtol=1e-4, atol=1e-5, msg=lambda m, w=where: f"gradient, {w}: {m}"
                    )


# An axis of two ranks is that of test_with_ranks_outside, too.
@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_on_one_axis(case, num_ranks):
    assert_case(case, Placement.of("cpu", list(range(num_ranks))), num_ranks, seed=num_ranks)


@pytest.mark.sampled(12, start=4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_two_axes_with_a_permuted_grid(case):
    """A rule knows one axis, and two are its product: what is wrong with one axis shows above."""
    assert_case(case, Placement.of("cpu", [[3, 0], [1, 2]]), 4, seed=4, count=1)


@pytest.mark.sampled(12, start=8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_with_ranks_outside(case):
    assert_case(case, Placement.of("cpu", [2, 0]), 3, seed=5)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if "expert" in case.name or "std" in case.name else pytest.mark.slow)
        for case in CASES
    ],
    ids=lambda case: case.name,
)
def test_with_more_ranks_than_rows(case):
    """Shards of some ranks are empty."""
    assert_case(case, Placement.of("cpu", [3, 0, 6, 1, 5, 2, 4]), 7, seed=8)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_under_many_layouts(case):
    assert_case(case, Placement.of("cpu", [[3, 0], [1, 2]]), 4, seed=4)
    assert_case(case, Placement.of("cpu", [1, 0, 2]), 3, seed=6, count=MANY)
    assert_case(case, Placement.of("cpu", [[0, 2], [1, 3]]), 4, seed=7, count=MANY)


def test_the_sweep_notices_a_wrong_function():
    class Wrong:
        name = "wrong"
        operands = staticmethod(CASES[0].operands)

        @staticmethod
        def function(x):
            return x + (wb.rank() == 1 if isinstance(x, GlobalTensor) else 0) * 0.01

    with pytest.raises(AssertionError):
        assert_case(Wrong, Placement.of("cpu", [0, 1]), 2, seed=0)


REFUSED = {
    "a norm of a vector": lambda x: torch.linalg.matrix_norm(x[0], 1),
    "a norm by rows of three dims": lambda x: torch.linalg.norm(x[None], 1),
    "blocks of three dims": lambda x: torch.block_diag(x[None]),
    "a mean of integers": lambda x: x.long().nanmean(),
    "a diagonal of three dims": lambda x: x[None].diag(),
    "softmax of integers": lambda x: x.long().softmax(0),
    "log_softmax as integers": lambda x: x.log_softmax(0, dtype=torch.uint8),
    "a real norm of complex numbers": lambda x: torch.linalg.vector_norm(x.cfloat(), 2, 0, dtype=torch.float32),
    "a covariance of bools": lambda x: torch.cov(x > 0),
}
_NORMS = {
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w, training=True),
    "the bias of batch_norm": lambda x, w: F.batch_norm(x, None, None, None, w, training=True),
    "running batch_norm": lambda x, w: F.batch_norm(x, w, w, training=True),
    "layer_norm": lambda x, w: F.layer_norm(x.t(), (4,), w),
    "the bias of layer_norm": lambda x, w: F.layer_norm(x.t(), (4,), None, w),
    "rms_norm": lambda x, w: F.rms_norm(x.t(), (4,), w),
    "group_norm": lambda x, w: F.group_norm(x, 1, w),
    "instance_norm": lambda x, w: F.instance_norm(x.t()[None], None, None, w),
    "running instance_norm": lambda x, w: F.instance_norm(x.t()[None], w, w),
}
REFUSED |= {
    f"{name} with {count} numbers": lambda x, norm=norm, count=count: norm(x, x.new_ones(count))
    for name, norm in _NORMS.items()
    for count in (1, 7)
}
REFUSED["batch_norm with one statistic"] = lambda x: F.batch_norm(x, None, x.new_ones(3), training=True)
_NAMES = """
softmax log_softmax logsumexp cumsum cumprod cummax cummin logcumsumexp max min amax argmax std var_mean prod all any
"""
NO_DIM = {
    **{name: lambda x, dim, name=name: getattr(torch, name)(x, dim) for name in _NAMES.split()},
    "softmin": lambda x, dim: F.softmin(x, dim),
    "_safe_softmax": lambda x, dim: torch._safe_softmax(x, dim),
    "aminmax": lambda x, dim: torch.aminmax(x, dim=dim),
    "norm": lambda x, dim: x.norm(2, dim),
    "norm_except_dim": lambda x, dim: torch.norm_except_dim(x, 2, dim),
    "weight_norm": lambda x, dim: torch._weight_norm(x, x[:1], dim),
    "normalize": lambda x, dim: F.normalize(x, dim=dim),
    "cosine_similarity": lambda x, dim: F.cosine_similarity(x, x, dim),
    "repeat_interleave": lambda x, dim: x.repeat_interleave(2, dim),
    "take_along_dim": lambda x, dim: torch.take_along_dim(x, x.long(), dim),
    "rot90": lambda x, dim: x.rot90(0, (0, dim)),
    "of a number": lambda x, dim: x.sum().softmax(dim - 1 if dim > 0 else dim + 1),
}
"""Functions along a dim, of which a matrix has none of the number 2 and none of the number -3."""


def assert_refused(call):
    x = torch.ones(4, 3)
    with pytest.raises((RuntimeError, IndexError, ValueError)) as refused:
        call(x)

    def program():
        with pytest.raises(type(refused.value)):
            call(wb.tensor(x, placement=wb.placement.all(), sbp="S(0)"))

    run_ranks(program)


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name):
    assert_refused(REFUSED[name])


@pytest.mark.parametrize("name", NO_DIM)
def test_a_dim_that_there_is_not_is_refused(name):
    for dim in (2, -3):
        assert_refused(lambda x, dim=dim: NO_DIM[name](x, dim))


class Reflecting:
    def __rpow__(self, other):
        return "its own"

    __rfloordiv__ = __rpow__


def _refused(call):
    try:
        return call()
    except TypeError as error:
        return str(error)


UNKNOWN = {
    "None": lambda x: (x == None, x != None, [x].count(None), [x, 1] == [None, 1]),  # noqa: E711
    "a word": lambda x: (x == "a", x != "a"),
    "a type": lambda x: x == int,  # noqa: E721
    "an object": lambda x: (x ** Reflecting(), x // Reflecting(), x.__pow__(Reflecting())),
    "an object, in place": lambda x: x.__ipow__(Reflecting()),
    "nobody knows": lambda x: [
        _refused(call).replace("GlobalTensor", "Tensor")
        for call in (lambda: x ** "a", lambda: "a" ** x, lambda: None // x, lambda: 1 - (None @ x), lambda: None - x)
    ],
}
"""Operators on what torch does not know: Python asks the other operand then."""


@pytest.mark.parametrize("name", UNKNOWN)
def test_operators_let_the_other_operand_answer_where_torch_does(name):
    x = torch.arange(12.0).view(4, 3)
    expected = UNKNOWN[name](x.clone())

    def program():
        return [UNKNOWN[name](wb.tensor(x, placement=wb.placement.all(), sbp=sbp)) for sbp in ("S(0)", "B")]

    assert run_ranks(program, 2) == [[expected] * 2] * 2


REDUCED = {
    "none": {"reduce": False},
    "sum": {"size_average": False},
    "a mean in place of a sum": {"size_average": True, "reduction": "sum"},
    "a sum in place of a mean": {"size_average": False, "reduction": "mean"},
    "rows": {"reduction": "none"},
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
@pytest.mark.parametrize("name", REDUCED)
def test_losses_are_reduced_by_old_words_and_of_bytes_as_on_one_device(name, dtype):
    scores, labels = torch.arange(20.0).view(5, 4).sin().log_softmax(1), torch.tensor([3, 1, 0, 2, 2], dtype=dtype)

    def program():
        def put(tensor, sbp):
            return wb.to_global(tensor, placement=wb.placement.all(), sbp="B").to_global(sbp=sbp)

        for function in (F.cross_entropy, F.nll_loss):
            expected = function(scores, labels, **REDUCED[name])
            for sbp in ("B", "P", "S(0)", "S(1)"):
                for given in ((put(scores, sbp), labels), (put(scores, sbp), put(labels, "S(0)"))):
                    torch.testing.assert_close(function(*given, **REDUCED[name]).full_tensor(), expected)
            torch.testing.assert_close(function(scores, put(labels, "S(0)"), **REDUCED[name]).full_tensor(), expected)

    run_ranks(program, 2)


@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
def test_norms_of_lists_take_an_order_and_a_dtype(sbp):
    values = [torch.arange(6.0).view(3, 2) + 1, torch.ones(2)]
    calls = [
        lambda tensors: torch._foreach_norm(tensors, 2, torch.float64),
        lambda tensors: torch._foreach_norm(tensors, ord=1, dtype=torch.float64),
    ]

    def program():
        p = wb.placement.all()
        tensors = [wb.tensor(value, placement=p, sbp="B").to_global(sbp=sbp) for value in values]
        return [[norm.full_tensor() for norm in call(tensors)] for call in calls]

    for found in run_ranks(program, 2):
        for call, norms in zip(calls, found, strict=True):
            torch.testing.assert_close(norms, list(call(values)))


@pytest.mark.parametrize("num_rows", [20, 75])
def test_all_rows_choose_the_algorithm_of_distances(num_rows):
    """The difference of equal rows is zero. For more than 25 rows torch multiplies, which rounds."""
    x = 100 + torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(0))
    is_exact = num_rows == 20
    assert torch.cdist(x, x[:25]).diagonal().eq(0).all() == is_exact

    def program():
        rows, few = (wb.tensor(part, placement=wb.placement.all(), sbp="B") for part in (x, x[:25]))
        return torch.cdist(rows.to_global(sbp="S(0)"), few).full_tensor().diagonal()

    for found in run_ranks(program, 4):
        assert found.eq(0).all() == is_exact


def test_distances_to_fewer_rows_than_ranks_have_gradients():
    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))

    def gradients(x, y):
        return torch.autograd.grad(torch.cdist(x, y).sin().sum(), (x, y))

    expected = gradients(rows[:30].requires_grad_(), rows[30:].requires_grad_())

    def program():
        whole = wb.tensor(rows[:30], placement=wb.placement.all(), sbp="B", requires_grad=True)
        few = wb.tensor(rows[30:], placement=wb.placement.all(), sbp="S(0)", requires_grad=True)
        return [gradient.full_tensor() for gradient in gradients(whole, few)]

    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, list(expected))


def test_a_name_has_one_rule():
    with pytest.raises(ValueError, match=r"\['cdist'\] are registered twice"):
        registry.rule("distances of nobody", "cdist")(lambda call: None)
    assert "distances of nobody" not in registry.RULES


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B"])
def test_weights_of_one_norm(sbp):
    v = torch.arange(12.0).view(4, 3) + 1
    expected = [torch._weight_norm(v, g, -1) for g in (torch.tensor(2.0), v[:1])]

    def program():
        x = wb.tensor(v, placement=wb.placement.all(), sbp=sbp)
        return [torch._weight_norm(x, g, -1).full_tensor() for g in (torch.tensor(2.0), x[:1])]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sbp", ["S(0)", "B"])
@pytest.mark.parametrize("function", [torch.any, torch.all])
def test_any_and_all_over_no_dims_reduce_nothing(function, sbp):
    full = torch.tensor([True, False, True])

    def program():
        return function(wb.tensor(full, placement=wb.placement.all(), sbp=sbp), dim=()).full_tensor()

    for found in run_ranks(program, 2):
        assert torch.equal(found, function(full, dim=()))
