"""Tensors made after others: values, dtypes, strides and gradients of one device, and nothing is gathered for them.

Written after the cases of PyTorch's test/distributed/tensor/test_tensor_ops.py and test_init.py.
"""

import pytest
import torch

import workbench as wb
from workbench.tensors.world import current
from workbench.testing import run_ranks

LIKE = {
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.int32),
    "ones_like": lambda x: torch.ones_like(input=x, requires_grad=True),
    "full_like": lambda x: torch.full_like(x, fill_value=2.5),
    "empty_like": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format).fill_(3.0),
    "of a transposed": lambda x: torch.zeros_like(x.t()),
    "of a transposed, contiguous": lambda x: torch.ones_like(x.t(), memory_format=torch.contiguous_format),
    "of channels last": lambda x: torch.zeros_like(x.view(2, 3, 2, 2).to(memory_format=torch.channels_last)),
}
NEW = {
    "new_zeros": lambda x: x.new_zeros(2, 3, requires_grad=True),
    "new_zeros without dims": lambda x: x.new_zeros(()),
    "new_ones": lambda x: x.new_ones(size=(2, 3), dtype=torch.int64),
    "new_full": lambda x: x.new_full((2,), fill_value=1.5, requires_grad=True),
    "new_empty_strided": lambda x: x.new_empty_strided((4, 3), (1, 4)).fill_(1.0),
    "new_empty_strided by name": lambda x: (
        x.new_empty_strided(size=(4,), stride=(2,), requires_grad=True).detach().fill_(2)
    ),
    "new_tensor": lambda x: x.new_tensor([[1, 2], [3, 4]], requires_grad=True),
    "new_tensor by name": lambda x: x.new_tensor(data=7, dtype=torch.int64),
    "new of sizes": lambda x: x.new(2, 3).fill_(1.0),
    "new of a size": lambda x: x.new(torch.Size([2])).fill_(1.0),
    "new of numbers": lambda x: x.new((2, 3)),
    "new": lambda x: x.new(),
}
PLAIN = torch.arange(24.0, dtype=torch.float64).view(4, 6)


def told(made):
    strides = None if getattr(made, "is_placeholder", False) else tuple(made.stride())  # there they are contiguous
    return made.detach(), made.dtype, made.requires_grad, strides


@pytest.mark.filterwarnings("error")
def test_as_on_one_device_and_without_an_exchange():
    expected = {name: told(make(PLAIN)) for name, make in (LIKE | NEW).items()}

    def program():
        found = []
        for sbp in ("S(0)", "S(1)", "B", "P"):
            x = wb.to_global(PLAIN, placement=wb.placement("cpu", ranks=[2, 0]), sbp="B").to_global(sbp=sbp)
            for name, make in (LIKE | NEW).items():
                current().traffic.reset()
                values, *rest = told(make(x))
                assert current().traffic.num_exchanges == 0 or "channels" in name, name
                assert str(values.sbp) in ({"P": "(B,)"}.get(sbp, f"({sbp},)"), "(B,)") or name.startswith("of "), name
                found.append((sbp, name, values.full_tensor(), *rest))
        return found

    for sbp, name, values, *rest in [item for found in run_ranks(program, 3) for item in found]:
        wanted, *others = expected[name]
        assert torch.equal(values, wanted) and rest[:2] == others[:2], (sbp, name, values, rest, others)
        assert rest[2] in (None, others[2]), (sbp, name, rest, others)
