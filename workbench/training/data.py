"""``wb.GlobalDataLoader``: batches as global tensors. Each rank reads only the rows that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, Dataset

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, SbpLike, Split, broadcast, split
from workbench.errors import LayoutError
from workbench.tensors import default_generator
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.global_tensor import new_placeholder, spec_of, wrap
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World, current, joined
from workbench.training.batches import as_tensors
from workbench.training.datasets import (
    Collate,
    check_dataset,
    checksum_of,
    collate,
    epoch_by_epoch,
    is_of_arrays,
    num_samples_of,
    take,
    which_have_rows,
    with_tensors,
)
from workbench.training.described_parts import Leaf, Shared, agreed, describe_part, target_leaves
from workbench.training.iterable_data import Chunk, Stream, check_alike, check_iterable, is_iterable, read, unchanged
from workbench.training.strategies.state import state_of

Rows = tuple[int, int]


class GlobalDataLoader:
    """Batches of a dataset as global tensors, split along dim 0. Without ``collate_fn`` each rank reads only its rows.

    The order of samples depends on ``seed`` and the epoch, not on the strategy or the number of ranks or workers. So do
    the random numbers that the dataset draws for a sample (augmentation) from torch, ``np.random`` or ``random``; a
    generator of its own it seeds itself. The last batch of an epoch may be smaller, even smaller than the number of
    ranks. Each iteration over the loader is one epoch.

    Args:
        dataset: all samples in arrays or tables of pandas (a tuple or dict of them), or a map-style dataset of tensors,
            arrays or numbers, or of tuples or dicts of them; or an iterable data set of such samples
            (``IterableDataset``, streamed ``datasets``), which every rank reads whole, in its own order.
        batch_size: samples of a global batch, over all ranks.
        module: a parallelized module. Its strategy gives the layouts: inputs are split over the data axis of the first
            stage, targets over the data axis of the last. Targets are a tuple's last entry, or a dict's
            ``label``, ``labels``, ``label_ids``, ``target`` and ``targets``.
        placement, sbp: a layout of S(0) and B, without a module. Default: all ranks of the world, S(0) on the first
            axis.
        shuffle: a new order in every epoch. Default: the dataset's order. An iterable data set shuffles itself; its
            ``set_epoch`` is called.
        seed: of the order and of the samples' random numbers.
        drop_last: leave out a last batch with fewer samples.
        num_workers, collate_fn, pin_memory: as for ``torch.utils.data.DataLoader``. ``collate_fn`` gets all samples of
            the batch, as on one device: it may pad to the longest or mix samples. So each rank that holds a part reads
            and collates the whole batch, and keeps its rows; where that takes too long, pad in the dataset and leave
            ``collate_fn`` out. What it draws from torch, ``np.random`` and ``random`` is equal on all ranks. Mappings
            (``BatchEncoding``) become dicts. Numbers, and tensors that all samples share (no dims, one row, positions
            ``(T,)`` beside words ``(N, T)``), must be equal on all ranks and stay plain; one row may come once per
            sample.

    Raises:
        RunError: a loader or an iterator instead of a dataset; an iterable one with ``shuffle``; other samples on other
            ranks, as far as numbers of samples, arrays, indices of a ``Subset`` and the ends of a list show it.
        LayoutError: a layout that splits another dim than 0, or parts of a batch that do not fit together.
        ValueError: a batch size below 1, or both module and placement.

    With ``loader = wb.GlobalDataLoader(dataset, batch_size=2, module=model, shuffle=True)`` and 5 pairs,
    ``for inputs, targets in loader`` gives global tensors of 2, 2 and 1 rows, on any number of ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        module: nn.Module | None = None,
        placement: Placement | None = None,
        sbp: SbpLike | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._is_iterable = is_iterable(dataset)
        if self._is_iterable:
            check_iterable(dataset, shuffle)
        else:
            check_dataset(dataset, collate_fn, f"GlobalDataLoader({type(dataset).__name__})")
        _check_arguments(batch_size, module, placement)
        self.dataset, self.batch_size, self.module = with_tensors(dataset), batch_size, module
        self._num_samples = None if self._is_iterable else num_samples_of(self.dataset)
        self._have_rows = which_have_rows(self.dataset) if is_of_arrays(dataset) else None
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.num_workers, self.collate_fn = num_workers, collate_fn or collate
        self._takes_whole_batches = collate_fn is not None
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self._given = None if placement is None else _checked_layout(placement, sbp)
        self.epoch = 0
        """The epoch of the current or the next iteration."""
        self._position = 0
        self._starts_new_epoch = False
        here = joined()
        self._num_rebuilds = 0 if here is None else here.num_rebuilds

    def __len__(self) -> int:
        """Number of batches in a whole epoch."""
        if self._num_samples is None:
            raise TypeError(f"GlobalDataLoader({type(self.dataset).__name__}): an iterable data set has no length.")
        count, rest = divmod(self._num_samples, self.batch_size)
        return count + (rest > 0 and not self.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader: after the last batch that it returned."""
        order = {"seed": self.seed, "shuffle": self.shuffle, "num_samples": self._num_samples}
        if self._is_at_end():
            return {**order, "epoch": self.epoch + 1, "position": 0}
        return {**order, "epoch": self.epoch, "position": self._position}

    def _is_at_end(self) -> bool:
        if self._num_samples is None:
            return False  # the iteration knows, and moves on by itself
        left = self._num_samples - self._position
        return left <= 0 or (self.drop_last and left < self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position: the next iteration gives the rest of that epoch, in batches of this loader's
        size.

        Raises:
            ValueError: the state is of a loader with another dataset size, seed or shuffle.
        """
        own = self.state_dict()
        wrong = [f"{n}={state[n]}, here {own[n]}" for n in ("seed", "shuffle", "num_samples") if state[n] != own[n]]
        if wrong:
            raise ValueError(
                f"GlobalDataLoader.load_state_dict: the state is of a loader with {'; '.join(wrong)}. A position is "
                "valid for the same order only: make the loader with the same dataset, seed and shuffle."
            )
        self.epoch, self._position, self._starts_new_epoch = state["epoch"], state["position"], False

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch, or of its rest after ``load_state_dict``. All ranks iterate together."""
        world = current()
        if world.num_rebuilds != self._num_rebuilds:
            self._agree_on_position(world)
        if self._starts_new_epoch:
            self.epoch, self._position = self.epoch + 1, 0
        self._starts_new_epoch = True
        batches = self._iterated if self._is_iterable else self._batches
        return batches(world, self.epoch, self._position)

    def _agree_on_position(self, world: World) -> None:
        """Continue where the rank is that has come farthest: an interrupt between two epochs, or two batches, finds
        the ranks on both sides.
        """
        own = self.epoch, self._position, not self._starts_new_epoch
        self.epoch, self._position, continues = max(all_gather_object(own, world, "position of GlobalDataLoader"))
        self._starts_new_epoch, self._num_rebuilds = not continues, world.num_rebuilds

    def _batches(self, world: World, epoch: int, start: int) -> Iterator[Any]:
        assert self._num_samples is not None
        what = f"data set of epoch {epoch}"
        check_alike(all_gather_object((self._num_samples, checksum_of(self.dataset)), world, what), what)
        epochs = epoch_by_epoch(self._num_samples, self.shuffle, self.seed)
        order = next(islice(epochs, epoch if self.shuffle else 0, None))[start:]
        size = self.batch_size  # another one that the loop sets is that of the next epoch
        starts = range(0, len(order) - (size if self.drop_last else 1) + 1, size)
        layouts = self._layouts(world)
        rows_of = cache(partial(_needed_rows, layouts, is_whole=self._takes_whole_batches, rank=world.rank))
        batches = (order[at : at + size] for at in starts)
        own = iter(self._reader(epoch, (batch[rows_of(len(batch))] for batch in batches)))
        for at in starts:
            num_samples = min(size, len(order) - at)
            rows = rows_of(num_samples)
            part = next(own) if len(rows) else None
            self._position += num_samples
            what = f"batch at {self._position} of epoch {epoch}"
            yield _assemble(part, rows, num_samples, layouts, world, what, self._have_rows)
        if self._is_at_end():
            self.epoch, self._position, self._starts_new_epoch = epoch + 1, 0, False

    def _iterated(self, world: World, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an iterable data set. One is read ahead, so that the position after the last is the end's."""
        layouts = self._layouts(world)
        rows_of = partial(_needed_rows, layouts, is_whole=self._takes_whole_batches, rank=world.rank)
        stream = Stream(self.dataset, self.batch_size, self.seed, epoch, start, self.collate_fn, rows_of)
        smallest, nothing = (self.batch_size if self.drop_last else 1), Chunk(0, torch.empty(0), None)
        chunks = iter(read(stream, self.num_workers))
        chunk, position = next(chunks, nothing), start
        while True:
            what = f"batch behind {position} of epoch {epoch}"
            position += chunk.num_samples
            check_alike(all_gather_object((chunk.num_samples, chunk.fingerprint), world, what), what)
            if chunk.num_samples < smallest:
                break
            following = next(chunks, nothing) if chunk.num_samples == stream.batch_size else nothing
            is_last = following.num_samples < smallest
            self.epoch, self._position, self._starts_new_epoch = (
                (epoch + 1, 0, False) if is_last else (epoch, position, True)
            )
            yield _assemble(chunk.part, chunk.rows, chunk.num_samples, layouts, world, what)
            chunk = following

    def _reader(self, epoch: int, batches: Iterable[torch.Tensor]) -> Iterable[Any]:
        """Read this rank's samples, without torch's default generator: all ranks must advance it equally. ``batches``
        are asked for once, in their order, as they are read.
        """
        if is_of_arrays(self.dataset):
            return (take(self.dataset, batch) for batch in batches if len(batch))
        return DataLoader(
            _Reproducible(self.dataset, self.seed, epoch, self.collate_fn),
            batch_size=None,
            sampler=(batch.tolist() for batch in batches if len(batch)),
            num_workers=self.num_workers,
            collate_fn=unchanged,
            pin_memory=self.pin_memory,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _layouts(self, world: World) -> _Layouts:
        if self.module is not None:
            return _Layouts(*state_of(self.module).layouts.plan.batch_layouts())
        layout = self._given or _checked_layout(Placement.of(world.device.type, list(range(world.world_size))), None)
        layout.placement.check_world(world.world_size)
        return _Layouts(layout, layout)


@dataclass(frozen=True)
class _Layouts:
    inputs: Layout
    targets: Layout


def _check_arguments(batch_size: int, module: Any, placement: Any) -> None:
    if batch_size < 1:
        raise ValueError(f"GlobalDataLoader(batch_size={batch_size}): a batch has at least 1 sample.")
    if module is not None and placement is not None:
        raise ValueError(
            "GlobalDataLoader(module=..., placement=...): 2 layouts are given. The module's strategy has one already: "
            "leave out placement and sbp."
        )


def _checked_layout(placement: Placement, sbp: SbpLike | None) -> Layout:
    layout = Layout.of(placement, (split(0), *[broadcast] * (placement.num_axes - 1)) if sbp is None else sbp)
    if any(not isinstance(entry, Broadcast) and entry != Split(0) for entry in layout.sbp):
        raise LayoutError(
            f"GlobalDataLoader(sbp={layout.sbp}): samples lie along dim 0, so a batch is S(0) or B on each of the "
            f"{placement.num_axes} axes. Box a batch to other layouts afterwards: batch.to_global(sbp=...)."
        )
    return layout


def _rows(layout: Layout, num_rows: int, rank: int) -> Rows:
    """The rows of a batch that a rank holds."""
    return layout.region((num_rows,), rank)[0] if rank in layout.placement else (0, 0)


def _needed_rows(layouts: _Layouts, num_rows: int, is_whole: bool, rank: int) -> torch.Tensor:
    """The rows that a rank reads: those that it holds; if it holds any and ``is_whole``, all of them."""
    both = {_rows(layout, num_rows, rank) for layout in (layouts.inputs, layouts.targets)}
    held = sorted({row for start, stop in both for row in range(start, stop)})
    return torch.tensor([*range(num_rows)] if held and is_whole else held, dtype=torch.long)


def _assemble(
    part: Any,
    rows: torch.Tensor,
    num_rows: int,
    layouts: _Layouts,
    world: World,
    what: str,
    have_rows: Sequence[bool] | None = None,
) -> Any:
    """A batch of global tensors from the rows ``rows`` that this rank has read (None: none)."""
    part = as_tensors(part)
    mine = describe_part(part, len(rows), what, have_rows)
    known = [found for found in all_gather_object(mine, world, what) if found is not None]
    leaves = [agreed(several, what) for several in zip(*(tree_leaves(one) for one in known), strict=True)]
    targets, structure = target_leaves(known[0]), tree_flatten(known[0])[1]
    values = tree_leaves(part) if part is not None else [None] * len(leaves)
    made = [
        _made(value, leaf, rows, num_rows, layouts.targets if is_target else layouts.inputs, world)
        for value, leaf, is_target in zip(values, leaves, targets, strict=True)
    ]
    return tree_unflatten(made, structure)


def _made(
    value: torch.Tensor | None, leaf: Leaf | Shared, rows: torch.Tensor, num_rows: int, layout: Layout, world: World
) -> Any:
    """One entry of the batch: a global tensor, or the plain value that all samples share."""
    if isinstance(leaf, Shared):
        return copy_to_device(leaf.value, world.device) if isinstance(leaf.value, torch.Tensor) else leaf.value
    spec = spec_of(world, layout, (num_rows, *leaf.shape))
    if spec.is_placeholder:
        return wrap(new_placeholder(spec.shape, leaf.dtype, world.device), spec)
    start, stop = _rows(layout, num_rows, world.rank)
    if value is None or start == stop:
        return wrap(torch.empty(spec.local_shape, dtype=leaf.dtype, device=world.device), spec)
    first = int((rows == start).nonzero())
    return wrap(copy_to_device(value[first : first + stop - start], world.device), spec)


@dataclass(frozen=True)
class _Reproducible(Dataset[Any]):
    """Batches, by the indices of their samples. The random numbers of a sample depend on the seed, the epoch and its
    index only, and those of ``collate`` on the first index. Default generators of the process do not change.
    """

    dataset: Sequence[Any]
    seed: int
    epoch: int
    collate: Collate

    def __getitem__(self, indices: list[int]) -> Any:
        samples = []
        with default_generator.all_restored():
            for index in indices:
                default_generator.reseed(self.seed, self.epoch, index)
                samples.append(self.dataset[index])
            default_generator.reseed(self.seed, self.epoch, -1, indices[0])
            return self.collate(samples)
