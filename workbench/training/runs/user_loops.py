"""``wb.log``: reports the steps of a user's own training loop to the live view of the notebook, and to logs."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, SupportsFloat

import torch
from torch import nn

from workbench.core.metrics import LossTerm, StepSpans, joined
from workbench.core.sbp import Partial
from workbench.errors import RunError
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor, plain
from workbench.tensors.world import World, at_shutdown, current
from workbench.training.diagnostics.device_use import DeviceMeter
from workbench.training.diagnostics.memory import PeakMeter, model_memory
from workbench.training.gradients.optimizer_meter import OptimizerMeter
from workbench.training.pipelining.timeline import clock_offset
from workbench.training.recorded_actions import ActionTimer, RecordedAction, read_actions
from workbench.training.runs.step_metrics import Listener, MeasuredStep, StepCollector
from workbench.transport.traffic import Moment
from workbench.writers.choose import Log, writers
from workbench.writers.run_log import RunLog

_SPANS_INTERVAL_S = 1.0


_listener: Listener | None = None
_number: Callable[[], int] = int


def listen(listener: Listener | None, number: Callable[[], int] = int) -> None:
    """Send the reports of loops to ``listener``. ``number()`` distinguishes loops. None: to no one, and loops without a
    log end, since nobody hears of their last steps.
    """
    global _listener, _number
    _listener, _number = listener, number
    if listener is None:
        for world in [world for world, loop in _loops.items() if not loop.has_log]:
            _loops.pop(world).stop()


def log(
    *,
    loss: torch.Tensor | float | None = None,
    samples: SupportsFloat = 0,
    tokens: SupportsFloat = 0,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    to: Log | None = None,
    **values: SupportsFloat | Mapping[str, Any] | None,
) -> None:
    """Report one step of a training loop to the notebook's live view (``wb.LiveView``), and to a log. All ranks call
    it, every step.

    A step lasts from one call to the next. About three times a second, one exchange of all ranks sends the steps. A
    loss stays on its device until then, so reading it does not slow the loop. When the cell ends, or the call of
    ``session.submit``, also by an error, the remaining steps are reported. Another ``model`` or ``to`` begins another
    loop. Without a notebook it does nothing until a call has a ``to``.

    Args:
        loss: loss of the step: a number, or a tensor with one element, global or not. Its value at the call counts: the
            loop may change the tensor in place afterwards.
        samples: samples of the step, over all ranks, for samples per second. A tensor is read at once, for which a GPU
            must be done with the step.
        tokens: tokens of the step, over all ranks, for tokens per second; also as a tensor.
        model: the trained model. With it and ``optimizer`` the view also shows memory by kind.
        optimizer: its optimizer. With it, its learning rate and the norm of the gradients are reported too.
        to: where rank 0 writes the steps, such as ``"jsonl:metrics.jsonl"`` or ``"tensorboard:runs/"``; see the guide
            "Keep logs where you keep them". Calls without it belong to the loop of the call before. In a notebook,
            ``wb.LiveView(log=...)`` writes them.
        values: other values by name: numbers, scalar tensors, global or not, or dicts of these. Of plain ones, rank 0's
            count. A call with values only, after a step, adds them to that step: an evaluation, for example, whose time
            belongs to no step.

    Raises:
        RunError: several models or optimizers; a place in ``to`` after another one has followed it; a loss, count or
            value that is neither a number nor one element, a value called ``step`` or ``run``, an unknown writer in
            ``to``, or one whose package is not installed.

    From the second step on the timeline shows the forwards of parallelized modules, the backwards from global losses
    and the optimizers' steps, between one call and the next.

    ``wb.log(loss=loss, samples=64)`` after ``optimizer.step()`` is all that a loop needs, and
    ``wb.log(evaluation={"accuracy": 0.93}, epoch=2)`` adds to it.
    """
    if _listener is None and to is None and not _loops:
        return
    world = current()
    if _listener is None and to is None and world not in _loops:
        return
    _check_trained(model, optimizer)
    samples, tokens = _count("samples", samples), _count("tokens", tokens)
    found = dict(_checked(values))
    if loss is not None:
        loss = _kept("loss", loss)
    loop = _loops.get(world)
    earlier: list[Any] = []
    if loop is not None and loop.is_another(_number(), model, to):
        earlier = loop.places_after(_number(), to)
        loop.report(_listener)
        loop.stop()
        loop = None
    if loop is None:
        loop = _loops[world] = _Loop(world, _number(), to)
        loop.earlier = earlier
    if loss is None and not (samples or tokens) and loop.adds_to_last_step(found):
        return
    loop.add(loss, samples, tokens, model, optimizer, found, _listener)


def _check_trained(model: Any, optimizer: Any) -> None:
    """Raise ``RunError`` for several models or optimizers in the place of one."""
    for name, value, kind, has in (
        ("model", model, "nn.Module", "parameters"), ("optimizer", optimizer, "optimizer", "param_groups"),
    ):  # fmt: skip
        if value is not None and not hasattr(value, has):
            many = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
            raise RunError(
                f"wb.log({name}=...): a {type(value).__name__}{many}; a step has 1 {kind}. Give the one whose "
                "memory, learning rate and gradients the view shows, and what you want to see of others as values: "
                "wb.log(model=generator, optimizer=first, rates={'second': second.param_groups[0]['lr']})."
            )


def _checked(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values by name, those of a dict as ``evaluation/accuracy``."""
    for name, value in values.items():
        if name == "step" and not prefix:
            raise RunError("wb.log(step=...): wb.log counts steps itself, one per call. Leave step= out.")
        if name == "run" and not prefix:
            raise RunError("wb.log(run=...): in a log, run is the name of the run. Give the value another name.")
        if isinstance(value, Mapping):
            yield from _checked(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", _kept(f"{prefix}{name}", value)


def _kept(name: str, value: Any) -> torch.Tensor | float:
    """A value as it is now: a scalar tensor of its own, since the loop may change its tensor in place; or a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(()).clone()
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    size = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise RunError(
        f"wb.log({name}=...): a {type(value).__name__}{size}. A value is a number, a tensor with one element, or a "
        "dict of these. Give one number per step, such as a mean."
    )


def _count(name: str, value: Any) -> int:
    """A number of samples or tokens."""
    kept = _kept(name, value)
    return int(value_on_all_ranks(kept) if isinstance(kept, GlobalTensor) else kept)


def report_remaining_steps(error: str | None = None) -> None:
    """Report the remaining steps of all loops when a request ends, also by an error. Each rank reports alone."""
    for world in list(_loops):
        loop = _loops.pop(world, None)  # None: of simulated ranks, another one has taken it
        if loop is not None:
            loop.end(_listener, error)


def error_text(error: BaseException | None) -> str | None:
    """An error as the log of a run has it; None for none."""
    return f"{type(error).__name__}: {error}" if error is not None else None


def _report_at_exit() -> None:
    """Write the last steps of loops with a log of their own when a program ends."""
    for world in list(_loops):
        _report_at_exit_of(world)


def _report_at_exit_of(world: World) -> None:
    """Let the ranks of a world do so together, if none has failed."""
    loop = _loops.get(world)
    if loop is None or not loop.has_log:
        return
    error = getattr(sys, "last_value", None)  # it ends this rank; in a notebook it is any earlier cell's
    with contextlib.suppress(Exception):  # another rank has failed, or does not come
        if error is None:
            loop.report(_listener)
    loop.end(_listener, error_text(error) if not hasattr(sys, "ps1") else None)
    _loops.pop(world, None)


class _Loop:
    """The steps of one loop on this rank."""

    def __init__(self, world: World, number: int, to: Log | None) -> None:
        begin = writers(to)  # first: it may raise
        self.world, self.number, self.place = world, number, _place_of(to)
        self.earlier: list[Any] = []
        self._collector = StepCollector(world)
        self._peak = PeakMeter(world.device, collects_garbage=False)
        self._device = DeviceMeter(world.device)
        self._timer = world.context.action_timer = ActionTimer(world)
        self._clock_offset = clock_offset(world)
        self._before: Moment | None = None
        self._until_spans_s = 0.0
        self._has_counted = False  # whether a call had a loss, samples or tokens
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._optimizer_meter: OptimizerMeter | None = None
        self._actions: tuple[RecordedAction, ...] = ()
        self.has_log = bool(begin)
        self._log = RunLog(begin, "loop", {"ranks": world.world_size}) if begin and world.rank == 0 else None

    def is_another(self, number: int, model: nn.Module | None, to: Log | None) -> bool:
        """Whether a step in this cell, of this model, to this place, belongs to another loop."""
        if to is not None and _place_of(to) != self.place:
            return True
        return number != self.number or (model is not None and self._model is not None and model is not self._model)

    def places_after(self, number: int, to: Log | None) -> list[Any]:
        """The places of this cell's loops so far, as the next one begins.

        Raises:
            RunError: the next one writes to one of these again.
        """
        if number != self.number or to is None or _place_of(to) == self.place:
            return []
        if _place_of(to) in self.earlier:
            raise RunError(
                f"wb.log(to={to!r}): the steps of that place had ended when those of {self.place!r} began. Calls that "
                "take turns belong to one loop, and a loop has one place, or a list of several. Leave to= out of the "
                "calls that add values to a step, such as wb.log(validation={'loss': 0.2}), or give all calls the same."
            )
        return [*self.earlier, self.place]

    def adds_to_last_step(self, values: dict[str, Any]) -> bool:
        """Add the values of a call without a step to the last step. False if the call is a step."""
        if not (values and self._has_counted):
            return False
        self._collector.add_values(values)
        self._before = self.world.traffic.moment()
        return True

    def add(
        self,
        loss: Any,
        samples: int,
        tokens: int,
        model: nn.Module | None,
        optimizer: Any,
        values: dict[str, Any],
        listener: Listener | None,
    ) -> None:
        now = self.world.traffic.moment()
        self._has_counted = self._has_counted or loss is not None or bool(samples or tokens)
        self._model, self._optimizer = model, optimizer
        rate, norm = self._read_optimizer()
        measured = MeasuredStep(samples, self._before or now, now, tokens, norm)  # the first step has no beginning
        self._collector.add(measured, loss, {**rate, **values})
        self._actions = self._timer.take()
        if self._collector.is_due:
            self.report(listener)
        if self._optimizer_meter is not None:
            self._optimizer_meter.wants_norm = self._collector.measures_norm
        self._before = self.world.traffic.moment()

    def _read_optimizer(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        meter = self._optimizer_meter
        if meter is not None and meter.optimizer is not self._optimizer:
            meter.end()
            meter = self._optimizer_meter = None
        if meter is None and self._optimizer is not None:
            meter = self._optimizer_meter = OptimizerMeter(self._optimizer)
        return meter.take() if meter is not None else ({}, None)

    def report(self, listener: Listener | None) -> None:
        """Exchange what the ranks have not reported yet, and report it. All ranks call it."""
        block, _ = self._collector.collect(self._memory(), device=self._device.read("fp32"))
        if self.world.rank == 0 and (block.samples or block.values):
            if listener is not None:
                listener(block)
            if self._log is not None:
                self._log.add([block])
        self._until_spans_s -= sum(block.step_times_s)
        if self._until_spans_s <= 0:
            self._report_spans(listener)

    def end(self, listener: Listener | None, error: str | None = None) -> None:
        """Report the last steps, and the timeline of the very last one, without an exchange. ``error`` ended them."""
        found = self._collector.take(_own_term)
        if found is not None:
            if listener is not None:
                listener(replace(found, memory_bytes=self._memory()))
            norms = found.norms if self.world.world_size == 1 else ()  # this rank's part only
            alone = joined([replace(found, rank=0, num_ranks=1, norms=norms)])
            if self._log is not None and alone is not None:
                self._log.add([alone])
        self._report_spans(listener)
        self.stop(error)

    def stop(self, error: str | None = None) -> None:
        """End the loop. Later actions belong to no timeline."""
        if self.world.context.action_timer is self._timer:
            self.world.context.action_timer = None
        if self._optimizer_meter is not None:
            self._optimizer_meter.end()
        if self._log is not None:
            self._log.close(error)

    def _report_spans(self, listener: Listener | None) -> None:
        if self._actions and listener is not None:
            self._until_spans_s = _SPANS_INTERVAL_S
            spans = read_actions(self.world.traffic, self._actions, self._clock_offset)
            listener(StepSpans(self.world.rank, self._collector.num_added - 1, spans))

    def _memory(self) -> dict[str, int]:
        is_known = self._model is not None and self._optimizer is not None
        held = model_memory(self._model, self._optimizer) if is_known else {}  # type: ignore[arg-type]
        return {**held, "peak": self._peak.peak_bytes()}


def _place_of(to: Log | None) -> Any:
    """What distinguishes places. A function may be made anew for each call, so all functions are one."""
    listed = [to] if isinstance(to, str) or callable(to) else list(to or ())
    return [one if isinstance(one, str) else "a function" for one in listed]


def _own_term(loss: Any) -> LossTerm | None:
    """This rank's part of a loss."""
    if loss is None or not isinstance(loss, torch.Tensor):
        return None if loss is None else LossTerm(float(loss))
    if not isinstance(loss, GlobalTensor):
        return LossTerm(float(loss))
    if loss._spec.is_placeholder:
        return None
    layout = loss._spec.layout
    reduction = next((entry.reduction for entry in layout.sbp if isinstance(entry, Partial)), "")
    return LossTerm(float(plain(loss)), layout.num_replicas, reduction, layout.placement.num_ranks)


_loops: dict[World, _Loop] = {}


at_shutdown(_report_at_exit_of)
atexit.register(_report_at_exit)  # a world of one rank needs no shutdown
