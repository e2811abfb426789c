"""Whether a row-split layer can take the columns of the layers before it as they are, in plain torch: tried out.

The parts of a model's forward that lie between them (activation functions, attention) then run on a part of the
features. That is right for attention over whole heads whose code asks for any number of heads, and wrong for queries,
keys and values in one layer, whose columns are cut across the three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workbench.tensors import default_generator


class _ReachedRow(Exception):
    """The forward has come to the row-split layer."""


def takes_columns(run: Callable[[], Any], columns: Sequence[nn.Linear], row: nn.Linear, num_parts: int) -> bool:
    """Whether the parts of ``row``'s result, each from one part of all columns, add up to its whole result.

    ``run`` calls the model on a batch.

    >>> up, down = nn.Linear(4, 8), nn.Linear(8, 2)
    >>> takes_columns(lambda: down(up(torch.randn(3, 4)).relu()), [up], down, 2)
    True
    >>> takes_columns(lambda: down(up(torch.randn(3, 4)).softmax(-1)), [up], down, 2)
    False
    """
    try:
        whole = _result(run, (), row, slice(None))
        parts = [_result(run, columns, row, *each) for each in _parts(columns, row, num_parts)]
    except Exception:  # noqa: BLE001 - the user's forward may fail on a part of the features in any way
        return False
    return torch.allclose(torch.stack(parts).sum(0), whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


def _parts(columns: Sequence[nn.Linear], row: nn.Linear, num_parts: int) -> Iterator[tuple[slice, list[slice]]]:
    """For each part the features of the row's input, and those of each layer's output."""
    sizes = [row.in_features, *(layer.out_features for layer in columns)]
    for part in range(num_parts):
        own, *others = [slice(part * size // num_parts, (part + 1) * size // num_parts) for size in sizes]
        yield own, others


def _result(
    run: Callable[[], Any], columns: Sequence[nn.Linear], row: nn.Linear, features: slice, cuts: Sequence[slice] = ()
) -> torch.Tensor:
    """The row's result, without its bias, from some of the features."""
    found: list[torch.Tensor] = []

    def reach(inputs: torch.Tensor) -> torch.Tensor:
        found.append(F.linear(inputs, row.weight[:, features]).double())
        raise _ReachedRow

    with torch.no_grad(), default_generator.restored(), default_generator.seeded(0), _cut(columns, cuts):
        row.__dict__["forward"] = reach  # in front of the class's
        try:
            run()
        except _ReachedRow:
            return found[0]
        finally:
            del row.__dict__["forward"]
    raise RuntimeError("the model does not call the layer")


@contextmanager
def _cut(columns: Sequence[nn.Linear], cuts: Sequence[slice]) -> Iterator[None]:
    """A context in which each layer gives some of its features."""
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output, cut=cut: output[..., cut].contiguous())
        for layer, cut in zip(columns, cuts, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
