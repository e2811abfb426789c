"""Ways to spread a model nobody here wrote: the batch, the weights by a rule that knows no model, or both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.global_tensor import GlobalTensor, spec_of, wrap
from workbench.tensors.world import current

MODES = ("batch-2", "batch-3", "weights-2", "weights-3", "both-2x2")


def ranks_of(mode: str) -> int:
    """Number of ranks of a mode."""
    return 4 if mode.endswith("2x2") else int(mode[-1])


def spread(model: nn.Module, batch: dict[str, torch.Tensor], mode: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model with global parameters and buffers, and the batch as global tensors."""
    kind = mode.partition("-")[0]
    placement = Placement.of("cpu", [[0, 1], [2, 3]] if mode.endswith("2x2") else list(range(ranks_of(mode))))

    def layout(data: str, weights: str) -> Layout:
        return Layout.of(placement, {"batch": [data], "weights": [weights], "both": [data, weights]}[kind])

    replace_parameters(model, lambda dim: layout("B", "B" if dim is None else f"S({dim})"))
    return model, {name: cut(tensor, layout("S(0)", "B")) for name, tensor in batch.items()}


def weight_dim(module: nn.Module, name: str, nth: int) -> int | None:
    """The dim along which a parameter is split, or None: the ``nth`` layer by columns where even, else by rows."""
    shape = module._parameters[name].shape
    if len(shape) < 2:
        return None
    if isinstance(module, nn.Embedding):
        return nth % 2
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
        return nth % 2
    if type(module).__name__ == "Conv1D":  # of GPT-2: its weight is (inputs, outputs)
        return 1 - nth % 2
    return len(shape) - 1


def split_dims(model: nn.Module) -> dict[nn.Parameter, int | None]:
    """The dim along which every parameter is split: matrices by the rule, biases like the rows of their matrix."""
    dims: dict[nn.Parameter, int | None] = {}
    counts: Counter[bool] = Counter()
    for module in model.modules():
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        is_table = isinstance(module, nn.Embedding)
        if any(parameter.dim() > 1 for parameter in own.values()):
            for name, parameter in own.items():
                dims.setdefault(parameter, weight_dim(module, name, counts[is_table]))
            counts[is_table] += 1
            if own.keys() == {"weight", "bias"}:
                outputs = 1 if type(module).__name__ == "Conv1D" else 0
                dims[module.bias] = 0 if dims[module.weight] == outputs else None
    return dims


def replace_parameters(model: nn.Module, layout_of: Callable[[int | None], Layout]) -> None:
    """Put global tensors in the place of parameters and buffers; what is tied stays tied."""
    dims = split_dims(model)
    replaced = {
        parameter: nn.Parameter(cut(parameter.detach(), layout_of(dims.get(parameter))), parameter.requires_grad)
        for parameter in model.parameters()
    }
    for module in model.modules():
        module._parameters.update({n: replaced[p] for n, p in module._parameters.items() if p is not None})
        module._buffers.update({n: cut(b, layout_of(None)) for n, b in module._buffers.items() if b is not None})


def cut(tensor: torch.Tensor, layout: Layout) -> GlobalTensor:
    """This rank's part of a tensor that every rank holds."""
    spec = spec_of(current(), layout, tuple(tensor.shape))
    region = spec.layout.region(spec.shape, current().rank)
    part = tensor[tuple(slice(start, stop) for start, stop in region)]
    return wrap(part.clone(memory_format=torch.contiguous_format), spec)
