"""Choices of a strategy that have no effect. They are no errors, but may surprise the author."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.strategy import ResolvedStrategy


@dataclass(frozen=True, slots=True)
class IneffectiveChoice:
    """One choice without effect: its layer (or None), what happens, why, and a fix (or an empty text)."""

    layer: str | None
    message: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.layer}: {self.message}" if self.layer else self.message


def find_ineffective_choices(resolved: ResolvedStrategy) -> list[IneffectiveChoice]:
    """All choices without effect, those of the whole strategy first.

    >>> from workbench.core.rows import Layer
    >>> from workbench.core.strategy import Strategy
    >>> layers = [Layer("fc", "Linear", {"weight": (4, 4)}), Layer("norm", "LayerNorm", {"weight": (4,)})]
    >>> [str(hint) for hint in find_ineffective_choices(Strategy("*: model").resolve(layers, 2))]
    ['norm: not split']
    >>> [hint.fix for hint in find_ineffective_choices(Strategy("fc: data; norm: data@1").resolve(layers, 2))]
    ['use mb=4']
    """
    return [*_of_the_pipeline(resolved), *_of_layers(resolved)]


def _of_the_pipeline(resolved: ResolvedStrategy) -> list[IneffectiveChoice]:
    pipeline = resolved.degrees[0]
    if pipeline == 1 or resolved.num_micro_batches > 1:
        return []
    reason = "with more micro-batches they work on different parts of the batch at the same time"
    message = f"One micro-batch: the {pipeline} stages work one after another"
    return [IneffectiveChoice(None, message, reason, f"use mb={2 * pipeline}")]


def _of_layers(resolved: ResolvedStrategy) -> list[IneffectiveChoice]:
    found = []
    for layer in resolved.layers:
        _, model = resolved.stage_width(layer.stage)
        if layer.parallel == "expert" and model * layer.over_data == 1:
            found.append(IneffectiveChoice(layer.name, "not split", "its experts are on one rank here"))
        if layer.parallel != "model" or layer.split is not None:
            continue
        reason = "has nothing to split here: every rank holds all of this layer's weights"
        one = "is over one rank here: the model axis of these ranks is 1 long"
        found.append(IneffectiveChoice(layer.name, "not split", f"model {reason if model > 1 else one}"))
    return found
