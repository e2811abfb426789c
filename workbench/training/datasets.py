"""Data sets: their number of samples, and batches of them.

A data set is all samples in arrays (a tuple or a dict of them, nested or not, one sample per row), or a map-style
``Dataset``, ``datasets.Dataset`` or list whose items are tuples or dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from workbench.errors import RunError
from workbench.tensors.agreement import fingerprint
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.batches import Batch, LossFunction, as_tensors, named_tensors, num_samples, of_kind
from workbench.training.sample_rows import batch_leaves, count_samples

Collate = Callable[[list[Any]], Any]
"""Samples -> a batch, as for ``torch.utils.data.DataLoader``."""
_NUM_ROWS = 8
"""Of an array that its checksum reads, at most."""


def check_dataset(dataset: Any, collate_fn: Collate | None, call: str) -> None:
    """Raise if a data set does not give samples by position.

    Raises:
        RunError: it has no positions, makes batches itself, is one table of all columns, has global tensors, or
            consists of arrays while ``collate_fn`` is given.
    """
    kind = type(dataset).__name__
    if hasattr(dataset, "__array__") and hasattr(dataset, "columns"):
        raise RunError(
            f"{call}: the data set is a {kind} of {len(dataset)} rows. Its positions name columns, but a sample "
            "is a row. Give columns for inputs and targets in a tuple: (table[['a', 'b']].astype('float32'), "
            "table['y']); or a dict from the names of the model's arguments to columns."
        )
    if isinstance(dataset, DataLoader):
        more = "" if dataset.collate_fn is default_collate else ", collate_fn=loader.collate_fn"
        size = f" of {len(dataset.dataset)} samples" if hasattr(dataset.dataset, "__len__") else ""
        raise RunError(
            f"{call}: the data set is a {kind}{size} in batches of {dataset.batch_size}. "
            f"The workbench takes samples by position and makes its own batches: give loader.dataset, and "
            f"batch_size={dataset.batch_size}{more}."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        fix = "call it, and give what it returns" if callable(dataset) else "list(dataset), for example"
        raise RunError(
            f"{call}: the data set is a {kind}, which has no positions. All runs and ranks take the same samples, each "
            f"by its index: give one with __getitem__ and __len__: {fix}."
        )
    if collate_fn is not None and is_of_arrays(dataset):
        raise RunError(
            f"{call}: collate_fn= with a {kind} of {len(dataset)} arrays. A batch is some rows of the arrays. "
            "Leave out collate_fn, or give a list of samples or a TensorDataset."
        )
    for leaf in tree_leaves(_tensors_or_ends(dataset)):
        if isinstance(leaf, GlobalTensor):
            raise RunError(
                f"{call}: the data set has a global tensor of shape {tuple(leaf.shape)}, {leaf.layout_on_ranks}. Each "
                "rank reads other samples, and to read a row of a global tensor, all ranks read the same one. Give its "
                "value: x.full_tensor()."
            )


def num_samples_of(dataset: Any) -> int:
    """Number of samples in a data set.

    Raises:
        RunError: tensors with different numbers of samples.
    """
    columns = columns_of(dataset)
    if columns is None:
        return len(dataset)
    if count_samples(batch_leaves(columns)) is None:
        told = ", ".join(f"{name} {tuple(column.shape)}" for name, column in named_tensors(columns).items())
        raise RunError(
            f"the data set's tensors have different numbers of samples: {told}. Each has one row per sample, along dim "
            "0; a number or a tensor of 1 row goes whole to each batch. Give all the same number of rows, or a list of "
            "samples, each with its own rows, and collate_fn=."
        )
    return num_samples(columns)


def epoch_by_epoch(num_samples: int, shuffle: bool, seed: int) -> Iterator[torch.Tensor]:
    """The indices of the samples in one epoch after another: in their order, or each epoch in another one.

    >>> next(epoch_by_epoch(3, shuffle=False, seed=0))
    tensor([0, 1, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        if shuffle:
            yield torch.randperm(num_samples, generator=generator, device="cpu")
        else:
            yield torch.arange(num_samples, device="cpu")


def take(dataset: Any, indices: torch.Tensor, collate_fn: Collate | None = None) -> Any:
    """The samples at ``indices``, as a batch of tensors. ``collate_fn`` makes the batch from a list of samples.

    >>> take({"x": torch.ones(9, 3), "label": [0, 1] * 4 + [0]}, torch.arange(3))["label"]
    tensor([0, 1, 0])
    """
    columns = columns_of(dataset) if collate_fn is None else None
    if columns is None:
        return (collate_fn or collate)([dataset[int(index)] for index in indices])
    leaves, structure = tree_flatten(columns)
    taken = zip(leaves, which_have_rows(columns), strict=True)
    return tree_unflatten([leaf[indices] if has_rows else leaf for leaf, has_rows in taken], structure)


def which_have_rows(columns: Any) -> list[bool]:
    """For each tensor of a data set of tensors, whether it has a row per sample. Others belong to all samples.

    >>> which_have_rows({"words": torch.ones(9, 4), "places": torch.arange(4)})
    [True, False]
    """
    rows = num_samples(columns)
    return [leaf.dim() > 0 and leaf.shape[0] == rows for leaf in tree_leaves(columns)]


def first_batch(dataset: Any, loss_fn: LossFunction | None, collate_fn: Collate | None = None) -> Batch:
    """The first two samples of a data set, or one if there is no other."""
    indices = torch.arange(min(2, num_samples_of(dataset)), device="cpu")
    return Batch.of(take(dataset, indices, collate_fn), loss_fn)


def columns_of(dataset: Any) -> Any:
    """The tensors of a data set whose samples all are in tensors; None for a data set that is read sample by sample."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    return _as_columns(dataset) if is_of_arrays(dataset) else None


def checksum_of(dataset: Any) -> str:
    """A checksum of a data set by which ranks see that they have others. It reads no sample: of arrays it has some
    rows, of a subset some indices, of a list the first and the last entry. Empty where nothing is known so.
    """
    columns = columns_of(dataset)
    if columns is not None:
        found = [column for column in tree_leaves(columns) if column.dim() and column.layout is torch.strided]
        return fingerprint(column[:: len(column) // _NUM_ROWS + 1].contiguous() for column in found)
    if isinstance(dataset, Subset):
        return f"{fingerprint([torch.as_tensor(dataset.indices)])} of {checksum_of(dataset.dataset)}"
    return fingerprint(tree_leaves(as_tensors(_tensors_or_ends(dataset))))


def _tensors_or_ends(dataset: Any) -> Any:
    """What is in a data set of tensors, or the first and the last entry of a list; nothing of any other."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    if is_of_arrays(dataset):
        return dataset
    return [dataset[0], dataset[-1]] if isinstance(dataset, list) and dataset else []


def is_of_arrays(dataset: Any) -> bool:
    """Whether a data set is all samples in arrays."""
    return isinstance(dataset, (tuple, Mapping))


def with_tensors(dataset: Any) -> Any:
    """A data set of arrays with tensors for them: its lists are converted once for all batches. Any other unchanged.

    Tensors have the memory of their arrays.
    """
    return _as_columns(dataset) if is_of_arrays(dataset) else dataset


def is_table(value: Any) -> bool:
    """Whether it is a table or a column of one, of pandas for example: numpy can read it, torch cannot."""
    return hasattr(value, "__array__") and not isinstance(value, (torch.Tensor, np.ndarray))


def _as_columns(value: Any) -> Any:
    """The arrays of a data set as tensors. A list is an array too, with one entry per sample, and so is what numpy can
    read: tables of pandas, and their columns.
    """
    if isinstance(value, Mapping):
        return {key: _as_columns(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return of_kind(value, map(_as_columns, value))
    try:
        return torch.as_tensor(np.array(value) if is_table(value) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RunError(
            f"the data set has a {type(value).__name__} beside its arrays, and torch cannot convert it: {error}. A "
            "tuple or dict holds arrays of numbers, one row per sample. Put samples of other forms into a list, and "
            "give a collate_fn that makes batches."
        ) from error


def collate(samples: Sequence[Any]) -> Any:
    """Samples as one batch: torch's ``default_collate``, with mappings as dicts and lists of numbers as tensors.

    >>> collate([{"input_ids": [1, 2, 3], "label": 0}, {"input_ids": [4, 5, 6], "label": 1}])
    {'input_ids': tensor([[1, 2, 3],
            [4, 5, 6]]), 'label': tensor([0, 1])}

    Raises:
        RunError: samples of different shapes.
    """
    try:
        return default_collate([_as_sample(sample) for sample in samples])
    except RuntimeError as error:
        raise RunError(
            f"{len(samples)} samples cannot form a batch: {error}. All need the same shapes: pad them in the dataset, "
            "e.g. to the longest, with labels of -100 and an attention_mask of 0 there, or give a collate_fn."
        ) from error


def _as_sample(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {key: _as_sample(entry) for key, entry in sample.items()}
    if isinstance(sample, tuple):
        return of_kind(sample, map(_as_sample, sample))
    is_array = isinstance(sample, list) and all(isinstance(leaf, Number) for leaf in tree_leaves(sample))
    return torch.as_tensor(sample) if is_array else as_tensors(sample)
