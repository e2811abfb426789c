"""Importing this module makes torch know global tensors: it registers the rules and installs the patches of torch."""

from __future__ import annotations

from workbench.tensors import dispatch, rules  # noqa: F401 - rules register themselves
from workbench.tensors.torch_patches import checkpoint, compile_ddp_fsdp, copying, torch_function_bypasses

compile_ddp_fsdp.install()
copying.install()
torch_function_bypasses.install()
checkpoint.install()
dispatch.hooks.install()
