"""Splits of weights of model-parallel layers that the strategy leaves open.

A layer split by columns gives each rank some of the output features, one split by rows takes some of the input features
and gives a sum; a row behind a column costs one exchange for the two. Names tell where they are the usual ones; else a
layer is split by rows if it takes what the split layer before it gives, in one block. Layers that share a weight share
its split. A convolution in groups is split by columns: its rows are inputs of all groups. So are queries, keys and
values of torch's attention, for whole heads, whatever its row says of a split. Experts are split by their number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from workbench.core.rows import Layer, Row, listed_order

SPLITTABLE_KINDS = ("Linear", "NonDynamicallyQuantizableLinear", "Conv1d", "Conv2d", "Conv3d", "Conv1D")
TRANSPOSED_KINDS = ("Conv1D",)
"""Layers whose weight is (inputs, outputs): the linear layer of GPT-2 in transformers."""
LINEAR_KINDS = ("Linear", "NonDynamicallyQuantizableLinear", *TRANSPOSED_KINDS)
TABLE = "Embedding"
"""A layer that looks up rows; its columns are the width, its rows the words."""
ATTENTION = "MultiheadAttention"
"""torch's attention, whose module has the weights of queries, keys and values: in one, or in three."""
PACKED = "in_proj_weight"
_QUERIES = (PACKED, "q_proj_weight")
IMAGE_KINDS = ("Conv1d", "Conv2d", "Conv3d", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
"""Layers whose features are channels: the dim behind the samples."""
_BEFORE, _BEHIND = "(w_?|to_|fc_|lin_|linear_|proj_)?", "(_?proj|_projection|_lin|_linear|_layer)?"
_COLUMN_NAMES = re.compile(
    f"{_BEFORE}(q|k|v|qk|kv|qkv|query|queries|key|value|query_key_value)s?{_BEHIND}|c_attn|gate_proj|up_proj|wi_0|wi_1",
    re.IGNORECASE,
)
_ROW_NAMES = re.compile(
    f"{_BEFORE}o{_BEHIND}|proj|c_proj|down_proj|to_out|linear_out|out(put)?_(proj|lin|linear)", re.IGNORECASE
)
"""Names under which attention and gated layers keep their weights; others are paired by their shapes."""


def known_kind(names: Sequence[str]) -> str:
    """The kind of a layer whose class and base classes have these names: the first one that a strategy knows, else the
    class itself. A table that scales its rows is a table.

    >>> known_kind(["ScaledTable", "Embedding", "Module"]), known_kind(["Gate", "Module"])
    ('Embedding', 'Gate')
    """
    return next((name for name in names if name in (TABLE, ATTENTION, *SPLITTABLE_KINDS, *IMAGE_KINDS)), names[0])


def splits_of(layers: Sequence[Layer], rows: Sequence[Row], stages: Sequence[int]) -> list[str | None]:
    """ "column", "row", "expert" or None (nothing is split) for every layer: as its row says, by name, or paired in the
    order in which the model lists the layers.
    """
    order = listed_order(layers)
    listed = _splits_of_listed([layers[at] for at in order], [rows[at] for at in order], [stages[at] for at in order])
    splits = dict(zip(order, listed, strict=True))
    return [splits[at] for at in range(len(layers))]


def _splits_of_listed(layers: Sequence[Layer], rows: Sequence[Row], stages: Sequence[int]) -> list[str | None]:
    splits: list[str | None] = []
    tables = {layer.name for layer in layers if layer.kind == TABLE}
    cut: list[tuple[Layer, str, int]] = []  # the split layers so far: split and stage of each
    for layer, row, stage in zip(layers, rows, stages, strict=True):
        possible = possible_splits(layer)
        if row.parallel != "model" or not possible:
            is_fused = layer.experts > 0 and layer.expert is None
            splits.append("expert" if is_fused and row.parallel != "data" else None)
            continue
        short = layer.name.rpartition(".")[2]
        if len(possible) == 1:
            split = possible[0]
        elif row.split or layer.kind == TABLE or layer.tied_to in tables or layer.groups > 1:
            split = row.split or "column"
        elif _COLUMN_NAMES.fullmatch(short):
            split = "column"
        elif _ROW_NAMES.fullmatch(short):
            split = "row"
        else:
            split = "row" if _is_row(layer, stage, cut) else "column"
        splits.append(split)
        cut.append((layer, split, stage))
    _follow_ties(layers, rows, splits)
    return splits


def _is_row(layer: Layer, stage: int, cut: Sequence[tuple[Layer, str, int]]) -> bool:
    """Whether a layer is the row of the layer split last: it takes what that column gives, or the values of queries,
    keys and values in one, and gives what that column takes.

    A column that ends a numbered block of several split layers has its row in this block or nowhere.
    """
    if not cut or cut[-1][1:] != ("column", stage) or cut[-1][0].kind == TABLE:
        return False
    column = cut[-1][0]
    if len(cut) > 1 and (_blocks(column) & _blocks(cut[-2][0])) - _blocks(layer):
        return False
    (inputs, outputs), (taken, given) = _features(layer), _features(column)
    return given == inputs or (given, taken) == (3 * inputs, outputs)


def _blocks(layer: Layer) -> set[str]:
    """The paths of all numbered modules around a layer."""
    parts = layer.name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts)) if parts[end - 1].isdecimal()}


def tied_pairs(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """(first, later) indices of layers that share their weight."""
    index = {layer.name: position for position, layer in enumerate(layers)}
    return [(index[layer.tied_to], i) for i, layer in enumerate(layers) if layer.tied_to in index]


def share_input(one: Layer, two: Layer) -> bool:
    """Whether two neighbours are parts of one layer and take the same tensor: queries, keys, values; gate and up.

    >>> weight = {"weight": (8, 8)}
    >>> share_input(Layer("a.q_proj", "Linear", weight), Layer("a.k_proj", "Linear", weight))
    True
    """
    (parent, _, name), (other_parent, _, other) = one.name.rpartition("."), two.name.rpartition(".")
    is_named = parent == other_parent and all(map(_COLUMN_NAMES.fullmatch, (name, other)))
    return is_named and _features(one)[:1] == _features(two)[:1]


def overlaps(kind: str, split: str | None, num_ranks: int) -> bool:
    """Whether the option ``overlap`` is for a layer: for the sums of a row-split linear layer over several ranks. The
    output projection of torch's attention is not called.

    >>> overlaps("Linear", "row", 2), overlaps("NonDynamicallyQuantizableLinear", "row", 2)
    (True, False)
    """
    return split == "row" and kind in ("Linear", *TRANSPOSED_KINDS) and num_ranks > 1


def feature_dim(kind: str, num_dims: int) -> int:
    """The dim of an activation that holds the features of a layer of this class: channels of images, else the last."""
    return 1 if kind in IMAGE_KINDS else num_dims - 1


def split_dim(kind: str, split: str | None, num_dims: int = 2) -> int | None:
    """The dim of a parameter, its weight or its bias, that a split cuts; None if every rank has all of it.

    A column split cuts output features, also of biases; a row split cuts input features. Experts are rows of dim 0.

    >>> split_dim("Linear", "column"), split_dim("Embedding", "row"), split_dim("Linear", "row", num_dims=1)
    (0, 0, None)
    """
    outputs_last = kind in (*TRANSPOSED_KINDS, TABLE)
    if kind == ATTENTION and num_dims != 2:  # biases in one belong to three parts, and are small
        return None
    if split == "expert":
        return 0
    if split == "column" and num_dims:
        return num_dims - 1 if outputs_last else 0
    if split == "row" and num_dims > 1:
        return 0 if outputs_last else 1
    return None


def _follow_ties(layers: Sequence[Layer], rows: Sequence[Row], splits: list[str | None]) -> None:
    """Of layers with one weight, the open ones follow: the one whose row says how, else the last, which is the head.

    A table follows a head by columns as a table by rows. One that no row splits (a layer of another kind) keeps the
    weight whole in all of them.
    """
    groups: dict[int, list[int]] = {}
    for first, later in tied_pairs(layers):
        groups.setdefault(first, [first]).append(later)
    for group in groups.values():
        members = [member for member in group if splits[member] is not None]
        if not members:
            continue
        if any(rows[member].parallel == "model" and splits[member] is None for member in group):
            for member in members:
                splits[member] = rows[member].split
            continue
        leader = next((member for member in members if rows[member].split is not None), members[-1])
        dim = split_dim(layers[leader].kind, splits[leader])
        for member in members:
            if rows[member].split is None:
                splits[member] = next(s for s in ("column", "row") if split_dim(layers[member].kind, s) == dim)


def possible_splits(layer: Layer) -> tuple[str, ...]:
    """How ``model`` can split the weight of a layer of a known kind; nothing without a matrix.

    >>> possible_splits(Layer("norm", "LayerNorm", {"weight": (8,)}))
    ()
    >>> possible_splits(Layer("attention", "MultiheadAttention", {"in_proj_weight": (24, 8)}))
    ('column',)
    """
    if layer.kind == ATTENTION:
        return ("column",) if layer.shapes.keys() & set(_QUERIES) else ()
    is_known = layer.kind in (*SPLITTABLE_KINDS, TABLE) and len(layer.shapes.get("weight", ())) > 1
    return ("column", "row") if is_known else ()


def moves_weights(num_rows: int, inputs: int) -> bool:
    """Whether ranks with slices of the weight of queries, keys and values exchange rows of the weight, so that each has
    those of its heads; else features of their result. The smaller of both: of ``inputs`` or of ``num_rows`` numbers.
    """
    return num_rows > inputs


def _features(layer: Layer) -> tuple[int, ...]:
    """(input features, output features) of a layer; empty without a matrix as its weight."""
    names = _QUERIES if layer.kind == ATTENTION else ("weight",)
    weight = next((layer.shapes[name][:2] for name in names if name in layer.shapes), ())
    return weight if layer.kind in (*TRANSPOSED_KINDS, TABLE) else weight[::-1]
