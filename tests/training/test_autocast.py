"""Mixed precision by ``torch.autocast``: one device's dtypes, its numbers within bf16, also on placeholders."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.tensors.dispatch.against_one_device import DATA
from workbench.tensors.dispatch import planning
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.testing import run_ranks

LABELS = torch.tensor([0, 3, 1, 2, 3])
FUNCTIONS = {
    "matmul": lambda a, w, y: a @ w,
    "linear": lambda a, w, y: F.linear(a, w.t()),
    "einsum": lambda a, w, y: torch.einsum("ij,jk->ik", a, w),
    "layer_norm": lambda a, w, y: F.layer_norm(a @ w, (4,)),
    "softmax": lambda a, w, y: (a @ w).softmax(-1),
    "cross_entropy": lambda a, w, y: F.cross_entropy(a @ w, y),
    "mse_loss": lambda a, w, y: F.mse_loss((a @ w)[:, :3], a),
    "norm": lambda a, w, y: (a @ w).norm(),
    "cat": lambda a, w, y: torch.cat([a @ w, a], 1),
    "residual": lambda a, w, y: (a @ w * 2 + (a @ w).relu()).sum() + a.mean(),
    "batch_norm": lambda a, w, y: F.batch_norm(a @ w, None, None, training=True),
}


def outputs(a, w, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [function(a, w, y) for function in FUNCTIONS.values()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sbps", [("S(0)", "B"), ("B", "S(1)"), ("S(1)", "S(0)")])
@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.{FallbackWarning.__name__}")
def test_dtypes_and_numbers(sbps):
    leaves = [DATA[name].float().requires_grad_() for name in "aw"]
    expected = outputs(*leaves, LABELS)
    sum(tensor.float().sum() for tensor in expected).backward()

    def program():
        placement = wb.placement("cpu", ranks=[0, 1])
        tensors = [
            wb.tensor(DATA[name].float(), placement=placement, sbp=sbp, requires_grad=True)
            for name, sbp in zip("aw", sbps, strict=True)
        ]
        found = outputs(*tensors, LABELS)
        sum(tensor.float().sum() for tensor in found).backward()
        dtypes = [str(tensor.dtype) for tensor in found]
        everywhere = wb.placement.all("cpu")  # the results leave for a rank that has only had placeholders
        whole = [t.detach().to_global(placement=everywhere, sbp="B") for t in (*found, *(t.grad for t in tensors))]
        return dtypes, [tensor.to_local().float() for tensor in whole]

    wanted = [*expected, *(leaf.grad for leaf in leaves)]
    for dtypes, values in run_ranks(program, 3):
        assert dtypes == [str(tensor.dtype) for tensor in expected]
        for name, found, want in zip([*FUNCTIONS, "gradient of a", "gradient of w"], values, wanted, strict=True):
            torch.testing.assert_close(
                found, want.detach().float(), rtol=3e-2, atol=0.1, msg=lambda m, n=name: f"{n}: {m}"
            )


OF_16_BITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(7)).bfloat16()
CLASSES = torch.tensor([0, 3, 1, 2, 3, 0])
OVER_SPLIT_DIMS = {
    "softmax": lambda x, y: x.softmax(1),
    "log_softmax": lambda x, y: F.log_softmax(x, 1),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), y[0], y[1]),
    "rms_norm": lambda x, y: F.rms_norm(x, (4,), y[0]),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x, 2, 1),
    "dist": lambda x, y: torch.dist(x, y),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, 1),
    "prod": lambda x, y: x.prod(1),
    "cross_entropy": lambda x, y: F.cross_entropy(x, CLASSES),
    "cross_entropy of 64 bits": lambda x, y: F.cross_entropy(x.double(), CLASSES),
    "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(6), reduction="none"),
    "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, x * 2, reduction="none"),
}


def split_columns(whole):
    return wb.to_global(whole, wb.placement("cpu", ranks=[0, 1]), "B").to_global(sbp="S(1)")


@pytest.mark.parametrize("name", OVER_SPLIT_DIMS)
def test_functions_over_a_split_dim_have_the_dtype_of_one_device(name):
    def program():
        with torch.autocast("cpu", torch.bfloat16):
            found = OVER_SPLIT_DIMS[name](split_columns(OF_16_BITS), split_columns(OF_16_BITS.flip(0)))
            expected = OVER_SPLIT_DIMS[name](OF_16_BITS, OF_16_BITS.flip(0))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.full_tensor(), expected, rtol=3e-2, atol=3e-2)

    run_ranks(program, 3)


@pytest.mark.parametrize("name", OVER_SPLIT_DIMS)
def test_functions_over_a_split_dim_compute_in_32_bits_where_torch_does(name, monkeypatch):
    """As on a GPU. Here, a substitute says that autocast gives 32 bits."""

    def infer(func, args, kwargs):
        infos, *rest = torchs(func, args, kwargs)
        is_cast = bool(planning.autocast_state())
        wide = [(shape, torch.float32 if is_cast and d == torch.bfloat16 else d, link) for shape, d, link in infos]
        return wide, *rest

    def program():
        with torch.autocast("cpu", torch.bfloat16):
            found = OVER_SPLIT_DIMS[name](split_columns(OF_16_BITS), split_columns(OF_16_BITS.flip(0)))
        torch.testing.assert_close(found.full_tensor(), expected)

    expected = OVER_SPLIT_DIMS[name](OF_16_BITS.float(), OF_16_BITS.flip(0).float())
    torchs = planning._inferred_or_none
    monkeypatch.setattr(planning, "_inferred_or_none", infer)
    run_ranks(program, 3)


class Halved(torch.autograd.Function):
    """Does not run on tensors without data."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() / 2)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


@wb.register_rule("b D -> b", meta=lambda x: x.new_empty(x.shape[:1]))
def place_of_largest(x):
    return torch.tensor([row.index(max(row)) for row in x.tolist()], dtype=x.dtype).reshape(len(x))


@wb.register_rule("b D -> b D")
def negated_in_numpy(x):
    return torch.from_numpy(-x.numpy())


NEED_DATA = {
    "one_hot": lambda x: F.one_hot(x.long()),
    "where": lambda x: torch.cat(torch.where(x > 0)),
    "tensor_split": lambda x: torch.cat(torch.tensor_split(x, x[0].long())),
    "place_of_largest": place_of_largest,
    "negated_in_numpy": negated_in_numpy,
    "Halved": Halved.apply,
}


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.{FallbackWarning.__name__}")
def test_functions_that_cannot_run_without_data(is_cast):
    whole = torch.tensor([[0.0, 2, 1], [3, 1, 0], [0, 0, 2], [1, 1, 4]])

    def program():
        x = wb.to_global(whole, wb.placement("cpu", ranks=[0, 1]), "B").to_global(sbp="S(0)")
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            results = [function(x) for function in NEED_DATA.values()]
        return [x.to_global(placement=wb.placement.all("cpu"), sbp="B").to_local().tolist() for x in results]

    expected = [function(whole).tolist() for function in NEED_DATA.values()]
    assert run_ranks(program, 3) == [expected] * 3


def test_attention_with_a_padding_mask_has_the_dtypes_of_one_device():
    """The mask of 32 bits made scores and weights of 32 bits."""
    attention, x, padding = nn.MultiheadAttention(4, 2, batch_first=True), torch.rand(4, 3, 4), torch.zeros(4, 3)
    padding[:, 2] = 1

    def dtypes(module):
        with torch.autocast("cpu", torch.bfloat16):
            return [result.dtype for result in module(x, x, x, key_padding_mask=padding.bool())]

    expected = dtypes(attention)
    program = lambda: dtypes(wb.parallelize(copy.deepcopy(attention), "*: data"))  # noqa: E731
    assert run_ranks(program, 2) == [expected] * 2
