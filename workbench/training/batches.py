"""Batches: inputs of the model and targets of the loss, number of samples, cutting and joining.

A batch is a tensor, or dicts, lists and tuples of tensors. Other mappings (transformers' ``BatchEncoding``) count as
dicts, numpy's arrays as tensors. All code that trains uses the rules of this module:

    call        a dict gives keyword arguments, a list or tuple positional ones, anything else one argument
    own loss    without ``loss_fn`` the whole batch goes to the model, which returns its loss (see ``loss_of``)
    loss_fn     ``loss_fn(output, targets)``: targets are a dict's entries named in ``TARGET_KEYS``, or a tuple's last
                entry; the model does not get them
    samples     are counted by dim 0; a tensor with no dims, one row, or the length of the samples' dim 1 belongs to all
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

from workbench.core.suggest import suggest
from workbench.errors import RunError
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.joined_outputs import refuse_dataclasses, refuse_packed_sequence
from workbench.training.sample_rows import (
    Rows,
    batch_leaves,
    check_lists,
    check_rows,
    check_targets,
    count_samples,
    lists_samples,
    rows_by_grids,
    split_list,
    split_rows,
)

TARGET_KEYS = ("label", "labels", "label_ids", "target", "targets")
"""Entries of a dict that are targets: the second argument of ``loss_fn``, needed where the loss is."""
LossFunction = Callable[[Any, Any], torch.Tensor]
Count = Callable[[Any, Any], Any]
"""(inputs, targets) of a micro-batch -> the number of terms of its mean loss: a number or a one-element tensor."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, or a micro-batch.

    Attributes:
        inputs: the arguments of the model.
        targets: the second argument of the loss function; None if the model computes its own loss.
        share: a micro-batch's weight in the step's loss, 0 to 1.
        rows: of tensors whose rows are no samples, see ``sample_rows``; those that grids of images give are added.
    """

    inputs: Any
    targets: Any = None
    share: float = 1.0
    rows: Rows = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.inputs, list):  # of arguments; other lists may have an entry per sample
            object.__setattr__(self, "inputs", tuple(self.inputs))

    @classmethod
    def of(cls, samples: Any, loss_fn: LossFunction | None) -> Batch:
        """A batch from a sample of a data set or a loader.

        >>> batch = Batch.of({"x": torch.ones(2, 3), "label": torch.zeros(2)}, F.cross_entropy)
        >>> sorted(batch.inputs), batch.targets.shape
        (['x'], torch.Size([2]))
        """
        samples = as_tensors(samples)
        if loss_fn is None:
            return cls(samples)
        if isinstance(samples, dict):
            inputs, targets = _without_targets(samples)
            return cls(inputs, targets)
        if isinstance(samples, (list, tuple)) and len(samples) > 1:
            first = samples[0] if len(samples) == 2 else tuple(samples[:-1])
            return cls(first, samples[-1])
        return cls(samples)

    @classmethod
    def of_arguments(cls, inputs: Any, targets: Any, loss_fn: LossFunction | None, rows: Rows | None = None) -> Batch:
        """A batch from separate inputs and targets. Without targets, those of a dict of inputs are used.

        Raises:
            RunError: ``rows`` that the batch does not have.
        """
        is_whole = targets is None and isinstance(inputs, Mapping)
        batch = cls.of(inputs, loss_fn) if is_whole else cls(as_tensors(inputs), as_tensors(targets))
        if not rows:
            return batch
        batch = replace(batch, rows=rows)
        check_rows(rows, batch._named(), batch.num_samples)
        return batch

    @property
    def num_samples(self) -> int:
        """Number of rows along dim 0.

        Raises:
            RunError: tensors with different numbers of rows, or no row at all.
        """
        named = self._named()
        others = {name for name in self._rows(named) if name in named}
        counted = {name: tensor for name, tensor in named.items() if name not in others}
        return num_samples(counted or (self.inputs, self.targets))

    def _named(self) -> dict[str, torch.Tensor]:
        """The tensors by where they are in the inputs or targets: ``pixel_values``, ``targets.boxes``."""
        named = named_tensors({"inputs": self.inputs, "targets": self.targets})
        return {name.removeprefix("inputs."): tensor for name, tensor in named.items()}

    @property
    def has_rows(self) -> bool:
        """Whether the rows of a tensor are no samples."""
        return bool(self._rows(self._named()))

    def _rows(self, named: Mapping[str, torch.Tensor]) -> Rows:
        return {**rows_by_grids(named), **self.rows}

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample of the first input with one row per sample; () if there is none."""
        leaves = batch_leaves(self.inputs)
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rows = count_samples(leaves)
        return next((shape[1:] for shape in shapes if shape and shape[0] == rows), ())

    def on_device(self, device: torch.device) -> Batch:
        """The batch with all tensors on a device."""
        both = (self.inputs, self.targets)
        inputs, targets = tree_map_only(torch.Tensor, lambda tensor: copy_to_device(tensor, device), both)
        return replace(self, inputs=inputs, targets=targets)

    def loss(self, model: nn.Module, loss_fn: LossFunction | None) -> torch.Tensor:
        """The batch's own loss, without its share; see ``loss_of``."""
        return loss_of(call(model, self.inputs), self.targets, loss_fn)

    def term_of(self, loss: torch.Tensor) -> torch.Tensor:
        """A micro-batch's term of the step's loss: 0, without history, where its share is 0, as its mean may be nan.

        >>> Batch(torch.ones(2, 3), share=0.25).term_of(torch.tensor(2.0))
        tensor(0.5000)
        """
        if self.share == 1.0:
            return loss
        return loss * self.share if self.share else torch.zeros_like(loss.detach())

    def cut(self, num_micro_batches: int, count: Count | None = None) -> list[Batch]:
        """Micro-batches along dim 0. Their sizes differ by at most one sample; there are never more micro-batches than
        samples.

        Args:
            num_micro_batches: the wanted number.
            count: number of terms of a micro-batch's mean loss. None: its samples.

        Raises:
            RunError: as ``num_samples``.

        >>> [(part.inputs.shape[0], part.share) for part in Batch(torch.ones(5, 2), torch.ones(5)).cut(2)]
        [(3, 0.6), (2, 0.4)]
        """
        rows, named = self.num_samples, self._named()
        parts = min(num_micro_batches, rows)
        sizes = [rows // parts + (i < rows % parts) for i in range(parts)]
        of_samples = {id(named[name]): given for name, given in self._rows(named).items()}
        both = (self.inputs, self.targets)
        is_list = lists_samples(both)
        if parts > 1:
            refuse_dataclasses(both, "the batch has", "Batches are cut tensor by tensor")
            check_lists(both, rows)
            check_targets([t for t in tree_leaves(self.targets, is_leaf=is_list) if id(t) not in of_samples], rows)

        def parts_of(value: Any) -> Sequence[Any]:
            if is_list(value):
                return split_list(value, sizes)
            if parts > 1 and id(value) in of_samples:
                return split_rows(value, of_samples[id(value)], sizes)
            is_cut = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows
            return split_rows(value, [1] * rows, sizes) if is_cut and parts > 1 else [value] * parts

        leaves, structure = tree_flatten(both, is_leaf=is_list)
        pairs = [tree_unflatten(list(row), structure) for row in zip(*map(parts_of, leaves), strict=True)]
        terms = [*map(float, sizes)] if count is None else [_as_number(count(*pair)) for pair in pairs]
        total = sum(terms) or 1.0
        return [Batch(pair[0], pair[1], n / total) for pair, n in zip(pairs, terms, strict=True)]


def as_tensors(value: Any) -> Any:
    """A batch with dicts for its mappings and tensors for its arrays. A ``PackedSequence`` in it is a ``RunError``.

    >>> as_tensors({"x": np.ones((2, 3))})["x"].shape
    torch.Size([2, 3])
    """
    if isinstance(value, Mapping):
        return {key: as_tensors(entry) for key, entry in value.items()}
    refuse_packed_sequence(value)
    if isinstance(value, (list, tuple)):
        return of_kind(value, map(as_tensors, value))
    return torch.as_tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" else value


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A value with its floating-point tensors in another dtype.

    >>> cast([torch.ones(2), torch.arange(2)], torch.float64)
    [tensor([1., 1.], dtype=torch.float64), tensor([0, 1])]
    """
    return tree_map_only(torch.Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value)


def of_kind(value: Any, entries: Iterable[Any]) -> Any:
    """Other entries in a list, tuple or named tuple of the type of ``value``.

    >>> of_kind((1, 2), [3, 4])
    (3, 4)
    """
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def _without_targets(samples: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A dict's entries for the model, and its targets: a single one alone, several as a dict, None without any."""
    targets = {key: entry for key, entry in samples.items() if key in TARGET_KEYS}
    inputs = {key: entry for key, entry in samples.items() if key not in targets}
    return inputs, next(iter(targets.values()), None) if len(targets) < 2 else targets


# ---- samples ------------------------------------------------------------------------------------------------------


def num_samples(batch: Any) -> int:
    """Number of rows of a batch.

    Raises:
        RunError: tensors with different numbers of rows, no row at all, or a dataclass that torch does not know.
    """
    leaves = batch_leaves(batch)
    found = count_samples(leaves)
    if found is None:
        told = [f"{name} {tuple(leaf.shape)}" for name, leaf in named_tensors(batch).items()]
        raise RunError(
            f"the batch's tensors have different numbers of rows: {', '.join(told)}. All are cut along dim 0, the "
            "samples. They need the same number of rows, or 1 row to go whole to each micro-batch: add a dim of 1. "
            "Where a sample has several rows, say how many: rows={name: [rows of each sample]}, or None for a tensor "
            "that goes whole to each micro-batch."
        )
    if found == 0 or not any(isinstance(leaf, list) or getattr(leaf, "shape", ()) for leaf in leaves):
        refuse_dataclasses(batch, "the batch has", "Batches are cut tensor by tensor")
        raise RunError(
            "the batch has 0 samples. A step needs at least 1: pass tensors with samples along dim 0, e.g. of shape "
            "(8, 32) for 8 samples."
        )
    return found


def named_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch by where they are in it, without those of lists of samples.

    >>> list(named_tensors({"inputs": (torch.ones(2), 3), "targets": torch.ones(2)}))
    ['inputs.0', 'targets']
    """
    paths = tree_flatten_with_path(batch, is_leaf=lists_samples(batch))[0]
    return {_name_of(path): leaf for path, leaf in paths if isinstance(leaf, torch.Tensor)}


def _name_of(path: Sequence[Any]) -> str:
    """The place of a tensor in a batch, for messages: its keys and positions."""
    return ".".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path) or "tensor"


def _as_number(value: Any) -> float:
    return float(value_on_all_ranks(value) if isinstance(value, GlobalTensor) else value)


# ---- model and loss -----------------------------------------------------------------------------------------------


def call(module: nn.Module, inputs: Any) -> Any:
    """``module`` on its inputs: a dict gives keywords, a list or tuple positions, anything else one argument.

    Raises:
        RunError: its forward does not take them.
    """
    args, kwargs = arguments(inputs)
    try:
        return module(*args, **kwargs)
    except TypeError as error:
        mistake = _refused_arguments(module, args, kwargs)
        if mistake is None:
            raise
        raise RunError(mistake) from error


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a module's call."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (list, tuple)) else ((inputs,), {})


def _refused_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The reason why a module's forward does not take its arguments; None if the error comes from inside it."""
    takes = signature(module.forward)
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        name = f"{type(module).__name__}.forward({', '.join(takes.parameters)})"
        unknown = [key for key in kwargs if key not in takes.parameters]
        if unknown:
            near = {key: suggest(key, takes.parameters) for key in unknown}
            told = ", ".join(repr(key) + (f" (nearest: {near[key][0]})" if near[key] else "") for key in unknown)
            given = f"the batch has {told}, but {name} takes no such argument"
        else:
            given = f"the batch gives {len(args) or len(kwargs)} arguments, but {name} does not take them: {error}"
        return (
            f"{given}. A dict gives keywords, a tuple positions. Rename or leave out what the model does not take; "
            f"a loss_fn gets what the loss alone needs: a dict's entries {', '.join(TARGET_KEYS)}, a tuple's last one."
        )
    return None


def check_loss_fn(loss_fn: Any) -> None:
    """Raise if ``loss_fn(output, targets)`` cannot give a loss.

    Raises:
        RunError: it is a class of losses, not a loss.
    """
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = loss_fn.__name__
        raise RunError(
            f"loss_fn is the class {name}, but it is called as loss_fn(output, targets) with 2 tensors. Give an "
            f"instance: {name}()."
        )


def loss_of(output: Any, targets: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """The loss of a model's output: ``loss_fn(output, targets)``, or the output's own loss.

    The own loss is the output itself if it is a scalar, its entry or attribute ``loss``, or, in a tuple, the first
    entry if that is a scalar, else the only scalar.

    Raises:
        RunError: there is no loss, or it is not a scalar that requires a gradient.

    >>> loss_of((torch.ones(4, 2), torch.tensor(0.5, requires_grad=True)), None, None)
    tensor(0.5000, requires_grad=True)
    """
    loss = _found_loss(output) if loss_fn is None else loss_fn(output, targets)
    if not isinstance(loss, torch.Tensor):
        raise RunError(
            f"loss_fn returned a {type(loss).__name__}, but a step needs one scalar tensor. For a sum and a count "
            "return sum / count, and give count=lambda inputs, targets: ... as well. If the model computes its own "
            "loss, leave out loss_fn, so that the model gets the whole batch."
        )
    if loss.dim() != 0:
        raise RunError(
            f"{'the model' if loss_fn is None else 'loss_fn'} returned a tensor of shape {tuple(loss.shape)} with "
            f"{loss.dim()} dims, but a loss has 0. Reduce it to a mean over the samples, e.g. loss.mean()"
            f"{', or give a loss_fn' if loss_fn is None else ''}."
        )
    if not loss.requires_grad:
        raise RunError(
            "the loss depends on no parameter that requires a gradient (0 of them), so there is no backward. Do not "
            "detach the output, and call it outside of torch.no_grad()."
        )
    return loss


def own_loss(output: Any) -> Any:
    """The loss that the model has computed, see ``loss_of``; None if its output has none."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, (list, tuple)):
        scalars = [entry for entry in output if isinstance(entry, torch.Tensor) and entry.dim() == 0]
        return scalars[0] if scalars and (scalars[0] is output[0] or len(scalars) == 1) else None
    return loss


def _found_loss(output: Any) -> Any:
    loss = own_loss(output)
    if loss is None:
        kind = type(output).__name__
        told = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise RunError(
            f"no loss_fn was given, and the model returned a {kind}{told}: 0 losses. A model computes its own (models "
            "of transformers do where the batch has 'labels') and returns it as a scalar, as an entry or attribute "
            "'loss', or as the scalar of a tuple; or give a loss_fn(output, targets)."
        )
    return loss
