"""Views, joins and rearrangements, for the sweep over layouts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.tensors.dispatch.cases import Case


def _case(name, function, *shapes):
    return Case(name, function, shapes)


CASES = [
    _case("view splits a dim", lambda x: x.view(2, 4, 3).sin(), (8, 3)),
    _case("view uneven", lambda x: x.view(5, 3, 2), (15, 2)),
    _case("view shifts", lambda x: x.view(3, 4).view(6, 2), (2, 6)),
    _case("view of nothing", lambda x: x.view(2, 0, 3).reshape(0, 5), (0, 6)),
    _case("view of a transpose", lambda x: x.t().reshape(-1), (5, 4)),
    _case("view as", lambda x, y: x.view_as(y) + y, (6, 2), (3, 4)),
    _case("view dtype", lambda x: x.view(torch.int32), (5, 4)),
    _case("unflatten", lambda x: x.unflatten(1, (2, -1)), (3, 8)),
    _case("windows", lambda x: x.unfold(1, 3, 2), (5, 7)),
    _case("diagonal", lambda x: x.diagonal(1, 0, 2), (4, 5, 3)),
    _case("complex parts", lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j), (5, 3, 2)),
    _case("chunks of a split dim", lambda x: torch.stack([c.sum(0) for c in x.chunk(3)]), (8, 3)),
    _case("split by sizes", lambda x: x.split([1, 6, 1])[1] * 2, (8, 3)),
    _case("cat three", lambda x, y, z: torch.cat([x, y, z], 1), (4, 5), (4, 1), (4, 3)),
    _case("block diag", lambda x, y: torch.block_diag(x, y), (3, 2), (1, 4)),
    _case("repeat", lambda x: x.repeat(2, 3, 1), (5, 4)),
    _case("repeat interleave", lambda x: x.repeat_interleave(3, 0), (5, 4)),
    _case("roll two", lambda x: x.roll((2, -1), (0, 1)), (5, 4)),
    _case("rot90", lambda x: torch.rot90(x, 3, (0, 2)), (3, 4, 5)),
    _case("triangle with offset", lambda x: x.triu(-1) + x.tril(-2), (2, 5, 4)),
    _case("filled diagonal", lambda x: (x * 1).fill_diagonal_(2.5), (5, 4)),
    _case("trace", torch.trace, (5, 4)),
    _case("diag embed", lambda x: torch.diag_embed(x, 1, 0, 2), (5, 3)),
    _case("pad zeros", lambda x: F.pad(x, (2, -1, 1, 3)), (5, 4)),
    _case("pad reflect", lambda x: F.pad(x, (2, 1), mode="reflect"), (3, 2, 6)),
    _case("pixel shuffle", lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2) * 2, 2), (2, 8, 2, 3)),
    _case("bilinear resize", lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), (2, 3, 4, 4)),
    _case("meshgrid", lambda x, y: torch.stack(torch.meshgrid(x, y, indexing="ij")), (5,), (3,)),
]
