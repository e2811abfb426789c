"""Writing one checkpoint: each rank writes its slices into one file, rank 0 writes the table of contents and renames.

    <path>.<token>.incomplete/   until all is written
        __0_0.distcp ...         the slices of a rank, one file per rank
        __0.written ...          the place of each slice in the file; removed at the end
        .metadata                torch.distributed.checkpoint's table of contents
        workbench.json           kinds of the parts, sizes and checksums
    <path>/                      the same directory, renamed when everything is on the disk

The main threads first agree on which rank writes which slice. The writing itself needs no communication and may run in
a helper thread: rank 0 learns from the files ``.written`` that the other ranks are done.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World
from workbench.training.saving.flat import Path as StatePath
from workbench.training.saving.flat import by_name, name_of
from workbench.training.saving.folders import MANIFEST, explaining, sync_folder, take_name, write_whole
from workbench.training.saving.plain_copies import unlike_entries

_POLL_S = 0.005
_GRACE_S = 10.0
"""Seconds for which rank 0 waits after its program has ended, while the files of the other ranks do not grow."""


@dataclass(frozen=True)
class Written:
    """The place of a slice: bytes ``offset`` to ``offset + length`` of a file, and their CRC-32."""

    index: Any
    file: str
    offset: int
    length: int
    checksum: int


@dataclass
class Job:
    """One rank's work for one checkpoint.

    Attributes:
        folder: the directory of the files until they are complete.
        items: (torch's description of the slice, the plain tensor on the CPU, or bytes).
        metadata: torch's table of contents, without the places in the files; only rank 0 uses it.
        aliases: other names of tied tensors, by the name of the entry.
        parts: entries of the manifest that describe the parts.
        on_complete: rank 0 calls it when the checkpoint has its final name.
        before_complete: rank 0 calls it with the directory when all is written, before that.
    """

    path: Path
    folder: Path
    world: World
    items: list[tuple[Any, torch.Tensor | bytes]]
    metadata: Any
    aliases: Mapping[str, str]
    parts: Mapping[str, Mapping[str, str]]
    on_complete: Callable[[], None] | None = None
    before_complete: Callable[[Path], None] | None = None
    given_up: threading.Event = field(default_factory=threading.Event)

    def write_own(self) -> None:
        """Write this rank's file to the disk, and the file that shows rank 0 that it is done."""
        rank = self.world.rank
        try:
            with explaining(self.path), self._telling_that_it_is_gone():
                written = _write_slices(self.folder / f"__{rank}_0.distcp", self.items)
                write_whole(self.folder / f"__{rank}.written", pickle.dumps(written))
        except Exception as error:
            _say_failed(self.folder / f"__{rank}.failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            self.items.clear()  # copies of all slices; the handle may live until the next save

    def finish(self) -> None:
        """On rank 0, when all ranks have written: write the table of contents, and set the final name."""
        if self.world.rank == 0:
            with explaining(self.path), self._telling_that_it_is_gone():
                self._complete()
            if self.on_complete is not None:
                self.on_complete()

    def _complete(self) -> None:
        self._wait_for_others()
        files = [self.folder / f"__{rank}.written" for rank in range(self.world.world_size)]
        self._write_contents([entry for file in files for entry in pickle.loads(file.read_bytes())])
        for file in files:
            file.unlink()
        if self.before_complete is not None:
            self.before_complete(self.folder)
        sync_folder(self.folder)
        take_name(self.folder, self.path)

    def discard(self) -> None:
        """Remove the files of a failed save."""
        if self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _telling_that_it_is_gone(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if self.folder.is_dir():
                raise
            raise CheckpointError(
                f"save({str(self.path)!r}): {self.folder.name}, the directory in which this save writes, is gone. "
                "Another save to the same path removes it when it begins. A path is for one save at a time: give each "
                "program a path of its own."
            ) from error

    def _wait_for_others(self) -> None:
        waiting, grown_at, size = set(range(self.world.world_size)), time.monotonic(), 0
        while waiting:
            names = set(os.listdir(self.folder))  # of one name NFS may know what was, see `check_seen`
            for rank in list(waiting):
                if f"__{rank}.failed" in names:
                    text = (self.folder / f"__{rank}.failed").read_text() or "not even the reason fitted on the disk"
                    raise CheckpointError(f"save({str(self.path)!r}): rank {rank} could not write its part: {text}")
                if f"__{rank}.written" in names:
                    waiting.discard(rank)
            if threading.main_thread().is_alive() or size != (size := _size_of(self.folder)):
                grown_at = time.monotonic()
            if waiting and (self.given_up.is_set() or time.monotonic() - grown_at > _GRACE_S):
                raise CheckpointError(
                    f"save({str(self.path)!r}): ranks {sorted(waiting)} have not written their parts."
                )
            if waiting:
                time.sleep(_POLL_S)

    def _write_contents(self, written: list[Written]) -> None:
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

        metadata = self.metadata
        places = {entry.index: _StorageInfo(entry.file, entry.offset, entry.length) for entry in written}
        for alias, name in self.aliases.items():
            if name in metadata.state_dict_metadata:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
                part, _, rest = alias.partition(".")
                metadata.planner_data[alias] = (part, rest)
        of_name: dict[str, list[Any]] = {}
        for index in places:
            of_name.setdefault(index.fqn, []).append(index)
        for alias, name in self.aliases.items():
            for index in of_name.get(name, []):
                places[MetadataIndex(alias, index.offset, index.index)] = places[index]
        metadata.storage_data, metadata.version = places, CURRENT_DCP_VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.path))
        manifest = {
            "format": 1,
            "ranks": self.world.world_size,
            **self.parts,
            "sizes": {entry.file: entry.offset + entry.length for entry in written},  # the last one of each file counts
            "checksums": {f"{entry.file}:{entry.offset}": entry.checksum for entry in written},
        }
        write_whole(self.folder / MANIFEST, json.dumps(manifest).encode())
        write_whole(self.folder / ".metadata", pickle.dumps(metadata))


def local_plan(flat: Mapping[StatePath, Any], to_lowest: bool = False) -> tuple[Any, Any]:
    """torch's planner, and the slices that this rank could write. ``to_lowest``: of equal slices, the lowest rank
    writes its own; else the one with the least to write.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=to_lowest
    )
    planner.set_up_planner(by_name(flat), is_coordinator=True)
    return planner, replace(planner.create_local_plan(), planner_data={name_of(path): path for path in flat})


def agree(
    planner: Any, local: Any, checksums: Mapping[str, int], leaves: Mapping[StatePath, Any], world: World, what: str
) -> tuple[list[Any], Any]:
    """This rank's items to write, and torch's table of contents. All ranks call it.

    Equal slices of several ranks are written once, by the rank with the least to write so far. Each rank computes that
    from the plans of all. ``checksums`` are those of this rank's leaves of which all ranks must have equal copies.
    Copies that differ by rounding are those of the first rank that has them.

    Raises:
        CheckpointError: ranks have other copies. All ranks raise it.
    """
    values = by_name(leaves)
    gathered = all_gather_object((local, checksums), world, what)
    unlike = unlike_entries([of_rank for _, of_rank in gathered], values.__getitem__, world, what)
    if unlike:
        _warn(unlike)
    plans, metadata = planner.create_global_plan(
        [
            replace(plan, items=[item for item in plan.items if unlike.get(item.index.fqn, rank) == rank])
            for rank, (plan, _) in enumerate(gathered)
        ]
    )
    metadata.planner_data = {name: path for plan in plans for name, path in plan.planner_data.items()}
    return plans[world.rank].items, metadata


def _warn(unlike: Mapping[str, int]) -> None:
    name, rank = next(iter(unlike.items()))
    more = f", as those of {len(unlike) - 1} other entries do" if len(unlike) > 1 else ""
    warnings.warn(
        f"wb.checkpoint.save: the copies of {name} differ between ranks by rounding{more}. The checkpoint has that of "
        f"rank {rank}. Ranks that train a plain module alike move apart: wb.parallelize it, or broadcast its values "
        "from time to time.",
        UserWarning,
        stacklevel=2,
    )


def snapshot(items: Iterable[Any], planner: Any, keeps: bool) -> list[tuple[Any, torch.Tensor | bytes]]:
    """The values to write, as they are now. ``keeps`` copies tensors, so that training may continue."""
    taken: list[tuple[Any, torch.Tensor | bytes]] = []
    for item in items:
        value = planner.resolve_data(item)
        if isinstance(value, io.BytesIO):
            taken.append((item, value.getvalue()))
            continue
        value = value.detach()
        own = value.cpu()
        copies = own.data_ptr() == value.data_ptr() and (keeps or own.untyped_storage().nbytes() != own.nbytes)
        taken.append((item, own.clone(memory_format=torch.contiguous_format) if copies else own))
    return taken


class _ChecksummedFile:
    """A file that computes the checksum of the bytes written to it, and keeps the first error of the system: torch
    raises another one in its place.
    """

    def __init__(self, file: Any) -> None:
        self.file, self.checksum = file, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write_slices(path: Path, items: Iterable[tuple[Any, torch.Tensor | bytes]]) -> list[Written]:
    written = []
    with open(path, "wb") as file:
        for item, value in items:
            checked, start = _ChecksummedFile(file), file.tell()
            try:
                if isinstance(value, bytes):
                    checked.write(value)
                else:
                    torch.save(value, checked)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise checked.error or error from None
            written.append(Written(item.index, path.name, start, file.tell() - start, checked.checksum))
        file.flush()
        os.fsync(file.fileno())
    return written


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def _say_failed(path: Path, text: str) -> None:
    """Write the reason of a failure for rank 0; an empty file if a full disk has no space for it."""
    with contextlib.suppress(OSError):
        write_whole(path, text.encode())
        return
    with contextlib.suppress(OSError):
        path.touch()
