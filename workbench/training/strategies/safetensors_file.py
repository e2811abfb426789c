"""Reads slices of tensors from safetensors files directly into their destination.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the header, the
data. The library's own reader maps the whole file, and the pages that it has read stay in memory beside the copies.
Reading slice by slice needs no more memory than the slice.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.core.layout import Region, Shape
from workbench.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
"""The format's names of dtypes."""
INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
_BUFFER_BYTES = 4 * 2**20
"""Values that change their dtype or device on the way pass through a buffer of this size."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its dtype, shape, and where its bytes begin."""

    path: Path
    dtype: torch.dtype
    shape: Shape
    offset: int


class SafetensorsFiles:
    """The tensors of a file or of a directory with one file or an index; use it as a context.

    Raises:
        CheckpointError: there is no such file, or it is cut short or no safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.entries: dict[str, Entry] = {}
        self._descriptors: dict[Path, int] = {}
        for file in _files_of(Path(path)):
            self.entries.update(_read_header(file))

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, name: str, region: Region, out: torch.Tensor) -> None:
        """Fill ``out``, contiguous and of the region's shape, with a region of a tensor, in the dtype of ``out``."""
        entry = self.entries[name]
        flat = out.view(-1)
        direct = out.dtype == entry.dtype and out.device.type == "cpu"
        most = max(1, _BUFFER_BYTES // entry.dtype.itemsize)
        buffer = torch.empty(0 if direct else min(most, out.numel()), dtype=entry.dtype)
        done = 0
        for start, count in _runs(entry.shape, region):
            for first in range(0, count, most):
                size = min(most, count - first)
                target = flat[done : done + size] if direct else buffer[:size]
                self._read_into(entry, start + first, target)
                if not direct:
                    flat[done : done + size].copy_(target)
                done += size

    def _read_into(self, entry: Entry, first: int, target: torch.Tensor) -> None:
        if entry.path not in self._descriptors:
            self._descriptors[entry.path] = os.open(entry.path, os.O_RDONLY)
        view = memoryview(target.view(torch.uint8).numpy().data)
        position = entry.offset + first * entry.dtype.itemsize
        while len(view):
            count = os.preadv(self._descriptors[entry.path], [view], position)
            if count == 0:
                raise CheckpointError(
                    f"{entry.path} ended at byte {position} while it was read. A file must not change during a load: "
                    "copy it again."
                )
            view, position = view[count:], position + count


def _runs(shape: Shape, region: Region) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of a region's consecutive stretches, in order."""
    if any(stop == start for start, stop in region):
        return
    cut = [dim for dim, (start, stop) in enumerate(region) if stop - start != shape[dim]]
    last = cut[-1] if cut else 0
    inner = math.prod(shape[last + 1 :])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start, stop = region[last] if region else (0, 1)
    for index in itertools.product(*(range(*bounds) for bounds in region[:last])):
        row = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield row + start * inner, (stop - start) * inner


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix != ".json" else _files_of_index(path)
    if (path / INDEX_NAME).is_file():
        return _files_of_index(path / INDEX_NAME)
    if (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME]
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: holds {len(found)} .safetensors files and no {INDEX_NAME}. Give a file, or a directory with "
            f"{SINGLE_NAME} or with an index."
        )
    return found


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} is no index of safetensors files: {error!r}. An index has a weight_map from tensors to files: "
            "copy it again, or give one of the files."
        ) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {len(missing)} are not there: {', '.join(missing)}. All of "
            "them must be in the directory of the index: copy them there."
        )
    return [index.parent / name for name in names]


def _read_header(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 0 < length <= size - 8 else b""
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        found = {
            name: Entry(path, DTYPES[info["dtype"]], tuple(info["shape"]), 8 + length + info["data_offsets"][0])
            for name, info in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} of {size} bytes is no safetensors file: its header cannot be read. Copy it again, or give another "
            "file."
        ) from error
    end = max((e.offset + math.prod(e.shape) * e.dtype.itemsize for e in found.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} has {size} bytes, its header promises {end}: it is cut short. Copy it again.")
    return found
