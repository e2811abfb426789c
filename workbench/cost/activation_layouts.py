"""Layouts of activations on the model axis, as short texts: input, output, and boxed output of a layer.

"B": every rank has the whole tensor. "P": partial sum. "S0", "S1", "S-1": split by samples, sequence or features. The
rules are those of the layout hooks (``training.strategies``): every layer boxes its input, and a row-split layer or
a split embedding boxes its output to the layout that the next layer needs.
"""

from __future__ import annotations

from workbench.core.strategy import ResolvedLayer

TABLE = "Embedding"


def input_sbp(choice: ResolvedLayer, num_dims: int, sequence: bool) -> str:
    """The layout of a layer's input."""
    if choice.parallel == "data":
        return "S0"
    if sequence and "Norm" in choice.kind and num_dims > 2:
        return "S1"
    return "S-1" if choice.split == "row" and choice.kind != TABLE else "B"


def output_sbp(choice: ResolvedLayer, num_dims: int, sequence: bool) -> str:
    """The layout of the result of the layer's function, before the output hook."""
    if choice.split == "column":
        return "S-1"
    return "P" if choice.split == "row" else input_sbp(choice, num_dims, sequence)


def boxed_output_sbp(choice: ResolvedLayer, following: ResolvedLayer | None, num_dims: int, sequence: bool) -> str:
    """The layout after the output hook. ``following`` is the next layer; None if it is on another stage or missing."""
    output = output_sbp(choice, num_dims, sequence)
    if output != "P" and not (choice.split and choice.kind == TABLE):
        return output
    if sequence and num_dims > 2:
        return "S1"
    if following is None:
        return "S0"
    return "B" if following.split == "row" else input_sbp(following, num_dims, sequence)


__all__ = ["TABLE", "boxed_output_sbp", "input_sbp", "output_sbp"]
