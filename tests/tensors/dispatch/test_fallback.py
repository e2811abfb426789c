"""The fallback: what comes back, on owners and on placeholders, when no rule applies."""

import threading

import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function

import workbench as wb
from workbench.core.placement import Placement
from workbench.tensors.dispatch import fallback
from workbench.tensors.dispatch.fallback import FallbackWarning, run_fallback
from workbench.tensors.dispatch.planning import Plan
from workbench.tensors.dispatch.registry import RULES, Name, Resolution
from workbench.testing import run_ranks

BOTH = Placement.of("cpu", [0, 1])
SECOND = Placement.of("cpu", [1])


def fall_back(function, tensor, *args):
    world = tensor._spec.world
    plan = Plan(None, [tensor._spec.layout.broadcast()], None, None, function, Name("some_function"), world)
    return run_fallback(plan, function, (tensor, *args), {})


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
def test_writing_to_a_result_leaves_the_remembered_form_alone():
    def program():
        x = wb.arange(6, placement=BOTH, sbp="S(0)", dtype=torch.float32).view(6)
        first = fall_back(torch.Tensor.detach, x)
        first.add_(100)
        return fall_back(torch.Tensor.detach, x).full_tensor().tolist(), x.full_tensor().tolist()

    for again, source in run_ranks(program):
        assert again == source == [0, 1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
def test_an_operand_that_comes_back_is_another_object():
    def program():
        x = wb.ones(4, placement=BOTH, sbp="B")
        y = fall_back(lambda tensor: tensor, x)
        return y is x, y.full_tensor().tolist()

    assert run_ranks(program) == [(False, [1.0] * 4)] * 2


def test_sizes_stay_sizes():
    def program():
        return fall_back(lambda _, size: (size, size.numel()), wb.ones(4, placement=BOTH, sbp="B"), torch.Size([2, 3]))

    for size, number in run_ranks(program):
        assert type(size) is torch.Size and size == (2, 3) and number == 6


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("threshold", [0.5, 2.5, 9.0])
def test_placeholders_learn_a_shape_that_depends_on_data(threshold):
    def program():
        x = wb.arange(4, placement=SECOND, sbp="B", dtype=torch.float32).requires_grad_()
        chosen = x[x.detach() > threshold]
        assert chosen.is_placeholder == (wb.rank() == 0)
        loss = (chosen.to_global(placement=BOTH, sbp="S(0)") * 3).sum()
        loss.backward()
        return chosen.shape, loss.item(), x.grad.to_global(placement=BOTH, sbp="B").full_tensor().tolist()

    values = torch.arange(4.0)
    kept = values > threshold
    expected = (torch.Size([int(kept.sum())]), float(values[kept].sum() * 3), (kept * 3.0).tolist())
    assert run_ranks(program) == [expected] * 2


def test_more_tensors_than_the_equation_has_inputs_fall_back(monkeypatch):
    monkeypatch.setitem(RULES, "lerp", lambda call: Resolution("..., ... -> ..."))

    def program():
        a, b, c = (wb.full((3,), v, placement=BOTH, sbp="S(0)") for v in (1.0, 3.0, 0.5))
        return torch.lerp(a, b, c).full_tensor().tolist()

    with pytest.warns(FallbackWarning, match="lerp: no rule"):
        assert run_ranks(program) == [[2.0] * 3] * 2


def test_a_rule_that_no_layout_meets_falls_back(monkeypatch):
    monkeypatch.setitem(RULES, "xlogy", lambda call: Resolution([]))

    def program():
        x = wb.full((3,), 2.0, placement=BOTH, sbp="S(0)")
        return torch.xlogy(x, x).full_tensor()

    with pytest.warns(FallbackWarning, match="xlogy"):
        values = run_ranks(program)
    torch.testing.assert_close(values[0], torch.xlogy(torch.full((3,), 2.0), 2.0))


@pytest.mark.parametrize(
    "write",
    [
        lambda x, rows: x.index_copy_(0, torch.tensor([1, 4]), rows),
        lambda x, rows: x.index_add_(0, torch.tensor([1, 4]), rows),
        lambda x, rows: x[1:3].add_(rows),
        lambda x, rows: x[3:].copy_(rows),
        lambda x, rows: x.__setitem__(slice(0, 2), rows),
    ],
    ids=["index_copy", "index_add", "add", "copy", "setitem"],
)
def test_split_rows_are_written_into_terms_without_a_fallback(write):
    """A fallback is a warning, which fails tests."""
    x, rows = torch.arange(30.0).view(5, 6), torch.arange(12.0).view(2, 6) - 5
    expected = x.clone()
    write(expected, rows)

    def program():
        terms = wb.to_global(x.clone(), placement=BOTH, sbp="B").to_global(sbp="P")
        write(terms, wb.to_global(rows.clone(), placement=BOTH, sbp="B").to_global(sbp="S(1)"))
        return str(terms.sbp[0]), terms.full_tensor()

    for sbp, found in run_ranks(program):
        assert sbp == "P" and torch.equal(found, expected)


WRITES_IN_PLACE = {
    "put": lambda x: x.put_(torch.tensor([1]), torch.tensor([7.0])),
    "fill_diagonal": lambda x: x.fill_diagonal_(3.0, wrap=True),
}


@pytest.mark.parametrize("name", WRITES_IN_PLACE)
def test_a_write_that_gathers_its_target_warns(name, monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())

    def program():
        x = wb.ones(4, 6, placement=BOTH, sbp="S(0)")
        WRITES_IN_PLACE[name](x)
        return str(x.sbp[0]), x.full_tensor()

    with pytest.warns(FallbackWarning, match=f"^{name}: no rule .* The result is right. "):
        found = run_ranks(program)
    expected = torch.ones(4, 6)
    WRITES_IN_PLACE[name](expected)
    assert all(sbp == "S(0)" and torch.equal(value, expected) for sbp, value in found)


def test_counts_and_filled_diagonals_gather_nothing(monkeypatch):
    """A fallback is a warning, which fails tests."""
    monkeypatch.setattr(fallback, "_warned", set())
    ids, expected = torch.tensor([4, 0, 4, 1, 0, 4, 2]), torch.ones(4, 6).fill_diagonal_(3.0)

    def program():
        split = wb.tensor(ids, placement=BOTH, sbp="S(0)")
        counts, x = torch.bincount(split, minlength=3), wb.ones(4, 6, placement=BOTH, sbp="S(1)")
        x.fill_diagonal_(3.0)
        return [str(t.sbp[0]) for t in (counts, x)], counts.full_tensor(), x.full_tensor()

    for sbps, counts, x in run_ranks(program):
        assert sbps == ["P", "S(1)"]
        assert torch.equal(counts, ids.bincount()) and torch.equal(x, expected)


def test_a_rule_that_takes_a_parameter_as_it_lies_says_how_to_box_it(monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())

    def program():
        weights = [torch.nn.Parameter(wb.ones(4, 4, placement=BOTH, sbp="S(0)")) for _ in range(2)]
        product = weights[0] @ weights[1]
        boxed = weights[0].to_global(sbp="B") @ weights[1].to_global(sbp="B")
        return product.full_tensor(), boxed.full_tensor()

    with pytest.warns(FallbackWarning, match=r"^matmul: .* as they lie.* weight\.to_global\(sbp=\"B\"\)"):
        found = run_ranks(program)
    assert all(torch.equal(one, two) for one, two in found)


@pytest.mark.parametrize("name", ["arccosh", "arcsinh", "arctanh"])
def test_names_from_numpy_gather_nothing(name):
    def program():
        x = wb.full((4, 6), 0.5, placement=BOTH, sbp="S(0)") + (name == "arccosh")
        with wb.debug.trace() as boxings:
            made = getattr(x, name)()
            getattr(x, f"{name}_")()
        return str(boxings), torch.equal(made.full_tensor(), x.full_tensor())

    assert run_ranks(program) == [("no boxings", True)] * 2


def test_a_mistake_is_reported_as_torch_reports_it():
    def program():
        torch.linalg.cholesky(wb.ones(2, 3, placement=BOTH, sbp="S(0)"))

    with pytest.raises(RuntimeError, match="square"):
        run_ranks(program)


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
def test_a_tensor_that_an_initializer_hands_on_by_name_is_filled():
    """Libraries put functions of their own in the place of torch's initializers, which then have no rule."""

    def constant_(tensor, val):
        return torch.nn.init.constant_(tensor, val)

    def program():
        x = wb.ones(4, 2, placement=BOTH, sbp="S(0)")
        torch.overrides.handle_torch_function(constant_, (x,), tensor=x, val=3.0)
        return x.full_tensor()

    assert all(value.eq(3).all() for value in run_ranks(program, 2))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
     "kl_div", "soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss", "multi_margin_loss",
     "multilabel_margin_loss", "multilabel_soft_margin_loss", "cross_entropy", "nll_loss"],
)  # fmt: skip
def test_no_loss_gathers_split_samples(loss, reduction):
    def program():
        values = torch.linspace(0.1, 0.9, 12).reshape(4, 3)
        labels = torch.arange(4) % 3 if loss in ("multi_margin_loss", "cross_entropy", "nll_loss") else values.flip(0)
        labels = torch.zeros(4, 3, dtype=torch.long) if loss == "multilabel_margin_loss" else labels
        with wb.debug.trace() as trace:
            found = getattr(torch.nn.functional, loss)(
                wb.to_global(values, BOTH, "B").to_global(sbp="S(0)"), labels, reduction=reduction
            )
        return str(found.sbp), trace.wire_bytes

    sbp, num_bytes = run_ranks(program)[0]
    assert num_bytes == 0 and sbp == ("(S(0),)" if reduction == "none" else "(P,)")


def test_a_function_without_a_rule_may_keep_what_it_returns():
    kept = threading.local()

    def keeping(x):
        if has_torch_function((x,)):
            return handle_torch_function(keeping, (x,), x)
        kept.mask = x > 0
        return x * 2, kept.mask

    def program():
        doubled, mask = keeping(wb.ones(4, 2, placement=wb.placement.all(), sbp="S(0)"))
        return type(mask) is type(doubled), type(kept.mask)

    with pytest.warns(FallbackWarning):
        assert run_ranks(program, 2) == [(True, torch.Tensor)] * 2
