"""The settings of an ``nn.Graph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.errors import StrategyError

_HINTS = frozenset(
    {
        "allow_fuse_add_to_output", "allow_fuse_cast_scale", "allow_fuse_model_update_ops",
        "enable_cudnn_conv_heuristic_search_algo", "enable_cudnn_fused_normalization_add_relu", "enable_fused_linear",
        "enable_multi_tensor_update", "enable_straighten_algorithm", "set_outputs_buffer_size",
    }
)  # fmt: skip
"""Settings of OneFlow's compiler that change no numbers: accepted, and without effect."""


class GraphConfig:
    """The settings in ``graph.config``.

    Attributes:
        num_micro_batches: the number of parts into which a training batch is cut.
        autocast: the dtype under which ``build`` runs; None for none.
        schedule: the order in which stages run micro-batches, e.g. ``"1f1b"`` or ``"gpipe"`` (an extension of OneFlow).
    """

    def __init__(self) -> None:
        self.num_micro_batches = 1
        self.autocast: torch.dtype | None = None
        self.schedule = "1f1b"

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Cut every training batch into ``value`` micro-batches along dim 0 (one per sample, if there are fewer)."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StrategyError(
                f"config.set_gradient_accumulation_steps({value!r}): a batch is cut into at least 1 part. Give a whole "
                "number, e.g. 2."
            )
        self.num_micro_batches = value

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Run ``build`` under autocast. With ``dtype=flow.float16`` give the graph a scaler (``set_grad_scaler``)."""
        self.autocast = dtype if mode else None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in _HINTS:
            return _without_effect
        known = sorted(n for n in {*dir(type(self)), *self.__dict__} if not n.startswith("_"))
        raise AttributeError(
            f"graph.config.{name}: no such setting; there are {', '.join(known)}. Settings of a strategy (zero, "
            "recompute, degrees) are options of wb.parallelize(module, strategy)."
        )


def _without_effect(*args: Any, **options: Any) -> None:
    pass
