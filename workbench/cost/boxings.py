"""The exchanges of a layer: on the model axis of its input, of its output, between slices of its output, in the loss;
on the context axis of its input and in attention (``cost.context``).

``core.layer_layouts`` has the layouts. Tests compare the bytes with those of dry runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from workbench.core.layer_layouts import (
    Entry,
    boxed_output_entry,
    context_entry,
    dual_entry,
    input_entry,
    output_entry,
)
from workbench.core.layout import balanced_bounds
from workbench.core.model_costs import Extent, LayerCost
from workbench.core.strategy import ResolvedLayer
from workbench.core.weight_splits import ATTENTION, PACKED, TABLE, moves_weights, overlaps, share_input
from workbench.cost.collectives import exchange_s, kind_of, received_parts, summed_bytes
from workbench.cost.context import attention_exchange
from workbench.cost.stage_settings import StageSettings

Neighbour = tuple[LayerCost, ResolvedLayer]
Change = tuple[Entry, Entry, float]
"""A boxing: the entry on the model axis before and after it, and the bytes of the whole activation."""
SUMS_OF_LOSS = (3, 3)
"""Numbers per row of logits that ranks with a split vocabulary sum, in forward and in backward, of 32 bits, or of 64 as
the logits: the sum of exponentials, the target's logit, and the share of smoothed targets. The maximum of the logits is
exchanged first.
"""


class Overlap(NamedTuple):
    """A product in pieces, each beside the exchange of another: all of its seconds, and its number of functions."""

    pieces: int
    product_s: float
    functions: int

    def exposed_s(self, piece_s: float, setting: StageSettings) -> float:
        """Seconds that exchanges of ``piece_s`` and the further starts of functions add to the product.

        The first product and the last exchange have nothing beside them (in backward, the first exchange and the last
        products).
        """
        later = max(0.0, piece_s - self.product_s / self.pieces) + self.functions * setting.hardware.op_s
        return piece_s + (self.pieces - 1) * later


class Exchange(NamedTuple):
    """One exchange of a micro-batch: its kind, the bytes that each rank of the axis receives, the product beside
    which it runs in pieces, and on the data axis its number of ranks.
    """

    kind: str
    received_bytes: float
    axis: str = "model"
    overlap: Overlap | None = None
    num_ranks: int = 0

    def seconds(self, setting: StageSettings) -> float:
        """Its time. The ranks of a context are as far apart as a model axis is long."""
        size = {"model": setting.model, "context": setting.context}.get(self.axis, self.num_ranks)
        stride = 1 if self.axis == "model" else setting.model
        pieces = 1 if self.overlap is None else self.overlap.pieces
        seconds = exchange_s(setting.hardware, self.received_bytes / pieces, size, stride, self.kind)
        return seconds if self.overlap is None else self.overlap.exposed_s(seconds, setting)


class Boxings(NamedTuple):
    """All exchanges of a layer. ``sums`` are those of ``backward`` that add terms of gradients."""

    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()

    @property
    def sums(self) -> list[Exchange]:
        return [exchange for exchange in self.backward if exchange.kind in ("all-reduce", "reduce-scatter")]


def boxings(
    row: LayerCost,
    choice: ResolvedLayer,
    before: Neighbour | None,
    following: ResolvedLayer | None,
    setting: StageSettings,
    boxed_for: ResolvedLayer | None = None,
    is_last: bool = False,
    products_s: tuple[float, float] = (0.0, 0.0),
) -> Boxings:
    """The exchanges of a layer; arguments are those of ``layers.layer_price``. ``boxed_for``: the layer for which the
    output of the one ``before`` was boxed, where that is another one than this. ``products_s``: of the layer's own
    products in forward and backward, beside which exchanges of its sums may run.
    """
    forward, backward = _on_context_axis(row, choice, before, setting, is_last)
    spread, brought = _to_experts(row, choice, ends_of_expert(choice, before, following, setting.model), setting)
    forward, backward = [*forward, *spread], [*brought, *backward]
    if setting.model == 1:
        return Boxings(tuple(forward), tuple(backward))
    arriving, leaving = _changes(row, choice, before, following, setting, boxed_for or choice)
    changes = [*arriving, *leaving]
    with_gradients = [*(arriving if row.has_gradients[0] else ()), *(leaving if row.has_gradients[1] else ())]
    back = [(dual_entry(target), dual_entry(source), size) for source, target, size in reversed(with_gradients)]
    if setting.sequence and not setting.software.keeps_gathered:  # slices were saved, the weights need all
        back += [change for change in changes if change[:2] == ("sequence", "B")]
    pieces = num_pieces(row, choice, following, setting)
    beside = [Overlap(pieces, seconds, number) for number, seconds in enumerate(products_s, start=1)]
    forward += [_exchange(change, setting, beside[0] if change[0] == "P" else None) for change in changes]
    backward += [_exchange(change, setting, beside[1] if change[1] == "B" else None) for change in back]
    if boxed_output_entry(choice, following, num_dims(row), setting.sequence) == "features":
        rows, sums = _moved_rows(row, setting), _sums_of_loss(row, setting)
        forward += [*rows, *sums[0]]
        backward += [*rows, *sums[1]] if row.has_gradients[1] else []
    return Boxings(tuple(forward), tuple(backward))


def num_pieces(row: LayerCost, choice: ResolvedLayer, following: ResolvedLayer | None, setting: StageSettings) -> int:
    """In how many pieces a layer's sums are exchanged: see ``core.row_pieces``. Cores that exchange do not cut them."""
    if setting.overlap == 1 or setting.hardware.exchanges_on_cores or row.output_shape is None:
        return 1
    if not overlaps(choice.kind, choice.split, setting.model):
        return 1
    left = boxed_output_entry(choice, following, num_dims(row), setting.sequence)
    samples = 0 if left == "samples" else int(setting.samples * setting.context)
    positions = 0 if left == "sequence" or num_dims(row) < 3 else row.output_shape[0] // setting.context
    return max(1, min(setting.overlap, max(samples, positions)))


def seconds_and_bytes(exchanges: Sequence[Exchange], setting: StageSettings) -> tuple[float, float]:
    """(seconds, bytes that a rank receives) of exchanges one after the other."""
    return sum(exchange.seconds(setting) for exchange in exchanges), sum(e.received_bytes for e in exchanges)


def _on_context_axis(
    row: LayerCost, choice: ResolvedLayer, before: Neighbour | None, setting: StageSettings, is_last: bool
) -> tuple[list[Exchange], list[Exchange]]:
    """Exchanges on the context axis in forward and backward: of the input, and of attention behind the layer."""
    forward, backward = list[Exchange](), list[Exchange]()
    if setting.context == 1:
        return forward, backward
    if before is not None and choice.kind != TABLE and not are_siblings(before, (row, choice)):
        samples = setting.samples * setting.context
        has_samples = is_last and samples % setting.context == 0
        source = context_entry(before[1], num_dims(before[0]))
        if source != context_entry(choice, num_dims(row), has_samples):
            left = boxed_output_entry(before[1], choice, num_dims(before[0]), setting.sequence)
            parts = 1 if left in ("B", "P") else setting.model
            moved = (1 - 1 / setting.context) * passed_bytes(before[0], setting) / parts
            forward.append(Exchange("all-to-all", moved, "context"))
            backward += forward[-1:] if row.has_gradients[0] else []
    for work in (*row.own, *row.after):
        if work.attention is not None:
            there, back = attention_exchange(work.attention, row.itemsize * setting.scale, setting)
            forward += [Exchange(kind, size, "context") for kind, size in there]
            backward += [Exchange(kind, size, "context") for kind, size in back if row.has_gradients[1]]
    return forward, backward


def ends_of_expert(
    choice: ResolvedLayer, before: Neighbour | None, following: ResolvedLayer | None, model: int
) -> tuple[bool, bool]:
    """Whether rows come to the ranks of an expert of a list before its layer, which the expert before does not have
    there, and whether results go back behind it.
    """
    if choice.expert is None:
        return False, False
    number, experts = choice.expert
    last = before[1].expert if before is not None else None
    ranks = choice.over_data * model
    is_there = last is not None and last[0] * ranks // experts == number * ranks // experts
    return not is_there, following is None or following.expert != choice.expert


def _to_experts(
    row: LayerCost, choice: ResolvedLayer, ends: tuple[bool, bool], setting: StageSettings
) -> tuple[list[Exchange], list[Exchange]]:
    """Exchanges of forward and backward over the data axis: of tokens that go to experts of other ranks, and of results
    that come back. All experts are chosen alike often.

    Of a list, all rows go to each rank that has an expert; what comes back is a sum over all ranks.
    """
    split, both = choice.over_data, row.has_gradients
    if choice.expert is None:
        chosen = max(1, row.layer.chosen) / setting.model
        tokens = Exchange("all-to-all", chosen * output_bytes(row, setting) * (1 - 1 / split), "data", None, split)
        return [tokens, tokens] * (split > 1), [tokens, tokens] * (split > 1 and both[1])
    taken = extent_bytes(row.input_extent or row.output, row.itemsize, setting)
    given = output_bytes(row, setting)
    num_bytes = (split - 1) * taken / (split * setting.model)  # all for one of these ranks
    rows = [Exchange("all-to-all", num_bytes, "data", None, split)] * ends[0]
    sums = [Exchange("reduce-scatter", (setting.data - 1) * given, "data", None, setting.data)] * ends[1]
    of_model = [Exchange("all-reduce", summed_bytes(setting.hardware, given, setting.model))] * ends[1]
    back = [each._replace(kind="all-gather") for each in sums if both[1]] + rows * both[0]
    return [*rows, *sums, *(of_model if setting.model > 1 else ())], back


def _changes(
    row: LayerCost,
    choice: ResolvedLayer,
    before: Neighbour | None,
    following: ResolvedLayer | None,
    setting: StageSettings,
    boxed_for: ResolvedLayer,
) -> tuple[list[Change], list[Change]]:
    """The boxing of the input and that of the output, if there are any."""
    dims = num_dims(row)
    taken = _of_input(row, choice, before, setting, boxed_for)
    left = _left_on_stage(choice, following, dims, setting)
    made = output_entry(choice, dims, setting.sequence), left, output_bytes(row, setting)
    arriving, leaving = ([one] if one is not None and one[0] != one[1] else [] for one in (taken, made))
    return arriving, leaving


def _of_input(
    row: LayerCost, choice: ResolvedLayer, before: Neighbour | None, setting: StageSettings, boxed_for: ResolvedLayer
) -> Change | None:
    """The boxing of the input; None if no layer of this stage has made it, or a sibling has boxed it."""
    if before is None or choice.kind == TABLE or are_siblings(before, (row, choice)):
        return None
    source = boxed_output_entry(before[1], boxed_for, num_dims(before[0]), setting.sequence)
    return source, input_entry(choice, num_dims(row), setting.sequence), passed_bytes(before[0], setting)


def copies_input(row: LayerCost, choice: ResolvedLayer, before: Neighbour | None, setting: StageSettings) -> bool:
    """Whether the layer's input is a copy, made by a boxing, of the output of the layer before."""
    change = _of_input(row, choice, before, setting, choice) if setting.model > 1 else None
    return change is not None and change[0] != change[1]


def splits_words(
    row: LayerCost, choice: ResolvedLayer, following: ResolvedLayer | None, setting: StageSettings
) -> bool:
    """Whether the loss is computed from logits that are split along the vocabulary."""
    left = boxed_output_entry(choice, following, num_dims(row), setting.sequence)
    return setting.model > 1 and left == "features" and any(work.name == "cross_entropy" for work in row.after)


def _exchange(change: Change, setting: StageSettings, beside: Overlap | None = None) -> Exchange:
    source, target, size = change
    overlap = beside if beside is not None and beside.pieces > 1 else None
    pieces = 1 if overlap is None else overlap.pieces
    if (source, target) == ("P", "B"):
        received = pieces * summed_bytes(setting.hardware, size / pieces, setting.model)
    else:
        received = received_parts(source, target, setting.model) * size
    return Exchange(kind_of(source, target), received, overlap=overlap)


def are_siblings(one: Neighbour, two: Neighbour) -> bool:
    """Whether two layers share one boxed input (queries, keys, values; gate and up)."""
    (row, choice), (other, other_choice) = one, two
    same = (choice.parallel, choice.split) == (other_choice.parallel, other_choice.split)
    return same and share_input(row.layer, other.layer)


def _left_on_stage(choice: ResolvedLayer, following: ResolvedLayer | None, dims: int, setting: StageSettings) -> Entry:
    left = boxed_output_entry(choice, following, dims, setting.sequence)
    between = following is None and left == "samples" and choice.parallel != "data"
    return "B" if between and setting.software.scatters_between_stages else left


def _moved_rows(row: LayerCost, setting: StageSettings) -> list[Exchange]:
    """The exchange after which every rank has its slice of each piece of the output."""
    pieces, size = row.pieces, output_bytes(row, setting)
    if row.layer.kind == ATTENTION and PACKED in row.layer.shapes:
        outputs, _ = row.layer.shapes[PACKED]
        pieces, size = (outputs // 3,) * 3, moved_weight_bytes(row, setting) or 3 * size
    if not pieces or row.output_shape is None:
        return []
    return [Exchange("rows", moved_features(pieces, setting.model) / sum(pieces) / setting.model * size)]


def moved_weight_bytes(row: LayerCost, setting: StageSettings) -> float:
    """Bytes of a weight of torch's attention, split over the model axis, if its rows move; 0 if features do."""
    if row.layer.kind != ATTENTION or PACKED not in row.layer.shapes or row.output_shape is None:
        return 0.0
    outputs, inputs = row.layer.shapes[PACKED]
    num_rows = setting.samples * prod(row.output_shape[:-1])
    is_one = sum(work.name == "linear" for work in row.own) == 1  # queries, keys and values of one tensor
    is_moved = not is_one or moves_weights(int(num_rows), inputs)
    return float(outputs * inputs * row.layer.itemsize_of(PACKED)) if is_moved else 0.0


@lru_cache(maxsize=1024)
def moved_features(pieces: tuple[int, ...], num_ranks: int) -> int:
    """Features that move if each rank has a slice of the whole and needs a slice of each piece; summed over ranks.

    >>> moved_features((4, 4, 4), 2)        # ranks have 0-5 and 6-11; rank 0 lacks 8 and 9, rank 1 lacks 2 and 3
    4
    """
    held, start, moved = balanced_bounds(sum(pieces), num_ranks), 0, 0
    for size in pieces:
        for (low, high), (first, last) in zip(held, balanced_bounds(size, num_ranks), strict=True):
            moved += last - first - max(0, min(high, start + last) - max(low, start + first))
        start += size
    return moved


def _sums_of_loss(row: LayerCost, setting: StageSettings) -> tuple[list[Exchange], list[Exchange]]:
    """Exchanges of a cross entropy over a split vocabulary: (forward, backward)."""
    if row.output_shape is None or not any(work.name == "cross_entropy" for work in row.after):
        return [], []
    num_rows = prod(row.output_shape[:-1]) * setting.samples
    keeps_type = not setting.software.has_master_weights
    itemsize = row.itemsize * setting.scale
    sizes = itemsize if keeps_type else 4.0, *(max(4.0, itemsize) * numbers for numbers in SUMS_OF_LOSS)
    largest, forward, backward = (_exchange(("P", "B", size * num_rows), setting) for size in sizes)
    return [largest, forward], [backward]


def num_dims(row: LayerCost) -> int:
    """Number of dims of the layer's output, with the batch."""
    return 0 if row.output is None else row.output.num_dims


def output_bytes(row: LayerCost, setting: StageSettings) -> float:
    """Bytes of the whole output of one data-parallel rank."""
    return extent_bytes(row.output, row.itemsize, setting)


def passed_bytes(row: LayerCost, setting: StageSettings) -> float:
    """Bytes of the tensor that the next layer takes."""
    return extent_bytes(row.passed or row.output, row.passed_itemsize or row.itemsize, setting)


def extent_bytes(extent: Extent | None, itemsize: int, setting: StageSettings) -> float:
    """Bytes of a whole activation of one data-parallel rank; 0 if its extent is unknown."""
    if extent is None:
        return 0.0
    return prod(extent.sizes) * itemsize * (1.0 if extent.is_batchless else setting.samples) * setting.scale
