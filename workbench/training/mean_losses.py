"""Whether a loss is a mean over samples: only then is a step's loss the mean of its micro-batches' losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from workbench.errors import RunError
from workbench.tensors import default_generator
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.program_state import ProgramState, UndoneWrites
from workbench.training.batches import LossFunction
from workbench.training.sample_rows import count_samples

_SAME = 0.02
"""Two losses that differ by less are the same mean, also in 16 bits."""


class _OfPlainTensors(TorchFunctionMode):
    """Context in which functions refuse global tensors, such as parameters, before ranks exchange anything."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, GlobalTensor) for kind in types):
            raise TypeError("no loss of plain tensors only")
        return func(*args, **(kwargs or {}))


def unlike_a_mean(loss_fn: LossFunction, output: Any, targets: Any) -> str:
    """Why the losses of micro-batches do not make that of the batch; empty where they do, or nobody can tell.

    A mean over samples (or words, or classes) stays the same where every sample comes twice; a sum doubles.

    Args:
        loss_fn: (output, targets) -> a scalar.
        output, targets: plain tensors of one batch, samples along dim 0.
    """
    rows = count_samples(tree_leaves((output, targets)))

    def twice(part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part, part]) if part.dim() and part.shape[0] == rows else part

    if not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in tree_leaves(output)):
        return ""
    batch = (output, targets)
    device = next(leaf.device for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    before = ProgramState((), device, code=[loss_fn], copies_tensors=False)
    if not before.is_whole:
        return ""
    try:
        with torch.no_grad(), default_generator.restored(device), UndoneWrites(), _OfPlainTensors():
            double = tree_map_only(torch.Tensor, twice, batch)
            loss, again, doubled = (_number(loss_fn(*pair)) for pair in (batch, batch, double))
    except Exception:  # noqa: BLE001 - a loss for batches of one size or of other values only: nobody can tell
        return ""
    finally:
        before.put_back()
    draws = again != loss
    if draws or not abs(doubled - loss) > _SAME * max(abs(loss), abs(doubled)):
        return ""
    return (
        f"loss_fn gives {loss:.6g} for {rows} samples and {doubled:.6g} where each of them comes twice, so it is no "
        "mean over the samples. A step of micro-batches is the mean of their losses, each by its samples: return a "
        "mean (reduction='mean', or a sum over len(targets)), or take strategies of one micro-batch"
    )


def identity_of(loss_fn: Any) -> Any:
    """A hashable value that is the same for a lambda, or a ``functools.partial``, that is made anew in every step.

    Values of tensors do not count: a partial may get new class weights in every step.
    """
    if isinstance(loss_fn, partial):
        keywords = [(name, identity_of(value)) for name, value in sorted(loss_fn.keywords.items())]
        return partial, identity_of(loss_fn.func), *map(identity_of, loss_fn.args), *keywords
    if isinstance(loss_fn, torch.Tensor):
        return torch.Tensor
    value = getattr(loss_fn, "__code__", loss_fn)
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return value


def check_mean(loss_fn: LossFunction, output: Any, targets: Any, num_micro_batches: int) -> None:
    """See whether losses of micro-batches make that of the step, by one sample of made-up values of the same shapes.

    It costs no exchange, and all ranks find the same.

    Raises:
        RunError: it does not.
    """
    rows = count_samples(tree_leaves((output, targets)))
    generator = torch.Generator().manual_seed(0)
    devices = [leaf.device for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    device = devices[0] if devices else torch.device("cpu")
    one = lambda value: tree_map(lambda leaf: _one_sample(leaf, rows, generator, device), value)  # noqa: E731
    problem = unlike_a_mean(loss_fn, one(output), one(targets))
    if problem:
        raise RunError(f"forward_backward: {problem}; this one has {num_micro_batches}.")


def check_own_loss(inputs: Any, num_micro_batches: int) -> None:
    """Refuse a batch by which a model of transformers makes its loss a sum over the batch's number of words.

    Raises:
        RunError: there are several micro-batches, whose mean would be as many times too small.
    """
    if num_micro_batches > 1 and isinstance(inputs, dict) and inputs.get("num_items_in_batch") is not None:
        raise RunError(
            "the batch has 'num_items_in_batch', so the model's loss is a sum over that number, and "
            f"the mean of {num_micro_batches} micro-batches would be about {num_micro_batches} times too small. Leave "
            "it out (in training, count=lambda inputs, targets: (inputs['labels'][:, 1:] != -100).sum() makes the loss "
            "the mean over all words), or take strategies of one micro-batch."
        )


def _one_sample(leaf: Any, rows: int | None, generator: torch.Generator, device: torch.device) -> Any:
    """A plain tensor of one sample: numbers between 0 and 1, which are probabilities too; the class 1; true."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = tuple(leaf.shape)
    shape = (1, *shape[1:]) if shape and shape[0] == rows else shape
    numbers = torch.rand(shape, generator=generator, device="cpu")
    return (numbers if leaf.is_floating_point() else torch.ones_like(numbers)).to(device, leaf.dtype)


def _number(loss: Any) -> float:
    if type(loss) is not torch.Tensor:
        raise TypeError(f"a {type(loss).__name__} is not a plain loss")
    return float(loss)
