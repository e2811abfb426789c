"""``wb.debug.profile``, and what brings the parts of all ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from workbench.core.profile import DEFAULT_STEPS, DEFAULT_WARMUP, Profile, RankPart
from workbench.errors import RunError
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.object_collectives import all_gather_object, raise_on_all_ranks
from workbench.tensors.world import World, current
from workbench.training.diagnostics.memory import uncounted_in_peaks
from workbench.training.profiling.rank_profiler import RankProfiler, check_numbers
from workbench.writers.profile_files import fill


@contextmanager
def profile(
    path: str | Path | None = None,
    *,
    steps: int = DEFAULT_STEPS,
    warmup: int = DEFAULT_WARMUP,
    any_size: bool = False,
) -> Iterator[Profile]:
    """Profile some steps of the training loop in this context. All ranks call it.

    torch's profiler runs on all ranks, and with it are recorded: exchanges with their layouts and bytes, the forwards
    and backwards of micro-batches, and the ends of steps. All of it comes in one file, with a process per rank, which
    https://ui.perfetto.dev and Chrome open. The table says what each rank does in a step: compute, exchange, both, or
    nothing. A step ends with an optimizer's step, also in a captured step; without one, the context is one step. A
    replay of a captured step has no forwards and backwards to show. What follows the last profiled step runs as ever.

    Args:
        path: rank 0 writes this file; those of other ranks do not count. With ``.gz`` at the end it is compressed.
            None: the table only. On GPUs each rank's allocator snapshot of a warm-up step is written beside it, for
            torch's viewer.
        steps: how many steps are profiled.
        warmup: how many steps come before. With at least 3, memory is measured in one of them. A captured step is
            recorded in its second one, and its first replay takes longer than others.
        any_size: profile also more than 20 steps. Without it, only the first 20 are, and the profile says how large the
            file of all of them would be.

    Yields:
        a ``Profile``, which is filled when the context ends: ``print`` it, or read ``ranks[0].compute_s``.

    Raises:
        RunError: one of the numbers is none, another profile is running, or the context ended before the first step.

    ::

        with wb.debug.profile("step.json", steps=3) as profile:
            for images, classes in batches:
                train_step(images, classes)
        print(profile)

        3 steps on 2 ranks, seconds of a step
        rank     step      compute     exchange  overlapped         idle  exchanges     sent
           0  4.10 ms  2.46 ms 60%  0.92 ms 22%    0 s   0%  0.72 ms 18%         ...
    """
    check_numbers("profile", steps, warmup)
    found, profiler = Profile(), RankProfiler(current(), steps, warmup, any_size)
    profiler.begin()
    try:
        yield found
    finally:
        profiler.end()
    part = profiler.part()
    error = None if part is not None else _nothing(profiler)
    raise_on_all_ranks(error, profiler.world, "profile()")
    assert part is not None
    with uncounted_in_peaks():
        _gather(found, part, profiler.world, path)


def _nothing(profiler: RankProfiler) -> RunError:
    return RunError(
        f"profile: {profiler.num_ended} steps ended here, and the first {profiler.warmup} are for warming up, so "
        "nothing was profiled. A step ends with an optimizer's step. Take more steps, or give a smaller warmup=."
    )


def _gather(found: Profile, part: RankPart, world: World, path: str | Path | None) -> None:
    """Fill the profile on all ranks; rank 0 writes the files, if it has a path."""
    small = all_gather_object(
        (replace(part, events=b"", snapshot=b""), path is not None, len(part.events), len(part.snapshot)),
        world,
        "profile()",
    )
    parts = [each for each, *_ in small]
    if small[0][1]:
        for rank, (_, _, *sizes) in enumerate(small[1:], start=1):
            for name, size in zip(("events", "snapshot"), sizes, strict=True):
                setattr(parts[rank], name, _send(getattr(part, name), size, rank, world))
        parts[0] = part if world.rank == 0 else parts[0]
    fill(found, parts, path if world.rank == 0 else None, world.device.type, "give any_size=True")
    found.path, found.size_bytes, found.snapshots, found.notes = all_gather_object(
        (found.path, found.size_bytes, found.snapshots, found.notes), world, "profile(): its files"
    )[0]


def _send(data: bytes, size: int, source: int, world: World) -> bytes:
    """Bytes of one rank on rank 0; empty on the others."""
    tag, what = world.context.next_tag(), f"profile(): the events of rank {source}"
    if not size or world.rank not in (0, source):
        return b""
    if world.rank == source:
        tensor = copy_to_device(torch.frombuffer(bytearray(data), dtype=torch.uint8), world.device)
        world.transport.exchange([(0, tensor)], [], tag, what)
        return b""
    received = torch.empty(size, dtype=torch.uint8, device=world.device)
    world.transport.exchange([], [(source, received)], tag, what)
    return received.cpu().numpy().tobytes()
