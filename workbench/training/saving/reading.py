"""Reading one checkpoint: its entries, whether it is complete, and the slices that a rank needs."""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench.errors import CheckpointError
from workbench.tensors.checkpoint_chunks import chunk_list
from workbench.tensors.global_tensor import GlobalTensor, plain
from workbench.training.saving.flat import Path as StatePath
from workbench.training.saving.flat import name_of, unflatten
from workbench.training.saving.folders import INCOMPLETE, MANIFEST, REPLACED, unfinished

KEPT_BYTES = 1 << 28
"""Bytes that are kept between the comparison of their checksum and their use. Bytes beyond that are read twice."""


class Piece(NamedTuple):
    """A slice with a correct checksum, its target, and its bytes if they were kept."""

    into: torch.Tensor
    item: Any
    place: Any
    data: bytes | None


def find(path: Path) -> Path:
    """The directory to read for ``path``: itself, or the one that it was replacing when its writer was killed.

    Raises:
        CheckpointError: there is none, or only a half-written one.
    """
    for candidate in (path, path.with_name(path.name + REPLACED)):
        if (candidate / ".metadata").is_file():
            return candidate
    partly = [folder for folder in unfinished(path) if folder.suffix == INCOMPLETE]
    if partly:
        raise CheckpointError(f"load({str(path)!r}): {_half_written(partly[0])} Load an earlier checkpoint.")
    if path.is_dir():
        raise CheckpointError(
            f"load({str(path)!r}): the directory has no .metadata, which is written last: it is half-written, or no "
            "checkpoint. Load an earlier checkpoint; for a directory of checkpoints use "
            "wb.checkpoint.Checkpoints(directory).load."
        )
    near = sorted(p.name for p in path.parent.glob("*") if (p / ".metadata").is_file())[:5]
    there = f"{path.parent} has {', '.join(near)}" if near else f"no checkpoint is in {path.parent}"
    raise CheckpointError(f"load({str(path)!r}): there is no such directory; {there}.")


def _half_written(folder: Path) -> str:
    """Names the ranks that had not finished when a save was interrupted."""
    started = sorted(int(p.name[2:].split("_")[0]) for p in folder.glob("__*_0.distcp"))
    done = {int(p.name[2:].split(".")[0]) for p in folder.glob("__*.written")}
    missing = [rank for rank in started if rank not in done]
    which = f"ranks {missing} had not finished" if missing else "it was not closed"
    return f"{folder.name} is half-written ({which}): its save was broken off."


class Checkpoint:
    """One complete checkpoint directory.

    Attributes:
        entries: (path in the nested state -> torch's description of the entry).
        kinds: the kind of each part of ``wb.checkpoint.save``.
        schedulers: the classes of the learning-rate schedulers among them, where these are known.

    Raises:
        CheckpointError: the table of contents is damaged or not readable here, or a file is missing or has another size
            than when it was written.
    """

    title = "the checkpoint"
    """Its name in messages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            metadata = pickle.loads((folder / ".metadata").read_bytes())
            self._metadata = metadata.state_dict_metadata
            self._places = metadata.storage_data
            paths = metadata.planner_data or {name: (name,) for name in self._metadata}
            manifest = json.loads((folder / MANIFEST).read_bytes()) if (folder / MANIFEST).is_file() else {}
        except OSError as error:
            raise CheckpointError(
                f"load({str(folder)!r}): {error.filename} cannot be read: {error.strerror}. All ranks read it: give a "
                "path on a file system that they share, whose files your user may read."
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"load({str(folder)!r}): its table of contents cannot be read ({type(error).__name__}: {error}): the "
                "files .metadata and workbench.json are damaged. Load another checkpoint."
            ) from error
        self.entries: dict[StatePath, Any] = {
            tuple(paths[name]): entry for name, entry in self._metadata.items() if name in paths
        }
        self.kinds: dict[str, str] = manifest.get("parts", {str(path[0]): "unknown" for path in self.entries})
        self.schedulers: dict[str, str] = manifest.get("schedulers", {})
        self._by_prefix: dict[StatePath, list[StatePath]] | None = None
        self._checksums: dict[str, int] = manifest.get("checksums", {})
        self._check_sizes(manifest.get("sizes", {}))

    def _check_sizes(self, sizes: dict[str, int]) -> None:
        wrong = []
        for name, size in sizes.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                wrong.append(f"{name} has {found} bytes, not {size}" if found is not None else f"{name} is missing")
        if wrong:
            raise CheckpointError(
                f"load({str(self.folder)!r}): {'; '.join(wrong)}. The checkpoint is damaged: load another one."
            )

    def below(self, *path: str | int) -> dict[StatePath, Any]:
        """The entries whose path begins with ``path``, by the rest of their paths."""
        if self._by_prefix is None:  # an index, so that each parameter needs no pass over all entries
            self._by_prefix = {}
            for whole in self.entries:
                for length in range(len(whole) + 1):
                    self._by_prefix.setdefault(whole[:length], []).append(whole)
        return {whole[len(path) :]: self.entries[whole] for whole in self._by_prefix.get(path, ())}

    def is_tensor(self, path: StatePath) -> bool:
        """Whether the entry is a tensor. Other entries are pickled Python values."""
        return hasattr(self.entries[path], "chunks")

    def value(self, *path: str | int, given: Mapping[StatePath, Any] | None = None) -> Any:
        """The nested value at ``path``: Python values, and whole tensors on the CPU. ``given`` stand in place of
        entries.
        """
        given, paths = given or {}, {rest: (*path, *rest) for rest in self.below(*path)}
        return unflatten({rest: given[full] if full in given else self._leaf(full) for rest, full in paths.items()})

    def _leaf(self, path: StatePath) -> Any:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        entry = self.entries[path]
        if self.is_tensor(path):
            whole = torch.empty(entry.size, dtype=entry.properties.dtype)
            self.read(path, whole)
            return whole
        place = self._places[MetadataIndex(name_of(path))]
        # A checkpoint is the user's own file, and its table of contents is a pickle already.
        return torch.load(io.BytesIO(self._bytes(place)), weights_only=False)

    def read(self, path: StatePath, into: torch.Tensor) -> None:
        """Fill a tensor (this rank's shard of a global one) from the slices that overlap it."""
        for item, place in self._reads(path, into):
            _put(into, item, self._bytes(place))

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fill the tensors in use from the pieces that ``check`` has returned."""
        for piece in pieces:
            _put(piece.into, piece.item, self._bytes(piece.place) if piece.data is None else piece.data)

    def _reads(self, path: StatePath, into: torch.Tensor) -> Iterator[tuple[Any, Any]]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        if isinstance(into, GlobalTensor):
            chunks = chunk_list(into)
        else:
            chunks = [ChunkStorageMetadata(torch.Size([0] * into.dim()), into.shape)]
        for item in create_read_items_for_chunk_list(name_of(path), self.entries[path], chunks):
            yield item, self._places[item.storage_index]

    def _bytes(self, place: Any) -> bytes:
        with open(self.folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            return file.read(place.length)  # os.pread would end after 2 GiB

    def check(self, wanted: Iterable[tuple[StatePath, torch.Tensor]], fresh: Container[StatePath] = ()) -> list[Piece]:
        """Compare the checksums of all Python values, and of the slices that ``wanted`` tensors are read from.

        Bytes are read once. Those of ``fresh`` tensors, which nothing uses yet, go into them at once. Others are kept,
        up to ``KEPT_BYTES``, until all checksums are correct.

        Returns:
            The pieces for ``fill``.

        Raises:
            CheckpointError: it lists every entry with wrong bytes.
        """
        left: list[Piece] = []
        damaged: dict[str, str] = {}
        num_checked, room = 0, KEPT_BYTES
        for path, tensor in wanted:
            for item, place in self._reads(path, tensor):
                is_kept = path in fresh or place.length <= room
                data = self._bytes(place) if is_kept else None
                num_checked += 1
                if not self._is_right(place, data):
                    damaged[_key(place)] = _describe_place(name_of(path), place)
                elif path in fresh:
                    assert data is not None
                    _put(tensor, item, data)
                else:
                    room -= place.length if is_kept else 0
                    left.append(Piece(tensor, item, place, data))
        for index, place in self._places.items():
            if index.offset is None:
                num_checked += 1
                if not self._is_right(place, self._bytes(place)):
                    damaged[_key(place)] = _describe_place(index.fqn, place)
        if damaged:
            raise CheckpointError(
                f"load({str(self.folder)!r}): {len(damaged)} of {num_checked} pieces do not have the checksum they "
                f"were written with: {'; '.join([damaged[key] for key in sorted(damaged)][:5])}. The files are "
                "damaged, and nothing was loaded: load another checkpoint."
            )
        return left

    def _is_right(self, place: Any, data: bytes | None) -> bool:
        expected = self._checksums.get(_key(place))
        return expected is None or expected == zlib.crc32(self._bytes(place) if data is None else data)


def _key(place: Any) -> str:
    return f"{place.relative_path}:{place.offset}"


def _describe_place(name: str, place: Any) -> str:
    return f"{name} ({place.relative_path}, bytes {place.offset} to {place.offset + place.length})"


def _put(into: torch.Tensor, item: Any, data: bytes) -> None:
    """Copy the overlap of a saved slice and a tensor into the tensor."""
    saved, part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), plain(into)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dim, start, length)
    for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    with torch.no_grad():
        part.copy_(saved)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The logical shape."""
    return tuple(tensor._spec.shape if isinstance(tensor, GlobalTensor) else tensor.shape)
