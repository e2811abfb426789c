"""Choices of a strategy that have no effect. They are no errors, but may surprise the author: the panel says them, and
``wb.parallelize`` warns of rows that name layers and split nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedStrategy, Strategy


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
    return [*_of_options(resolved), *_of_the_pipeline(resolved), *_of_layers(resolved)]


def rows_that_split_nothing(strategy: Strategy, layers: Sequence[Layer], resolved: ResolvedStrategy) -> list[str]:
    """Texts about rows ``model`` for layers with matrices, of which none is split, nor any layer beside them. Between
    split layers such a row saves boxings; ``*: model`` is for whatever can be split, which should be
    half of the weights.

    >>> layers = [Layer("fc", "Linear", {"weight": (4, 4)}), Layer("rnn", "LSTM", {"weight_ih_l0": (16, 4)}, 64)]
    >>> strategy = Strategy("fc: data; rnn: model")
    >>> rows_that_split_nothing(strategy, layers, strategy.resolve(layers, 2))[0].partition(". ")[0]
    "row 'rnn: model' splits no weight: each of 2 ranks holds all 64 of rnn (LSTM)"
    """
    found, rows = dict[str, Layer](), strategy.rows_of(layers)
    splits = [choice.split for choice in resolved.layers]
    useful = {str(row) for index, row in enumerate(rows) if any(splits[max(0, index - 1) : index + 2])}
    for row, layer, choice in zip(rows, layers, resolved.layers, strict=True):
        is_as_meant = resolved.stage_width(choice.stage)[1] == 1 or row.parallel != "model" or str(row) in useful
        if row.pattern != "*" and not is_as_meant and _has_matrix(layer):
            found.setdefault(str(row), layer)
    widths = {choice.name: resolved.stage_width(choice.stage)[1] for choice in resolved.layers}
    texts = [
        f"row {row!r} splits no weight: each of {widths[layer.name]} ranks holds all {layer.num_parameters} of "
        f"{layer.name} ({layer.kind}). {_WHAT_IS_SPLIT} Fix: write data in place of model, so that each rank computes "
        "its own samples."
        for row, layer in found.items()
    ]
    asked = [index for index, row in enumerate(rows) if row.parallel == "model" and row.pattern == "*"]
    whole = [layers[index] for index in asked if splits[index] is None]
    number, of = sum(each.num_parameters for each in whole), sum(layers[index].num_parameters for index in asked)
    largest = max(whole, key=attrgetter("num_parameters"), default=None)
    if largest is not None and 2 * number > of and widths[largest.name] > 1:
        texts.append(
            f"row '*: model' splits less than half of the weights: each of {widths[largest.name]} ranks holds {number} "
            f"of {of}, the most of them in {largest.name} ({largest.kind}). {_WHAT_IS_SPLIT} Fix: write data in place "
            "of model, with zero=3 if memory is short."
        )
    return texts


_WHAT_IS_SPLIT = "model splits linear layers, embeddings, convolutions, torch's attention and experts."


def _has_matrix(layer: Layer) -> bool:
    return any(sum(size > 1 for size in shape) > 1 for shape in layer.shapes.values())


def _of_options(resolved: ResolvedStrategy) -> list[IneffectiveChoice]:
    """Options of which these ranks and stages have nothing. An ``overlap`` without effect is a mistake."""
    options, found = resolved.options, list[tuple[str, str, str]]()
    widths = [resolved.stage_width(stage) for stage in range(resolved.num_stages)]
    if options.sequence and all(model == 1 for _, model in widths):
        found.append(("sequence", "splits no activations", "it splits them over the model axis, which is 1 long"))
    if options.zero and all(data * model == 1 for data, model in widths):
        found.append((f"zero={options.zero}", "shards nothing", "each weight is on one rank"))
    if options.schedule and resolved.num_stages == 1:
        found.append((options.schedule, "orders nothing", "with one stage, micro-batches run one after another"))
    return [IneffectiveChoice(None, f"{option} {what}", why, f"leave {option} out") for option, what, why in found]


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
