"""A training run under a strategy that reports its steps and follows commands: pause, another strategy, stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from statistics import median_high
from typing import Any

import torch
from torch import nn

from workbench.core.metrics import RunEvent, StepSpans
from workbench.core.presets import StrategyLike
from workbench.core.run_commands import RunCommand
from workbench.errors import StrategyError
from workbench.pipeline.schedules import Action
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import current
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.training.batches import Batch
from workbench.training.diagnostics.device_use import DeviceMeter
from workbench.training.diagnostics.memory import ActivationMeter, PeakMeter, model_memory
from workbench.training.gradients.optimizer_meter import OptimizerMeter
from workbench.training.parallel import parallelize, state_of
from workbench.training.pipelining.step import Around, train_micro_batches
from workbench.training.pipelining.timeline import clock_offset
from workbench.training.profiling.rank_profiler import RankProfiler, is_simulated
from workbench.training.recorded_actions import RecordedAction, read_actions
from workbench.training.runs.compiled_steps import CompiledSteps
from workbench.training.runs.job import WARM_UP_STEPS, Job, RankResult, RankSegment, checked_step, seed_draws
from workbench.training.runs.layer_times import LayerTimes, is_measured
from workbench.training.runs.step_metrics import Listener, MeasuredStep, StepCollector, num_tokens
from workbench.training.runs.weight_changes import state_tensors
from workbench.transport.traffic import Moment
from workbench.units import counted

_SPANS_INTERVAL_S = 1.0
_PAUSE_S = 0.05
_SILENT_STEPS = 1000
"""Steps between two exchanges of losses in a run without a listener."""


class LiveRun:
    """One strategy's run on this rank; see ``train.run_strategy``."""

    def __init__(
        self,
        job: Job,
        strategy: StrategyLike,
        listen: Listener | None = None,
        commands: Callable[[], list[RunCommand]] | None = None,
        compiles: bool = False,
    ) -> None:
        self.job, self.world = job, current()
        self.world.traffic.reset()
        collects = job.measures_memory and not is_simulated(self.world)
        self.peak = PeakMeter(self.world.device, collects_garbage=collects)
        self.model = parallelize(job.model(), strategy)
        self.optimizer = job.optimizer(self.model)
        self.meter = ActivationMeter(self.model)
        self._device = DeviceMeter(self.world.device)
        self.memory: dict[str, int] = {}
        self.generator = torch.Generator().manual_seed(job.seed)  # of the seeds of steps, equal under every strategy
        self.result = RankResult([], [], {}, 0)
        self._listen = listen
        self._commands: Callable[[], list[RunCommand]] = commands or list
        self._has_listener = listen is not None or commands is not None
        self._collector = StepCollector(self.world, job.num_steps, job.flops_per_sample)
        self._optimizer_meter = OptimizerMeter(self.optimizer)
        self._clock_offset = clock_offset(self.world) if listen is not None else 0.0
        self._until_spans_s = 0.0
        self._optimizing: tuple[Moment, Moment]
        self._num_commands = 0
        self._sent: list[int] = []
        self._segment_start = 0
        self._compiled: CompiledSteps | None = None
        self._compiling = 0  # the step that may be compiled
        if compiles:
            said = self._say_compiling
            self._compiled = CompiledSteps(self._take, self.model, self.optimizer, self.generator, said)
        self._around: Around = contextlib.nullcontext  # around the forward of each micro-batch
        measured = 0 if compiles else 1  # a compiled run's first step is the last one that runs the model
        self._measures_at = {measured} if job.measures_memory else set[int]()  # steps in which activations are counted
        self._layers, self._layers_since = LayerTimes(self.model), 0
        self._profiler: RankProfiler | None = None

    def train(self, keeps_weights: bool = False) -> RankResult:
        """Take the job's steps. All ranks call it."""
        seed_draws(self.job)
        try:
            with self.world.context.temporarily(generator=self.generator):
                for step, batch in enumerate(self.job.batches()):
                    self._step(step, batch)
                    if keeps_weights and step == checked_step(self.job):
                        self.result.weights = logical_state(self.model)
                    if self._is_time_to_collect(step) and not self._collect(step):
                        break
        finally:
            if self._profiler is not None:  # it may lack steps, and counts none of the next run
                self._profiler.end()
        self._report_profile(len(self._sent))
        if self._compiled is not None:
            self._say_uncompiled(len(self._sent), self._compiled.reason)
        last = self._segment()
        segments = [*self.result.segments, last]
        peak = max(segment.memory_bytes["peak"] for segment in segments)
        self.result.segments = segments if self.result.changes else []
        self.result.memory_bytes = {**last.memory_bytes, "peak": peak}
        self.result.boxed_bytes = median_high(self._sent or [0])
        self.result.layer_forward_s, self.result.layer_backward_s = self._layers.forward_s, self._layers.backward_s
        return self.result

    # ---- a step ---------------------------------------------------------------------------------------------------

    def _step(self, step: int, batch: Batch) -> None:
        """One training step. The loss stays on its device until steps are collected."""
        traffic = self.world.traffic
        started = traffic.moment()
        state = state_of(self.model)
        state.compare_first_batch({"inputs": batch.inputs, "targets": batch.targets}, "the run")
        parts = batch.cut(state.resolved.num_micro_batches, self.job.count)
        self._around = self.meter.measure if step in self._measures_at else contextlib.nullcontext
        self._optimizer_meter.wants_norm = self._has_listener and self._collector.measures_norm
        if self._compiled is not None:
            loss = self._take_compiled(step, self._compiled, parts)
        else:
            is_timed = self._listen is not None and is_measured(step - self._layers_since)
            with self._layers.measure() if is_timed else contextlib.nullcontext():
                loss = self._take([(part.inputs, part.targets, part.share, part.rows) for part in parts])
        stopped = traffic.moment()
        rate, norm = self._optimizer_meter.take()
        measured = MeasuredStep(batch.num_samples, started, stopped, num_tokens(batch.inputs), norm)
        self._collector.add(measured, loss, rate)
        self._sent.append(stopped.sent_bytes - started.sent_bytes)
        if step <= 1 or step == WARM_UP_STEPS or step in self._measures_at:
            self._measure_memory()

    def _take(self, parts: Sequence[tuple[Any, ...]]) -> torch.Tensor:
        """Forward, backward and optimizer on the fields of micro-batches."""
        self.optimizer.zero_grad()
        batches = [Batch(*part) for part in parts]
        loss = train_micro_batches(self.model, self.job.loss_fn, batches, self._around)
        before = self.world.traffic.moment()
        self.optimizer.step()
        self._optimizing = before, self.world.traffic.moment()
        return loss.detach()

    def _take_compiled(self, step: int, compiled: CompiledSteps, parts: Sequence[Batch]) -> torch.Tensor:
        """The same by a compiled program, once there is one."""
        compiles, self._compiling = compiled.compiles_next, step
        loss: torch.Tensor = compiled([(part.inputs, part.targets, part.share, part.rows) for part in parts])
        if compiles:
            self.peak.start_again()  # the compiler's memory is not the run's
        self._say_uncompiled(step, compiled.problem)
        return loss

    def _say_uncompiled(self, step: int, problem: str) -> None:
        if problem != self.result.uncompiled:
            self.result.uncompiled = problem
            self._report(RunEvent("uncompiled", step, problem))

    def _say_compiling(self, number: int, count: int) -> None:
        self._report(RunEvent("compiling", self._compiling, f"{number} of {count}"))

    def _actions(self) -> list[RecordedAction]:
        """This rank's actions of the last step."""
        found = state_of(self.model).spans
        stage = found[-1].action.stage if found else 0
        return [*found, RecordedAction(Action(stage, "O", 0), *self._optimizing)]

    def _measure_memory(self) -> None:
        """Live storages by kind, and the peak so far."""
        self.memory = {
            **model_memory(self.model, self.optimizer),
            "activations": self.meter.size_bytes,
            "peak": self.peak.peak_bytes(),
        }

    # ---- between two steps, on all ranks together -------------------------------------------------------------------

    def _is_time_to_collect(self, step: int) -> bool:
        if step == self.job.num_steps - 1:
            return True
        return self._collector.is_due if self._has_listener else (step + 1) % _SILENT_STEPS == 0

    def _collect(self, step: int) -> bool:
        """Report the steps since the last call, and follow commands. False if the run ends here."""
        if self._has_listener:
            self.memory["peak"] = self.peak.peak_bytes()
        received = self._commands()
        device = self._device.read(state_of(self.model).strategy.options.precision) if self._has_listener else {}
        block, counts = self._collector.collect(self.memory, float(len(received)), device)
        self.result.losses += [loss for loss in block.losses if loss is not None]
        self.result.step_times_s += block.time_s[self.world.rank]
        self.result.samples += block.samples
        self._report(block)
        self._report_profile(step + 1)
        self._until_spans_s -= sum(block.step_times_s)
        is_due = self._until_spans_s <= 0 or step == self.job.num_steps - 1
        if is_due:
            self._report_spans(step)
        goes_on = self._apply_commands(received, counts, step + 1)
        if not (goes_on or is_due):
            self._report_spans(step)
        return goes_on

    def _report_spans(self, step: int) -> None:
        """Report this rank's actions of the step."""
        if self._listen is not None and self._compiled is None:
            self._until_spans_s = _SPANS_INTERVAL_S
            spans = read_actions(self.world.traffic, self._actions(), self._clock_offset)
            self._listen(StepSpans(self.world.rank, step, spans))

    def _apply_commands(self, received: list[RunCommand], counts: list[float], step: int) -> bool:
        """Execute the commands that every rank has received. False after a stop."""
        paused = False
        while True:
            agreed = int(min(counts))
            for command in received[self._num_commands : agreed]:
                if command.kind == "stop":
                    return False
                if command.kind == "strategy":
                    self._change_strategy(command.text, step)
                elif command.kind == "profile":
                    self._begin_profile(step)
                elif (command.kind == "pause") != paused:
                    paused = not paused
                    self._report(RunEvent("paused" if paused else "running", step))
            self._num_commands = agreed
            if not paused:
                return True
            time.sleep(_PAUSE_S)
            received = self._commands()
            counts = all_gather_object(float(len(received)), self.world, "agreement on commands")

    def _change_strategy(self, text: str, step: int) -> None:
        """Continue under another strategy, with the same weights and optimizer state."""
        if self._profiler is not None:  # a profile is of one strategy
            self._profiler.end()
            self._report_profile(step)
        started, sent = time.perf_counter(), self.world.traffic.sent_bytes
        before = self._segment()
        try:
            parallelize(self.model, text, optimizer=self.optimizer)
        except StrategyError as error:  # all ranks find it, before any data has moved
            self._report(RunEvent("refused", step, str(error)))
            return
        self.meter = ActivationMeter(self.model)
        self._measures_at = {step}
        self._layers, self._layers_since = LayerTimes(self.model), step
        self.result.segments.append(before)
        self._segment_start = len(self._sent)
        self._collector.interval = 1  # steps may be far slower now
        self.peak.start_again()
        self.result.changes.append((step, text))
        moved = self.world.traffic.sent_bytes - sent
        total = sum(all_gather_object(moved, self.world, "what a change has moved"))
        self._report(RunEvent("strategy", step, text, time.perf_counter() - started, total))

    def _begin_profile(self, step: int) -> None:
        """Profile the next steps, unless a profile counts them already."""
        if self.world.context.profiler is not None:
            self._report(RunEvent("unprofiled", step, "another profile counts the steps"))
            return
        self._profiler = RankProfiler(self.world)
        self._profiler.begin()
        self._report(RunEvent("profiling", step))

    def _report_profile(self, step: int) -> None:
        """Report this rank's part of a profile that counts no more steps."""
        profiler = self._profiler
        if profiler is None or not profiler.is_done:
            return
        self._profiler, part = None, profiler.part()
        if part is None:
            ended = counted(profiler.num_ended, "step")
            self._report(RunEvent("unprofiled", step, f"{ended} ended, the first {profiler.warmup} are for warming up"))
        elif self._listen is not None:
            self._listen(part)

    def _segment(self) -> RankSegment:
        """The figures since the last change of strategy."""
        self._measure_memory()
        return RankSegment(dict(self.memory), median_high(self._sent[self._segment_start :] or [0]))

    def _report(self, what: object) -> None:
        """Report an object that all ranks have. One of them sends it."""
        if self._listen is not None and self.world.rank == 0:
            self._listen(what)


def logical_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and kept buffers as plain logical tensors, on every rank of the world. All ranks call it."""
    return {
        name: (value_on_all_ranks(value) if isinstance(value, GlobalTensor) else value.detach()).clone()
        for name, value in state_tensors(model).items()
    }
