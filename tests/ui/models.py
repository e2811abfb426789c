"""Models for the panel's tests: four linear layers, and a GPT of any depth with costs by formula."""

from __future__ import annotations

from dataclasses import replace

from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer


def linear(name: str, out_features: int, in_features: int) -> Layer:
    shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
    return Layer(name, "Linear", shapes, out_features * in_features + out_features)


def called_in_order(layers: list[Layer]) -> list[Layer]:
    return [replace(layer, calls=(position, position)) for position, layer in enumerate(layers)]


MLP = called_in_order(
    [linear("fc1", 256, 64), linear("fc2", 256, 256), linear("fc3", 128, 256), linear("head", 10, 128)]
)


def gpt(num_blocks: int = 8, width: int = 256, num_words: int = 4096, length: int = 64) -> ModelCosts:
    """A GPT: two tables, blocks of six layers, a norm and a head."""

    def norm(name: str) -> Layer:
        return Layer(name, "LayerNorm", {"weight": (width,), "bias": (width,)}, 2 * width)

    def table(name: str, rows: int) -> Layer:
        return Layer(name, "Embedding", {"weight": (rows, width)}, rows * width)

    layers = [table("tok_emb", num_words), table("pos_emb", length)]
    for number in range(num_blocks):
        block = f"blocks.{number}"
        layers += [norm(f"{block}.ln_1"), linear(f"{block}.attn.qkv", 3 * width, width)]
        layers += [linear(f"{block}.attn.proj", width, width), norm(f"{block}.ln_2")]
        layers += [linear(f"{block}.mlp.fc1", 4 * width, width), linear(f"{block}.mlp.fc2", width, 4 * width)]
    layers += [norm("ln_f"), linear("lm_head", num_words, width)]
    return ModelCosts(tuple(_cost(layer, width, length) for layer in called_in_order(layers)), (length,))


def _cost(layer: Layer, width: int, length: int) -> LayerCost:
    is_linear = layer.kind == "Linear"
    outputs, inputs = layer.shapes["weight"] if is_linear else (width, width)
    flops = 2 * length * outputs * inputs if is_linear else 0
    work = OpCost(
        "linear" if is_linear else "norm",
        flops,
        4 * length * (outputs + inputs),
        inner=inputs if is_linear else 0,
        saved_bytes=4 * length * inputs,
    )
    return LayerCost(layer, (work,), (), Extent((length, outputs)), 4)


GPT_HYBRID = "*_emb: data; blocks.[0-3]: model; blocks.[4-7]: model@1; ln_f: data@1; lm_head: model@1 | 2x1x2 mb=4 1f1b"
