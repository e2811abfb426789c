"""What some ranks still hold of a program's parts, as a checkpoint in memory that the other ranks read.

Each rank plans which slices it could give, as for a checkpoint on disk; of equal slices the lowest rank gives its own.
A part is readable if the slices of all ranks cover its tensors: parameters that are whole on each rank, or split over
ranks that are all still there.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.tensors.agreement import content_hash
from workbench.tensors.boxing.bucketed import cut_into_buckets
from workbench.tensors.object_collectives import all_gather_object, run_on_all_ranks
from workbench.tensors.world import World
from workbench.training.gradients.nested_steps import distinct
from workbench.training.saving import writing
from workbench.training.saving.flat import Path as StatePath
from workbench.training.saving.parts import Restoring, is_extra, kind_of, leaves_of
from workbench.training.saving.reading import Checkpoint

_WHAT = "reading the copies of other ranks"
_BATCH_BYTES = 1 << 25
"""Bytes that travel in one exchange. Every rank gets them, and keeps the slices that it needs."""


class PeerCopies(Checkpoint):
    """The parts that ranks hold. All ranks make it together.

    Args:
        parts: modules, optimizers, objects with state and global tensors by name; those that this rank holds.

    Attributes:
        problems: why a part cannot be read, by its name.
        differing: parts of which ranks hold copies that differ; known after ``restore``.
        unlike: parts to fill that are not like those that ranks hold, and how they differ; known after ``compare``.
    """

    title = "the copies that are left"

    def __init__(self, parts: Mapping[str, Any], world: World) -> None:
        self.folder, self._world = Path(_WHAT), world
        leaves, own_problems = _plannable(parts)
        self._planner, own = writing.local_plan(leaves, to_lowest=True)
        self._own = {item.index: item for item in own.items}
        kinds = {part: (kind_of(value), _make(value)) for part, value in parts.items()}
        gathered = all_gather_object((own, own_problems, kinds), world, _WHAT)
        plans = [plan for plan, _, _ in gathered]
        paths: dict[str, StatePath] = {name: path for plan in plans for name, path in plan.planner_data.items()}
        self.problems = _uncovered(plans, paths)
        for rank, (_, said, _) in reversed(list(enumerate(gathered))):
            self.problems |= {part: f"rank {rank} cannot give it: {why}" for part, why in said.items()}
        usable = [
            replace(plan, items=[item for item in plan.items if paths[item.index.fqn][0] not in self.problems])
            for plan in plans
        ]
        plans, metadata = self._planner.create_global_plan(usable)
        self._givers = [(item, rank) for rank, plan in enumerate(plans) for item in plan.items]
        self._places = {item.index: item.index for item, _ in self._givers}
        self.entries = {paths[name]: entry for name, entry in metadata.state_dict_metadata.items()}
        held = {part: each for _, _, said in reversed(gathered) for part, each in said.items()}
        self.kinds = {part: kind for part, (kind, _) in held.items() if part not in self.problems}
        self._makes = {part: make for part, (_, make) in held.items()}
        self.differing: tuple[str, ...] = ()
        self.unlike: dict[str, str] = {}
        self._paths, self._pieces = paths, dict[Any, bytes]()
        self.schedulers, self._by_prefix, self._checksums = {}, None, {}
        first = [(item, giver) for item, giver in self._givers if _is_compared(item, paths)]
        self._exchange(first, self._places)

    def givers(self, part: str) -> list[int]:
        """The ranks whose slices of a part the others read."""
        return sorted({rank for item, rank in self._givers if self._paths[item.index.fqn][0] == part})

    def compare(self, parts: Mapping[str, Any]) -> dict[str, str]:
        """Why some of the parts cannot be filled, by name. All ranks call it, with the parts to fill."""
        restoring = Restoring(parts, self, self._world, strict=True)

        def compare() -> dict[str, str]:
            found = {part: [] if part in self.problems else restoring.problems_of(part) for part in parts}
            for part, value in parts.items():
                if (make := _make(value)) != (held := self._makes.get(part, make)):
                    found[part].append(f"{part}: {held} in {self.title}, {make} in what they fill")
            return {part: "; ".join(lines).removeprefix(f"{part}: ") for part, lines in found.items() if lines}

        for said in all_gather_object(run_on_all_ranks(compare, self._world, _WHAT), self._world, _WHAT):
            self.unlike = {**said, **self.unlike}
        left = {**self.unlike, **{part: why for part, why in self.problems.items() if part in parts}}
        gone = {id(p) for part in left if isinstance(parts[part], nn.Module) for p in parts[part].parameters()}
        for part, value in parts.items():
            within = distinct(value) if isinstance(value, Optimizer) else ()
            if any(id(p) in gone for each in within for group in each.param_groups for p in group["params"]):
                left.setdefault(part, "some of its parameters are lost")
        return left

    def restore(self, parts: Mapping[str, Any], chosen: Collection[str]) -> None:
        """Fill the chosen ones of the parts that were compared, in place. All ranks call it."""
        restoring = Restoring(parts, self, self._world, strict=True)
        restoring.parts = {part: parts[part] for part in chosen}
        wanted = run_on_all_ranks(lambda: list(restoring.targets()), self._world, _WHAT)
        self._fetch(wanted)

        def fill() -> None:
            restoring.load_objects()
            for path, tensor in wanted:
                self.read(path, tensor)
            restoring.assign()

        run_on_all_ranks(fill, self._world, _WHAT)

    def _fetch(self, wanted: Sequence[tuple[StatePath, torch.Tensor]]) -> None:
        """Exchange what the ranks want."""
        needed = {item.storage_index for path, tensor in wanted for item, _ in self._reads(path, tensor)}
        whole = [path for path in self.entries if self.kinds[str(path[0])] == "stateful" or is_extra(path)]
        needed |= {item.index for item, _ in self._givers if self._paths[item.index.fqn] in whole}
        differing: set[str] = set()
        givers = [(item, giver) for item, giver in self._givers if item.tensor_data is not None]
        for batch in cut_into_buckets(givers, lambda _: None, _num_bytes, _BATCH_BYTES):
            differing |= self._exchange(batch, needed)
        found = all_gather_object(differing, self._world, _WHAT)
        self.differing = tuple(sorted(set().union(*found)))

    def _exchange(self, batch: Iterable[tuple[Any, int]], needed: Container[Any]) -> set[str]:
        """Keep what is needed of the slices that their givers send; returns the parts of which this rank's differ."""
        own = {item.index: self._dump(item) for item, giver in batch if giver == self._world.rank}
        differing = set()
        for received in all_gather_object(own, self._world, _WHAT):
            for index, data in received.items():
                if index in needed:
                    self._pieces[index] = data
                if index not in own and index in self._own and not self._is_equal(index, data):
                    differing.add(str(self._paths[index.fqn][0]))
        return differing

    def _dump(self, item: Any) -> bytes:
        ((_, value),) = writing.snapshot([item], self._planner, keeps=False)
        if isinstance(value, bytes):
            return value
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    def _is_equal(self, index: Any, data: bytes) -> bool:
        """Whether this rank's copy of a tensor has the same bits as the one received."""
        ((_, own),) = writing.snapshot([self._own[index]], self._planner, keeps=False)
        if isinstance(own, bytes):
            return True  # equal values may have different pickles
        return content_hash(own) == content_hash(torch.load(io.BytesIO(data), weights_only=True))

    def _bytes(self, place: Any) -> bytes:
        return self._pieces[place]


def _is_compared(item: Any, paths: Mapping[str, StatePath]) -> bool:
    """Whether a slice is read before any is filled: Python values, and settings of optimizers, which may be tensors."""
    return item.tensor_data is None or "param_groups" in paths[item.index.fqn]


def _make(value: Any) -> str:
    """What must be equal so that one part can be filled from another, beside what a load compares: classes of objects
    with state, and the dtypes of tensors.
    """
    if isinstance(value, nn.Module | torch.Tensor):
        tensors = [value] if isinstance(value, torch.Tensor) else [*value.parameters(), *value.buffers()]
        return ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
    return "an optimizer" if isinstance(value, Optimizer) else type(value).__qualname__


def _plannable(parts: Mapping[str, Any]) -> tuple[dict[StatePath, Any], dict[str, str]]:
    """The leaves of all parts that have slices to give, and why others have none."""
    leaves: dict[StatePath, Any] = {}
    problems: dict[str, str] = {}
    for part, value in parts.items():
        try:
            found, _ = leaves_of(part, value, parts)
            writing.local_plan(found)
            leaves |= found
        except Exception as error:  # noqa: BLE001 - a part's own state_dict may raise anything
            problems[part] = f"{type(error).__name__}: {error}"
    return leaves, problems


def _uncovered(plans: Sequence[Any], paths: Mapping[str, StatePath]) -> dict[str, str]:
    """Parts with tensors of which the ranks do not hold every element."""
    sizes: dict[str, int] = {}
    held: dict[str, dict[tuple[int, ...], int]] = {}
    for item in (item for plan in plans for item in plan.items if item.tensor_data is not None):
        sizes[item.index.fqn] = item.tensor_data.size.numel()
        chunk = item.tensor_data.chunk
        held.setdefault(item.index.fqn, {})[tuple(chunk.offsets)] = chunk.sizes.numel()
    given = {item.index.fqn for plan in plans for item in plan.items}
    problems: dict[str, str] = {}
    for name, path in paths.items():
        if name not in given:
            problems.setdefault(str(path[0]), f"of {name} nothing is left")
    for name, size in sizes.items():
        if (found := sum(held[name].values())) < size:
            text = f"of {name} only {found:,} of {size:,} elements are left"
            problems.setdefault(str(paths[name][0]), text)
    return problems


def _num_bytes(given: tuple[Any, int]) -> int:
    data = given[0].tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize if data is not None else 0
