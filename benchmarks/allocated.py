"""The most bytes that tensors have at one moment of a training step, as torch's allocator tells it.

Kinds that are counted apart (parameters, gradients, activations that autograd keeps) are never all there at once, and
what functions take and make for a moment is none of them. The allocator knows. On CPUs its profiler tells of every
tensor's memory as it comes and goes; what was made elsewhere (other threads, before the profiler) is what is held
besides at the end of a step: parameters, gradients and the optimizer's state. Large results of boxings, and what ranks
gather, lie in memory that ranks share, where there is room; for this run there is none, so that the allocator sees
them, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from workbench.tensors.world import World, current
from workbench.training.batches import Batch
from workbench.training.runs.job import Job
from workbench.training.runs.train import run_strategy

_MARK = "a step begins"
NUM_STEPS = 4
"""The last but one counts: sums start in backward and parameters come ahead of their use from the second step on."""
_HELD = ("parameters", "gradients", "optimizer", "buffers")


class MarkedJob(Job):
    """Leaves a mark in the profile where a step begins, and behind the last one."""

    def batches(self) -> Iterator[Batch]:
        for batch in super().batches():
            _mark()
            yield batch
        _mark()


def _mark() -> None:
    """Cycles of Python's objects that hold tensors of an earlier step go first: when they would is chance."""
    gc.collect()
    with record_function(_MARK):
        pass


def peak_allocated(job: Job, strategy: str) -> int:
    """Bytes of this rank's tensors at the fullest moment of a step. All ranks call it."""
    marked = MarkedJob(job.model_fn, job.dataset, job.loss_fn, job.optimizer_fn, job.batch_size, NUM_STEPS, job.seed)
    with (
        _only_new_objects_collected(),
        _in_ordinary_memory(current()),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched,
    ):
        result = run_strategy(marked, strategy)
    events: Any = watched.profiler.kineto_results.events()
    marks = sorted(event.start_ns() for event in events if event.name() == _MARK)
    begin, end = marks[NUM_STEPS - 2 : NUM_STEPS]
    now = most = at_end = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        if event.start_ns() >= end:
            break
        now += event.nbytes()
        most = max(most, now) if event.start_ns() >= begin else now
        at_end = now
    return sum(result.memory_bytes[kind] for kind in _HELD) + most - at_end


@contextmanager
def _only_new_objects_collected() -> Iterator[None]:
    """What was there before (every module of torch) is not looked at by each mark: 0.2 s of a core each time."""
    was_set_aside = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_set_aside:
            gc.unfreeze()


@contextmanager
def _in_ordinary_memory(world: World) -> Iterator[None]:
    transport: Any = world.transport
    segment: Any = getattr(transport, "_segment", None)
    if segment is None:
        yield
        return

    def allocate_for_tensor(num_bytes: int) -> None:
        """There is none: tensors lie in ordinary memory."""

    has_room = segment.allocate_for_tensor
    segment.allocate_for_tensor = allocate_for_tensor
    transport.start_shared_all_gather = lambda *args: (False, list)
    try:
        yield
    finally:
        segment.allocate_for_tensor = has_room
        del transport.start_shared_all_gather


__all__ = ["peak_allocated"]
