"""``wb.capture``: a training step that is recorded once and replayed as a local program."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, plain, wrap
from workbench.tensors.tensor_state import gradient_state, memory_of
from workbench.tensors.world import World, current
from workbench.training.capture.compiled import Program
from workbench.training.capture.gradients import (
    LeafCollector,
    gradient_kinds,
    has_grad,
    held_grad,
    hold_grad,
    shard_spec,
)
from workbench.training.capture.graphs import GraphProgram
from workbench.training.capture.guards import Guards, called_modules, kind_of, laid_out, own_input
from workbench.training.capture.operators import RejectValueReads
from workbench.training.capture.optimizer_steps import notes_optimizers, stepped_optimizers
from workbench.training.capture.parts import written_memory
from workbench.training.capture.read_numbers import Numbers, named_by, read_numbers
from workbench.training.capture.recorded_transport import RecordedTransport
from workbench.training.capture.recorder import Recorder
from workbench.training.capture.recordings import InputKind, Recording
from workbench.training.capture.replay_options import ReplayOptions
from workbench.training.capture.step_warnings import warn_of_changes, warn_of_inputs, warn_of_numbers, warn_of_values
from workbench.training.capture.trace import Trace
from workbench.training.gradients.optim import adopt_loaded_state
from workbench.training.gradients.overlap import GradientReducer
from workbench.training.gradients.reduction import forget_sums
from workbench.training.strategies.state import STATE
from workbench.training.zero.gathered_call import autocast_dtype
from workbench.transport.closed import restore_transport
from workbench.transport.traffic import TrafficCount

_log = logging.getLogger("workbench.capture")
_MOST_KINDS = 32
"""Of inputs that have come once. They have no recording, but hold memory."""
_MOST_CHANGES = 8
"""Of the modules before a warning, one after the other without a replay."""
_HAVE_MOVED = "of a recorded kind, but parameters or buffers have moved; p.data.copy_(...) moves none"
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def capture(
    step: Callable[_Arguments, _Result],
    *,
    max_recordings: int = 8,
    backend: str | None = None,
    memory_bytes: int | None = None,
) -> CapturedStep[_Arguments, _Result]:
    """A training step that runs as a local program: no layouts, no dispatch, no autograd, the same numbers.

    The first call with inputs of some shapes and layouts runs ``step`` normally. The second records this rank's work.
    Every later call replays the record: torch's operators on this rank's shards, the exchanges between ranks, the
    optimizers. A replay writes parameters, buffers and optimizer state in place. Random draws (dropout) continue as
    without capture. An optimizer reads its settings at every step, so a scheduler outside may change them.

    A step with micro-batches is replayed in the order of its schedule. ``wb.debug.timeline`` shows the last step that
    ran normally. Calls run normally under ``wb.debug.trace``, ``check_agreement``, ``explicit_boxing`` and torch's
    ``detect_anomaly``.

    A call records again if its inputs have another shape or layout, if another argument has another value, if a module
    that the step calls has another strategy, mode (``train()``, ``eval()``), set of frozen parameters or hooks, or has
    got other layers, parameters, buffers, plain tensors or functions, if a number that the step reads from a module
    (``model.drop.p``) or from an object that the module has (``model.cfg.tau``) or that the step, or a hook of the
    module, gets or names (``args.tau``; also strings, flags, and lists, tuples and dicts of these with at most 64
    entries) has another value, if parameters have moved, or if the world was rebuilt. After ``max_recordings`` records,
    calls run normally, with a warning. All ranks make the same calls, with inputs of equal logical shapes, and read the
    same numbers: a rank that alone reads another value records anew while the others replay, and they wait for each
    other.

    A replay runs none of the step's Python: code that prints, counts calls or reads the clock has no new effect. A
    warning names numbers of modules and objects that the step itself changes, and random numbers of Python and numpy.
    What the step takes from a variable outside (a batch, a weight of a loss, another optimizer) stays that of the
    recording: hand it in as an argument.
    Gradients are those that the step leaves in ``.grad``. Results have no history.

    With ``backend="inductor"``, torch's operators between two exchanges and optimizers (dropout included) are compiled
    by ``torch.compile``'s compiler. The first replay compiles, which takes seconds to minutes; what it makes is kept on
    disk for other ranks and later runs. Numbers equal those without it but for rounding.

    With ``backend="cudagraphs"``, a GPU gets torch's operators between two exchanges, optimizers and random numbers as
    one CUDA graph, which saves the time of launching small operators one by one. The second replay records the graphs.
    Numbers equal those without it. ``"inductor+cudagraphs"`` does both: graphs of compiled operators.

    Args:
        step: takes tensors (global or plain, also in lists and dicts) and other values, and returns the same.
        max_recordings: the most records that are kept.
        backend: "inductor" to compile, "cudagraphs" for CUDA graphs, "inductor+cudagraphs" for both; None to replay
            operator by operator.
        memory_bytes: the most that values of a replay may take on a rank at one time, without parameters, optimizer
            state and inputs. Values that are cheap to compute are computed again in backward, as many as are needed. A
            warning says if that is not enough.

    Raises:
        ValueError: there is no such backend, or no memory.
        CaptureError: the step reads a value (``.item()``, ``.tolist()``, ``if loss > 3``), computes a shape from
            values, steps an optimizer with a closure or with hooks of its own, sets a learning rate (as a scheduler
            does), keeps tensors for its next call, reads an input also from outside, or reads what a kernel has written
            that is no operator of torch.

    >>> x = wb.ones(2, 2, placement=wb.placement(ranks=[0]), sbp=wb.sbp.broadcast)
    >>> double = wb.capture(lambda x: x * 2)
    >>> [double(x).shape for _ in range(3)]
    [torch.Size([2, 2]), torch.Size([2, 2]), torch.Size([2, 2])]
    >>> print(double.traces[0])
    v2 = aten.mul.Tensor(v1, 2)
    """
    options = ReplayOptions(backend, memory_bytes)
    options.check()
    return CapturedStep(step, max_recordings, options)


class CapturedStep(Generic[_Arguments, _Result]):
    """What ``wb.capture`` returns; call it like the step.

    Attributes:
        num_recordings: how often the step was recorded.
        num_replays: how often a recording was replayed.
    """

    def __init__(self, step: Callable[_Arguments, _Result], max_recordings: int, options: ReplayOptions) -> None:
        functools.update_wrapper(self, step)
        self._options = options
        self._step, self._max_recordings = step, max_recordings
        self._kinds: dict[Any, list[InputKind]] = {}
        self._guards = Guards()
        self.num_recordings = self.num_replays = 0
        self._num_rebuilds = self._num_forgotten = 0
        self._num_changes = 0  # of the modules since the last replay
        self._has_warned_of_numbers = self._has_warned_of_values = False

    @property
    def traces(self) -> list[Trace]:
        """The recorded programs; ``print`` one."""
        return [recording.trace for kind in chain(*self._kinds.values()) for recording in kind.recordings.values()]

    @property
    def problem(self) -> str:
        """Why a part of it is not compiled, or no CUDA graph; empty if none has failed."""
        programs = (
            call.function
            for trace in self.traces
            for call in trace.calls
            if isinstance(call.function, Program | GraphProgram)
        )
        return next((program.problem for program in programs if program.problem), "")

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """Run the step, record it, or replay it."""
        world = current()
        leaves, structure = tree_flatten((args, kwargs))
        context = world.context
        is_observed = context.tracer is not None or context.recorder is not None or notes_optimizers()
        is_checked = context.checks_agreement or not context.implicit_boxing_allowed or torch.is_anomaly_enabled()
        if is_observed or is_checked:
            return self._step(*args, **kwargs)  # a tracer, a check, or an outer captured step must see every call
        if world.num_rebuilds != self._num_rebuilds:
            self._forget_recordings(world.num_rebuilds)
        elif self._guards.have_changed():
            self._num_changes += 1
            if self._num_changes == _MOST_CHANGES:
                warn_of_changes(self._name, _MOST_CHANGES)
            self._forget_recordings(world.num_rebuilds)
        key = (structure, torch.is_grad_enabled(), autocast_dtype(world), *map(kind_of, leaves))
        kinds = self._kinds.get((key, self._guards.now()), [])
        kind = _fitting(kinds)
        if kind is None:
            with LeafCollector() as seen, called_modules() as modules, stepped_optimizers() as optimizers:
                result = self._step(*args, **kwargs)
            self._guards.add(modules())
            if self._forget_one():
                which = f"another kind of inputs than {_MOST_KINDS} before, of which none has come twice"
                warn_of_inputs(self._name, leaves, which)
            stepped = chain(*(group["params"] for optimizer in optimizers for group in optimizer.param_groups))
            worked_on = _joined(seen.found.values(), self._guards.trained(), stepped)
            kind = InputKind(Numbers(), worked_on, self._guards.tensors(), optimizers, {})
            self._kinds.setdefault((key, self._guards.now()), []).append(kind)
            return result
        graded = gradient_kinds(kind.leaves)
        recording = kind.recordings.get(graded)
        if recording is not None and recording.fits():
            self.num_replays += 1
            self._num_changes = 0
            return _replay(recording, world, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        if self.num_recordings - self._num_forgotten >= self._max_recordings:
            changed = [] if kind.recordings else next((c for k in reversed(kinds) if (c := k.numbers.changes())), [])
            if not changed:
                limit = f"none of the {self.num_recordings} kinds of inputs it was recorded for"
                limit = limit if recording is None else _HAVE_MOVED
                warn_of_inputs(self._name, leaves, f"{limit} (max_recordings={self._max_recordings})")
            elif not self._has_warned_of_values:
                self._has_warned_of_values = True
                warn_of_values(self._name, changed, self._max_recordings)
            return self._step(*args, **kwargs)
        _log.info("capture: recording %d of %s", self.num_recordings + 1, self._name)
        objects = self._guards.objects((*leaves, *named_by(self._step)))
        before, drawn = self._guards.numbers(objects), self._guards.numbers_drawn(objects)
        with read_numbers(objects) as reads:
            result, recording = _record(self._step, world, leaves, structure, kind, self._options)
        changed = kind.numbers.add(reads, before)
        kind.recordings[graded] = recording
        self.num_recordings += 1
        random = [] if drawn == self._guards.numbers_drawn(objects) else ["random numbers of Python or numpy"]
        changed = list(dict.fromkeys((*self._guards.changes_since(before, objects), *changed, *random)))
        if changed and not self._has_warned_of_numbers:
            self._has_warned_of_numbers = True
            warn_of_numbers(self._name, changed)
        return result

    def _forget_recordings(self, num_rebuilds: int) -> None:
        """Begin anew where modules have changed, since recordings hold their memory, and in a rebuilt world: not all
        ranks may have a recording, as the call that broke off made it, or as a rank was replaced. A replay sends with
        the tags of its recording, which ranks without one do not expect.
        """
        self._num_rebuilds, self._num_forgotten = num_rebuilds, self.num_recordings
        self._kinds.clear()
        self._guards = Guards()

    def _forget_one(self) -> bool:
        """Forget the oldest of too many kinds of inputs that have come once; returns whether there were too many."""
        once = [(key, kind) for key, kinds in self._kinds.items() for kind in kinds if not kind.recordings]
        if len(once) < _MOST_KINDS:
            return False
        key, oldest = once[0]
        self._kinds[key].remove(oldest)
        if not self._kinds[key]:
            del self._kinds[key]
        return True

    @property
    def _name(self) -> str:
        return getattr(self._step, "__qualname__", "a step")

    def __repr__(self) -> str:
        return f"CapturedStep({self._name}, {self.num_recordings} recordings, {self.num_replays} replays)"


def _fitting(kinds: list[InputKind]) -> InputKind | None:
    """The one whose numbers are those of now; one of optimizers that are others now is removed."""
    kind = next((kind for kind in kinds if kind.numbers.hold()), None)
    if kind is not None and not all(step.fits() for each in kind.recordings.values() for step in each.steps):
        kinds.remove(kind)
        return None
    return kind


def _record(
    step: Callable[..., Any],
    world: World,
    arguments: Sequence[Any],
    structure: TreeSpec,
    kind: InputKind,
    options: ReplayOptions,
) -> tuple[Any, Recording]:
    """Run the step and record it."""
    given = [own_input(argument) for argument in arguments]
    inputs = [value for value in given if isinstance(value, torch.Tensor)]
    with local_torch():
        graded = [(leaf, grad) for leaf in kind.leaves if (grad := held_grad(leaf)) is not None]
    recorder = Recorder(world, arguments, inputs, [grad for _, grad in graded], kind.optimizers)
    args, kwargs = tree_unflatten(given, structure)
    before, transport = TrafficCount.so_far(world.traffic), world.transport
    world.transport = RecordedTransport(recorder, transport)
    is_recording = world.context.temporarily(recorder=recorder)
    try:
        with is_recording, RejectValueReads(), recorder, called_modules() as modules:
            result = tree_map(_without_history, step(*args, **kwargs))
            end_sums(module for module in modules() if STATE in module.__dict__)
    finally:
        restore_transport(world, transport)
    parts, result_structure = tree_flatten(result)
    with local_torch():
        met = [tensor for tensor in recorder.originals if tensor.requires_grad and tensor.is_leaf]
    leaves = _joined(kind.leaves, met)
    left = recorder.finish([part for part in parts if isinstance(part, torch.Tensor)], leaves)
    trace = recorder.trace
    with torch.no_grad(), local_torch():
        trace.simplify()
        read = trace.reads()
        slots = dict(zip(map(id, [leaf for leaf, _ in graded]), trace.inputs[len(inputs) :], strict=True))
        used = [leaf for leaf, _ in graded if slots[id(leaf)] in read]
        trace.inputs = [*trace.inputs[: len(inputs)], *(slots[id(leaf)] for leaf in used)]
        cleared = [leaf for leaf, grad in graded if held_grad(leaf) is not grad]
        addresses = [(tensor, tensor.data_ptr()) for tensor in recorder.originals]
        known = _joined(leaves, kind.held, recorder.placeholders)
        memory = [(tensor, memory_of(tensor)) for tensor in known if isinstance(tensor, GlobalTensor)]
        changed = written_memory(trace)
        strides = [
            None if slot in changed else plain(value).stride()
            for slot, value in zip(trace.inputs[: len(inputs)], inputs, strict=True)
        ]
        written = [tensor for tensor in recorder.originals if tensor.untyped_storage()._cdata in changed]
        trace = options.prepare(trace, sum(isinstance(part, torch.Tensor) for part in parts))
        elsewhere = [
            (leaf, has_grad(leaf))
            for leaf in _joined(kind.leaves, recorder.placeholders)
            if isinstance(leaf, GlobalTensor) and leaf._spec.is_placeholder
        ]
    results = [(isinstance(part, torch.Tensor), _layout_or_value(part)) for part in parts]
    made = [(leaf, output, shard_spec(leaf)) for leaf, output in zip(leaves, left, strict=True) if output is not None]
    recording = Recording(
        trace, trace.compile(), strides, made, used, cleared, elsewhere, results, result_structure, addresses,
        memory, written, recorder.steps, before.until(world.traffic).without(recorder.counted_by_calls),
    )  # fmt: skip
    return result, recording


def _layout_or_value(part: Any) -> Any:
    """What a recording keeps of a result: the spec of a global tensor, nothing of a plain one, other values."""
    return part._spec if isinstance(part, GlobalTensor) else None if isinstance(part, torch.Tensor) else part


def _without_history(leaf: Any) -> Any:
    """A result as a replay hands it out: the graph of a block that runs again in backward would outlive the step."""
    with local_torch():
        has_history = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    return leaf.detach() if has_history else leaf


def _joined(*leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves of autograd, each once."""
    return list({id(leaf): leaf for leaf in chain(*leaves)}.values())


def _replay(recording: Recording, world: World, inputs: Sequence[torch.Tensor]) -> Any:
    for step in recording.steps:
        adopt_loaded_state(step.optimizer)
    with torch.no_grad(), local_torch(), torch._C._DisableAutocast():
        grads = [grad for leaf in recording.used_grads if (grad := held_grad(leaf)) is not None]
        for leaf in recording.cleared:
            leaf.grad = None
        made = recording.run(*map(laid_out, inputs, recording.strides), *map(plain, grads))
        torch.autograd.graph.increment_version(recording.written)  # the trace's own tensors count by themselves
        for leaf, output, spec in recording.leaves:
            hold_grad(leaf, made[output], spec)
        for placeholder, has_grad in recording.placeholders:
            gradient_state(placeholder).placeholder = has_grad
    recording.traffic.add_to(world.traffic)
    if world.context.profiler is not None and recording.steps:  # its optimizers step without what follows a step
        world.context.profiler.step_ends(recording.steps[0].optimizer)
    values = iter(made)
    parts = [_handed_out(next(values), value) if is_tensor else value for is_tensor, value in recording.results]
    return tree_unflatten(parts, recording.structure)


def _handed_out(value: torch.Tensor, spec: Spec | None) -> torch.Tensor:
    return value if spec is None else wrap(value, spec)


def end_sums(modules: Iterable[nn.Module]) -> None:
    """Wait for sums of gradients that the step has begun and none of its optimizers has used."""
    for module in modules:
        parameters = [p for p in module.parameters() if isinstance(p, GlobalTensor)]
        for reducer in GradientReducer.of_all(parameters):
            reducer.drain()
        forget_sums(parameters)
