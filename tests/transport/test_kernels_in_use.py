"""Boxing, losses, tables and random numbers give one device's numbers through the kernels, in Triton's interpreter.

On a GPU the kernels are the default; here ``launch.requested`` selects them. Every test counts their launches, so that
none passes because the references ran.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.kernels import launch
from workbench.tensors.boxing.exchange import packed
from workbench.testing import run_ranks

pytest.importorskip("triton", reason="Triton exists for Linux only")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that were launched."""
    if not launch.is_interpreted():
        pytest.skip("this process compiles its kernels; TRITON_INTERPRET=1 chooses the interpreter")
    names, run = [], launch.launch

    def counted(kernel, *args, **options):
        names.append(kernel.fn.__name__)
        run(kernel, *args, **options)

    for module in ("blocks", "cross_entropy_terms", "embedding_rows", "random_slice"):
        name = f"workbench.kernels.{module}_triton"
        monkeypatch.setattr(f"{name}.{'launch_kernel' if module == 'blocks' else 'launch'}", counted)
    monkeypatch.setattr(launch, "requested", "triton")
    return names


def cluster(*ranks):
    return wb.placement("cpu", ranks=list(ranks))


def tolerance(dtype):
    eps = torch.finfo(dtype).eps
    return {"rtol": max(4 * eps, 1e-6), "atol": max(4 * eps, 1e-6)}


LAYOUTS = ["S(0)", "S(1)", "B", "P(sum)"]


def boxed_both_ways(source, target, shape, dtype, num_ranks):
    """A boxing, and the gradient of a weighted sum of its result, with shards that are not contiguous."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = torch.linspace(-1, 1, x.numel()).reshape(shape).to(dtype)

    def program():
        placement = cluster(*range(num_ranks))
        given = wb.to_global(x, placement=placement, sbp="B").to_global(sbp=source).requires_grad_()
        result = given.to_global(sbp=target)
        (result * wb.to_global(weights, placement=placement, sbp="B")).sum().backward()
        return result.detach().full_tensor(), given.grad.full_tensor()

    for value, grad in run_ranks(program, num_ranks):
        torch.testing.assert_close(value, x)
        torch.testing.assert_close(grad, weights)


def test_boxing_moves_by_one_kernel(launches):
    boxed_both_ways("S(0)", "S(1)", (5, 7), torch.float32, 3)
    assert set(launches) == {"_move"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 2), (3, 0), (2, 3, 2)], ids=str)
def test_boxing_between_all_layouts(shape, dtype, launches):
    for source in LAYOUTS:
        for target in LAYOUTS:
            boxed_both_ways(source, target, shape, dtype, 3)
    assert "_move" in launches or 0 in shape


QUICK = [("sum", torch.bfloat16), ("sum", torch.bool), ("max", torch.int64)]
REDUCED = itertools.product(["sum", "max", "min"], [torch.bool, torch.int64, torch.bfloat16])


@pytest.mark.parametrize(
    ("reduction", "dtype"), [pytest.param(*c, marks=[] if c in QUICK else [pytest.mark.slow]) for c in REDUCED]
)
def test_terms_of_any_reduction(reduction, dtype, launches):
    terms = (torch.arange(24).reshape(4, 2, 3) * 7 % 5 - 2).to(dtype)
    whole = {"sum": terms.double().sum(0), "max": terms.amax(0), "min": terms.amin(0)}[reduction].to(dtype)

    def program(rank):
        term = wb.to_global(terms[rank], placement=cluster(0, 1, 2, 3), sbp=f"P({reduction})")
        return term.to_global(sbp="S(0)").full_tensor(), term.to_global(placement=cluster(3, 1), sbp="S(1)").to_local()

    found = run_ranks(program, 4)
    assert all(torch.equal(value, whole) for value, _ in found)
    assert torch.equal(torch.cat([found[3][1], found[1][1]], 1), whole)
    assert "_move" in launches


def test_one_kernel_packs_all_sent_slices(launches):
    x = torch.arange(24).reshape(4, 6)
    sent = packed([(1, x[:, :2]), (2, x[:, 2:])])
    assert [rank for rank, _ in sent] == [1, 2] and launches == ["_move"]
    assert all(piece.is_contiguous() for _, piece in sent)
    assert sent[0][1].tolist() == x[:, :2].tolist() and sent[1][1].tolist() == x[:, 2:].tolist()
    assert packed([(1, x)])[0][1] is x


def losses_over_classes(shape, dtype, options, sbp, grid, again=False):
    """Values and gradients (of gradients) of a cross entropy, against torch's."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * 5).to(dtype)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    target.flatten()[::3] = options.get("ignore_index", -100)

    def everything(x, t):
        loss = F.cross_entropy(x, t, **options)
        total = loss.sum() if loss.dim() else loss
        (grad,) = torch.autograd.grad(total, x, create_graph=again)
        second = torch.autograd.grad((grad * grad).sum(), x) if again else ()
        return [loss, grad, *second]

    truth = everything(logits.clone().requires_grad_(), target)

    def program():
        placement = wb.placement("cpu", ranks=grid)
        whole = ["B"] * placement.num_axes
        x = wb.to_global(logits, placement=placement, sbp=whole).to_global(sbp=sbp).requires_grad_()
        found = everything(x, wb.to_global(target, placement=placement, sbp=whole))
        return [value.detach().full_tensor() for value in found]

    for values in run_ranks(program, torch.tensor(grid).numel()):
        for value, expected in zip(values, truth, strict=True):
            torch.testing.assert_close(value, expected.detach(), **tolerance(dtype))


def test_cross_entropy_over_split_classes(launches):
    losses_over_classes((5, 7), torch.float32, {"label_smoothing": 0.1}, ["S(1)"], [0, 1])
    assert {"_forward", "_backward", "_move"} == set(launches)


def test_cross_entropy_is_differentiated_twice(launches):
    losses_over_classes((3, 5), torch.float64, {"reduction": "sum"}, ["S(1)"], [0, 1], again=True)
    assert "_forward" in launches


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 9), (4, 2), (5, 7, 3), (2, 130)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.2}, {"ignore_index": 1}, {"reduction": "none", "ignore_index": 0}, {"reduction": "sum"}],
    ids=str,
)
def test_cross_entropy_of_all_kinds(shape, dtype, options, launches):
    losses_over_classes(shape, dtype, options, ["S(1)"], [0, 1, 2])
    losses_over_classes(shape, dtype, options, ["S(0)", "S(1)"], [[0, 1], [2, 3]])
    assert "_forward" in launches


def test_a_target_out_of_range_is_an_error(launches):
    def program():
        x = wb.to_global(torch.zeros(2, 4), placement=cluster(0, 1), sbp="B").to_global(sbp="S(1)")
        F.cross_entropy(x, torch.tensor([1, 4]))

    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        run_ranks(program)


def rows_of_a_table(shape, dtype, padding, sbp, num_ranks, again=False):
    rows, width, positions = shape
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(rows, width, generator=generator).to(dtype)
    indices = torch.randint(0, rows, (positions, 2), generator=generator)
    weights = torch.randn(positions, 2, width, generator=generator).to(dtype)

    def everything(t, i, w):
        out = F.embedding(i, t, padding_idx=padding)
        if not again:
            return [out, *torch.autograd.grad((out * w).sum(), t)]
        (grad,) = torch.autograd.grad((out * out * w).sum(), t, create_graph=True)
        return [out, grad, *torch.autograd.grad((grad * grad).sum(), t)]

    truth = everything(table.clone().requires_grad_(), indices, weights)

    def program():
        placement = cluster(*range(num_ranks))
        t, i, w = (wb.to_global(value, placement=placement, sbp="B") for value in (table, indices, weights))
        found = everything(t.to_global(sbp=sbp).requires_grad_(), i, w)
        return [value.detach().full_tensor() for value in found]

    for values in run_ranks(program, num_ranks):
        for value, expected in zip(values, truth, strict=True):
            torch.testing.assert_close(value, expected.detach(), **tolerance(dtype))


def test_a_table_with_split_rows(launches):
    rows_of_a_table((7, 3, 5), torch.float32, 3, "S(0)", 3)
    assert {"_forward", "_backward"} <= set(launches)


def test_a_table_is_differentiated_twice(launches):
    rows_of_a_table((5, 2, 4), torch.float64, 1, "S(0)", 2, again=True)
    assert {"_forward", "_backward"} <= set(launches)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 5, 20), (2, 1, 3), (4, 700, 3), (5, 3, 0)], ids=str)
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_tables_of_all_kinds(shape, dtype, padding, launches):
    rows_of_a_table(shape, dtype, padding, "S(0)", 3)
    assert "_forward" in launches or not shape[2]


def drawn(program, monkeypatch, launches):
    """The random numbers of a program by kernels, and by the references."""
    by_kernel = run_ranks(program, 3)
    assert launches
    monkeypatch.setattr(launch, "requested", "auto")
    return by_kernel[0], run_ranks(program, 3)[0]


RANDOMS = {
    "rand": lambda p, dtype: wb.rand(5, 7, placement=p, sbp="S(1)", dtype=dtype),
    "uniform": lambda p, dtype: wb.zeros(4, 3, placement=p, sbp="S(0)", dtype=dtype).uniform_(-0.1, 0.3),
    "bernoulli": lambda p, dtype: wb.zeros(4, 3, 2, placement=p, sbp="S(1)", dtype=dtype).bernoulli_(0.3),
    "randint": lambda p, dtype: wb.zeros(9, placement=p, sbp="S(0)", dtype=dtype).random_(-3, 100),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", RANDOMS)
def test_random_numbers_have_the_bits_of_the_references(name, dtype, launches, monkeypatch):
    def program():
        return RANDOMS[name](cluster(0, 1, 2), dtype).full_tensor()

    found, wanted = drawn(program, monkeypatch, launches)
    assert torch.equal(found, wanted) and launches[0] == "_fill"


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])])
@pytest.mark.parametrize("p", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_dropout_drops_what_the_reference_drops(p, dtype, launches, monkeypatch):
    def program():
        x = (torch.arange(30).reshape(6, 5) + 1).to(dtype)
        given = wb.to_global(x, placement=cluster(0, 1, 2), sbp="B").to_global(sbp="S(1)").requires_grad_()
        out = F.dropout(given, p)
        out.backward(torch.ones_like(out))
        return out.detach().full_tensor(), given.grad.full_tensor()

    found, wanted = drawn(program, monkeypatch, launches)
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, expected, **tolerance(dtype))
        assert torch.equal(value == 0, expected == 0)
    assert p == 1.0 or "_fill" in launches
