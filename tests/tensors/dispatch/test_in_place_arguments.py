"""Writes in place give the numbers of one device: ``inplace`` of activations and dropouts by position and by name, on
every layout, and what comes from other placements.
"""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.tensors.dispatch.registry import fold_name
from workbench.testing import run_ranks

FUNCTIONS = {
    F.relu: (), F.relu6: (), F.silu: (), F.mish: (), F.selu: (), F.elu: (1.3,), F.celu: (1.1,), F.leaky_relu: (0.1,),
    F.hardtanh: (-0.5, 0.5), F.hardswish: (), F.hardsigmoid: (), F.threshold: (0.1, 0.2), F.rrelu: (0.1, 0.3, False),
    F.dropout: (1.0, True), F.dropout1d: (0.5, False), F.alpha_dropout: (0.5, False),
}  # fmt: skip
X = torch.linspace(-2, 2, 30, dtype=torch.float64).reshape(5, 6)


def run(function, x, *options, **named):
    """What was returned, and what has become of the argument."""
    y = x * 1
    return function(y, *FUNCTIONS[function], *options, **named) + 2 * y


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_in_place_by_position_and_keyword(function, sbp):
    def forms(x):
        results = [run(function, x, True), run(function, x, False), run(function, x, inplace=True)]
        return [(result, torch.autograd.grad(result.sin().sum(), x)[0]) for result in results]

    expected = forms(X.clone().requires_grad_())

    def program():
        x = wb.to_global(X.clone(), placement=wb.placement("cpu", ranks=[0, 2]), sbp="B").to_global(sbp=sbp)
        return [[part.detach().full_tensor() for part in pair] for pair in forms(x.detach().requires_grad_())]

    for found in run_ranks(program, 3):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, [part.detach() for part in theirs])


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
def test_unit_vectors_are_written_to_out(sbp):
    def program():
        x = wb.to_global(X.clone(), placement=wb.placement("cpu", ranks=[0, 2]), sbp="B").to_global(sbp=sbp)
        for dim in (0, 1):
            F.normalize(x, dim=dim, out=x)
        return x.full_tensor()

    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, F.normalize(F.normalize(X, dim=0), dim=1))


@pytest.mark.parametrize("target", [["S(0)", "B"], ["B", "S(1)"], ["S(1)", "S(0)"]])
def test_on_a_grid_a_tensor_keeps_its_layout_and_boxes_what_it_takes(target):
    def program():
        grid = wb.placement("cpu", ranks=[[0, 1], [2, 3]])
        whole = wb.to_global(X.clone(), placement=grid, sbp=["B", "B"])
        x, y = whole.to_global(sbp=target), whole.to_global(sbp=["S(0)", "S(1)"])
        x += y
        return [str(entry) for entry in x.sbp], x.full_tensor()

    for sbp, value in run_ranks(program, 4):
        assert sbp == target
        torch.testing.assert_close(value, 2 * X)


ROWS = torch.tensor([0, 2, 4, 1, 3])
WRITES = {
    "copy_": lambda q, p: q.copy_(p),
    "add_": lambda q, p: q.add_(p, alpha=0.3),
    "mul_": lambda q, p: q.mul_(p),
    "lerp_": lambda q, p: q.lerp_(p, 0.2),
    "addcmul_": lambda q, p: q.addcmul_(p, p.sin()),
    "index_add_": lambda q, p: q.index_add_(0, ROWS, p),
    "rows": lambda q, p: q.__setitem__(slice(1, 3), p[1:3]),
    "a view": lambda q, p: q.t()[1].add_(p[:, 2]),
    "masked_scatter_": lambda q, p: q.masked_scatter_(p > 0, p),
    "a list": lambda q, p: torch._foreach_lerp_([q], [p], 0.3),
}
PLACES = {  # ranks and sbp of the target, and of what it takes
    "stages": ([0], "B", [1], "B"),
    "stages of two": ([0, 1], "S(0)", [2, 3], "S(1)"),
    "ranks in common": ([1], "B", [0, 1, 2], "S(0)"),
    "terms": ([0, 1], "B", [3], "P"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("write", WRITES)
def test_what_a_write_takes_comes_from_other_placements(write, places):
    def written(q, p):
        target = q * 1
        WRITES[write](target, p)
        (target.sin().sum() + 0.0).backward()
        return target.detach(), q.grad, p.grad

    expected = written(X.clone().requires_grad_(), X.cos().requires_grad_())

    def program():
        there, sbp, elsewhere, other = PLACES[places]
        q, p = (
            wb.to_global(value, placement=wb.placement(ranks=ranks), sbp="B").to_global(sbp=entry)
            for value, ranks, entry in ((X.clone(), there, sbp), (X.cos(), elsewhere, other))
        )
        found = written(q.detach().requires_grad_(), p.detach().requires_grad_())
        assert found[0].placement == q.placement and found[0].sbp == q.sbp
        return [part.full_tensor() for part in found]

    for found in run_ranks(program, 4):
        torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize("ranks", [[0, 1], [2]])
def test_lists_of_terms_take_what_comes_from_other_placements(ranks):
    def program():
        q = wb.to_global(X.clone(), placement=wb.placement(ranks=[0, 1]), sbp="B").to_global(sbp="P")
        p = wb.to_global(X.cos(), placement=wb.placement(ranks=ranks), sbp="B")
        torch._foreach_add_([q], [p], alpha=2)
        torch._foreach_lerp_([q], [p], [0.5])
        return str(q.sbp[0]), q.full_tensor()

    for sbp, found in run_ranks(program, 3):
        assert sbp == "P"
        torch.testing.assert_close(found, X / 2 + 1.5 * X.cos())


@pytest.mark.parametrize("ranks", [[0, 1], [2]])
def test_all_ranks_know_the_gradients_of_what_is_written_into_terms(ranks):
    def program():
        placement = wb.placement(ranks=[0, 1])
        q = wb.to_global(X.clone(), placement=placement, sbp="B").to_global(sbp="P")
        p = wb.to_global(X.cos(), placement=wb.placement(ranks=ranks), sbp="B").requires_grad_()
        (q * 1).mul_(p).sum().backward()
        return p.grad.full_tensor()

    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, X)


def test_a_target_on_another_stage_follows_a_moving_average():
    def trained(online, target):
        optimizer, losses = torch.optim.SGD(online.parameters(), lr=0.1), []
        for _ in range(3):
            loss = online(X).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
            losses.append(target(X).square().mean().detach())
        return losses

    def layers():
        torch.manual_seed(0)
        return torch.nn.Linear(6, 4).double(), torch.nn.Linear(6, 4).double()

    copies = [torch.nn.ModuleDict(dict(zip(("online", "target"), layers(), strict=True))) for _ in range(2)]

    def program(rank):
        model = wb.parallelize(copies[rank], "online: data@0; target: data@1 | 2x1x1")
        return [loss.full_tensor() for loss in trained(model["online"], model["target"])]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, trained(*layers()))


def test_every_operator_in_place_of_torch_is_known_as_one():
    names = [f"__i{name[2:]}" for name in dir(torch.Tensor) if name.startswith("__")]
    operators = [getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)]
    assert len(operators) > 10 and torch.Tensor.__ilshift__ in operators
    assert [operator for operator in operators if not fold_name(operator).in_place] == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
def test_shifts_write_into_their_target(sbp):
    def program():
        counts = wb.to_global(torch.arange(8), placement=wb.placement("cpu", ranks=[0, 2]), sbp="B").to_global(sbp=sbp)
        kept, plain, taken = counts, torch.arange(8), counts % 3
        counts <<= 4
        counts >>= 2
        plain <<= taken
        assert counts is kept
        return str(kept.sbp), kept.full_tensor(), plain

    for entry, found, plain in run_ranks(program, 3):
        assert entry == f"({sbp},)" and torch.equal(found, 4 * torch.arange(8))
        assert torch.equal(plain, torch.arange(8) << torch.arange(8) % 3)
