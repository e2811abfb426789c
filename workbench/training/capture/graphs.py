"""CUDA graphs of a recorded step: the operators between two exchanges are launched at once.

A small operator takes a GPU less time than Python takes to launch it. The first replay of a part runs its operators,
the second records their launches as a CUDA graph, and every later one launches the graph. A graph reads and writes
fixed addresses. Parameters and buffers have them, and so have results of earlier graphs; everything else is copied to
memory of the graph before it is launched. What a graph hands out lies in its own memory, which the next replay writes
again, so the results of the step are copies.

Exchanges, optimizers and random numbers stay calls in between: their arguments change from step to step.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from workbench.errors import CaptureWarning
from workbench.kernels.operators import TABLES_ON_HOST
from workbench.training.capture.compiled import Compiler, Program
from workbench.training.capture.parts import drawn_keys, keys_first, memory_of, replace_parts, written_by
from workbench.training.capture.trace import Call, Slot, Trace

DEVICE = "cuda"
"""Where operators can be part of a graph."""
_ALIGNMENT_BYTES = 512
_one_at_a_time = threading.Lock()
"""Simulated ranks are threads, and torch records one graph at a time."""
Run = Callable[..., Sequence[torch.Tensor]]


def graph_parts(trace: Trace, num_results: int, memories: GraphMemories, compiler: Compiler | None = None) -> Trace:
    """The same trace with its parts as single calls of CUDA graphs, which replays record.

    Args:
        num_results: how many of the first outputs the caller gets; the others are gradients.
        memories: of the step's recordings; those with graphs share one.
        compiler: a graph launches what Inductor makes of its operators; None for the operators themselves.
    """
    calls = keys_first(trace.calls)
    keys, memory = drawn_keys(calls), memory_of(trace)
    shared = _Shared(memories.setdefault("graphs", GraphMemory()))
    constants = {memory[slot] for slot in trace.constants}
    makers: dict[Any, GraphProgram] = {}

    def can_be(call: Call) -> bool:
        has_tables = call.operator._schema.name in TABLES_ON_HOST
        return call.devices == {DEVICE} and not has_tables and not call.reads() & keys

    def make(inputs: Sequence[Slot], part: list[Call], outputs: Sequence[Slot]) -> GraphProgram:
        written = {memory[slot] for call in part for slot in written_by(call)}
        operands = [
            _Operand(memory[slot] in constants, makers.get(memory[slot]), memory[slot] in written) for slot in inputs
        ]
        whole = Trace(inputs, part, outputs)
        run = whole.compile() if compiler is None else Program(compiler, inputs, part, outputs)
        program = GraphProgram(shared, operands, run)
        makers.update((memory[slot], program) for call in part for slot in call.makes() if memory[slot] == slot)
        return program

    graphed = replace_parts(trace, calls, can_be, make, "graph")
    if not any(isinstance(call.function, GraphProgram) for call in graphed.calls):
        devices = ", ".join(sorted({device for call in calls for device in call.devices})) or "no device"
        shared.failed(f"it has no part that runs on a GPU alone; its tensors are on: {devices}")
    own = constants | set(trace.inputs)
    results = {slot for slot in trace.outputs[:num_results] if memory[slot] not in own}
    _copy_outputs(graphed, results | {slot for slot in trace.outputs if memory[slot] in makers}, memory)
    return graphed


def _copy_outputs(trace: Trace, copied: set[Slot], memory: Iterable[Slot]) -> None:
    """Hand out copies of these slots: what graphs make, exchanges may return."""
    first = max((slot.number for slot in memory), default=0) + 1
    copies = {slot: Slot(number) for number, slot in enumerate(sorted(copied), first)}
    if copies:
        made = tuple(copies.values())
        trace.calls.append(Call(_copies, (list(copies),), {}, made, has_side_effect=False, name="copies"))
    trace.outputs = [copies.get(slot, slot) for slot in trace.outputs]


class _Operand(NamedTuple):
    """An operand of a part.

    Attributes:
        is_constant: it has the same address in every replay.
        maker: the program in whose memory it lies, if that becomes a graph.
        is_written: the part writes to it.
    """

    is_constant: bool
    maker: GraphProgram | None
    is_written: bool

    def is_copied(self) -> bool:
        """Whether its address changes from replay to replay."""
        return not self.is_constant and (self.maker is None or not self.maker.is_graph)


def _copies(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    if all(tensor.is_floating_point() for tensor in tensors):
        return torch._foreach_mul(tensors, 1)  # few launches for all of them
    return [tensor.clone() for tensor in tensors]


@dataclass
class GraphMemory:
    """What the graphs of all recordings of a step share: they run one after the other.

    Attributes:
        operands: memory for the operands of one graph at a time.
        needed_bytes: the most that a graph needs of it, as far as their first replays have shown.
        latest: the graph that was recorded last. It keeps the pool, from which later graphs take their memory.
        stream: of all recordings. A pool gives memory that was used on one stream to no other stream.
    """

    operands: torch.Tensor | None = None
    needed_bytes: int = 0
    latest: torch.cuda.CUDAGraph | None = None
    stream: torch.cuda.Stream | None = None

    def expect(self, operands: Sequence[torch.Tensor]) -> None:
        """Note that a graph will have such operands."""
        self.needed_bytes = max(self.needed_bytes, sum(map(_size_of, operands)))

    def views_like(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors with the sizes and strides of these, in the shared memory."""
        if not values:
            return []
        needed = max(self.needed_bytes, sum(map(_size_of, values)))
        if self.operands is None or self.operands.numel() < needed:
            self.operands = torch.empty(needed, dtype=torch.uint8, device=values[0].device)
        start, views = 0, []
        for value in values:
            memory = self.operands[start : start + _size_of(value)].view(value.dtype)
            views.append(memory.as_strided(value.shape, value.stride()))
            start += _size_of(value)
        return views


GraphMemories = WeakValueDictionary[str, GraphMemory]
"""Of the recordings of one step. It is empty when the step has forgotten all recordings with graphs."""


@dataclass
class _Shared:
    """What the graphs of one trace share.

    Attributes:
        problem: why a part is replayed operator by operator; else empty.
    """

    memory: GraphMemory
    problem: str = ""

    def failed(self, cause: str) -> None:
        """Warn that a part runs operator by operator."""
        self.problem = f"this step, or a part of it, is no CUDA graph and is replayed operator by operator: {cause}."
        warnings.warn(f"capture: {self.problem}", CaptureWarning, stacklevel=2)


def _size_of(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element, rounded up to what every dtype may begin at."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class GraphProgram:
    """A part as a function of tensors, which a CUDA graph runs from its second call on.

    Args:
        run: runs the operators one by one.

    Attributes:
        is_graph: whether it has become a graph.
    """

    def __init__(self, shared: _Shared, operands: Sequence[_Operand], run: Run) -> None:
        self._shared, self._operands, self._run = shared, operands, run
        self.is_graph, self._has_run = False, False
        self._launch: Callable[[], object] | None = None
        self._results: Sequence[torch.Tensor] = ()
        self._copied: list[tuple[int, torch.Tensor]] = []
        self._written: list[tuple[int, torch.Tensor]] = []

    @property
    def problem(self) -> str:
        """Why a part of the step is no graph, or is not compiled; else empty."""
        return self._shared.problem or (self._run.problem if isinstance(self._run, Program) else "")

    def __call__(self, *values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Results of the part for these inputs."""
        launch = self._launch or self._recorded(values)
        if launch is None:
            return self._run(*values)
        if self._copied:
            given = [_without_repeats(values[at]) for at, _ in self._copied]
            torch._foreach_copy_([place for _, place in self._copied], given)
        launch()
        for at, place in self._written:
            values[at].copy_(place)
        return self._results

    def _recorded(self, values: Sequence[torch.Tensor]) -> Callable[[], object] | None:
        """Launches the graph; None before the second call, and where there can be none."""
        if self._shared.problem:
            return None
        copied = [at for at, operand in enumerate(self._operands) if operand.is_copied()]
        if not self._has_run:
            self._has_run = True
            self._shared.memory.expect([values[at] for at in copied])
            return None
        places = dict(zip(copied, self._shared.memory.views_like([values[at] for at in copied]), strict=True))
        given = [places.get(at, value) for at, value in enumerate(values)]
        try:
            self._launch, self._results = record(self._shared.memory, self._run, given)
        except RuntimeError as error:
            cause = (str(error).strip() or "no message").splitlines()[0]
            self._shared.failed(f"{type(error).__name__}: {cause}")
            return None
        self._copied = [(at, _without_repeats(place)) for at, place in places.items()]
        self._written = [(at, place) for at, place in places.items() if self._operands[at].is_written]
        self.is_graph = True
        return self._launch


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The first of the equal slices along each dim that is expanded."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def record(
    memory: GraphMemory, run: Run, operands: Sequence[torch.Tensor]
) -> tuple[Callable[[], object], Sequence[torch.Tensor]]:
    """Record what ``run`` launches for these operands, which stay where they are.

    Returns:
        a function that launches it again, and the results, which each launch writes.

    Raises:
        RuntimeError: an operator cannot be recorded: it waits for the GPU, for example.
    """
    graph, stream = torch.cuda.CUDAGraph(), memory.stream or torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle() if memory.latest is None else memory.latest.pool()
    with _one_at_a_time:
        torch.cuda.synchronize()
        is_collecting = gc.isenabled()
        gc.disable()  # to free an old graph or tensor would end the recording
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    results = run(*operands)
                finally:
                    graph.capture_end()
        finally:
            if is_collecting:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
    memory.latest, memory.stream = graph, stream
    return graph.replay, results
