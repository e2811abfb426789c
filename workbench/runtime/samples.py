"""Data sets: how many samples they have, and batches of them.

A data set is all samples in arrays (a tuple or a dict of them, nested or not, one sample per row), or a map-style
``Dataset``, ``datasets.Dataset`` or list whose items are tuples or dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import TensorDataset, default_collate

from workbench.errors import RunError
from workbench.runtime.batches import Batch, LossFunction, as_tensors, num_samples


def num_samples_of(dataset: Any) -> int:
    """Samples in a data set.

    Raises:
        RunError: tensors of unlike numbers of samples.
    """
    columns = columns_of(dataset)
    return len(dataset) if columns is None else num_samples(columns)


def take(dataset: Any, indices: torch.Tensor) -> Any:
    """The samples at ``indices``, as a batch of tensors.

    >>> take({"x": torch.ones(9, 3), "label": [0, 1] * 4 + [0]}, torch.arange(3))["label"]
    tensor([0, 1, 0])
    """
    columns = columns_of(dataset)
    if columns is None:
        return collate([dataset[int(index)] for index in indices])
    rows = num_samples(columns)
    return tree_map_only(
        torch.Tensor, lambda part: part[indices] if part.dim() and part.shape[0] == rows else part, columns
    )


def first_batch(dataset: Any, loss_fn: LossFunction | None, num_samples: int = 2) -> Batch:
    """The first samples of a data set, as many as there are up to ``num_samples``."""
    indices = torch.arange(min(num_samples, num_samples_of(dataset)))
    return Batch.of(take(dataset, indices), loss_fn)


def columns_of(dataset: Any) -> Any:
    """A data set whose samples all lie in tensors, as these tensors; None for one that is read sample by sample."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    return _as_columns(dataset) if isinstance(dataset, (tuple, Mapping)) else None


def _as_columns(value: Any) -> Any:
    """A data set that lies in arrays, as tensors; its lists are arrays too, with one entry per sample."""
    if isinstance(value, Mapping):
        return {key: _as_columns(entry) for key, entry in value.items()}
    return tuple(map(_as_columns, value)) if isinstance(value, tuple) else torch.as_tensor(value)


def collate(samples: Sequence[Any]) -> Any:
    """Samples as one batch: torch's ``default_collate``, where mappings are dicts and lists of numbers are tensors.

    >>> collate([{"input_ids": [1, 2, 3], "label": 0}, {"input_ids": [4, 5, 6], "label": 1}])
    {'input_ids': tensor([[1, 2, 3],
            [4, 5, 6]]), 'label': tensor([0, 1])}

    Raises:
        RunError: samples of unlike shapes.
    """
    try:
        return default_collate([_as_sample(sample) for sample in samples])
    except RuntimeError as error:
        raise RunError(
            f"{len(samples)} samples are no batch: {error}. All must have the same shapes: pad them in the dataset, "
            "e.g. to the longest, with labels of -100 and an attention_mask of 0 there."
        ) from error


def _as_sample(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {key: _as_sample(entry) for key, entry in sample.items()}
    if isinstance(sample, tuple):
        return tuple(map(_as_sample, sample))
    is_array = isinstance(sample, list) and all(isinstance(leaf, Number) for leaf in tree_leaves(sample))
    return torch.as_tensor(sample) if is_array else as_tensors(sample)


__all__ = ["collate", "columns_of", "first_batch", "num_samples_of", "take"]
