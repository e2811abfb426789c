"""The files of a profile, made from the parts of all ranks."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from workbench.core.profile import MOST_STEPS, Profile, RankPart
from workbench.units import format_bytes

_ON_CPU = "allocator snapshots: none, the tensors are on the CPU and torch records its allocator on GPUs only"


def fill(
    profile: Profile, parts: Sequence[RankPart], path: str | Path | None, device_type: str, more_steps: str
) -> None:
    """Complete a profile, and write its files unless ``path`` is None. A disk that refuses them is a note.

    ``more_steps`` says how to profile more than ``MOST_STEPS``.
    """
    profile.ranks = tuple(part.profile for part in parts)
    profile.memory = tuple(part.memory for part in parts if part.memory is not None)
    profile.notes = _notes(parts, device_type, more_steps)
    try:
        if path is not None:
            _write(profile, parts, Path(path).expanduser())
    except OSError as error:
        profile.path, profile.size_bytes = None, 0
        profile.notes += (f"{path} was not written: {error}",)


def _write(profile: Profile, parts: Sequence[RankPart], path: Path) -> None:
    profile.size_bytes = write_trace(path, (zlib.decompress(part.events) for part in parts))
    profile.path = path
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    for part in parts:
        if part.snapshot:
            file = path.with_name(f"{stem}-memory-rank{part.profile.rank}.pickle")
            file.write_bytes(part.snapshot)
            profile.snapshots += (file,)


def _notes(parts: Sequence[RankPart], device_type: str, more_steps: str) -> tuple[str, ...]:
    """What a reader of the table should know, each once."""
    num_steps, size_bytes = min(part.profile.num_steps for part in parts), sum(part.events_bytes for part in parts)
    found = [_size_note(parts[0].num_wanted, num_steps, size_bytes, more_steps)]
    found += dict.fromkeys(note for part in parts for note in part.notes)
    found += [_ON_CPU] * (device_type == "cpu")
    return tuple(filter(None, found))


def _size_note(num_wanted: int, num_steps: int, size_bytes: int, fix: str) -> str:
    """What is said where fewer steps were profiled than asked for, because of their size; empty otherwise."""
    if num_wanted <= num_steps or num_steps != MOST_STEPS:
        return ""
    each = size_bytes / num_steps
    return (
        f"{num_wanted} steps would be {format_bytes(each * num_wanted)}, {format_bytes(each)} per step: only the first "
        f"{num_steps} were profiled. For all of them, {fix}."
    )


def write_trace(path: str | Path, parts: Iterable[bytes]) -> int:
    """Join the ranks' events, as ``core.trace_events.encoded`` gives them, in one file, and return its size in bytes.

    A name that ends with ``.gz`` is compressed.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wb", 3) if file.suffix == ".gz" else file.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, part in enumerate(part for part in parts if part):
            out.write(b",\n" * (number > 0) + part)
        out.write(b"\n]}\n")
    return file.stat().st_size
