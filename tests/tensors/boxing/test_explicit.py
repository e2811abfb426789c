"""Explicit mode, check mode and misuse: what the errors say, part by part."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.errors import ExplicitBoxingError, LayoutError, SbpError
from workbench.testing import run_ranks


def _on_two(*sbps, shape=(4, 4), **options):
    p = wb.placement("cpu", ranks=[0, 1])
    return [wb.ones(*shape, placement=p, sbp=sbp, **options) for sbp in sbps]


def test_an_implicit_boxing_names_function_argument_layouts_and_the_line_to_write():
    def program(rank):
        images, weight = _on_two("S(1)", "S(0)")
        with wb.debug.explicit_boxing(), pytest.raises(ExplicitBoxingError) as caught:
            F.linear(images, weight)
        message = str(caught.value)
        for part in (
            "linear: needs a boxing", "argument", "(4, 4) on placement(\"cpu\", ranks=[0, 1])", "all-",
            ".to_global(sbp=", "Under wb.debug.explicit_boxing()",
        ):  # fmt: skip
            assert part in message, message
        assert "images.to_global(" in message or "weight.to_global(" in message
        return message

    first, second = run_ranks(program, 2)
    assert first == second


def test_the_written_line_works_and_what_moves_nothing_stays_implicit():
    def program(rank):
        (x,) = _on_two("S(1)")
        with wb.debug.explicit_boxing():
            with pytest.raises(ExplicitBoxingError, match=r'softmax: .*intermediate.*S\(1\).*x\.to_global\(sbp="B"\)'):
                torch.softmax(x, dim=1)
            with pytest.raises(ExplicitBoxingError, match=r'of argument 1 \(input\).*x\.to_global\(sbp="B"\)'):
                x.median()
            first = torch.softmax(x.to_global(sbp="S(0)"), dim=1)
            whole, half = _on_two("B", "S(0)")
            assert (whole + half).sbp == half.sbp  # a slice of what is there
            x.requires_grad_()
            (x.to_global(sbp="B") * 2).sum().backward()  # backward of a written boxing
        assert torch.softmax(x, dim=1).shape == first.shape and x.median().item() == 1.0

    run_ranks(program, 2)


def test_fallbacks_parameters_and_several_arguments_are_named_too():
    def program(rank):
        (x,) = _on_two("S(1)")
        weight = torch.nn.Parameter(_on_two("S(0)")[0])
        with wb.debug.explicit_boxing():
            with pytest.raises(ExplicitBoxingError, match=r"linalg_inv|inv.*S\(1\) -> B.*x\.to_global"):
                torch.linalg.inv(x)
            with pytest.raises(ExplicitBoxingError, match=r"weight\.to_global"):
                torch.linalg.inv(weight)
            other = wb.ones(4, 4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="P")
            with pytest.raises(ExplicitBoxingError, match="needs a boxing"):
                x.copy_(other)

    run_ranks(program, 2)


def test_two_placements():
    def program(rank):
        left = wb.ones(2, placement=wb.placement("cpu", ranks=[0]), sbp="B")
        right = wb.ones(2, placement=wb.placement("cpu", ranks=[1]), sbp="B")
        with pytest.raises(LayoutError) as caught:
            torch.add(left, right)
        with pytest.raises(
            LayoutError, match=r'left\.to_global\(placement=wb\.placement\("cpu", ranks=\[1\]\), sbp="B"\)'
        ):
            left + (right + 0)
        message = str(caught.value)
        for part in ("add: operands lie on different placements", "argument 1", "B on cpu:[0]", "argument 2",
                     "B on cpu:[1]", "runs on one placement",
                     'left.to_global(placement=right.placement, sbp="B")'):  # fmt: skip
            assert part in message, message

    run_ranks(program, 2)


def test_in_place_forms_that_change_the_shape():
    def program(rank):
        (column,) = _on_two("S(1)", shape=(5, 1))
        with pytest.raises(LayoutError, match=r"squeeze_: .*\(5,\).*S\(1\) on cpu.*In place.*x = x\.squeeze"):
            column.squeeze_()
        (rows,) = _on_two("S(0)", shape=(5, 3))
        with pytest.raises(LayoutError, match=r"resize_.*S\(0\) on cpu.*wb\.empty"):
            rows.resize_(2, 2)
        assert rows.shape == (5, 3) and rows.to_local().shape == (3 - rank, 3)

    run_ranks(program, 2)


def test_gradients_of_maxima_are_refused_where_the_layout_is_made():
    def program(rank):
        (x,) = _on_two("B", requires_grad=True)
        with pytest.raises(LayoutError, match=r"to_global: boxing B -> P\(max\).*not differentiable.*detach\(\)"):
            (x * 2).to_global(sbp="P(max)")
        maxima = x.detach().to_global(sbp="P(max)")
        assert torch.equal(maxima.full_tensor(), torch.ones(4, 4))
        (total,) = _on_two("P(max)", shape=(), requires_grad=True)
        with pytest.raises(LayoutError, match=r"backward.*P\(max\).*not differentiable.*B"):
            total.backward()

    run_ranks(program, 2)


def test_out_takes_results_in_its_own_layout():
    def program(rank):
        x, y, out = _on_two("S(0)", "P", "S(1)")
        with torch.no_grad():
            assert torch.add(x, y, out=out) is out
            values, indices = torch.empty(0), None
            p = wb.placement("cpu", ranks=[0, 1])
            values = wb.zeros(4, placement=p, sbp="S(0)")
            indices = wb.zeros(4, placement=p, sbp="B", dtype=torch.int64)
            found = torch.max(x, 1, out=(values, indices))
            assert found.values is values and found.indices is indices
            assert torch.sort(x, 0, out=[out, wb.zeros(4, 4, placement=p, sbp="B", dtype=torch.int64)]).values is out
            torch.add(x, y, out=out)
        assert torch.equal(out.full_tensor(), torch.full((4, 4), 2.0)) and out.to_local().shape == (4, 2)
        assert torch.equal(values.full_tensor(), torch.ones(4)) and not indices.full_tensor().any()

    run_ranks(program, 2)


def test_out_of_placeholders():
    def program(rank):
        p = wb.placement("cpu", ranks=[1])
        x, out = wb.ones(3, placement=p, sbp="B"), wb.zeros(3, placement=p, sbp="B")
        torch.add(x, x, out=out)
        return out.sum().item()

    assert run_ranks(program, 2) == [6.0, 6.0]


def test_misuse_of_out():
    def program(rank):
        (x,) = _on_two("S(0)")
        with pytest.raises(LayoutError, match=r"add\(out=\.\.\.\): out is a plain Tensor.*S\(0\) on cpu.*full_tensor"):
            torch.add(x, x, out=torch.empty(4, 4))
        with pytest.raises(LayoutError, match=r"shape \(2, 2\), but the result has shape \(4, 4\).*not resized"):
            torch.add(x, x, out=_on_two("S(0)", shape=(2, 2))[0])
        with pytest.raises(LayoutError, match=r"out is torch\.int64, but the result is torch\.float32"):
            torch.add(x, x, out=_on_two("S(0)", dtype=torch.int64)[0])
        with pytest.raises(LayoutError, match=r"out is torch.float32, but the result is torch.complex64"):
            torch.mul(x, 1j, out=_on_two("S(0)")[0])
        with pytest.raises(LayoutError, match="out has 1 tensors, but there are 2 results"):
            torch.max(x, 1, out=(x,))
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            torch.add(x.clone().requires_grad_(), x, out=_on_two("B")[0])
        elsewhere = wb.empty(4, 4, placement=wb.placement("cpu", ranks=[1]), sbp="B")
        assert torch.add(x, x, out=elsewhere).placement.grid == (1,)

    run_ranks(program, 2)


def _doubled(rank):
    return torch.ones(4).mul(rank + 1)


@pytest.mark.parametrize("by_environment", [True, False])
def test_check_mode_names_argument_ranks_and_values(monkeypatch, by_environment):
    if by_environment:
        monkeypatch.setenv("WORKBENCH_CHECK", "1")

    def program(rank):
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")

        def compare():
            bias = _doubled(rank)
            with pytest.raises(LayoutError) as caught:
                torch.add(x, bias)
            with pytest.raises(LayoutError, match=r"argument 'weight'|argument 2"):
                F.linear(x, weight=torch.full((2, 4), float(rank)))
            with pytest.raises(LayoutError, match=r"ranks 0 and 1 hold different values.*int64.*float32"):
                x * (torch.ones(4) if rank else torch.ones(4, dtype=torch.int64))
            assert (x * torch.ones(4)).sum().item() == 4.0
            return str(caught.value)

        if by_environment:
            return compare()
        (x * torch.ones(4)).sum()
        with wb.debug.check_agreement():
            return compare()

    first, second, _ = run_ranks(program, 3)
    assert first == second
    for part in ("add: argument 2", "ranks 0 and 1 hold different values",
                 "rank 0 has float32 (4,) [1, 1, 1, ...], sum 4",
                 "rank 1 has float32 (4,) [2, 2, 2, ...], sum 8", "ranks 1, 2", "counts as B",
                 "wb.to_global(", "broadcast_from=0"):  # fmt: skip
        assert part in first, first


def test_without_check_mode_nothing_is_sent():
    def program(rank):
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)")
        with wb.debug.trace() as trace:
            x * _doubled(rank)
        return trace.wire_bytes

    assert run_ranks(program, 2) == [0, 0]


def test_a_check_that_never_fails_is_none():
    def program(rank):
        with wb.debug.check_agreement():
            x = wb.ones(4, placement=wb.placement("cpu", ranks=[0]), sbp="B")
            return (x + _doubled(rank)).sum().item()  # rank 1 is outside the placement: its value does not count

    assert run_ranks(program, 2) == [8.0, 8.0]


def test_wrong_entries_name_the_tensor():
    def program(rank):
        (x,) = _on_two("S(0)")
        with pytest.raises(SbpError, match=r"2 entries.*1 axis"):
            x.to_global(sbp="S(0), B")

    run_ranks(program, 2)
