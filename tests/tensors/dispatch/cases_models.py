"""Functions as the models of ``transformers`` call them: caches, mixtures of experts."""

from __future__ import annotations

import torch

from tests.tensors.dispatch.cases import Case


def _experts(generator: torch.Generator) -> list[torch.Tensor]:
    offsets = torch.tensor([2, 2, 7, 9], dtype=torch.int32)
    return [torch.randn(9, 8, generator=generator), torch.randn(4, 8, 12, generator=generator), offsets]


def _transposed(generator: torch.Generator) -> list[torch.Tensor]:
    rows, weights, offsets = _experts(generator)
    return [rows, weights.transpose(1, 2).contiguous(), offsets]


CASES = [
    Case("cat to nothing", lambda x: torch.cat([torch.tensor([]), x], dim=-2), ((3, 2, 4),)),
    Case("experts", lambda x, w, offsets: torch._grouped_mm(x, w, offs=offsets) * 2, (), _experts),
    Case(
        "experts transposed",
        lambda x, w, offsets: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets) * 2,
        (),
        _transposed,
    ),
]
