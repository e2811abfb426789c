"""``wb.debug.find_nonfinite``: finds the layer and the rank that made the first nan or infinity of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from workbench.errors import NonFiniteError
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import current

_FROM_LATER = "; it came from what follows this layer in forward"


@dataclass(frozen=True, order=True, slots=True)
class _FirstNonFinite:
    """The first value of one rank that is not finite. ``moment`` counts the searches, equally on all ranks."""

    moment: int
    rank: int
    what: str
    layer: str
    num_nan: int
    num_infinite: int
    num_elements: int
    origin: str

    def __str__(self) -> str:
        kinds = [f"{count} {name}" for count, name in ((self.num_nan, "nan"), (self.num_infinite, "inf")) if count]
        return (
            f"rank {self.rank}: {self.what} of {self.layer or 'the model'}: {' and '.join(kinds)} among "
            f"{self.num_elements} values of its shard{self.origin}"
        )


@contextmanager
def find_nonfinite(module: nn.Module) -> Iterator[None]:
    """In this context, each layer's parameters, results and gradients are searched for nan and infinity.

    At the end the ranks compare their findings and report the first. All ranks use it together. An error that ends the
    context before gets a note with the finding of its own rank. Each search waits for the device: use it to look for a
    mistake, not in training runs.

    Args:
        module: the model, plain or parallelized. The error uses its names of layers.

    Raises:
        NonFiniteError: on all ranks. It names the layer, the rank, the tensor (parameter, result, gradient of the
            result), the number of values, and of a result whether the layer received them or made them.

    >>> model = wb.parallelize(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), "*: data")
    >>> with wb.debug.find_nonfinite(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> with wb.debug.find_nonfinite(model):
    ...     model(torch.tensor([[1.0, float("inf")]]))
    Traceback (most recent call last):
    workbench.errors.NonFiniteError: ...
    """
    search = _Search(current().rank)
    for name, layer in module.named_modules():
        search.handles.append(layer.register_forward_hook(search.hook(name), with_kwargs=True))
    try:
        yield
    except Exception as error:
        if search.first is not None:
            error.add_note(f"find_nonfinite: the first value that is not finite here is on {search.first}.")
        raise
    finally:
        for handle in search.handles:
            handle.remove()
    found = [item for item in all_gather_object(search.first, current(), "find_nonfinite()") if item is not None]
    if found:
        first, *others = sorted(found)
        lines = [f"find_nonfinite: the first value that is not finite is on {first}.", *map(str, others[:3])]
        raise NonFiniteError("\n  then ".join(lines))


class _Search:
    """The findings of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.first: _FirstNonFinite | None = None
        self.handles: list[Any] = []
        self._moment = 0

    def hook(self, name: str) -> Any:
        def look_at_gradient(grad: Any) -> None:
            self._look(grad, "the gradient of the result", name, _FROM_LATER)

        def look(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            was_finite = all(_count(leaf) is None for leaf in tree_leaves((args, kwargs)))
            origin = "; what came in was " + ("finite" if was_finite else "so already")
            for parameter_name, parameter in layer.named_parameters(recurse=False):
                self._look(parameter, f"parameter {parameter_name!r}", name, "")
            for leaf in tree_leaves(output):
                self._look(leaf, "the result", name, origin)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    self.handles.append(leaf.register_hook(look_at_gradient))

        return look

    def _look(self, value: Any, what: str, layer: str, origin: str) -> None:
        self._moment += 1
        if self.first is not None:
            return
        counts = _count(value)
        if counts is not None:
            self.first = _FirstNonFinite(self._moment, self.rank, what, layer, *counts, origin)


def _count(value: Any) -> tuple[int, int, int] | None:
    """(nan, infinite, all) values of this rank's shard; None where all are finite."""
    if not isinstance(value, torch.Tensor):
        return None
    with torch.no_grad(), local_torch():
        local = value.detach()
        if not (local.is_floating_point() or local.is_complex()) or bool(torch.isfinite(local).all()):
            return None
        return int(local.isnan().sum()), int(local.isinf().sum()), local.numel()
