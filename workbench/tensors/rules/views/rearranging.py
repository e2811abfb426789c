"""Rearrangements that are not views: triangles, diagonals, grids of tensors, repeats, resampled images."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from workbench.core.rules import Signature, signatures
from workbench.core.sbp import Split, broadcast, partial_sum
from workbench.tensors.dispatch.planning import check_as_torch
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, composite, normalize_dims, rule, term
from workbench.tensors.global_tensor import GlobalTensor, Spec
from workbench.tensors.rules.reduction.empty_shards import as_if_filled, zeros_where_empty
from workbench.tensors.rules.reduction.two_stage import own_rows
from workbench.tensors.rules.views.concatenation import listed


def _corner(spec: Spec) -> int:
    """First row minus first column of this rank's part of the last two dims."""
    ndim = len(spec.shape)
    return own_rows(spec, ndim - 2)[0] - own_rows(spec, ndim - 1)[0]


@rule("tril", "triu")
def _triangle(call: Call) -> Resolution:
    """On a shard, the diagonal is shifted by the shard's first row and column."""

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction | None:
        shift = _corner(inputs[0])
        if not shift:
            return None
        function = call.func
        return lambda x, diagonal=0, **__: function(x, diagonal + shift)

    ndim = len(call.shapes[0])
    return Resolution(f"+{term(ndim)} -> {term(ndim)}", localize)


@rule("fill_diagonal")
def _fill_diagonal(call: Call) -> Resolution | None:
    """Each rank fills its part of the diagonal of a matrix."""
    if len(call.shapes[0]) != 2 or call.arg(2, "wrap", False):
        return None

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
        shift = _corner(inputs[0])
        return lambda x, value, *_, **__: x.diagonal(shift).fill_(value)

    return Resolution("ab -> ab", localize)


@rule("trace")
def _trace(call: Call) -> Resolution:
    """Each rank sums its part of the diagonal."""

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
        shift = _corner(inputs[0])
        return lambda x, **__: torch.diagonal(x, shift).sum()

    split = [Signature((Split(d),), (partial_sum,), chr(97 + d)) for d in (0, 1)]
    rest = [Signature((entry,), (entry,)) for entry in (partial_sum, broadcast)]
    return Resolution([*split, *rest], localize)


@rule("diag_embed")
def _diag_embed(call: Call) -> Resolution:
    """The last dim becomes a diagonal and stays whole; all other dims keep their split."""
    ndim = len(call.shapes[0])
    pair = sorted(dim % (ndim + 1) for dim in (call.arg(2, "dim1", -2), call.arg(3, "dim2", -1)))
    names = list(term(ndim, [ndim - 1])[:-1])
    for at in pair:
        names.insert(at, "Z")
    return Resolution(f"+{term(ndim, [ndim - 1])} -> {''.join(names)}")


@composite("diag")
def diag(input: Any, diagonal: int = 0) -> Any:
    """A vector as a diagonal, or the diagonal of a matrix."""
    check_as_torch(torch.diag, input, diagonal)
    return torch.diag_embed(input, diagonal) if input.dim() == 1 else input.diagonal(diagonal).clone()


@composite("diagflat")
def diagflat(input: Any, offset: int = 0) -> Any:
    """All elements as a diagonal."""
    return torch.diag_embed(input.reshape(-1), offset)


@composite("rot90")
def rot90(input: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    """A quarter turn: a flip and a transposition."""
    check_as_torch(torch.rot90, input, k, dims)
    quarters = k % 4
    if quarters == 0:
        return input.clone()
    if quarters == 2:
        return input.flip(dims)
    return input.flip([dims[1 if quarters == 1 else 0]]).transpose(dims[0], dims[1])


@composite("repeat_interleave")
def repeat_interleave(input: Any, repeats: Any = None, dim: int | None = None, **options: Any) -> Any:
    """By counts that every rank knows, as the result's shape depends on them: a global tensor's are read."""
    if not isinstance(input, GlobalTensor) or repeats is None:
        return NotImplemented
    if isinstance(repeats, GlobalTensor):
        repeats = value_on_all_ranks(repeats) if repeats.dim() else int(repeats)
    if dim is None:
        return repeat_interleave(input.reshape(-1), repeats, 0, **options)
    [dim] = normalize_dims(dim, input.dim())
    shape = list(input.shape)
    if isinstance(repeats, torch.Tensor):
        rows = torch.arange(shape[dim], device=repeats.device)
        return input.index_select(dim, torch.repeat_interleave(rows, repeats.expand(shape[dim])))
    wide = input.unsqueeze(dim + 1).expand(*shape[: dim + 1], repeats, *shape[dim + 1 :])
    if repeats == 1 or shape[dim] == 1:  # of which a reshape is a view
        wide = wide.clone(memory_format=torch.contiguous_format)
    return wide.reshape(*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])


@composite("broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> Any:
    """All tensors expanded to their common shape."""
    given = listed(tensors)
    shape = torch.broadcast_shapes(*(tuple(t.shape) for t in given))
    return tuple(t.expand(shape) for t in given)


@composite("cartesian_prod")
def cartesian_prod(*tensors: Any) -> Any:
    """All combinations of the elements of vectors, as rows; of one vector, a view of it."""
    given = listed(tensors)
    if len(given) == 1 and given[0].dim() == 1:
        return given[0].view(-1)
    shape = tuple(t.shape[0] for t in given)
    grids = [t.view([-1 if d == k else 1 for d in range(len(shape))]).expand(shape) for k, t in enumerate(given)]
    return torch.stack([grid.reshape(-1) for grid in grids], 1)


@composite("combinations")
def combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """All choices of ``r`` elements of a vector, as rows. Their indices depend on its length only."""
    if input.dim() != 1 or r < 1:
        return NotImplemented
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(choose(range(input.shape[0]), r))
    return input[torch.tensor(rows, dtype=torch.int64).reshape(-1)].reshape(len(rows), r)


def _each(name: str, least: int) -> None:
    def widen(*tensors: Any) -> Any:
        widened = [_with_dims(t, least) for t in listed(tensors)]
        return widened[0] if len(tensors) == 1 and not isinstance(tensors[0], (list, tuple)) else tuple(widened)

    composite(name)(widen)


def _with_dims(tensor: Any, least: int) -> Any:
    """torch.atleast_1d, 2d and 3d: a vector becomes a row, a matrix gets a last dim of size one."""
    if tensor.dim() >= least:
        return tensor.view(tensor.shape)
    if tensor.dim() == 0:
        return tensor.reshape([1] * least)
    if tensor.dim() == 1:
        return tensor.unsqueeze(0) if least == 2 else tensor.unsqueeze(0).unsqueeze(-1)
    return tensor.unsqueeze(-1)


for _least in (1, 2, 3):
    _each(f"atleast_{_least}d", _least)


def _copy_of(name: str) -> None:
    def copy(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(torch.Tensor, name)(input, *args, **kwargs)
        return result.clone() if isinstance(result, torch.Tensor) else tuple(part.clone() for part in result)

    composite(f"{name}_copy")(copy)


for _name in (
    "expand", "diagonal", "narrow", "view", "split", "split_with_sizes", "unbind", "unfold", "squeeze", "unsqueeze",
    "transpose", "t", "permute", "select",
):  # fmt: skip
    _copy_of(_name)


@rule("pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle", "channel_shuffle")
def _shuffle_pixels(call: Call) -> Resolution:
    """Channels to pixels and back. Channels may be split if slices hold whole blocks."""
    shape, target = call.shapes[0], call.outputs[0][0]
    ndim = len(shape)
    if call.name in ("channel_shuffle", "native_channel_shuffle"):
        return Resolution(f"+{term(ndim, [1])} -> {term(ndim, [1])}", zeros_where_empty)
    text = term(ndim, range(ndim - 3, ndim))
    found = list(signatures(f"+{text} -> {text}", call.shapes, [ndim]))
    parts = call.operands[0]._spec.layout.placement.num_ranks
    if shape[-3] % parts == 0 and target[-3] % parts == 0:
        found.insert(0, Signature((Split(ndim - 3),), (Split(ndim - 3),), "c"))
    return Resolution(found, zeros_where_empty)


@rule(
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa",
)  # fmt: skip
def _resample(call: Call) -> Resolution:
    """Batch and channels may be split; the image stays whole. Linear, unless means of integers are rounded."""
    text = "nc" + "XYZ"[: len(call.shapes[0]) - 2]
    addend = "+" * (call.has_fractions or "nearest" in call.name)
    return Resolution(f"{addend}{text} -> {text}", zeros_where_empty)


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def _sample_grid(call: Call) -> Resolution:
    """Batch, channels and sampled points may be split; the image stays whole."""
    image, points = ("XY", "hw") if len(call.shapes[0]) == 4 else ("XYZ", "dhw")
    text = f"nc{image}, n{points}V -> nc{points}"
    found = list(signatures(text, call.shapes, [len(call.outputs[0][0])]))
    found.insert(-1, Signature((partial_sum, broadcast), (partial_sum,)))
    return Resolution(found, as_if_filled)


@composite("meshgrid")
def meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    """Grids of coordinates: each vector along its own dim, expanded over the dims of the others."""
    given = listed(tensors)
    if any(t.dim() > 1 for t in given) or indexing not in (None, "ij", "xy"):
        return NotImplemented
    shape = [t.numel() for t in given]
    grids = [t.reshape([-1 if d == k else 1 for d in range(len(shape))]).expand(shape) for k, t in enumerate(given)]
    if indexing == "xy" and len(grids) > 1:
        grids = [grid.transpose(0, 1) for grid in grids]
    return tuple(grids)
