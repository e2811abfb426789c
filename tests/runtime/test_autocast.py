"""Mixed precision by ``torch.autocast``: one device's dtypes, and its numbers within bf16; ghosts know the dtypes."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.runtime.against_one_device import DATA
from workbench.testing import run_ranks


def region(a, w, v):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = a @ w
        z = F.layer_norm(F.linear(a, w.t()), (4,))
        p = z.softmax(-1)
        e = torch.einsum("ij,jk->ik", a, w)
        total = (y * 2 + p).sum() + e.float().mean() + (a * v).sum()
    return [y, z, p, e, total]


@pytest.mark.parametrize("sbps", [("S(0)", "B", "B"), ("B", "S(1)", "B"), ("S(1)", "S(0)", "S(0)")])
def test_dtypes_and_numbers(sbps):
    leaves = [DATA[name].float().requires_grad_() for name in "awv"]
    expected = region(*leaves)
    expected[-1].backward()

    def program(rank):
        placement = wb.placement("cpu", ranks=[0, 1])
        tensors = [
            wb.tensor(DATA[name].float(), placement=placement, sbp=sbp, requires_grad=True)
            for name, sbp in zip("awv", sbps, strict=True)
        ]
        found = region(*tensors)
        dtypes = [str(tensor.dtype) for tensor in found]
        found[-1].backward()
        everywhere = wb.placement.all("cpu")  # the results leave for a rank that has only had ghosts
        values = [t.detach().to_global(placement=everywhere, sbp="B").to_local() for t in found]
        grads = [t.grad.to_global(placement=everywhere, sbp="B").to_local() for t in tensors]
        return dtypes, values, grads

    for dtypes, values, grads in run_ranks(program, 3):
        assert dtypes == [str(tensor.dtype) for tensor in expected]
        for found, want in zip([*values, *grads], [*expected, *(leaf.grad for leaf in leaves)], strict=True):
            torch.testing.assert_close(found, want.detach(), rtol=3e-2, atol=6e-2)
