"""Iterable data sets: samples in an order of their own, without positions, such as ``IterableDataset`` or a streamed
``datasets.IterableDataset``.

Every rank reads the whole stream in its order, and makes a batch of the rows of each chunk that it needs. So batches
depend on no number of ranks or workers, and all ranks know where the stream ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from workbench.errors import RunError
from workbench.tensors import default_generator
from workbench.tensors.agreement import fingerprint
from workbench.training.batches import as_tensors
from workbench.training.datasets import Collate


def is_iterable(dataset: Any) -> bool:
    """Whether a data set gives samples in its own order, and not by position.

    Raises:
        RunError: an iterator, which gives its samples only once.
    """
    if isinstance(dataset, (DataLoader, tuple, Mapping)) or not hasattr(dataset, "__iter__"):
        return False
    if hasattr(dataset, "__next__"):
        raise RunError(
            f"GlobalDataLoader({type(dataset).__name__}): an iterator gives its samples once, and every epoch reads "
            "them all. Give an object whose __iter__ begins anew, such as an IterableDataset, or list(dataset)."
        )
    has_positions = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or not has_positions


def check_iterable(dataset: Any, shuffle: bool) -> None:
    """Raise ``RunError`` for options that need positions."""
    if shuffle:
        raise RunError(
            f"GlobalDataLoader({type(dataset).__name__}, shuffle=True): an iterable data set has 1 order, its own, and "
            "no positions to shuffle. Shuffle in the data set (a buffer; datasets: .shuffle(buffer_size=...)), and "
            "leave out shuffle."
        )


@dataclass(frozen=True)
class Chunk:
    """What one batch is made of on this rank.

    Attributes:
        num_samples: in the whole batch.
        rows: of the batch that this rank needs.
        part: these rows as a batch; None where there are none.
        fingerprint: of all samples; empty where it was not asked for.
    """

    num_samples: int
    rows: torch.Tensor
    part: Any
    fingerprint: str = ""


@dataclass
class Stream(IterableDataset[Chunk]):
    """The chunks of one epoch from position ``start`` on, for one rank.

    Attributes:
        dataset: gives the samples. Its ``set_epoch``, if it has one, is called.
        rows_of: from the number of samples in a batch to the rows that this rank needs.
    """

    dataset: Iterable[Any]
    batch_size: int
    seed: int
    epoch: int
    start: int
    collate: Collate
    rows_of: Callable[[int], torch.Tensor]

    def __iter__(self) -> Iterator[Chunk]:
        samples = itertools.islice(self._samples(), self.start, None)
        is_first, position = True, self.start
        while True:
            with default_generator.all_restored():
                chunk = list(itertools.islice(samples, self.batch_size))
                if not chunk:
                    return
                rows = self.rows_of(len(chunk))
                known = fingerprint(tree_leaves(as_tensors(self._collated(chunk, position)))) if is_first else ""
                part = self._collated([chunk[int(row)] for row in rows], position) if len(rows) else None
            yield Chunk(len(chunk), rows, part, known)
            is_first, position = False, position + len(chunk)

    def _collated(self, samples: list[Any], position: int) -> Any:
        default_generator.reseed(self.seed, self.epoch, -1, position)
        return self.collate(samples)

    def _samples(self) -> Iterator[Any]:
        """Samples whose random numbers depend on the seed, the epoch and the position."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        default_generator.reseed(self.seed, self.epoch)
        samples = iter(self.dataset)
        for position in itertools.count():
            default_generator.reseed(self.seed, self.epoch, position)
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample


def read(stream: Stream, num_workers: int) -> Iterable[Chunk]:
    """The chunks, read in this process or by one worker: several would each read a stream of their own."""
    if not num_workers:
        return stream
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=1,
        collate_fn=unchanged,
        generator=torch.Generator().manual_seed(stream.seed),
    )


def unchanged(part: Any) -> Any:
    """For a ``DataLoader`` whose data set makes batches: the batch as it is."""
    return part


def check_alike(found: list[tuple[int, str]], what: str) -> None:
    """Raise ``RunError`` if ranks have other samples: numbers and fingerprints of a batch or a data set, by rank."""
    odd = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if odd is None:
        return
    counts = f"{found[0][0]} samples on rank 0, {found[odd][0]} on rank {odd}"
    raise RunError(
        f"GlobalDataLoader, {what}: {counts}{'' if found[0][0] != found[odd][0] else ', and not the same ones'}. Every "
        "rank has the whole data set, in one order, and reads its own rows, or keeps them: do not split it by rank "
        "(split_dataset_by_node, shard, RANK), and seed what draws it (random_split(..., generator=...))."
    )
