"""Importing this module registers all rules, and adds the patches that global tensors need to the table."""

from __future__ import annotations

from workbench.tensors import dispatch, rules
from workbench.tensors.torch_patches import (
    checkpoint,
    compile_ddp_fsdp,
    copying,
    joined_rows,
    later_group,
    saving,
    torch_function_bypasses,
)

__all__ = [
    "checkpoint", "compile_ddp_fsdp", "copying", "dispatch", "joined_rows", "later_group", "rules",
    "saving", "torch_function_bypasses",
]  # fmt: skip
