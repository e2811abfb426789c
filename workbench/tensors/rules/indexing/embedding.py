"""Tables of vectors: indices, width and rows of the table may be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.rules import Signature, signatures
from workbench.core.sbp import Sbp, Split, broadcast, partial_sum
from workbench.kernels.embedding_rows import embedding_rows
from workbench.kernels.launch import can_launch
from workbench.tensors.dispatch import gradient_accumulation_fusion as fusion
from workbench.tensors.dispatch.arguments import by_name
from workbench.tensors.dispatch.local_call import can_read
from workbench.tensors.dispatch.registry import EXACT, Call, LocalFunction, Resolution, composite, rule
from workbench.tensors.global_tensor import GlobalTensor, Spec
from workbench.tensors.rules.indexing.indexing import own_term, shifted
from workbench.tensors.rules.reduction.empty_shards import zeros, zeros_where_empty
from workbench.tensors.rules.reduction.two_stage import own_rows


@rule("embedding")
def _embedding(call: Call) -> Resolution | None:
    """Any dim of the indices may be split, or the width of the table, or its rows: each rank then looks up its own rows
    and returns zeros for the others.

    Gradients are dense, whatever ``sparse`` says. Gradients scaled by frequency need all indices.
    """
    by_function = call.func is F.embedding
    indices, table = (0, 1) if by_function else (1, 0)
    scales = call.arg(5, "scale_grad_by_freq", False) if by_function else call.arg(3, "scale_grad_by_freq", False)
    kept = "ABCDFGHIJKLMNOP"[: len(call.shapes[indices])] if scales else "..."
    terms = [kept, "Ve"] if by_function else ["Ve", kept]
    found = list(signatures(f"{', '.join(terms)} -> {kept}e", call.shapes, [len(call.outputs[0][0])]))
    if not scales:
        entries: list[Sbp] = [broadcast, broadcast]
        entries[table] = Split(0)
        found.insert(0, Signature(tuple(entries), (partial_sum,), "v"))

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction | None:
        if 0 in inputs[table].local_shape:
            nothing = zeros(call, outputs)
            return lambda *args, **kwargs: -nothing(*args, **kwargs)  # as in ``own_term``
        padding = call.arg(2, "padding_idx", None if by_function else -1)
        if padding is not None and padding < 0:
            padding = padding + call.shapes[table][0] if by_function else None
        if "v" in letters:
            return _own_rows(by_function, own_rows(inputs[table], 0), call.shapes[table][0], padding)
        return _whole_table(by_function, padding, bool(scales))

    return Resolution(found, localize)


def _operands(by_function: bool, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and table, whose order differs between ``F.embedding`` and ``torch.embedding``."""
    second = args[1] if len(args) > 1 else kwargs["weight" if by_function else "indices"]
    return (args[0], second) if by_function else (second, args[0])


def _whole_table(by_function: bool, padding: int | None, scales: bool) -> Callable[..., torch.Tensor]:
    def look_up(*args: Any, **kwargs: Any) -> torch.Tensor:
        indices, weight = _operands(by_function, args, kwargs)
        if scales:
            return F.embedding(indices, weight, padding, scale_grad_by_freq=True)
        return fusion.embedding(indices, weight, padding)

    return look_up


def _own_rows(
    by_function: bool, rows: tuple[int, int], num_rows: int, padding: int | None
) -> Callable[..., torch.Tensor]:
    """Vectors of this rank's rows, zeros for the others."""
    start, stop = rows
    own_padding = padding - start if padding is not None and start <= padding < stop else None

    def look_up(*args: Any, **kwargs: Any) -> torch.Tensor:
        indices, weight = _operands(by_function, args, kwargs)
        _check_range(indices, num_rows)
        if can_launch(weight) and weight.is_floating_point():
            found = embedding_rows(weight, indices.reshape(-1).long(), start, -1 if padding is None else padding)
            return found.view(*indices.shape, weight.shape[1])
        row, valid = shifted(indices, start, stop)
        return own_term(fusion.embedding(row, weight, own_padding), valid.unsqueeze(-1))

    return look_up


def _check_range(indices: torch.Tensor, num_rows: int) -> None:
    """Raise for an index that no rank has. torch raises only if the table is whole; on slices the result would be
    zeros.
    """
    if not can_read(indices) or not indices.numel():
        return
    lowest, highest = (int(bound) for bound in indices.aminmax())
    if lowest < 0 or highest >= num_rows:
        raise IndexError(
            f"embedding: index {lowest if lowest < 0 else highest} is out of range for a table of {num_rows} rows. "
            f"Indices are at least 0 and less than {num_rows}: check them, or give the table more rows."
        )


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding``; with ``max_norm``, the rows in use are first scaled in place."""
    if max_norm is None:
        return NotImplemented
    _scale_rows(weight, input, max_norm, norm_type)
    return F.embedding(input, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)


@torch.no_grad()
def _scale_rows(weight: Any, indices: Any, max_norm: float, norm_type: float) -> None:
    torch.embedding_renorm_(weight.detach(), indices.contiguous(), max_norm, norm_type)


EXACT[F.embedding] = embedding  # the first argument of torch.embedding is the table


@rule("embedding_bag")
def _embedding_bag(call: Call) -> Resolution | None:
    """The rows of two-dim indices may be split (each is a bag), and the width of the table. With offsets, all indices
    stay whole.
    """
    if call.func is not F.embedding_bag:
        return None
    scales = call.arg(5, "scale_grad_by_freq", False)
    bags = "B" if scales else "b"
    indices = f"{bags}N" if len(call.shapes[0]) == 2 else "N"
    weights = f", {indices}" if isinstance(call.arg(8, "per_sample_weights"), torch.Tensor) else ""
    offsets = ", O" if isinstance(call.arg(2, "offsets"), torch.Tensor) else ""
    width = "E" if weights else "e"  # a weight's gradient sums over the width; one device rounds that sum once
    result = f"{bags}{width}" if len(call.shapes[0]) == 2 else f"Q{width}"
    return Resolution(f"{indices}, V{width}{offsets}{weights} -> {result}", zeros_where_empty)


@composite("embedding_bag")
def embedding_bag(input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Bags over rows of a split table: each rank looks up its own rows, and the bags are summed. Dense gradients."""
    if input.is_floating_point():  # the first argument of torch.embedding_bag is the table
        return NotImplemented
    options = by_name(F.embedding_bag, (input, weight, *args), kwargs)
    if options.get("sparse"):
        return F.embedding_bag(**{**options, "sparse": False})
    if options.get("max_norm") is not None:
        _scale_rows(weight, input, options["max_norm"], options.get("norm_type", 2.0))
        return F.embedding_bag(**{**options, "max_norm": None})
    mode = options.get("mode", "mean")
    rows_split = isinstance(weight, GlobalTensor) and Split(0) in weight._spec.layout.sbp
    scales = options.get("scale_grad_by_freq")
    if scales or not (rows_split and input.dim() == 2 and mode in ("sum", "mean")):
        return NotImplemented
    padding = options.get("padding_idx")
    found = F.embedding(input, weight, padding)
    each = options.get("per_sample_weights")
    if padding is not None:
        counts = input != padding % weight.shape[0]
        each = counts.to(weight.dtype) if each is None else each * counts
    total = found.sum(1) if each is None else (found * each.unsqueeze(-1)).sum(1)
    if mode == "sum":
        return total
    if padding is None:
        return total / input.shape[1] if input.shape[1] else total
    return total / counts.sum(1, keepdim=True).clamp(min=1)


@rule("one_hot")
def _one_hot(call: Call) -> Resolution | None:
    return Resolution("... -> ...C", lambda *_: _local_one_hot) if call.arg(1, "num_classes", -1) > 0 else None


def _local_one_hot(tensor: torch.Tensor, num_classes: int) -> torch.Tensor:
    """torch's own looks at all values, to check them: a step that is recorded may not."""
    if can_read(tensor):
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()
