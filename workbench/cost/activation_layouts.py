"""How activations lie on the model axis, as short words: what a layer takes, what it leaves, and what lies between.

Words: "B" (all ranks have all of it), "P" (terms of a sum), "S0" (samples), "S1" (the sequence), "S-1" (features). The
rules are those of the runtime's doors: a row-split layer and a split table box what they leave to what the next layer
expects, every layer boxes what it takes.
"""

from __future__ import annotations

from workbench.core.strategy import ResolvedLayer

TABLE = "Embedding"


def input_sbp(choice: ResolvedLayer, num_dims: int, sequence: bool) -> str:
    """How the input of a layer has to lie."""
    if choice.parallel == "data":
        return "S0"
    if sequence and "Norm" in choice.kind and num_dims > 2:
        return "S1"
    return "S-1" if choice.split == "row" and choice.kind != TABLE else "B"


def output_sbp(choice: ResolvedLayer, num_dims: int, sequence: bool) -> str:
    """How the layer's function leaves its output, before its door boxes it."""
    if choice.split == "column":
        return "S-1"
    return "P" if choice.split == "row" else input_sbp(choice, num_dims, sequence)


def boxed_output_sbp(choice: ResolvedLayer, following: ResolvedLayer | None, num_dims: int, sequence: bool) -> str:
    """How it lies behind the door. ``following`` is the next layer, None if that is on another stage or not there."""
    raw = output_sbp(choice, num_dims, sequence)
    if raw != "P" and not (choice.split and choice.kind == TABLE):
        return raw
    if sequence and num_dims > 2:
        return "S1"
    if following is None:
        return "S0"
    return "B" if following.split == "row" else input_sbp(following, num_dims, sequence)


__all__ = ["TABLE", "boxed_output_sbp", "input_sbp", "output_sbp"]
