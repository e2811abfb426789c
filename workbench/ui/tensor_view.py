"""Draws the tensors of one row, its weights and its input, with the part on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from workbench.core.layer_plan import LayerPlan
from workbench.session.on_engine.tensor_html import tensor_html
from workbench.ui.assets import element

_MAX_PARAMETERS = 2
_DTYPES = {2: "bfloat16", 4: "float32"}


def tensors_html(planned: LayerPlan, stage: int) -> str:
    """Pictures of a layer's largest parameters and of its input."""
    layer = planned.layer
    largest = sorted(layer.shapes.items(), key=lambda item: -prod(item[1]))[:_MAX_PARAMETERS]
    parts = []
    for name, shape in largest:
        picture = tensor_html("float32", 4, shape, planned.parameters[name], hue=stage)
        parts.append(_titled(f"{layer.name}.{name}", picture))
    if planned.input_shape is not None:
        itemsize = planned.itemsize
        picture = tensor_html(_DTYPES[itemsize], itemsize, planned.input_shape, planned.input_layout, hue=stage)
        parts.append(_titled(f"what enters {layer.name}, one micro-batch", picture))
    return element("div", *parts, css="wb-tensors")


def _titled(title: str, picture: str) -> str:
    return element("div", element("div", text=title, css="wb-title"), picture)


def no_tensor_html(labels: Sequence[str]) -> str:
    """The note of a row that stands for several layers: choose one of them."""
    names = ", ".join(labels[:8])
    return element("div", element("span", text=f"unfold the row and choose a layer: {names}", css="wb-quiet"))
