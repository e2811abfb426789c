"""Mixed precision by ``torch.autocast``: one device's dtypes, its numbers within bf16, also on placeholders."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.tensors.dispatch.against_one_device import DATA
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
