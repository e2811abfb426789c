"""Modules that hold all experts of a mixture in one tensor per weight, and slices of their experts.

Such a module is called with tokens, the numbers of the experts that each token has chosen, and their weights, and gives

    out[t] = sum over k of weights[t, k] * expert(numbers[t, k], tokens[t])

The experts of ``transformers`` do (Mixtral, Qwen-MoE, DeepSeek-V3, GPT-OSS, OLMoE and others), and so may a user's. A
trial on some random tokens tells, not the name of a class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from math import prod
from numbers import Number
from operator import is_not
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from workbench.errors import StrategyError
from workbench.tensors import default_generator

PASSING = "_workbench_passing"
"""Among the attributes of a module that is made for one call: nobody keeps it, with the tensors that it has."""
_ARGUMENTS = 3
"""Tokens, numbers of experts, weights."""
_NOT_OWN = {*vars(nn.Module()), "forward"}
_COMPARED = (Number, str, bytes, type(None), Enum, torch.dtype)
"""Settings whose values count. Functions count as themselves, without being kept; of others their types do."""
_TRIED_EXPERTS = 3
_TOLERANCE = 1e-3
_FEW = 4
"""Tokens of one call in the trial, which no capacity drops where many tokens choose one expert."""
_MANY = 64
_MOST_NUMBERS = 2**30
"""In the weights of the experts of many tokens: some forwards make copies of these."""
_tried: WeakKeyDictionary[type[nn.Module], dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
"""By class and settings: a trial of large experts takes seconds, and a model has many alike."""


def count_experts(module: nn.Module) -> int:
    """The number of experts of a module of fused experts; 0 for any other module.

    All its parameters have one row per expert, as dim 0, and a slice of the rows is a module of fewer experts. Its
    forward is that of its class: one of its own, as hooks of other libraries are, knows all experts only.
    """
    if not getattr(vars(module).get("forward"), "runs_some_experts", "forward" not in vars(module)):
        return 0
    shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) != 1 or max(map(len, shapes)) < _ARGUMENTS or len(argument_names(module)) < _ARGUMENTS:
        return 0
    (experts,) = rows
    holds_more = any(True for _ in module.buffers()) or sum(1 for _ in module.parameters()) > len(shapes)
    holds_more |= any(isinstance(value, torch.Tensor) for value in tree_leaves(_attributes(module)))
    if holds_more or not experts:
        return 0
    settings, tried = _settings(module), _tried.setdefault(type(module), {})
    if settings not in tried:
        tried[settings] = _is_sum_of_experts(module, experts, shapes)
    return experts if tried[settings] else 0


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of its forward that may be given by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_position)


def run_some(
    module: nn.Module,
    experts: int,
    tensors: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of a module of fused experts as one of fewer experts, on plain tensors.

    Args:
        module: of all experts.
        experts: their number.
        tensors: the rows of its parameters of consecutive experts.
        rows, numbers, weights: the arguments; numbers count from the first of these experts.

    Raises:
        StrategyError: the forward changes an attribute, of which this rank's value would be lost.
    """
    some: nn.Module = object.__new__(type(module))
    here = len(next(iter(tensors.values())))
    named = {name: tensors.get(name) for name in module._parameters}
    own = {name: value for name, value in vars(module).items() if name != "forward"}
    vars(some).update({**own, **dict.fromkeys(_counts(module, experts), here), "_parameters": named, PASSING: True})
    before = _contents(some)
    result: torch.Tensor = some.forward(rows, numbers, weights)
    for name, (leaves, spec) in _contents(some).items():
        known, known_spec = before.get(name, ([], None))
        if spec != known_spec or any(map(is_not, leaves, known)):
            raise StrategyError(
                f"{type(module).__name__}: its forward keeps {name!r} in the module, but it runs on one rank's part of "
                "the tokens or experts, so the value is not that of all. Keep it in the module that calls the experts."
            )
    return result


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Those that torch does not give every module."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_OWN}


def _contents(module: nn.Module) -> dict[str, tuple[list[Any], TreeSpec]]:
    """What the attributes of a module and its parts hold, by their paths; what lists and dicts hold at present."""
    parts = module.named_modules()
    return {
        f"{path}.{name}".lstrip("."): tree_flatten(v) for path, part in parts for name, v in _attributes(part).items()
    }


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What may decide the verdict among the attributes of a module, of its parts, and of their configurations."""
    own = [_attributes(part) for part in module.modules()]
    held = [vars(value) for each in own for value in each.values() if hasattr(value, "__dict__")]
    leaves = tree_leaves([list(each.items()) for each in [*own, *held]])
    leaves = [ref(leaf) if isinstance(leaf, FunctionType | partial) else leaf for leaf in leaves]
    return tuple(leaf if isinstance(leaf, (*_COMPARED, ref)) else type(leaf) for leaf in leaves)


def _counts(module: nn.Module, experts: int) -> Iterator[str]:
    """The names of the attributes that hold the number of experts."""
    for name, value in vars(module).items():
        if type(value) is int and value == experts and "expert" in name and "per" not in name.split("_"):
            yield name


def _is_sum_of_experts(module: nn.Module, experts: int, shapes: list[tuple[int, ...]]) -> bool:
    """Whether a module of three experts with random weights gives what its slices give together for few tokens at a
    time, also where nearly all tokens choose one expert, and keeps nothing.

    The width of a token is one of the sizes of the weights.
    """
    draw = torch.Generator().manual_seed(0)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    tensors = {
        name: torch.randn(_TRIED_EXPERTS, *shape[1:], generator=draw, device="cpu") / max(1, shape[-1]) ** 0.5
        for name, shape in zip(names, shapes, strict=True)
    }
    trained: nn.Module = object.__new__(type(module))
    vars(trained).update(tree_map(lambda leaf: leaf, vars(module)))  # with lists and dicts of its own
    trained.training = True  # dropout would differ from rank to rank
    many = max(2 * _FEW, min(_MANY, _MOST_NUMBERS // sum(map(prod, (shape[1:] for shape in shapes)))))
    with default_generator.restored(), torch.no_grad():
        for width in dict.fromkeys(size for shape in shapes for size in reversed(shape[1:])):
            tokens = torch.randn(many, width, generator=draw, device="cpu")
            try:
                return all(_agrees(trained, experts, tensors, tokens, *choices) for choices in _choices(many))
            except Exception:  # noqa: BLE001 - another width, or code that is no such module
                continue
    return False


def _choices(many: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The numbers of experts that tokens choose, and their weights."""
    weights = torch.tensor([[0.5, 0.25], [1.5, -0.5], [0.75, 1.0], [0.25, 0.5]], device="cpu")
    yield torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]], device="cpu"), weights
    most = torch.zeros(many, 1, dtype=torch.long, device="cpu")
    most[0] = _TRIED_EXPERTS - 1
    yield most, torch.linspace(0.5, 1.5, many, device="cpu")[:, None]


def _agrees(
    module: nn.Module,
    experts: int,
    tensors: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    numbers: torch.Tensor,
    weights: torch.Tensor,
) -> bool:
    tokens = tokens[: len(numbers)]
    whole = run_some(module, experts, tensors, tokens, numbers, weights)
    if not isinstance(whole, torch.Tensor) or whole.shape != tokens.shape or whole.dtype != tokens.dtype:
        raise TypeError("no sum of experts")
    total = torch.zeros_like(whole)
    for first, stop in ((0, 2), (2, _TRIED_EXPERTS)):
        here = {name: tensor[first:stop].contiguous() for name, tensor in tensors.items()}
        for column in range(numbers.shape[1]):
            here_too = (numbers[:, column] >= first) & (numbers[:, column] < stop)
            for chosen in here_too.nonzero().flatten().split(_FEW):
                local = numbers[chosen, column, None] - first
                ones = torch.ones_like(local, dtype=weights.dtype)
                terms = run_some(module, experts, here, tokens[chosen], local, ones)
                total.index_add_(0, chosen, terms * weights[chosen, column, None])
    return bool((total - whole).abs().max() <= _TOLERANCE * whole.abs().max())
