"""Results that a block keeps for its second run under ``recompute=cheap`` and ``attention``: torch's selective
checkpointing, for blocks that write to such results, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from workbench.training.diagnostics.memory import ActivationMeter


def _operators(*names: str) -> list[Any]:
    """Those that this torch has."""
    found = (getattr(getattr(torch.ops.aten, name, None), "default", None) for name in names)
    return [operator for operator in found if operator is not None]


_PRODUCTS = _operators(
    "mm", "addmm", "_scaled_mm", "convolution", "_convolution", "_grouped_mm", "mkldnn_convolution"
)  # fmt: skip
"""Products with weights: linear layers, convolutions, experts."""
_ATTENTION = _operators(
    "bmm", "baddbmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""Products of two activations."""
KEPT: dict[str, list[Any]] = {"attention": _PRODUCTS, "cheap": [*_PRODUCTS, *_ATTENTION]}
"""By the option ``recompute``: the operators whose results a block keeps."""
_Caching: Any = type(create_selective_checkpoint_contexts([])[0])
"""torch's mode of a first run, which keeps results as ``val`` of the leaves of its ``storage``."""


class _CopyingBeforeWrites(_Caching):
    """Keeps a copy of a result to which the block is about to write (``x += y`` behind a linear layer).

    The second run finds what the first one had there, and writes to the copy again. torch compares versions, which a
    view without history does not share, and so may find written numbers without a word.
    """

    __module__ = _Caching.__module__  # hidden where torch's own mode is, see ``hidden_from_modes``

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            named = kwargs or {}
            written = [
                args[place] if place < len(args) else named.get(argument.name)
                for place, argument in enumerate(schema.arguments)
                if argument.is_write
            ]
            self._copy(tree_leaves(written))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy(self, written: list[Any]) -> None:
        storages = {_storage_of(each) for each in written if isinstance(each, torch.Tensor)}
        for kept in _kept_in(self.storage):
            if _storage_of(kept.val) in storages:
                kept.val = kept.val.clone()
                kept.version = kept.val._version


def keeping_contexts(operators: list[Any]) -> tuple[Any, Any]:
    """The contexts of a block's first and second run, which keep and give the results of operators."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(operators)
    contexts[0].__class__ = _CopyingBeforeWrites
    return contexts


def count_kept(context: Any) -> None:
    """Let a meter of activations count the results that a first run has kept, until backward takes them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    meter = getattr(hooks[0], "__self__", None) if hooks is not None else None
    if isinstance(meter, ActivationMeter):
        for kept in _kept_in(context.storage):
            kept.counted = meter.count(kept.val)


def _kept_in(storage: Any) -> list[Any]:
    return [kept for kept in tree_leaves(storage) if isinstance(getattr(kept, "val", None), torch.Tensor)]


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
