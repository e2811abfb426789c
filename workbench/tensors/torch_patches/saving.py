"""``save_pretrained`` of ``transformers`` and files of ``safetensors``: they write memory by its address.

Of a global tensor that is the shard's memory, read with the logical size. ``save_pretrained`` gets whole tensors, and
so does who asks torch for a full state dict; everything else that would write a global tensor raises.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from workbench.errors import LayoutError
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.object_collectives import all_gather_object, run_on_all_ranks
from workbench.tensors.patch_table import patch
from workbench.tensors.specs import Spec


def _saving_whole(transformers_own: Any) -> Any:
    @functools.wraps(transformers_own)
    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        held = self.state_dict(keep_vars=True)
        given = held if state_dict is None else state_dict
        world = next((t._spec.world for t in given.values() if isinstance(t, GlobalTensor)), None)
        if world is None:
            return transformers_own(self, save_directory, is_main_process, state_dict, *args, **kwargs)
        what = "save_pretrained()"
        wanted = all_gather_object(os.path.abspath(save_directory) if is_main_process else None, world, what)
        writes = is_main_process and wanted.index(wanted[world.rank]) == world.rank  # one rank writes each directory
        whole = _whole_tensors(given, held, keeps=writes)

        def write() -> Any:
            # transformers' own also asks torch.distributed, and lets only rank 0 write.
            self.should_save_on_this_rank = lambda is_main_process: is_main_process
            try:
                return transformers_own(self, save_directory, True, whole, *args, **kwargs)
            finally:
                vars(self).pop("should_save_on_this_rank", None)

        return run_on_all_ranks(write if writes else lambda: None, world, what)

    return save_pretrained


def _whole_tensors(given: Any, held: Any, keeps: bool) -> dict[str, Any]:
    """Logical values as plain tensors; tied parameters stay one tensor. All ranks take part."""
    found: dict[int, torch.Tensor] = {}
    named: dict[str, Any] = {}
    for name, value in given.items():
        key = id(held.get(name, value))
        if isinstance(value, GlobalTensor) and key not in found:
            whole = value.detach().full_tensor()
            found[key] = whole.clone() if keeps else torch.empty(0)
        named[name] = found.get(key, value)
    return named


def _refusing(safetensors_own: Any, refuses: Callable[[Spec], bool], advice: str) -> Any:
    """A function of safetensors that refuses global tensors of such specs."""
    if safetensors_own is None:  # this version has no such function
        return None

    @functools.wraps(safetensors_own)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in tensors.items():
            if isinstance(value, GlobalTensor) and refuses(spec := value._spec):
                held = "nothing" if spec.is_placeholder else tuple(spec.local_shape)
                raise LayoutError(
                    f"safetensors: {name!r} is a global tensor of shape {tuple(spec.shape)}, {spec.layout}, of "
                    f"which this rank holds {held}. A file holds whole tensors: {advice} on all ranks."
                )
        return safetensors_own(tensors, *args, **kwargs)

    return checked


def refuse_state_of_stages(what: str, data: Any) -> None:
    """Raise ``LayoutError`` for state of an optimizer that only ranks of one stage have."""
    for value in tree_leaves(data):
        if isinstance(value, GlobalTensor) and value._is_read_in_place:
            placement, num_ranks = value._spec.layout.placement, value._spec.world.world_size
            if placement.num_ranks != num_ranks:
                raise LayoutError(
                    f"{what} of an optimizer: ranks {list(placement)} of {num_ranks} have the state of shape "
                    f"{tuple(value.shape)}. Under a pipeline each stage has entries of its own: call "
                    "wb.checkpoint.save(path, model=model, optimizer=optimizer)."
                )


def _giving_whole(torchs_own: Any) -> Any:
    @functools.wraps(torchs_own)
    def maybe_full_or_cpu_state_dict(state_dict: Any, info: Any) -> Any:
        if not info.full_state_dict:
            return torchs_own(state_dict, info)
        refuse_state_of_stages("get_state_dict(full_state_dict=True)", state_dict)

        def whole(value: GlobalTensor) -> torch.Tensor:
            found = value.detach().full_tensor()
            return found.cpu() if info.cpu_offload else found

        return torchs_own(tree_map_only(GlobalTensor, whole, state_dict), info)

    return maybe_full_or_cpu_state_dict


patch(
    "torch.distributed.checkpoint.state_dict._maybe_full_or_cpu_state_dict",
    "it gathers the tensors of torch's own kinds and leaves global ones as they are",
    _giving_whole,
)
patch(
    "transformers.modeling_utils.PreTrainedModel.save_pretrained",
    "it writes the memory of shards, read with the sizes of the whole",
    _saving_whole,
)
patch(
    "safetensors.torch._remove_duplicate_names",
    "load_model and save_model look by it for whole tensors in the memory of shards",
    functools.partial(
        _refusing,
        refuses=lambda spec: not spec.is_whole_everywhere,
        advice="call wb.checkpoint.load_safetensors(model, path), or wb.checkpoint.export_safetensors(model, folder),",
    ),
)
patch(
    "safetensors.torch._flatten_as_ptr",
    "it reads the memory of a shard with the size of the whole",
    functools.partial(
        _refusing,
        refuses=lambda spec: True,
        advice="call wb.checkpoint.export_safetensors(model, folder), or give value.full_tensor() for each,",
    ),
)
