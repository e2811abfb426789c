"""Layer costs of a decoder transformer by formula, and the strategies that Megatron-LM has for it.

For s positions, hidden size h, a heads, 16-bit activations; bytes and operations of one sample, nothing divided:

    function          operations         moved               saved for backward
    norm              0                  4 s h               2 s h
    q, k, v           2 s h (h + 2 k)    in + out            2 s h                  k: heads of keys x head size
    scores            2 s^2 h            in + 2 a s^2        2 s (h + k)
    softmax           0                  4 a s^2             2 a s^2
    dropout           0                  5 a s^2             3 a s^2
    context           2 s^2 h            in + out            2 s k
    projection        2 s h^2            in + out            2 s h
    dropout and sum   0                  7 s h               s h                    twice in a block
    up                2 s h f            in + out            2 s h                  twice as wide where it is gated
    GELU              0                  4 s f               2 s f
    down              2 s f h            in + out            2 s f
    logits, loss      2 s h V            24 s V              14 s V                 8 s V where made in place

Saved bytes of a block add up to s h (34 + 5 a s / h). (Korthikanti et al., arXiv 2205.05198.) A flash kernel stands for
scores to context, moves and saves only its inputs and output, and skips what the causal mask hides. Logits are there in
16 bits, and in 32 bits as themselves, softmax and gradient; since June 2024 Megatron-LM makes softmax and gradient
in the place of the logits and hands the gradient on in 16 bits (its commit 9634c0e4a3).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from workbench.core.model_costs import AttentionSize, Extent, LayerCost, ModelCosts, OpCost
from workbench.core.options import Options
from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.errors import StrategyError

_ITEM = 2
_LOGITS_MOVED = 24
"""Bytes per logit in forward: cast to 32 bits, maximum, difference, exponential, sum. Backward moves half as many
again.
"""
LOSS_IN_PLACE_SINCE = 2024
"""The first year of Megatron-LM whose loss works in place."""
_LOGITS_SAVED, _LOGITS_SAVED_IN_PLACE = 2 + 4 + 4 + 4, 2 + 4 + 2
"""Bytes per logit that are alive when the loss goes backward."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder.

    Attributes:
        hidden, heads, layers, vocab, seq: its sizes.
        kv_heads: heads of keys and values; None: as many as ``heads``.
        ffn: width of the feed-forward part; None: 4 hidden.
        is_gated: the feed-forward part has a gate (SwiGLU); the model then has rotary positions, no dropout, and an
            embedding that is not tied.
        has_flash: attention in one kernel, including its dropout.
        has_loss_in_place: the loss keeps one copy of the logits in 32 bits, not three.
    """

    hidden: int
    heads: int
    layers: int
    vocab: int
    seq: int
    kv_heads: int | None = None
    ffn: int | None = None
    is_gated: bool = False
    has_flash: bool = False
    has_loss_in_place: bool = False

    @property
    def width(self) -> int:
        """Width of the feed-forward part."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_size(self) -> int:
        """Features of the keys, and of the values."""
        return (self.kv_heads or self.heads) * (self.hidden // self.heads)


def transformer_costs(model: Transformer) -> ModelCosts:
    """Rows of every layer, 16-bit.

    >>> costs = transformer_costs(Transformer(hidden=12288, heads=96, layers=96, vocab=51200, seq=2048))
    >>> round(costs.num_parameters / 1e9, 1)
    174.6
    """
    s, h = model.seq, model.hidden
    block = _block(model)
    # positions as one dim, like biases: every rank of the model axis has all of them
    positions: dict[str, tuple[int, ...]] = {} if model.is_gated else {"positions": (s * h,)}
    rows = [_row("embedding", "Embedding", (model.vocab, h), (), _dropout(model), (s, h), positions)]
    for index in range(model.layers):
        rows += [
            _row(f"layers.{index}.{name}", kind, weight, own, after, output, block=(index, model.layers))
            for name, kind, weight, own, after, output in block
        ]
    rows.append(_row("norm", "LayerNorm", (h,), _norm(model), (), (s, h)))
    saved = _LOGITS_SAVED_IN_PLACE if model.has_loss_in_place else _LOGITS_SAVED
    loss = OpCost("cross_entropy", 0, _LOGITS_MOVED * s * model.vocab, 0, saved * s * model.vocab)
    logits = _product(s, h, model.vocab)
    tied = None if model.is_gated else "embedding"
    rows.append(_row("head", "Linear", (model.vocab, h), logits, (loss,), (s, model.vocab), tied_to=tied))
    heads = tuple(dict.fromkeys((model.heads, model.kv_heads or model.heads)))
    return ModelCosts(tuple(rows), (s,), "fp16", ((1, len(block), model.layers),), heads)


def transformer_strategy(
    model: Transformer,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    num_micro_batches: int = 1,
    layers_per_stage: int | None = None,
    **options: object,
) -> ResolvedStrategy:
    """Megatron-LM's strategy: q, k, v and up by columns, projection and down by rows, embedding by words, equal stages.

    Args:
        model: the decoder.
        tensor, pipeline, data: degrees.
        num_micro_batches: per step.
        layers_per_stage: fewer than layers / pipeline for interleaved stages. The first and the last one may have one
            layer less, in place of which they have the embedding or the loss.
        options: of ``Options``: zero, recompute, sequence, precision.

    Raises:
        StrategyError: the sizes do not divide.
    """
    num_stages = stages_of(model.layers, pipeline, layers_per_stage) if layers_per_stage else pipeline
    if not num_stages:
        raise StrategyError(
            f"{model.layers} layers in stages of {layers_per_stage} on {pipeline} ranks: every rank takes the same "
            f"number of stages, so layers must be a multiple of {layers_per_stage} x {pipeline}, or at most 2 less."
        )
    sizes = _stage_sizes(model.layers, num_stages)
    stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    if model.heads % tensor:
        raise StrategyError(f"{model.heads} heads over {tensor} ranks: heads must be a multiple of the tensor degree.")
    last = len(sizes) - 1
    splits = {"qkv": "column", "projection": "row", "up": "column", "down": "row"}
    choices = [ResolvedLayer("embedding", "model", "row", 0, "Embedding")]
    for index in range(model.layers):
        for name, kind, *_ in _block(model):
            choices.append(ResolvedLayer(f"layers.{index}.{name}", "model", splits.get(name), stage_of[index], kind))
    choices += [ResolvedLayer("norm", "model", None, last, "LayerNorm")]
    choices += [ResolvedLayer("head", "model", "column", last, "Linear")]
    settled = Options(
        degrees=(pipeline, data, tensor),
        num_micro_batches=num_micro_batches,
        schedule="interleaved" if last + 1 > pipeline else "1f1b",
        **options,  # type: ignore[arg-type]
    )
    return ResolvedStrategy(tuple(choices), (pipeline, data, tensor), settled)


def stages_of(layers: int, pipeline: int, layers_per_stage: int) -> int:
    """Number of stages if the first and the last may have one layer less than the others; 0 if layers do not fit.

    >>> stages_of(96, 16, 2), stages_of(126, 16, 1), stages_of(10, 4, 2)
    (48, 128, 0)
    """
    num_stages = -(-layers // (layers_per_stage * pipeline)) * pipeline
    return num_stages if num_stages * layers_per_stage - layers <= 2 else 0


def _stage_sizes(layers: int, stages: int) -> list[int]:
    """Layers per stage, as equal as possible. First and last stage, with embedding and loss, get fewer."""
    sizes = [layers // stages] * stages
    for extra in range(layers % stages):
        sizes[(stages - layers % stages) // 2 + extra] += 1
    return sizes


_Part = tuple[str, str, tuple[int, ...], tuple[OpCost, ...], tuple[OpCost, ...], tuple[int, ...]]
"""Name, class, shape of the weight, functions of the layer, functions after it, shape of the output."""


def _block(model: Transformer) -> list[_Part]:
    s, h, k, f = model.seq, model.hidden, model.kv_size, model.width
    up = 2 * f if model.is_gated else f
    moved, saved = (6 * s * f, 4 * s * f) if model.is_gated else (4 * s * f, 2 * s * f)
    activation = OpCost("silu" if model.is_gated else "gelu", 0, moved, 0, saved)
    behind = _dropout_and_sum(model)
    return [
        ("norm1", "LayerNorm", (h,), _norm(model), (), (s, h)),
        ("qkv", "Linear", (h + 2 * k, h), _product(s, h, h + 2 * k), _attention(model), (s, h)),
        ("projection", "Linear", (h, h), _product(s, h, h), behind, (s, h)),
        ("norm2", "LayerNorm", (h,), _norm(model), (), (s, h)),
        ("up", "Linear", (up, h), _product(s, h, up), (activation,), (s, f)),
        ("down", "Linear", (h, f), _product(s, f, h), behind, (s, h)),
    ]


def _row(
    name: str, kind: str, weight: tuple[int, ...], own: tuple[OpCost, ...], after: tuple[OpCost, ...],
    output: tuple[int, ...], more: dict[str, tuple[int, ...]] | None = None, *, tied_to: str | None = None,
    block: tuple[int, int] | None = None,
) -> LayerCost:  # fmt: skip
    shapes = {"weight": weight} | ({"bias": weight[:1]} if kind in ("Linear", "LayerNorm") and tied_to is None else {})
    shapes |= more or {}
    layer = Layer(name, kind, shapes, sum(map(prod, shapes.values())), tied_to, block=block)
    return LayerCost(layer, own, after, Extent(output), _ITEM)


def _product(s: int, inner: int, outputs: int) -> tuple[OpCost, ...]:
    return (OpCost("linear", 2 * s * inner * outputs, _ITEM * s * (inner + outputs), inner, _ITEM * s * inner),)


def _norm(model: Transformer) -> tuple[OpCost, ...]:
    size = model.seq * model.hidden
    return (OpCost("layer_norm", 0, 2 * _ITEM * size, 0, _ITEM * size),)


def _dropout(model: Transformer) -> tuple[OpCost, ...]:
    size = model.seq * model.hidden
    return () if model.is_gated else (OpCost("dropout", 0, 5 * size, 0, size),)


def _dropout_and_sum(model: Transformer) -> tuple[OpCost, ...]:
    """Bias, dropout and residual sum in one function: it reads two tensors, writes one and a mask of one byte per
    element.
    """
    size = model.seq * model.hidden
    return (OpCost("add", 0, 6 * size),) if model.is_gated else (OpCost("dropout_add", 0, 7 * size, 0, size),)


def _attention(model: Transformer) -> tuple[OpCost, ...]:
    s, h, k, head = model.seq, model.hidden, model.kv_size, model.hidden // model.heads
    inputs = _ITEM * s * (h + 2 * k)
    rotary = (OpCost("rotary", 0, 2 * _ITEM * s * (h + k)),) if model.is_gated else ()
    if model.has_flash:
        size = AttentionSize(model.heads, model.kv_heads or model.heads, s, s, (head, head), is_causal=True)
        flash = OpCost(
            "scaled_dot_product_attention", 2 * s * s * h, inputs + _ITEM * s * h, head, inputs, attention=size
        )
        return (*rotary, flash)
    scores = model.heads * s * s
    return (
        *rotary,
        OpCost("matmul", 2 * s * s * h, _ITEM * (s * (h + k) + scores), head, _ITEM * s * (h + k)),
        OpCost("softmax", 0, 2 * _ITEM * scores, 0, _ITEM * scores),
        OpCost("dropout", 0, 5 * scores, 0, 3 * scores),
        OpCost("matmul", 2 * s * s * h, _ITEM * (s * (h + k) + scores), s, _ITEM * s * k),
        OpCost("contiguous", 0, 2 * _ITEM * s * h),
    )
