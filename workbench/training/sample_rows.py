"""Tensors of a batch whose rows are no samples: a sample has some of them, as an image has patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workbench.errors import RunError
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor

Rows = Mapping[str, Sequence[int] | None]
"""By the name of a tensor in a batch: the rows of each sample, in order; None for a tensor that belongs to all."""
GRIDS = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}
"""In vision-language models of transformers: patches of each image (time, height, width), and the tensor of patches."""


def lists_samples(value: Any) -> bool:
    """Whether it is a list with a dict for each sample, as labels of detection are: boxes and classes of an image.

    The tensors inside belong to one sample each, whatever their rows are.
    """
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def batch_leaves(batch: Any) -> list[Any]:
    """The leaves of a batch; a list of samples is one.

    >>> len(batch_leaves({"pixels": torch.ones(2, 3), "labels": [{"boxes": torch.ones(5, 4)}, {}]}))
    2
    """
    return tree_leaves(batch, is_leaf=lists_samples)


def split_list(samples: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """The entries of a list of samples for each micro-batch.

    Raises:
        RunError: the list has more or fewer entries than the batch has samples.
    """
    if len(samples) != sum(sizes):
        raise RunError(
            f"the batch has a list of {len(samples)} dicts and tensors of {sum(sizes)} samples. A list of dicts has "
            "one for each sample, in order."
        )
    return [samples[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def rows_by_grids(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """The rows of each image in tensors that have a row for each patch, where the batch has a grid for each image.

    >>> grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    >>> rows_by_grids({"image_grid_thw": grids, "pixel_values": torch.ones(12, 5)})
    {'pixel_values': [4, 8]}
    """
    found: dict[str, list[int]] = {}
    for name, grids in tensors.items():
        folder, _, short = name.rpartition(".")
        pixels = ".".join(filter(None, (folder, GRIDS.get(short, ""))))
        if short not in GRIDS or pixels not in tensors or grids.is_meta or grids.dim() != 2:
            continue
        values: Any = value_on_all_ranks(grids) if isinstance(grids, GlobalTensor) else grids
        rows = values.prod(1).tolist()
        if sum(rows) == tensors[pixels].shape[0]:
            found[pixels] = rows
    return found


def check_rows(rows: Rows, tensors: Mapping[str, torch.Tensor], num_samples: int) -> None:
    """Raise for rows that the batch does not have.

    Raises:
        RunError: no tensor of that name, not a number for each sample, or numbers that do not add up to its rows.
    """
    for name, of_samples in rows.items():
        if name not in tensors:
            raise RunError(
                f"rows={{{name!r}: ...}}: the batch has no tensor {name!r}, it has {', '.join(tensors)}. Names are the "
                "keys of a dict, or the positions of a tuple."
            )
        if of_samples is None:
            continue
        num_rows = tensors[name].shape[0] if tensors[name].dim() else 0
        if len(of_samples) != num_samples or sum(of_samples) != num_rows:
            raise RunError(
                f"rows={{{name!r}: ...}}: {len(of_samples)} numbers that add up to {sum(of_samples)}, but the batch "
                f"has {num_samples} samples and {name!r} has {num_rows} rows. Give the rows of each sample, in order, "
                f"or rows={{{name!r}: None}} to give the whole tensor to each micro-batch."
            )


def split_rows(tensor: torch.Tensor, of_samples: Sequence[int] | None, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The tensor's parts for micro-batches of ``sizes`` samples."""
    if of_samples is None:
        return [tensor] * len(sizes)
    ends = [0, *accumulate(sizes)]
    return list(tensor.split([sum(of_samples[start:end]) for start, end in pairwise(ends)]))


__all__ = ["GRIDS", "Rows", "check_rows", "rows_by_grids", "split_rows"]
