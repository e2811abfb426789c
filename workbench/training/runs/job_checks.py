"""Checks whether a job can be trained, before it runs and in a first small step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import nn

from workbench.errors import RunError, WorkbenchError
from workbench.tensors.agreement import fingerprint
from workbench.training.batches import check_loss_fn


def check_functions(functions: Mapping[str, Any]) -> None:
    """Check that the functions of a job are functions.

    Raises:
        RunError: an argument is a module or an optimizer instead of a function that makes it, a class of losses, or no
            function.
    """
    for name, value in functions.items():
        kind = type(value).__name__
        if isinstance(value, nn.Module) and name == "model_fn":
            raise RunError(
                f"model_fn is a {kind}, but every run makes its own, with fresh weights. Give the function or class "
                f"that makes the model, without calling it: make_model, not make_model()."
            )
        if isinstance(value, torch.optim.Optimizer):
            raise RunError(
                f"{name} is a {kind}, but every run has an optimizer of its own, over its own weights. Give what makes "
                f"it: lambda parameters: torch.optim.{kind}(parameters, lr=0.1)."
            )
        if name == "loss_fn":
            check_loss_fn(value)
        if value is not None and not callable(value):
            raise RunError(f"{name} is a {kind}: {value!r:.60}. It is called in every run: give a function.")


def check_numbers(numbers: Mapping[str, Any]) -> None:
    """Check that numbers are whole and at least 1.

    Raises:
        RunError: a number is not.
    """
    for name, number in numbers.items():
        if not isinstance(number, Integral) or number < 1:
            raise RunError(f"{name}={number!r}: a whole number of at least 1, e.g. {name}=20.")


def check_batch_size(batch_size: int, num_samples: int, dataset: Any) -> None:
    """Check that a batch is no larger than the data set.

    Raises:
        RunError: the batch is larger.
    """
    if batch_size <= num_samples:
        return
    is_pair = isinstance(dataset, list) and all(isinstance(entry, torch.Tensor) for entry in dataset)
    hint = " A list has a sample in each entry: arrays of all samples stand in a tuple." if is_pair else ""
    raise RunError(
        f"batch_size={batch_size}, but the data set has {num_samples} samples. "
        f"A step takes each of them at most once: batch_size={num_samples} is the largest.{hint}"
    )


def check_model(model: Any) -> None:
    """Check that a model is a module whose weights have values.

    Raises:
        RunError: the model is no module, or some of its weights have no values.
    """
    if not isinstance(model, nn.Module):
        described = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise RunError(f"model_fn() returned {described}, not an nn.Module. A run trains 1 module: return model.")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if empty:
        raise RunError(
            f"model_fn() returned a {type(model).__name__} with {len(empty)} of {len(tensors)} tensors on meta, "
            f"{empty[0]} first. All runs and one device start from the same weights, which have values: make the model "
            "outside of torch.device('meta')."
        )


def check_first_weights(model: nn.Module, begun: dict[int, dict[str, str]], seed: int) -> None:
    """Check that a model has the weights of the first one with its seed, by checksums of some of their elements.

    Raises:
        RunError: it has others.
    """
    own = {name: fingerprint([weight]) for name, weight in model.named_parameters() if weight.requires_grad}
    first = begun.setdefault(seed, own)
    others = [name for name in {**first, **own} if first.get(name) != own.get(name)]
    if others:
        raise RunError(
            f"model_fn() returned a {type(model).__name__} of which {len(others)} of {len(own)} trained parameters are "
            f"not as in an earlier call with seed {seed}, {others[0]!r} first. All runs and one device start from the "
            "same weights, and each trains its own: make all layers and weights in model_fn, or copy them there "
            "(copy.deepcopy). Draw weights without a generator of your own: torch, numpy and Python are seeded before "
            "each call."
        )


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Check that an optimizer trains the parameters of the model, and no others.

    Raises:
        RunError: it is no optimizer, it is several optimizers, its step needs a closure, or it has tensors that are not
            the model's.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        described = f"a {kind} of {len(optimizer)}" if isinstance(optimizer, (list, tuple, dict)) else f"a {kind}"
        raise RunError(
            f"optimizer_fn(parameters) returned {described}; a run has 1 torch.optim.Optimizer. Return one; different "
            "settings for different parameters are its groups: torch.optim.SGD([{'params': ..., 'lr': ...}, ...]). A "
            "scheduler follows by optimizer.register_step_post_hook(lambda *_: scheduler.step())."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RunError(
            f"optimizer_fn(parameters) returned a {kind}, whose step() evaluates the loss several times, by a closure. "
            "A run has 1 forward and 1 backward in each step, as on one device: train with it in an own loop, by "
            "optimizer.step(closure), or give another optimizer."
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = sum(id(parameter) not in own for parameter in held)
    if others:
        raise RunError(
            f"optimizer_fn(parameters) returned a {kind} over {len(held)} tensors, {others} of which are not among the "
            f"model's {len(own)}. Each run has a fresh model: make the optimizer of the parameters that are passed."
        )


@contextmanager
def explained(call: str, given: Mapping[str, Any], fix: str) -> Iterator[None]:
    """A context that adds the arguments of the user's code to the errors that it raises."""
    try:
        yield
    except WorkbenchError:
        raise
    except Exception as error:
        described = "; ".join(f"{name} is {shown(value)}" for name, value in given.items())
        error.add_note(f"{call} was called with the first samples of the data set: {described}. {fix}")
        raise


def shown(value: Any) -> str:
    """Shapes and types of a batch or an output, in words.

    >>> shown((torch.ones(2, 4), {"mask": torch.ones(2)}))
    'a tuple of (float32 (2, 4), a dict of {mask: float32 (2,)})'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    kind = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        return f"{kind} of {{{', '.join(f'{key}: {shown(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{kind} of ({', '.join(map(shown, value))})"
    return "None" if value is None else kind
