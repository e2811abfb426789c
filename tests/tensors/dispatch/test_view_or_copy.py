"""Whether a result shares memory with its operand is as on one device, in every layout, also on ranks outside.

Each function is called twice: once its result is written and the operand is read, once the other way round.
"""

import itertools
import warnings

import pytest
import torch

import workbench as wb
from tests.tensors.dispatch.against_one_device import assert_same, logical
from workbench.tensors.dispatch.fallback import FallbackWarning
from workbench.testing import run_ranks

IDS = torch.tensor([0, 1])
FUNCTIONS = """
x.transpose(1, 2).reshape(2, 3, 4)
x.transpose(1, 2).contiguous()
x.transpose(1, 2).contiguous().reshape(2, 12)
x.transpose(1, 2).flatten(2)
x.transpose(1, 2).transpose(1, 2).reshape(-1)
x.permute(3, 0, 1, 2).reshape(-1)
x.movedim(0, 3).ravel()
x.expand(3, 2, 2, 3, 2).reshape(6, 2, 3, 2)
x.expand(1, 2, 2, 3, 2).reshape(4, 3, 2)
x.reshape(-1)
x.reshape(8, 3)
x.flatten()
x.flatten(1, 2)
x.ravel().reshape(4, 6)
x.reshape(3, 8).reshape(-1)[3:7]
x.contiguous()
x.contiguous(memory_format=torch.channels_last)
x.contiguous(memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last)
x.contiguous(memory_format=torch.channels_last).reshape(2, 12)
x[:, :1].contiguous()
x[:1].contiguous()
x[:1].reshape(3, 4)
x[:, 1:].reshape(12)
x[:, :, ::2].contiguous()
x[::2].contiguous()
x[1].reshape(12)
x[:, 1].flatten()
x[..., 1].contiguous()
x[..., 1].reshape(2, 6)
x[IDS]
x[:, IDS]
x[[0, 1]]
x[x[:, 0, 0, 0] > -1]
x[True]
x[0, IDS]
x.take(IDS)
x.repeat_interleave(1, 0)
x[:1].repeat_interleave(2, 0)
x.repeat_interleave(1)
x.to(memory_format=torch.contiguous_format)
x.float()
x.double()
x.float(memory_format=torch.contiguous_format)
x.type(torch.float32)
x.expand(3, 2, 2, 3, 2)
torch.broadcast_tensors(x, torch.ones(2, 1, 1, 1, 1))[0]
torch.meshgrid(x[0, 0, :, 0], x[0, 1, :, 1], indexing="ij")[0]
torch.cartesian_prod(x[0, 0, :, 0])
torch.cartesian_prod(x[0, 0, :, 0], x[0, 1, :, 1])
torch.linalg.diagonal(x)
torch.linalg.diagonal(x[1:], offset=1, dim1=1, dim2=2)
x.sum_to_size(2, 2, 3, 2)
x[1:].sum_to_size(1, 2, 3, 2)
x.sum_to_size(2, 1, 2)
x.sum_to_size(torch.Size([2, 1, 3, 2]))
x.to_dense()
x[1].to_dense()
torch.meshgrid(x[0, 0, :, 0], x[0, 1, :, 1], indexing="xy")[1]
torch.einsum("iijk->ijk", x)
torch.einsum("aabc->bac", x)
torch.einsum("abcd->bdac", x)
""".strip().splitlines()
LAYOUTS = [(2, [0, 1], "S(0)"), (3, [0, 1], "S(1)"), (3, [2, 0, 1], "S(2)"), (2, [0, 1], "P"), (3, [1, 2], "S(3)")]


def call(text, x):
    return eval(text, {"torch": torch, "x": x, "IDS": IDS})


def write_both_ways(make):
    found = {}
    for text in FUNCTIONS:
        for writes_to_result in (True, False):
            x = make() * 1
            y = call(text, x)
            before = x.sum(2), (y * y).sum()
            with torch.no_grad():
                (y if writes_to_result else x).fill_(9)
            found[text, writes_to_result] = [*before, x, y, x.sum(2)]
    return found


MADE = """
torch.relu(x.transpose(0, 1))
torch.square(x.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
x.transpose(1, 2) * 2
(x.transpose(0, 1) + x.transpose(0, 1)).transpose(0, 1)
x.transpose(0, 1).double().float()
""".strip().splitlines()
OF_MADE = """
x.contiguous()
x.reshape(-1)
x.transpose(0, 1).contiguous()
x.transpose(1, 2).reshape(-1)
x.float()
x.to(torch.float32)
x.positive()
x.conj()
x[:1].float()
""".strip().splitlines()


def write_and_use(make):
    """As above, of operands that a function has made, and both are used before and after."""
    found = {}
    for made, text, writes_to_result in itertools.product(MADE, OF_MADE, (True, False)):
        x = call(made, make())
        y = call(text, x)
        before = x.sum(2), x.sum(0), y.sum(), (y * y).sum()
        with torch.no_grad():
            (y if writes_to_result else x).fill_(9)
        found[made, text, writes_to_result] = [*before, x.sum(2), x.sum(0), y.sum(), x, y]
    return found


CASES = [(write_both_ways, *layout) for layout in LAYOUTS]
CASES += [
    (write_and_use, *layout) for layout in LAYOUTS if layout[2] != "P"
]  # a function that boxes makes it contiguous


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("write", "num_ranks", "ranks", "sbp"), CASES)
def test_what_is_a_view_on_one_device_is_one_in_every_layout(write, num_ranks, ranks, sbp):
    data = torch.arange(24.0).reshape(2, 2, 3, 2)

    def program():
        placement = wb.placement(ranks=ranks)
        return logical(write(lambda: wb.to_global(data, placement, "B").to_global(sbp=sbp)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = run_ranks(program, num_ranks)
    expected = write(data.clone)
    for rank in range(num_ranks):
        for case, values in expected.items():
            assert_same(found[rank][case], values, f"{case} in {sbp} on {ranks}, rank {rank}")
