"""What the methods of ``GlobalTensor`` call, in modules that import ``GlobalTensor`` themselves."""

from __future__ import annotations

from typing import Any


class _LateImports:
    """Functions and modules by name; the first use of any of them loads all, and each later one is a look-up."""

    def __getattr__(self, name: str) -> Any:
        from workbench.tensors import checkpoint_chunks, rules  # noqa: F401 - rules register themselves
        from workbench.tensors.boxing.box import box, box_to
        from workbench.tensors.boxing.fused import to_global_async
        from workbench.tensors.conversion import from_local, to_local
        from workbench.tensors.dispatch.aliasing import share_data
        from workbench.tensors.dispatch.dispatcher import dispatch
        from workbench.tensors.dispatch.read_values import check_reading, describe, format_values, on_all_ranks
        from workbench.tensors.torch_patches import copying

        functions = (box, box_to, to_global_async, from_local, to_local, dispatch, share_data)
        reading = (check_reading, describe, format_values, on_all_ranks)
        vars(self).update({function.__name__: function for function in (*functions, *reading)})
        vars(self).update(checkpoint_chunks=checkpoint_chunks, copying=copying)
        if name not in vars(self):
            raise AttributeError(f"{__name__}: methods of GlobalTensor call nothing of the name {name!r}.")
        return vars(self)[name]


later = _LateImports()
