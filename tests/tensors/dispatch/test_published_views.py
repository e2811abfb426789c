"""Views of split tensors: which layouts need an exchange, and that the others stay views of the shard.

Written after test/distributed/tensor/test_view_ops.py of PyTorch, whose views need none in more layouts nowhere. Not
here: how torch writes a view as groups of dims.
"""

import torch

import workbench as wb
from workbench.tensors.world import current
from workbench.testing import run_ranks

# (function, shape, split dims that need an exchange)
VIEWS = {
    "atleast_1d": (torch.atleast_1d, (), ()),
    "atleast_2d": (torch.atleast_2d, (6,), ()),
    "atleast_3d": (torch.atleast_3d, (6,), ()),
    "atleast_3d of two dims": (torch.atleast_3d, (4, 6), ()),
    "atleast_3d of four dims": (torch.atleast_3d, (4, 6, 2, 4), ()),
    "broadcast_to more dims": (lambda x: torch.broadcast_to(x, (7, 4, 6)), (4, 6), ()),
    "broadcast_to a longer dim": (lambda x: torch.broadcast_to(x, (3, 4, 5, 6)), (4, 1, 6), (1,)),
    "broadcast_to, a dim as it was": (lambda x: torch.broadcast_to(x, (-1, 6)), (4, 6), ()),
    "expand": (lambda x: x.expand(6, 4, 8, -1, 4), (4, 1, 6, 1), (1, 3)),
    "flatten": (torch.flatten, (4, 6), (1,)),
    "ravel": (torch.ravel, (6,), ()),
    "movedim": (lambda x: torch.movedim(x, (0, 2, 1), (2, 1, 0)), (4, 6, 8), ()),
    "movedim from the end": (lambda x: torch.movedim(x, (1, 2), (-3, -2)), (6, 4, 8), ()),
    "permute from the end": (lambda x: torch.permute(x, (-1, -3, -2)), (4, 6, 8), ()),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1, 2), (4, 6), (1,)),
    "tile": (lambda x: torch.tile(x, (1, 3)), (4, 6, 8), (2,)),
    "transpose": (lambda x: torch.transpose(x, -1, 0), (4, 6, 8, 6), ()),
    "unsqueeze": (lambda x: torch.unsqueeze(x, 1), (4, 6), ()),
    "view that merges": (lambda x: x.view(24, 8), (4, 6, 8), (1,)),
    "view that splits": (lambda x: x.view(4, 2, 5, 3, 2), (8, 5, 6), (2,)),
    "view across dims": (lambda x: x.view(4, 4, 5, 3), (8, 5, 6), (1, 2)),
    "view that adds ones": (lambda x: x.view(1, 4, 2, 4, 1, 3, 1), (4, 24), ()),
    "view that drops ones": (lambda x: x.view(-1), (1, 1, 4, 1, 6, 1), (0, 1, 3, 4, 5)),
    "view_as_complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j), (4, 6, 2), (2,)),
    "unbind": (lambda x: torch.stack(x.unbind(1)), (4, 6), (1,)),
    "slice": (lambda x: x[:, :], (4, 6), ()),
    "view of one row": (lambda x: x.view(1, 2, 4), (1, 2, 2, 2), (3,)),
    "view of uneven rows": (lambda x: x.view(5, 8), (5, 2, 2, 2), (2, 3)),
}
COPIES = {"repeat", "tile", "view_as_complex", "unbind", "view that splits"}
"""Copies on one device too; or of a shard with strides that no view has (a dim behind the split one is merged)."""


def drawn(shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def test_what_moves_and_what_stays_a_view():
    def program():
        problems = []
        for name, (view, shape, moved) in VIEWS.items():
            x = drawn(shape)
            for sbp in [*(f"S({dim})" for dim in range(len(shape))), "B", "P"]:
                split = wb.to_global(x, placement=wb.placement.all("cpu"), sbp="B").to_global(sbp=sbp)
                current().traffic.reset()
                found = view(split)
                has_moved, is_moved = current().traffic.num_exchanges > 0, any(sbp == f"S({dim})" for dim in moved)
                is_view = found.to_local().data_ptr() == split.to_local().data_ptr()
                if has_moved != is_moved or not torch.equal(found.full_tensor(), view(x)):
                    problems.append((name, sbp, found.sbp, current().traffic.num_exchanges))
                if not (is_view or has_moved or name in COPIES or not split.to_local().numel()):
                    problems.append((name, sbp, "is a copy"))
        return problems

    assert run_ranks(program, 2) == [[]] * 2
