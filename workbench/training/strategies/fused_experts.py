"""Modules that hold all experts of a mixture in one tensor per weight, and slices of their experts.

Such a module is called with tokens, the numbers of the experts that each token has chosen, and their weights, and gives

    out[t] = sum over k of weights[t, k] * expert(numbers[t, k], tokens[t])

The experts of ``transformers`` do (Mixtral, Qwen-MoE, DeepSeek-V3, GPT-OSS, OLMoE and others), and so may a user's. A
trial on a few random tokens tells, not the name of a class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn

from workbench.tensors import default_generator

PASSING = "_workbench_passing"
"""Among the attributes of a module that is made for one call: nobody keeps it, with the tensors that it has."""
_ARGUMENTS = 3
"""Tokens, numbers of experts, weights."""
_CHOSEN = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_TRIED_EXPERTS = 3
_TOLERANCE = 1e-3
_tried: WeakKeyDictionary[type[nn.Module], bool] = WeakKeyDictionary()


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
    if holds_more or not experts:
        return 0
    kind = type(module)
    if kind not in _tried:
        _tried[kind] = _is_sum_of_experts(module, experts, shapes)
    return experts if _tried[kind] else 0


def count_chosen(around: nn.Module, experts: int) -> int:
    """How many of the experts in a module a token chooses, as the module, a part of it or their configuration says.

    0 if none does.
    """
    parts = [around, *around.children()]
    places = [*parts, *(getattr(part, "config", None) for part in parts)]
    found = (getattr(place, name, None) for place in places for name in _CHOSEN)
    return next((number for number in found if type(number) is int and 0 < number <= experts), 0)


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
    """
    some: nn.Module = object.__new__(type(module))
    here = len(next(iter(tensors.values())))
    named = {name: tensors.get(name) for name in module._parameters}
    own = {name: value for name, value in vars(module).items() if name != "forward"}
    vars(some).update({**own, **dict.fromkeys(_counts(module, experts), here), "_parameters": named, PASSING: True})
    result: torch.Tensor = some.forward(rows, numbers, weights)
    return result


def _counts(module: nn.Module, experts: int) -> Iterator[str]:
    """The names of the attributes that hold the number of experts."""
    for name, value in vars(module).items():
        if type(value) is int and value == experts and "expert" in name and "per" not in name.split("_"):
            yield name


def _is_sum_of_experts(module: nn.Module, experts: int, shapes: list[tuple[int, ...]]) -> bool:
    """Whether a module of three experts with random weights gives what its slices give together.

    The width of a token is one of the sizes of the weights.
    """
    draw = torch.Generator().manual_seed(0)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    tensors = {
        name: torch.randn(_TRIED_EXPERTS, *shape[1:], generator=draw, device="cpu") / max(1, shape[-1]) ** 0.5
        for name, shape in zip(names, shapes, strict=True)
    }
    trained: nn.Module = object.__new__(type(module))
    vars(trained).update(vars(module), training=True)  # dropout would differ from rank to rank
    with default_generator.restored(), torch.no_grad():
        for width in dict.fromkeys(size for shape in shapes for size in reversed(shape[1:])):
            tokens = torch.randn(4, width, generator=draw, device="cpu")
            try:
                return _agrees(trained, experts, tensors, tokens)
            except Exception:  # noqa: BLE001 - another width, or code that is no such module
                continue
    return False


def _agrees(module: nn.Module, experts: int, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> bool:
    numbers = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]], device="cpu")
    weights = torch.tensor([[0.5, 0.25], [1.5, -0.5], [0.75, 1.0], [0.25, 0.5]], device="cpu")
    whole = run_some(module, experts, tensors, tokens, numbers, weights)
    if not isinstance(whole, torch.Tensor) or whole.shape != tokens.shape or whole.dtype != tokens.dtype:
        raise TypeError("no sum of experts")
    total = torch.zeros_like(whole)
    for first, stop in ((0, 2), (2, _TRIED_EXPERTS)):
        here = {name: tensor[first:stop].contiguous() for name, tensor in tensors.items()}
        for column in range(numbers.shape[1]):
            chosen = ((numbers[:, column] >= first) & (numbers[:, column] < stop)).nonzero().flatten()
            local = numbers[chosen, column, None] - first
            ones = torch.ones_like(local, dtype=weights.dtype)
            terms = run_some(module, experts, here, tokens[chosen], local, ones)
            total.index_add_(0, chosen, terms * weights[chosen, column, None])
    return bool((total - whole).abs().max() <= _TOLERANCE * whole.abs().max())
