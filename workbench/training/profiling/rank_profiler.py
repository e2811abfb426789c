"""Counts the steps of one rank and profiles some of them, without an exchange."""

from __future__ import annotations

import math
import socket
import time
import zlib
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from workbench.core.profile import DEFAULT_STEPS, DEFAULT_WARMUP, MOST_STEPS, RankPart
from workbench.core.trace_events import encoded
from workbench.errors import RunError
from workbench.tensors.world import World
from workbench.training.diagnostics.memory import uncounted_in_peaks
from workbench.training.pipelining.timeline import clock_offset
from workbench.training.profiling.memory_curve import MemoryMeter
from workbench.training.profiling.recording import Recording
from workbench.training.recorded_actions import ActionTimer

_MEMORY_BEFORE = 2
"""Steps before the first profiled one: measuring memory takes time, and the step after lets the ranks meet again."""


def is_simulated(world: World) -> bool:
    """Whether other ranks are threads of this process."""
    return world.transport.scope == "process" and world.world_size > 1


def check_numbers(what: str, steps: Any, warmup: Any) -> None:
    """Raise ``RunError`` where a profile cannot have these numbers."""
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if type(value) is not int or value < least:
            raise RunError(f"{what}: {name} is {value!r}; it is a whole number, at least {least}. E.g. {name}=3.")


class RankProfiler:
    """Profiles ``steps`` steps of this rank after ``warmup`` others, from ``begin`` on.

    A step ends with the step of an optimizer, of the first one that steps where there are several. All ranks begin
    together; after that each counts alone. What records is started one step before the first one that counts, since
    starting it takes unlike times on the ranks, and the ranks meet in that step.

    torch's profiler is started once. Another start while a ``record_function`` of before is open, such as an
    optimizer's, would write to memory that the first one has freed.

    Args:
        world: of the rank.
        steps, warmup, any_size: see ``wb.debug.profile``.
    """

    def __init__(
        self, world: World, steps: int = DEFAULT_STEPS, warmup: int = DEFAULT_WARMUP, any_size: bool = False
    ) -> None:
        self.world, self.warmup, self.num_wanted = world, warmup, steps
        self.num_steps = steps if any_size else min(steps, MOST_STEPS)
        self.num_ended = 0
        self.is_done = False
        self._optimizer: Optimizer | None = None
        self._others: set[int] = set()  # that have stepped since the last step of this one
        self._recording: Recording | None = None
        self._own_timer: ActionTimer | None = None
        self._meter: MemoryMeter | None = None
        self._began_s, self._shortest_s = 0.0, math.inf  # a step that is recorded or compiled takes long
        self._clock_offset = 0.0
        self._uncounted = ExitStack()  # while something is recorded

    def begin(self) -> None:
        """Count steps from here on. All ranks call it.

        Raises:
            RunError: another profile counts them.
        """
        context = self.world.context
        if context.profiler is not None:
            raise RunError(
                "profile: another profile of this rank is not done yet, and they exclude each other. End it."
            )
        self._clock_offset = clock_offset(self.world)
        context.profiler = self
        if context.action_timer is None:
            self._own_timer = context.action_timer = ActionTimer(self.world)
        self._prepare()

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has made its step."""
        if self.is_done:
            return
        if optimizer is not self._optimizer and self._optimizer is not None and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return
        self._optimizer = optimizer  # the first one; where it steps no more, another that steps again and again
        self._others.clear()
        self.num_ended += 1
        if self._meter is not None and self._recording is None:
            self._meter.stop()
        if self._recording is not None and self.num_ended > self.warmup:
            self._recording.step_ends()
            if self._recording.num_steps == self.num_steps:
                self.end()
        if self._own_timer is not None:
            self._own_timer.take()
        if not self.is_done:
            self._prepare()

    def end(self) -> None:
        """Count no more steps; safe to call twice."""
        if self.is_done:
            return
        self.is_done = True
        if self._recording is None:
            if self._meter is not None:
                self._meter.stop()
        else:
            if self.warmup == self.num_ended == 0:  # without an optimizer all of it is one step
                self._recording.step_ends()
            self._recording.stop()
        self._uncounted.close()
        context = self.world.context
        context.profiler = None
        if self._own_timer is not None and context.action_timer is self._own_timer:
            context.action_timer = None

    def part(self) -> RankPart | None:
        """This rank's part of the profile, once; None if no step was profiled."""
        recording, self._recording = self._recording, None
        if recording is None or not recording.num_steps:
            return None
        with uncounted_in_peaks():
            part = self._read(recording)
            del recording
        return part

    def _read(self, recording: Recording) -> RankPart:
        host = socket.gethostname() if self.world.transport.scope == "network" else ""
        events = encoded(recording.events(self._clock_offset, host))
        part = RankPart(recording.profile(), zlib.compress(events, 3), len(events), self.num_wanted)
        part.notes = recording.notes
        if self._meter is not None:
            part.memory, part.snapshot = self._meter.curve(), self._meter.snapshot
        return part

    def _prepare(self) -> None:
        """Begin what the next step is for."""
        began_s, self._began_s = self._began_s, time.perf_counter()
        self._shortest_s = min(self._shortest_s, self._began_s - began_s)
        if self.num_ended == self.warmup - _MEMORY_BEFORE and self._optimizer is not None:
            self._meter = MemoryMeter(self.world, self._optimizer, self._shortest_s)
            self._meter.start()
        if self.num_ended == max(0, self.warmup - 1):
            sees_torch = not is_simulated(self.world)
            self._recording = Recording(self.world, sees_torch)
            if sees_torch:
                self._uncounted.enter_context(uncounted_in_peaks())
            self._recording.start()
        if self.num_ended == self.warmup and self._recording is not None:
            self._recording.begin_steps()
