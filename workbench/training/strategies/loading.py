"""``wb.checkpoint.load_safetensors``: weights from safetensors files into a module's shards, slice by slice."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.tensors.global_tensor import GlobalTensor, plain
from workbench.tensors.object_collectives import run_on_all_ranks
from workbench.tensors.tensor_state import forget_derived
from workbench.tensors.world import current
from workbench.training.strategies.safetensors_file import SafetensorsFiles

_MAX_LISTED = 20
_CONVERTED = (
    "  transformers renames and joins tensors of some files while it reads them, such as those of each expert. Read "
    "such files with its from_pretrained, and save them once with the names of the module: "
    "save_pretrained(folder, save_original_format=False)"
)


def load_safetensors(module: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> nn.Module:
    """Fill the parameters and persistent buffers of a module from safetensors files. All ranks call it.

    Under any strategy, each rank reads only the slices that it holds. Values are cast to the dtype of the module's
    tensors. Tied parameters may have any of their names in the file.

    Args:
        module: a module after ``wb.parallelize``, or a plain one.
        path: a ``.safetensors`` file, or a directory of ``save_pretrained``: one file, or several and
            ``model.safetensors.index.json``. ``transformers`` saves experts one by one, unless it gets
            ``save_original_format=False``.
        strict: whether names that only one side has are an error. Shapes must always agree.

    Raises:
        CheckpointError: files that cannot be read or do not fit; it lists every mismatch.

    >>> wb.checkpoint.load_safetensors(model, "gpt2/")  # doctest: +SKIP
    """

    def fill() -> None:
        try:
            with SafetensorsFiles(path) as files, torch.no_grad():
                for name, tensor in find_weights(module, files, strict):
                    _fill(files, name, tensor)
        except OSError as error:
            raise CheckpointError(f"load_safetensors: {error}.") from error

    run_on_all_ranks(fill, current(), "load_safetensors")
    return module


def _fill(files: SafetensorsFiles, name: str, tensor: torch.Tensor) -> None:
    """Read this rank's slice of a tensor."""
    if isinstance(tensor, GlobalTensor):
        forget_derived(tensor)  # boxings of what it held before, on all ranks
        if tensor.is_placeholder:
            return
        local, region = plain(tensor), tensor._spec.layout.region(tensor._spec.shape, tensor._spec.world.rank)
    else:
        local, region = tensor.detach(), tuple((0, size) for size in tensor.shape)
    if local.is_contiguous():
        files.read(name, region, local)
    else:
        part = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        files.read(name, region, part)
        local.copy_(part)


def find_weights(module: nn.Module, files: SafetensorsFiles, strict: bool = True) -> list[tuple[str, torch.Tensor]]:
    """The module's tensors that the files have, each behind its name there. Raises ``CheckpointError`` with a list of
    all mismatches.
    """
    aliases: dict[int, list[str]] = {}
    tensors: Mapping[str, torch.Tensor] = {
        name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)
    renamed = _names_in(set(files.entries), set(tensors), getattr(module, "base_model_prefix", ""))
    weights, missing, shapes, on_meta = [], [], [], []
    for names in aliases.values():
        tensor, known = tensors[names[0]], [renamed[name] for name in names if name in renamed]
        if not known:
            missing.append(" = ".join(names))
            continue
        if files.entries[known[0]].shape != tuple(tensor.shape):
            shapes.append(f"{names[0]} {tuple(tensor.shape)}, in the file {files.entries[known[0]].shape}")
        if tensor.is_meta:
            on_meta.append(names[0])
        weights.append((known[0], tensor))
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in sorted(set(files.entries) - set(renamed.values()))
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    problems = [
        *_problem("missing in the file", missing if strict else []),
        *_problem("not in the module", unexpected if strict else []),
        *_problem("of another shape in the module", shapes),
        *_problem("on meta, without storage; wb.parallelize(module, strategy, init=path) makes it", on_meta),
    ]
    if strict and missing and unexpected and hasattr(module, "save_pretrained"):
        problems.append(_CONVERTED)
    if problems:
        raise CheckpointError(
            f"load_safetensors: the file has {len(files.entries)} tensors, {type(module).__name__} has "
            f"{len(aliases)}, and they do not fit.\n" + "\n".join(problems)
        )
    return weights


def _problem(what: str, names: list[str]) -> list[str]:
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return [f"  {len(names)} {what}: {', '.join(names[:_MAX_LISTED])}{more}"] if names else []


def _names_in(have: set[str], want: set[str], prefix: str) -> dict[str, str]:
    """Module's name -> file's name. Files of a bare model lack the prefix that a model with a head adds."""
    same = {name: name for name in want & have}
    if same or not prefix:
        return same
    shorter = {name: name.removeprefix(f"{prefix}.") for name in want}
    longer = {name: f"{prefix}.{name}" for name in want}
    found = ({name: other for name, other in names.items() if other in have} for names in (shorter, longer))
    return max(found, key=len)
