"""Costs of a model's layers as rows. A trace on metadata or a formula makes them; planner and simulator read them.

All figures are of the forward of ONE sample on one device, undivided. ``workbench.cost`` applies a strategy to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from operator import attrgetter

from workbench.core.float8_layers import multiplies_in_8_bits
from workbench.core.rows import Layer, count_parameters


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """The sizes of attention in one function, which decide how a split sequence passes the ranks.

    Attributes:
        heads, key_heads: of queries, and of keys and values.
        rows, keys: lengths of the sequences of queries and of keys.
        widths: features of a head of queries and keys, and of values.
        is_causal: whether queries see the earlier keys only.
        has_mask: whether a mask for all heads has a row for each query: slices of heads would each need all of it.
    """

    heads: int
    key_heads: int
    rows: int
    keys: int
    widths: tuple[int, int]
    is_causal: bool = False
    has_mask: bool = False


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of one function's forward.

    Attributes:
        name: name of the function: "linear", "softmax", "layer_norm".
        flops: multiplications and additions, 2 m n k for a matrix product. 0 for what only moves memory.
        moved_bytes: read and written.
        inner: size of the dim that a matrix product sums over; 0 for others. Small ones run below the machine's rate.
        saved_bytes: bytes that autograd keeps for backward, without parameters.
        backward_bytes: read and written by its backward, matrix products left out; None if not counted.
        again_bytes: saved by it, too, but counted with the function that saved it first: two copies where something is
            boxed in between.
        passing_bytes: inputs and results of its backward, except saved tensors and gradients of weights.
        attention: its sizes, if it is attention.
        fused_bytes: read and written by its forward and its backward, matrix products left out, where it is one program
            with its neighbours, as in a compiled step; None if not counted.
        backward_products: whether backward has its product for the input, and that for the weight: a frozen weight has
            none, nor has an input behind which nothing is trained.
    """

    name: str
    flops: float
    moved_bytes: float
    inner: int = 0
    saved_bytes: float = 0.0
    backward_bytes: float | None = None
    again_bytes: float = 0.0
    passing_bytes: float = 0.0
    attention: AttentionSize | None = None
    fused_bytes: tuple[float, float] | None = None
    backward_products: tuple[bool, bool] = (True, True)

    @property
    def is_matmul(self) -> bool:
        """Whether it is bound by the rate of matrix products rather than by memory."""
        return self.inner > 0


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of an activation.

    Attributes:
        sizes: sizes of one sample, or of a tensor that is equal for all samples, such as positions.
        batch_dim: the dim that counts samples; None if the tensor is equal for all.

    >>> Extent((8, 16)).whole(32), Extent((8, 16), batch_dim=1).whole(32), Extent((8, 16), batch_dim=None).whole(32)
    ((32, 8, 16), (8, 32, 16), (8, 16))
    """

    sizes: tuple[int, ...]
    batch_dim: int | None = 0

    def whole(self, num_samples: int) -> tuple[int, ...]:
        """The logical shape for a batch of ``num_samples`` samples."""
        if self.batch_dim is None:
            return self.sizes
        return (*self.sizes[: self.batch_dim], num_samples, *self.sizes[self.batch_dim :])

    @property
    def num_dims(self) -> int:
        """With the dim that counts samples."""
        return len(self.sizes) + (self.batch_dim is not None)

    @property
    def is_batchless(self) -> bool:
        """Whether the tensor is equal for all samples."""
        return self.batch_dim is None


@dataclass(frozen=True, slots=True)
class SkipConnection:
    """An activation that later layers read.

    Attributes:
        size_bytes: bytes of one sample.
        readers: the layers whose functions read it, as places after the layer that makes it: 1 is the next one.
        as_input: those of ``readers`` whose own input it is.
        has_gradient: whether backward computes its gradient.
    """

    size_bytes: float
    readers: tuple[int, ...]
    as_input: tuple[int, ...] = ()
    has_gradient: bool = True


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer with parameters, and the functions between it and the next one, which are counted with it.

    Attributes:
        layer: name, class, shapes of its parameters.
        own: the layer's own function.
        after: functions on its output until the next layer begins (attention, an activation function, a residual sum);
            behind the last layer, the loss.
        output: extent of its output; None if that is not one tensor, or unknown.
        itemsize: bytes of an element of the output.
        passed: extent of the tensor that goes to the next layer, behind ``after``; None if equal to the output's.
        passed_itemsize: bytes of an element of it; None if equal to ``itemsize``.
        pieces: sizes of the slices into which its features are cut: queries, keys and values of one weight.
        num_cast: number of its weights that autocast keeps for backward as copies in 16 bits.
        input_extent: extent of its input; None if unknown.
        skip_connections: activations that it and ``after`` make for later layers; empty if not counted.
        has_gradients: whether backward computes the gradient of its input, and that of its output. False before the
            first trained layer.
    """

    layer: Layer
    own: tuple[OpCost, ...] = ()
    after: tuple[OpCost, ...] = ()
    output: Extent | None = None
    itemsize: int = 4
    passed: Extent | None = None
    pieces: tuple[int, ...] = ()
    passed_itemsize: int | None = None
    num_cast: int = 0
    input_extent: Extent | None = None
    skip_connections: tuple[SkipConnection, ...] = ()
    has_gradients: tuple[bool, bool] = (True, True)

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        """Shape of one sample of its output; None if that is equal for all samples, not one tensor, or unknown."""
        return None if self.output is None or self.output.is_batchless else self.output.sizes

    @property
    def flops(self) -> float:
        """Operations of the forward of one sample."""
        return sum(work.flops for work in (*self.own, *self.after))

    @property
    def saved_bytes(self) -> float:
        """Bytes of one sample that are kept for backward."""
        return sum(work.saved_bytes for work in (*self.own, *self.after))

    @property
    def counted(self) -> tuple[object, ...]:
        """The key of its price: rows with equal keys cost the same under equal choices."""
        layer = self.layer
        kinds = layer.itemsize, layer.frozen, layer.elsewhere, *layer.itemsizes.items()
        return (*_COUNTED(self), *layer.shapes.items(), kinds)


_COUNTED = attrgetter(*(each.name for each in fields(LayerCost) if each.name not in ("layer", "skip_connections")))


def in_8_bits(row: LayerCost) -> LayerCost:
    """A row of a model under autocast, whose linear layer multiplies in 8 bits if its sizes fit.

    It keeps its own input in 8 bits, where autocast keeps one of 16 bits that others may share, and no copy of its
    weight.

    >>> work = OpCost("linear", flops=4 * 2 * 16 * 32, moved_bytes=0, inner=16, saved_bytes=4 * 16 * 2)
    >>> row = LayerCost(Layer("fc", "Linear", {"weight": (32, 16)}), (work,), num_cast=512)
    >>> in_8_bits(row).own[0].saved_bytes, in_8_bits(row).num_cast
    (64.0, 0)
    """
    products = [work for work in row.own if work.is_matmul and work.name == "linear"]
    if not multiplies_in_8_bits(row.layer) or len(products) != 1:
        return row
    product = products[0]
    numbers = product.flops / (2 * (prod(row.layer.shapes["weight"]) // product.inner))
    saved = max(0.0, product.saved_bytes - 2 * numbers) + numbers
    changed = replace(product, saved_bytes=saved, again_bytes=max(0.0, product.again_bytes - 2 * numbers))
    return replace(row, own=tuple(changed if work is product else work for work in row.own), num_cast=0)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer, in a model that calls some layers several times.

    Attributes:
        row: what this call computes, makes and takes, with the functions after it.
        input: number of the tensor that it takes: calls that take the same tensor have the same.
        source: number of the call whose result it takes; None if it takes a part of the batch.
        itemsize: bytes of an element of its input.
    """

    row: LayerCost
    input: int
    source: int | None = None
    itemsize: int = 4


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """All layers in the order of the forward.

    Attributes:
        rows: one per layer with parameters.
        sample_shape: of one sample of the input.
        dtype: "fp32", "bf16", "fp16" or "fp8": what the rows were counted in; or torch's name of another one
            ("float64").
        blocks: runs of equal blocks, (first row, rows per block, how many), so that a search may tie them.
        heads: how many heads attention has, and how many its keys and values have; empty if unknown.
        autocast: the rows of a model in 32 bits as they are under autocast to 16 bits: products are cast, residuals,
            norms and weights are not. Empty if not counted.
        calls: all calls of layers in the order in which they run; empty if each layer is called once. The row of a
            layer that is called several times has the work of all its calls.
        autocast_calls: the same under autocast.
        recomputed: for each row the number of the block that recomputation runs again as a whole, below zero for a row
            outside of blocks; all below zero: each layer alone. Empty: ``blocks``.
        is_traced: whether a real model was counted, which a strategy without a precision computes in its own dtype.
            Rows of a formula are those of any precision.
    """

    rows: tuple[LayerCost, ...]
    sample_shape: tuple[int, ...] = ()
    dtype: str = "fp32"
    blocks: tuple[tuple[int, int, int], ...] = field(default=())
    heads: tuple[int, ...] = ()
    autocast: tuple[LayerCost, ...] = ()
    calls: tuple[LayerCall, ...] = ()
    autocast_calls: tuple[LayerCall, ...] = ()
    recomputed: tuple[int, ...] = ()
    is_traced: bool = False

    @property
    def training_flops(self) -> float:
        """Operations of one sample in a step, without recomputation: backward has two products for every one of
        forward, and none for what is frozen."""
        works = (work for row in self.rows for work in (*row.own, *row.after))
        left_out = sum(work.flops * work.backward_products.count(False) for work in works)
        return 3 * sum(row.flops for row in self.rows) - left_out

    def under_autocast(self, precision: str) -> ModelCosts:
        """The model at a precision whose casts torch makes; unchanged, if they have not been counted.

        >>> one, two = LayerCost(Layer("fc", "Linear")), LayerCost(Layer("fc", "Linear"), itemsize=2)
        >>> costs = ModelCosts((one,), autocast=(two,))
        >>> costs.under_autocast("bf16").rows[0].itemsize, costs.under_autocast("fp32").rows[0].itemsize
        (2, 4)
        """
        if not self.autocast or precision not in ("bf16", "fp16", "fp8"):
            return self
        rows, calls = self.autocast, self.autocast_calls
        if precision == "fp8":
            rows, calls = tuple(map(in_8_bits, rows)), tuple(replace(call, row=in_8_bits(call.row)) for call in calls)
        return replace(self, rows=rows, dtype=precision, autocast=(), calls=calls, autocast_calls=())

    @property
    def layers(self) -> list[Layer]:
        """The layers, for ``Strategy.resolve``."""
        return [row.layer for row in self.rows]

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return count_parameters(self.layers)


def find_blocks(rows: Sequence[LayerCost]) -> tuple[tuple[int, int, int], ...]:
    """Runs of equal blocks: (first row, rows per block, how many). Rows are equal whose names differ in numbers only,
    with the same class and shapes; their costs may differ (the first of a run saves what the others share).

    >>> rows = [LayerCost(Layer(f"block.{i}.{n}", "Linear")) for i in range(3) for n in ("up", "down")]
    >>> find_blocks(rows)
    ((0, 2, 3),)
    """
    keys = [(re.sub(r"\d+", "#", row.layer.name), row.layer.kind, row.output_shape, row.layer.shapes) for row in rows]
    return find_repeats(keys)


def find_repeats(keys: Sequence[object]) -> tuple[tuple[int, int, int], ...]:
    """Runs of equal stretches of a sequence: (first position, length of a stretch, how many).

    >>> find_repeats("xababab")
    ((1, 2, 3),)
    """
    found, start = [], 0
    while start < len(keys):
        covered, period = max(((_covered(keys, start, p), -p) for p in _periods(keys, start)), default=(0, 0))
        if covered:
            found.append((start, -period, covered // -period))
        start += max(covered, 1)
    return tuple(found)


def _periods(keys: Sequence[object], start: int) -> list[int]:
    """After how many rows the first one comes again."""
    return [p for p in range(1, (len(keys) - start) // 2 + 1) if keys[start + p] == keys[start]]


def _covered(keys: Sequence[object], start: int, period: int) -> int:
    """Rows of the run of equal blocks that begins here; 0 for a single one."""
    end = start + period
    while end + period <= len(keys) and keys[end : end + period] == keys[start : start + period]:
        end += period
    return end - start if end > start + period else 0
