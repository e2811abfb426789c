"""Functions along split dims: what moves (a row per rank, never the tensor), and how exact the numbers are."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.tensors.world import current
from workbench.testing import assert_equal_to_one_device, run_ranks

ROWS, COLUMNS = 1024, 8
ROW = COLUMNS * 4
TARGETS = torch.arange(COLUMNS) * 100


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def placed(full, sbp, ranks=(0, 1)):
    """A plain tensor that all ranks hold, as a global one."""
    return wb.to_global(full, placement=wb.placement("cpu", ranks=ranks), sbp=["B"] * len(sbp)).to_global(sbp=sbp)


# (function, exchanges and bytes sent by a rank forward, the same backward); two ranks, S(0) of (1024, 8)
TRAFFIC = {
    "sum": (lambda x: x.sum(0), (0, 0), (0, 0)),
    "mean": (lambda x: x.mean(0), (0, 0), (0, 0)),
    "amax without gradient": (lambda x: x.detach().amax(0), (0, 0), (0, 0)),
    "amax": (lambda x: x.amax(0), (2, 2 * ROW), (1, ROW)),
    "max": (lambda x: x.max(0)[0], (2, 3 * ROW), (1, ROW)),
    "argmax": (lambda x: x.argmax(0), (2, 3 * ROW), (0, 0)),
    "topk": (lambda x: x.topk(3, 0)[0], (2, 9 * ROW), (1, 3 * ROW)),
    "prod": (lambda x: x.prod(0), (1, ROW), (1, ROW)),
    "var": (lambda x: x.var(0), (1, 3 * ROW), (1, 3 * ROW)),
    "norm": (lambda x: x.norm(dim=0), (1, ROW), (1, ROW)),
    "logsumexp": (lambda x: x.logsumexp(0), (2, 2 * ROW), (1, ROW)),
    "softmax": (lambda x: x.softmax(0), (2, 2 * ROW), (1, ROW)),
    "log_softmax": (lambda x: x.log_softmax(0), (2, 2 * ROW), (1, ROW)),
    "cumsum": (lambda x: x.cumsum(0), (1, ROW), (1, ROW)),
    "layer_norm": (lambda x: F.layer_norm(x.T, (ROWS,)), (1, 3 * ROW), (1, 3 * ROW)),
    "rms_norm": (lambda x: F.rms_norm(x.T, (ROWS,)), (1, ROW), (1, ROW)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (1, 2 * ROW), (1, 2 * ROW)),
    "cross_entropy of rows": (lambda x: F.cross_entropy(x, torch.zeros(ROWS, dtype=torch.int64)), (0, 0), (0, 0)),
    "cross_entropy of classes": (lambda x: F.cross_entropy(x.T, TARGETS), (2, 4 * ROW), (1, 3 * ROW)),
    "nll_loss of classes": (lambda x: F.nll_loss(x.T, TARGETS), (0, 0), (0, 0)),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_what_moves_is_a_row_per_rank(name):
    function, forward, backward = TRAFFIC[name]
    full = random(ROWS, COLUMNS)

    def program():
        x = placed(full, ["S(0)"]).requires_grad_()
        traffic, found = current().traffic, []
        traffic.reset()
        result = function(x)
        found.append((traffic.num_exchanges, traffic.sent_bytes))
        if result.requires_grad:
            weight = torch.linspace(-1, 1, result.numel()).reshape(result.shape)
            traffic.reset()
            (result * weight).sum().backward()
        else:
            traffic.reset()
        return [*found, (traffic.num_exchanges, traffic.sent_bytes)]

    # Multiplying terms with the weight would end them: those functions are compared forward only.
    found = run_ranks(program, 2)
    keeps_terms = forward == (0, 0)
    assert all(each[0] == forward and (keeps_terms or each[1] == backward) for each in found), found


def test_extrema_lie_as_terms_only_where_no_gradient_is_needed():
    full = random(5, 4)

    def program():
        x = placed(full, ["S(0)"])
        assert str(x.amax(0).sbp) == "(P(max),)" and str(x.min().sbp) == "(P(min),)"
        with torch.no_grad():
            assert str(x.requires_grad_().amax(0).sbp) == "(P(max),)"
        assert str(x.amax(0).sbp) == "(B,)" and x.amax(0).requires_grad

    run_ranks(program, 2)


_KEEPING = {
    "clone": torch.clone, "detach": torch.detach, "contiguous": torch.Tensor.contiguous, "t": torch.t,
    "T": lambda x: x.T, "mT": lambda x: x.mT, "permute": lambda x: x.permute(1, 0), "view": lambda x: x.view(2, 3, 5),
    "reshape": lambda x: x.reshape(15, 2), "flatten": torch.flatten, "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0), "transpose": lambda x: x.transpose(0, 1),
    "movedim": lambda x: x.movedim(0, 1), "unflatten": lambda x: x.unflatten(0, (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", _KEEPING)
def test_terms_of_an_extremum_may_be_copied_and_viewed(name):
    full = random(4, 6, 5)

    def program():
        found = []
        for sbp, ranks in ((["S(0)"], [1, 0]), (["S(0)", "B"], [[1], [0]])):
            x = placed(full, sbp, ranks)
            for extremum in (torch.amax, torch.amin):
                terms = extremum(x, 0)
                current().traffic.reset()
                kept = _KEEPING[name](terms)
                assert kept.sbp == terms.sbp and current().traffic.num_exchanges == 0, (kept.sbp, terms.sbp)
                assert_equal_to_one_device(kept, _KEEPING[name](extremum(full, 0)))
                found += [str(entry) for entry in kept.sbp]
        return found

    assert all("P(max)" in found and "P(min)" in found for found in run_ranks(program, 2))


def test_a_maximum_of_terms_that_are_changed_is_not_that_of_the_terms():
    full = random(4, 6)

    def program():
        terms = placed(full, ["S(0)"]).amax(0)
        for change in (torch.neg, lambda x: x * -1, lambda x: x + x):
            assert "P(max)" not in str(change(terms).sbp)
            assert_equal_to_one_device(change(terms), change(full.amax(0)))

    run_ranks(program, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_the_first_of_equal_values_wins_also_among_empty_shards(rows):
    generator = torch.Generator().manual_seed(rows)
    ties = torch.randint(0, 2, (rows, 3), generator=generator).float()
    full = torch.where(torch.tensor([False, True, False]), -torch.inf, ties)

    def program():
        for sbp, ranks in (
            (["S(0)"], [3, 1, 0, 2]),
            (["S(0)", "S(0)"], [[0, 1], [2, 3]]),
            (["S(0)", "S(1)"], [[0, 1], [2, 3]]),
        ):
            x = placed(full, sbp, ranks)
            for name in ("argmax", "argmin"):
                assert_equal_to_one_device(getattr(x, name)(0), getattr(full, name)(0))
                assert_equal_to_one_device(getattr(x, name)(), getattr(full, name)())
            for name in ("max", "min", "cummax", "cummin"):
                for part, expected in zip(getattr(x, name)(0), getattr(full, name)(0), strict=True):
                    assert_equal_to_one_device(part, expected)

    run_ranks(program, 4)


LOW_PRECISION = {
    "var": lambda x: x.var(0),
    "norm": lambda x: x.norm(dim=0),
    "softmax": lambda x: x.softmax(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "layer_norm": lambda x: F.layer_norm(x.T, (x.shape[0],)),
    "rms_norm": lambda x: F.rms_norm(x.T, (x.shape[0],)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cross_entropy": lambda x: F.cross_entropy(x.T, torch.arange(x.shape[1]), reduction="none"),
}


def test_bfloat16_is_no_less_exact_than_on_one_device():
    full = torch.randn(301, 6, generator=torch.Generator().manual_seed(0)).bfloat16()

    def program():
        x = placed(full, ["S(0)"], [0, 1, 2])
        return {name: f(x).to(torch.float32).full_tensor().double() for name, f in LOW_PRECISION.items()}

    found = run_ranks(program, 3)[0]
    for name, function in LOW_PRECISION.items():
        exact = function(full.double())
        ours, theirs = ((value - exact).abs().max() for value in (found[name], function(full).double()))
        rounding = 2**-8 * exact.abs().max()
        assert ours <= max(theirs * 1.05, rounding), (name, ours, theirs)


def test_the_mean_of_halves_does_not_overflow_where_their_sum_would():
    full = torch.full((4000, 2), 1000.0, dtype=torch.float16)
    run_ranks(lambda: assert_equal_to_one_device(placed(full, ["S(0)"]).mean(0), full.mean(0)), 2)


def test_cosines_along_a_split_dim_take_rows_and_integers():
    rows, row = random(6, 4), random(4)
    integers = (rows * 5).long()

    def program():
        for full, other in ((rows, row), (integers, rows)):
            found = F.cosine_similarity(placed(full, ["S(0)"]), placed(other, ["B"]), 0)
            assert_equal_to_one_device(found, F.cosine_similarity(full, other, 0))

    run_ranks(program, 2)


def test_variance_of_values_far_from_zero_keeps_its_digits():
    full = 1e4 + torch.randn(1001, 3, generator=torch.Generator().manual_seed(0))
    exact = full.double().var(0)

    def program():
        error = (placed(full, ["S(0)"], [0, 1, 2]).var(0).full_tensor() - exact).abs().max()
        assert error <= 2 * (full.var(0) - exact).abs().max() + 1e-5

    run_ranks(program, 3)


def test_other_kinds_of_numbers():
    generator = torch.Generator().manual_seed(0)
    complex_ = torch.randn(7, 5, dtype=torch.complex64, generator=generator)
    integers, booleans = torch.randint(-5, 5, (7, 5), generator=generator), torch.rand(7, 5, generator=generator) > 0.5
    functions = [
        *[(complex_, name) for name in ("sum", "mean", "prod", "var", "std", "cumsum", "cumprod")],
        *[(integers, name) for name in ("sum", "prod", "amax", "argmin", "cumsum", "cumprod", "any", "logsumexp")],
        *[(booleans, name) for name in ("sum", "prod", "amax", "amin", "all", "any", "cumsum")],
    ]

    def program():
        for full, name in functions:
            found, expected = getattr(placed(full, ["S(0)"]), name)(0), getattr(full, name)(0)
            assert found.dtype == expected.dtype, name
            assert_equal_to_one_device(found, expected)
        norm = torch.linalg.vector_norm(placed(complex_, ["S(0)"]), 3, 0)
        assert_equal_to_one_device(norm, torch.linalg.vector_norm(complex_, 3, 0))

    run_ranks(program, 2)


DTYPES = (torch.uint8, torch.int32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("given", [torch.int64, torch.float32, torch.bool], ids=str)
def test_results_have_the_dtype_that_is_asked_for_on_all_ranks(given):
    full = torch.tensor([[200, 0], [150, 3], [1, 1], [7, 5]]).to(given)
    calls = [(name, dtype) for name in ("sum", "prod", "nansum", "cumsum", "cumprod") for dtype in DTYPES]
    calls += [(name, dtype) for name in ("mean", "softmax", "log_softmax") for dtype in (torch.bfloat16, torch.float64)]

    def program():
        x = placed(full, ["S(0)"], [0, 1])  # rank 2 has what the rule says
        for name, dtype in calls:
            found, expected = (getattr(torch, name)(t, 0, dtype=dtype) for t in (x, full))
            assert found.dtype == found.to_local().dtype == dtype, (name, dtype)
            torch.testing.assert_close(found.full_tensor(), expected)

    run_ranks(program, 3)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
def test_running_values_under_autocast_have_the_dtype_of_one_device(name):
    full = random(4, 3).bfloat16()

    def program():
        x = placed(full, ["S(0)"], [0, 1])
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (getattr(torch, name)(t, 0) for t in (x, full))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.full_tensor(), expected)

    run_ranks(program, 3)


def test_a_batch_without_a_label_that_counts_is_nan_as_on_one_device():
    full, target = random(4, 6), torch.full((4,), -100)

    def program():
        for sbp in ("S(0)", "S(1)"):
            x = placed(full, [sbp]).requires_grad_()
            for labels in (target, placed(target, ["S(0)"])):
                assert F.cross_entropy(x, labels).full_tensor().isnan()
                assert F.cross_entropy(x, labels, reduction="sum").full_tensor() == 0

    run_ranks(program, 2)


def test_a_label_that_is_no_class_is_an_error_over_split_classes():
    full = random(3, 6)

    def program():
        with pytest.raises(IndexError, match="Target 9 is out of bounds"):
            F.cross_entropy(placed(full, ["S(1)"]), torch.tensor([1, 9, 2]))

    run_ranks(program, 2)


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B"])
def test_weights_of_classes_have_no_gradient_with_class_numbers_as_on_one_device(sbp):
    scores, labels, weights = random(3, 4), torch.tensor([0, 1, 2]), torch.rand(4).requires_grad_()

    def program(loss, targets):
        return loss(placed(scores, [sbp]), targets, weights).requires_grad

    assert run_ranks(lambda: program(F.cross_entropy, scores.softmax(1)), 2) == [True, True]
    for loss in (F.cross_entropy, F.nll_loss):
        with pytest.raises(RuntimeError, match="weight"):
            loss(scores, labels, weights)
        with pytest.raises(RuntimeError, match="weight"):
            run_ranks(lambda loss=loss: program(loss, labels), 2)


def test_the_old_arguments_of_reductions():
    full, target = random(4, 6), torch.tensor([0, 5, 2, 2])

    def program():
        x = placed(full, ["S(0)"])
        found = F.cross_entropy(x, target, size_average=False)
        assert_equal_to_one_device(found, F.cross_entropy(full, target, reduction="sum"))
        assert_equal_to_one_device(F.l1_loss(x, -x, None, False), F.l1_loss(full, -full, reduction="none"))

    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        run_ranks(program, 2)


def test_double_backward_through_exchanges():
    full = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def penalty(x):
        y = x.softmax(0).square().sum() + x.var(0).sum() + x.logsumexp(0).pow(2).sum() + x.amax(0).pow(3).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return grad.square().sum()

    expected = full.clone().requires_grad_()
    penalty(expected).backward()

    def program():
        x = placed(full, ["S(0)"]).requires_grad_()
        penalty(x).backward()
        assert_equal_to_one_device(x.grad, expected.grad)

    run_ranks(program, 2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_of_a_split_batch_are_those_of_one_device(momentum):
    batches = torch.randn(3, 7, 4, 2, generator=torch.Generator().manual_seed(0))
    alone = torch.nn.BatchNorm1d(4, momentum=momentum)
    for batch in batches:
        expected = alone(batch)
    frozen = F.batch_norm(batches[0], alone.running_mean, alone.running_var, alone.weight, alone.bias)

    def program():
        everyone = {"placement": wb.placement("cpu", ranks=[0, 1, 2]), "sbp": ["B"]}
        module = torch.nn.BatchNorm1d(4, momentum=momentum)
        module.running_mean = wb.to_global(module.running_mean, **everyone)
        module.running_var = wb.to_global(module.running_var, **everyone)
        for batch in batches:
            found = module(placed(batch, ["S(0)"], [0, 1, 2]))
        assert_equal_to_one_device(found, expected)
        assert_equal_to_one_device(module.running_mean, alone.running_mean)
        assert_equal_to_one_device(module.running_var, alone.running_var)
        module.eval()
        assert_equal_to_one_device(module(placed(batches[0], ["S(0)"], [0, 1, 2])), frozen)

    run_ranks(program, 3)


TWICE = {
    "conv1d": (F.conv1d, [(1, 4, 7), (2, 4, 3), (2,)]),
    "conv2d groups": (lambda x, w: F.conv2d(x, w, groups=2), [(1, 4, 7, 6), (2, 2, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(1, 4, 5, 5), (4, 1, 3, 3)]),
    "bilinear": (lambda x, w, b: F.bilinear(x, x, w, b), [(1, 4), (1, 4, 4), (1,)]),
    "grid_sample": (lambda x, w: F.grid_sample(x, w.tanh(), align_corners=False), [(1, 2, 4, 4), (1, 3, 3, 2)]),
    **{
        f.__name__: (lambda x, w, f=f: f(x + w), [(1, 3, 3), (1, 3, 3)])
        for f in (torch.linalg.det, torch.det, torch.logdet, torch.linalg.inv, torch.matrix_exp)
    },
    "gru_cell": (lambda x, h, *w: torch.gru_cell(x, h, *w), [(1, 4), (1, 3), (9, 4), (9, 3)]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layouts", [["S(0)", "B"], ["S(1)", "B"], ["B", "S(0)"], ["B", "S(1)"]], ids=" ".join)
@pytest.mark.parametrize("name", TWICE)
def test_second_gradients_where_a_rank_has_no_row(name, layouts):
    """A rank without a gradient would let the others wait."""
    function, shapes = TWICE[name]
    torch.manual_seed(0)
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def gradients(x, *others):
        (first,) = torch.autograd.grad(function(x, *others).sum(), x, create_graph=True)
        first.square().sum().backward()
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, *others)]

    def program():
        layout_of = [*layouts, *["B"] * len(shapes)]
        x, *others = (
            wb.tensor(t, placement=wb.placement.all(), sbp=s).requires_grad_()
            for t, s in zip(operands, layout_of, strict=False)
        )
        return [t.detach().full_tensor() for t in gradients(x, *others)]

    expected = gradients(*(t.clone().requires_grad_() for t in operands))
    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, [t.detach() for t in expected])
