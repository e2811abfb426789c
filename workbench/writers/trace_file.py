"""Joins the events of all ranks in one file for Perfetto."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path


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
