"""``wb.checkpoint.export_safetensors``: a module's logical weights as safetensors files, like those of
``save_pretrained``.
"""

from __future__ import annotations

import copy
import json
import os
import re
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast
from workbench.errors import CheckpointError
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain
from workbench.tensors.object_collectives import raise_on_all_ranks, run_on_all_ranks
from workbench.tensors.world import World, current
from workbench.training.saving.folders import check_seen
from workbench.training.strategies.safetensors_file import DTYPES, INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 5_000_000_000
_OURS = re.compile(rf"{re.escape(SINGLE_NAME)}|model-\d{{5}}-of-\d{{5}}\.safetensors")
"""Names of files of an export, which the next one removes."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _File:
    name: str
    writer: int
    tensors: tuple[str, ...]


def export_safetensors(
    module: nn.Module, directory: str | os.PathLike[str], *, max_shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write a module's parameters and persistent buffers as whole tensors, under any strategy. All ranks call it.

    Tensors are written one by one, so no rank holds more than one whole tensor; the ranks share the files. Tied
    parameters are written once, under their first name. A ``transformers`` model also gets its ``config.json``:
    ``AutoModel.from_pretrained(directory)`` loads it, and so does ``wb.checkpoint.load_safetensors``.

    Args:
        directory: on a file system that all ranks share. It is made if it does not exist; an earlier export in it is
            replaced when all of the new one is written, other files stay.
        max_shard_bytes: the largest file, unless one tensor is larger. With several files there is an index beside
            them.

    Returns:
        The directory.

    Raises:
        CheckpointError: a state that is not a tensor, or a dtype that safetensors does not have; or a rank that writes
            files does not see the directory.

    ``wb.checkpoint.export_safetensors(model, "gpt2-tuned")``
    """
    world, folder = current(), Path(os.path.abspath(directory))
    what = f"export_safetensors({str(folder)!r})"
    tensors = _tensors_of(module)
    files = _share_out(tensors, max_shard_bytes, world.world_size)
    run_on_all_ranks(lambda: folder.mkdir(parents=True, exist_ok=True) if world.rank == 0 else None, world, what)
    has_files = any(file.writer == world.rank for file in files)
    run_on_all_ranks(lambda: check_seen(folder, world.rank) if has_files else None, world, what)
    try:
        for file in files:
            _write(folder, file, tensors, world, what)
    except BaseException:
        for file in files:
            if file.writer == world.rank:
                _partly(folder, file).unlink(missing_ok=True)
        raise
    run_on_all_ranks(lambda: _finish(folder, module, files, tensors) if world.rank == 0 else None, world, what)
    return folder


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors to write, by name; tied tensors under their first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    ignored = getattr(module, "_keys_to_ignore_on_save", None) or ()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"export_safetensors: {name} is a {type(value).__name__}, and safetensors hold tensors only. Save the "
                "module with wb.checkpoint.save, which takes everything."
            )
        if value.dtype not in _NAMES:
            raise CheckpointError(
                f"export_safetensors: {name} is {value.dtype}; safetensors know {', '.join(sorted(_NAMES.values()))}. "
                "Cast it first, or save the module with wb.checkpoint.save."
            )
        if id(value) not in seen and not any(re.search(pattern, name) for pattern in ignored):
            seen.add(id(value))
            found[name] = value
    return found


def _nbytes(tensor: torch.Tensor) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _share_out(tensors: Mapping[str, torch.Tensor], limit: int, num_ranks: int) -> list[_File]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + _nbytes(tensor) > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += _nbytes(tensor)
    names = [
        SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    return [
        # The widest elements first, so that every tensor begins at a multiple of its element size.
        _File(name, number % num_ranks, tuple(sorted(group, key=lambda n: -tensors[n].dtype.itemsize)))
        for number, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def _partly(folder: Path, file: _File) -> Path:
    """Where a file is until all are written: an export that fails changes nothing of an earlier one."""
    return folder / f"{file.name}.tmp"


def _write(folder: Path, file: _File, tensors: Mapping[str, torch.Tensor], world: World, what: str) -> None:
    """Write one file: every rank sends its slices, and the file's writer writes them, tensor by tensor."""
    gathered, error = _gather_in_order(file, tensors, world), None
    try:
        if world.rank == file.writer:
            with open(_partly(folder, file), "wb") as out:
                out.write(_header(file, tensors))
                out.writelines(whole.reshape(-1).view(torch.uint8).numpy().data for whole in gathered)
    except OSError as found:
        error = found
    deque(gathered, maxlen=0)  # a writer that failed still takes part in the remaining exchanges
    raise_on_all_ranks(error, world, what)


def _gather_in_order(file: _File, tensors: Mapping[str, torch.Tensor], world: World) -> Iterator[torch.Tensor]:
    there = Placement.of(world.device.type, [file.writer])
    for name in file.tensors:
        value: Any = tensors[name].detach()
        if isinstance(value, GlobalTensor):
            with torch.no_grad():
                value = plain(box(value, Layout(there, (broadcast,))))
        with local_torch():
            yield value.cpu().contiguous() if world.rank == file.writer else value


def _header(file: _File, tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in file.tensors:
        tensor = tensors[name]
        stop = start + _nbytes(tensor)
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _finish(folder: Path, module: nn.Module, files: list[_File], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the files their names, write the index and the configuration, and remove weights of an earlier export."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for file in files:
        os.replace(_partly(folder, file), folder / file.name)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(map(_nbytes, tensors.values()))},
            "weight_map": {name: file.name for file in files for name in file.tensors},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
    ours = {file.name for file in files}
    for path in folder.glob("model*.safetensors"):
        if path.name not in ours and _OURS.fullmatch(path.name):
            path.unlink()
    for name in ("config", "generation_config"):
        config: Any = getattr(module, name, None)
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            if name == "config":
                config.architectures = [type(module).__name__]
                config.dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
            config.save_pretrained(folder)
