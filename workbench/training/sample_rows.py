"""How many samples a batch has, and what in it has no row per sample.

Patches of images: a sample has some of the rows. Lists with an entry per sample: each entry's rows are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


def count_samples(values: Iterable[Any]) -> int | None:
    """Number of rows that the tensors among ``values`` share; None if dim 0 is ambiguous. Without tensors the length of
    lists of dicts, or 1.

    A tensor of one row belongs to all samples. So does a tensor whose dims all have the length of the samples' dim 1
    (positions ``(T,)``, masks ``(T, T)`` beside words ``(N, T)``), unless that length is N.

    >>> count_samples([torch.ones(8, 32), torch.arange(32), torch.ones(1, 32), torch.tensor(0.5)])
    8
    """
    leaves = list(values)
    shapes = {tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    rows = {shape[0] for shape in shapes} or {len(leaf) for leaf in leaves if _lists(leaf, Mapping)}
    if len(rows) < 2:
        return next(iter(rows), 1)
    fitting = {n for n in rows if _share_the_others(n, shapes)}
    if len(fitting) > 1:  # one sample beside vectors, or samples beside what has one row
        fitting &= {1} if all(shape[0] == 1 or len(shape) == 1 for shape in shapes) else rows - {1}
    return fitting.pop() if len(fitting) == 1 else None


def may_count(num_samples: int, values: Iterable[Any]) -> bool:
    """Whether the tensors among ``values`` can be those of so many samples: any other belongs to all samples."""
    shapes = [tuple(leaf.shape) for leaf in values if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return any(shape[0] == num_samples for shape in shapes) and _share_the_others(num_samples, shapes)


def _share_the_others(num_samples: int, shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether, with ``num_samples`` samples, all tensors without one row per sample would belong to all samples."""
    lengths = {shape[1] for shape in shapes if shape[0] == num_samples and len(shape) > 1}
    others = [set(shape) for shape in shapes if shape[0] not in (num_samples, 1)]
    return all(len(dims) == 1 and dims <= lengths for dims in others)


def lists_samples(batch: Any) -> Callable[[Any], bool]:
    """Says of a part of the batch whether it is a list with an entry for each sample.

    Such are labels of detection, a dict for each image, and masks of segmentation, a tensor for each image. A list of
    tensors is one if it has as many entries as the tensors outside of lists have samples, unless all of its tensors
    have that many rows themselves; or as there are dicts, where no tensor is outside of lists. A tuple is one only if
    it has texts (captions), as many as there are samples; so is a list of texts.

    >>> batch = {"pixels": torch.ones(2, 3), "masks": [torch.ones(5, 4), torch.ones(1, 4)]}
    >>> lists_samples(batch)(batch["masks"])
    True
    """
    leaves = tree_leaves(batch, is_leaf=lambda part: _lists(part, Mapping) or _lists(part, torch.Tensor))
    are_loose = any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves)
    rows = count_samples(leaves) if are_loose or any(_lists(leaf, Mapping) for leaf in leaves) else None

    def is_list(part: Any) -> bool:
        if isinstance(part, (list, tuple)) and part and all(isinstance(entry, str) for entry in part):
            return len(part) == rows
        if not _lists(part, torch.Tensor):
            return _lists(part, Mapping)
        return len(part) == rows and not (are_loose and all(entry.dim() and len(entry) == rows for entry in part))

    return is_list


def _lists(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, kind) for entry in value)


def batch_leaves(batch: Any) -> list[Any]:
    """The leaves of a batch; a list of samples is one.

    >>> len(batch_leaves({"pixels": torch.ones(2, 3), "labels": [{"boxes": torch.ones(5, 4)}, {}]}))
    2
    """
    return tree_leaves(batch, is_leaf=lists_samples(batch))


def check_lists(batch: Any, num_samples: int) -> None:
    """Raise where a list of tensors can be read in two ways, before it is cut.

    Raises:
        RunError: it has as many tensors as there are samples, and each of them has that many rows.
    """
    is_list = lists_samples(batch)
    for part in tree_leaves(batch, is_leaf=lambda part: _lists(part, torch.Tensor)):
        if _lists(part, torch.Tensor) and len(part) == num_samples and not is_list(part):
            raise RunError(
                f"the batch has {num_samples} samples and a list of {num_samples} tensors of {num_samples} rows each: "
                "the list may have a tensor for each sample, or each tensor a row for each sample. Give a tuple if "
                "rows are samples. If entries are, pass another number of samples, or use one micro-batch."
            )


def check_targets(targets: Iterable[Any], num_samples: int) -> None:
    """Raise where samples are cut, and no target is: dim 0 of the inputs is then another one, such as time.

    Raises:
        RunError: there are targets, and none has a row for each sample, or one row for all.
    """
    shapes = [tuple(leaf.shape) for leaf in targets if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if shapes and all(shape[0] not in (1, num_samples) for shape in shapes):
        raise RunError(
            f"the batch has {num_samples} samples, by dim 0 of its inputs, and targets of shape "
            f"{', '.join(map(str, shapes))}: 0 of them have a row for each sample, so inputs would be cut and targets "
            "not. Samples lie along dim 0: x.transpose(0, 1), with batch_first=True in the model. If targets belong to "
            "all samples, use one micro-batch, or say so in the call: rows={'targets': None}."
        )


def split_list(samples: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
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
    """The tensor's parts for micro-batches of ``sizes`` samples.

    Each counts its writes alone: a forward may write into its labels while the backward of another part needs its own.
    """
    if of_samples is None:
        return [tensor] * len(sizes)
    ends = [0, *accumulate(sizes)]
    parts = tensor.split([sum(of_samples[start:end]) for start, end in pairwise(ends)])
    is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad
    return [part.data for part in parts] if is_plain else list(parts)
