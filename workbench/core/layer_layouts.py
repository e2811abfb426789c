"""What a choice means for a layer: the entries of its parameters, its input and its output on the model axis.

This is the only place that decides it. Entries of activations name what a dim means; ``sbp_of`` finds the dim:

    choice          input              result       behind the output hook
    data            samples            samples
    model           B, or sequence     its input's
    model:column    B                  features     of a table: for the next layer
    model:row       features           P            for the next layer
                    of a table: B
    model, experts  B                  P            for the next layer

"For the next layer" is the entry of that layer's input: B before a row split, sequence under the option ``sequence``,
samples where the next layer is on another stage or missing. Under ``sequence``, norms of three dims and more take
slices of the sequence. On the data axis activations are split by samples, and parameters are B.

On the context axis parameters are B, too. Activations of three dims and more, and the ids that a table takes, are split
along the sequence. What has no sequence (images, pooled features) is split by samples, as on the data axis. So is the
input of the last layer, where samples suffice for all data ranks: losses often join samples and sequence in one dim,
and of slices of the sequence the logits would have to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.core.sbp import Sbp, Split, broadcast, partial_sum
from workbench.core.strategy import ResolvedLayer
from workbench.core.weight_splits import TABLE, feature_dim

Entry = Literal["B", "P", "samples", "sequence", "features"]
"""An entry of an activation on one axis: whole, a partial sum, or split by what a dim counts."""
_WITHOUT_SEQUENCE = ("Conv1d", "Conv2d", "Conv3d", "BatchNorm", "InstanceNorm", "GroupNorm", "RNN", "LSTM", "GRU")
"""Parts of names of layers that need all of the dims behind the samples."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation on a stage: its entries on the axes."""

    stage: int
    data: Entry
    context: Entry
    model: Entry


def input_entry(choice: ResolvedLayer, num_dims: int, sequence: bool) -> Entry:
    """The entry of a layer's input. ``sequence`` is the strategy's option."""
    if choice.parallel == "data":
        return "samples"
    if sequence and "Norm" in choice.kind and num_dims > 2:
        return "sequence"
    return "features" if choice.split == "row" and choice.kind != TABLE else "B"


def context_entry(choice: ResolvedLayer, num_dims: int, has_samples_for_all: bool = False) -> Entry:
    """The entry of a layer's input, and of its output, on the context axis.

    ``has_samples_for_all``: of the last layer, whether every data rank can take as many samples.
    """
    has_sequence = num_dims > 2 or (num_dims == 2 and choice.kind == TABLE)
    if not has_sequence or has_samples_for_all or any(word in choice.kind for word in _WITHOUT_SEQUENCE):
        return "samples"
    return "sequence"


def output_entry(choice: ResolvedLayer, num_dims: int, sequence: bool) -> Entry:
    """The entry of the result of a layer's function, before the output hook."""
    if choice.split is None:
        return input_entry(choice, num_dims, sequence)
    return "features" if choice.split == "column" else "P"  # a rank has the terms of its rows, or of its experts


def following_of(choices: Sequence[ResolvedLayer], index: int) -> ResolvedLayer | None:
    """The layer for which the output of one is boxed: the next one, if it is on the same stage."""
    after = choices[index + 1] if index + 1 < len(choices) else None
    return after if after is not None and after.stage == choices[index].stage else None


def has_output_hook(choice: ResolvedLayer) -> bool:
    """Whether the result is boxed at once: partial sums, and the columns of a table."""
    return choice.split in ("row", "expert") or (choice.split is not None and choice.kind == TABLE)


def boxed_output_entry(choice: ResolvedLayer, following: ResolvedLayer | None, num_dims: int, sequence: bool) -> Entry:
    """The entry behind the output hook. ``following``: see ``following_of``."""
    if not has_output_hook(choice):
        return output_entry(choice, num_dims, sequence)
    if sequence and num_dims > 2:
        return "sequence"
    if following is None:
        return "samples"
    return "B" if following.split == "row" else input_entry(following, num_dims, sequence)


def dual_entry(entry: Entry) -> Entry:
    """The entry of the gradient."""
    return "P" if entry == "B" else "B" if entry == "P" else entry


def sbp_of(entry: Entry, kind: str, num_dims: int, batch_dim: int | None = 0) -> Sbp:
    """The entry as an sbp, for an activation of a layer of class ``kind``. ``batch_dim`` counts samples, if one does.

    >>> sbp_of("features", "Conv2d", 4), sbp_of("features", "Linear", 3), sbp_of("sequence", "Linear", 3, batch_dim=1)
    (S(1), S(2), S(0))
    """
    if entry == "B" or entry == "P":
        return broadcast if entry == "B" else partial_sum
    if entry == "samples":
        return Split(batch_dim or 0)
    if entry == "sequence":
        return Split(0 if batch_dim == 1 else 1) if num_dims > 1 else broadcast
    return Split(feature_dim(kind, num_dims))
