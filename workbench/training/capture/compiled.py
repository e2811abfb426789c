"""Compiled parts of a recorded step: torch's operators between two exchanges become one program of Inductor.

A recorded step is a list of calls. Those that run operators, one after the other, are a part: forward, backward and
what lies between, up to the next exchange or optimizer. A part becomes a graph of FX, which Inductor compiles when the
first replay has its operands at hand. Everything else stays a call. Keys of random numbers are drawn before the
programs that use them, and are operands like tensors.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from workbench.kernels.operators import has_key, keyed
from workbench.training.capture.compile_cache import broken_library, one_process
from workbench.training.capture.trace import Call, Slot, Trace, slots_in

_FEWEST_CALLS = 3
"""A compiled program costs more to call than so many operators."""
_one_at_a_time = threading.Lock()
"""Simulated ranks are threads, and Inductor compiles for one at a time."""

_shared: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Compiled programs in use, by their code and their kinds of operands."""


class CaptureWarning(UserWarning):
    """A captured step is slower than it could be: it was recorded too often, or could not be compiled."""


def compile_parts(trace: Trace) -> Trace:
    """The same trace with its parts as single calls, which compile themselves when a replay first calls them."""
    given = _keys_first(trace.calls)
    memory = _memory(trace)
    last_read = {slot: at for at, call in enumerate(given) for slot in call.reads()}
    last_read |= dict.fromkeys(trace.outputs, len(given))
    calls: list[Call] = []
    compiler, end = Compiler(), 0
    for part in _parts(given, memory):
        end += len(part.calls)
        read_later = {slot for slot, at in last_read.items() if at >= end}
        calls += part.as_calls(compiler, read_later, memory) if part.is_worth_it() else part.calls
    return Trace(trace.inputs, calls, trace.outputs, trace.constants)


def _keys_first(calls: Sequence[Call]) -> list[Call]:
    """The calls, with draws of keys and seeds moved to the front, but behind operators that draw by themselves."""
    moved: list[Call] = []
    place = 0
    for call in calls:
        if call.draws and call.operator is None:
            moved.insert(place, call)
            place += 1
        else:
            moved.append(call)
            place = len(moved) if call.draws else place
    return moved


class Compiler:
    """Inductor, for the programs of one trace.

    Attributes:
        is_missing: whether there turned out to be no compiler on this machine.
    """

    is_missing = False

    def __call__(self, graph: fx.GraphModule, values: list[Any]) -> Callable[..., Sequence[torch.Tensor]]:
        """The graph compiled for such values. Equal programs of blocks and of simulated ranks are compiled once, and
        Inductor keeps what it makes on disk, for other ranks and later runs.
        """
        given = [(tuple(value.shape), value.stride(), value.dtype, value.device) for value in values]
        text = f"{graph.code}{given}"
        with _one_at_a_time, one_process(text):
            made = _shared.get(text)
            if made is None:
                made = _shared[text] = _compile(graph, values)
        return made

    def failed(self, error: Exception) -> str:
        """Warn that a program runs operator by operator; returns why."""
        self.is_missing = "C++ compiler" in str(error) or "CppCompiler" in repr(error)
        if self.is_missing:
            cause = "there is no C++ compiler on this machine. Install one (Debian: apt-get install g++)"
        else:
            cause = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        problem = (
            f"Inductor could not compile this step, or a part of it, which is replayed operator by operator: {cause}."
        )
        warnings.warn(f"capture: {problem}", CaptureWarning, stacklevel=2)
        return problem


def _compile(graph: fx.GraphModule, values: list[Any]) -> Callable[..., Sequence[torch.Tensor]]:
    """By Inductor. It tries once more without a library in its cache that a killed compiler has left half written."""

    def attempt() -> Any:
        return torch._inductor.standalone_compile(graph, values, dynamic_shapes="from_example_inputs")

    try:
        return attempt()
    except Exception as error:
        broken = broken_library(error)
        if broken is None:
            raise
        broken.unlink(missing_ok=True)
    return attempt()


class Program:
    """A part as a function of tensors; its first call compiles it.

    Attributes:
        num_operators: operators of torch in it.
        is_compiled: whether it has been compiled; False before the first call, and where Inductor failed.
        problem: why Inductor failed; else empty.
    """

    def __init__(self, compiler: Compiler, inputs: Sequence[Slot], calls: list[Call], outputs: Sequence[Slot]) -> None:
        self._compiler, self._inputs, self._calls, self._outputs = compiler, inputs, calls, outputs
        self._run: Callable[..., Sequence[torch.Tensor]] | None = None
        self.num_operators, self.is_compiled, self.problem = len(calls), False, ""

    def __call__(self, *values: torch.Tensor | int) -> Sequence[torch.Tensor]:
        """Results of the part for these inputs: tensors, and keys of random numbers."""
        if self._run is None:
            self._run = self._compiled(values)
        return self._run(*values)

    def _compiled(self, values: Sequence[torch.Tensor | int]) -> Callable[..., Sequence[torch.Tensor]]:
        """Compiled for such values; the operators one by one if that fails."""
        keys = [at for at, value in enumerate(values) if isinstance(value, int)]
        if not self._compiler.is_missing:
            try:
                run = self._compiler(self._graph({self._inputs[at] for at in keys}), _as_tensors(values, keys))
            except Exception as error:  # noqa: BLE001 - whatever a compiler trips over, the step goes on
                self.problem = self._compiler.failed(error)
            else:
                self.is_compiled = True
                return (lambda *values: run(*_as_tensors(values, keys))) if keys else run
        return Trace(self._inputs, self._calls, self._outputs).compile()

    def _graph(self, keys: set[Slot]) -> fx.GraphModule:
        graph = fx.Graph()
        nodes: dict[Slot, fx.Node] = {slot: graph.placeholder(f"x{at}") for at, slot in enumerate(self._inputs)}

        def filled(value: Any) -> Any:
            if isinstance(value, Slot):
                return nodes[value]
            return type(value)(map(filled, value)) if type(value) in (list, tuple) else value

        def name(result: Any, node: fx.Node) -> None:
            if isinstance(result, Slot):
                nodes[result] = node
            for at, part in enumerate(result if isinstance(result, tuple) else ()):
                if part is not None:
                    name(part, graph.call_function(operator.getitem, (node, at)))

        for call in self._calls:
            function = keyed(call.operator) if call.reads() & keys else call.operator
            node = graph.call_function(function, filled(call.args), {k: filled(v) for k, v in call.kwargs.items()})
            name(call.result, node)
        graph.output(tuple(nodes[slot] for slot in self._outputs))
        return fx.GraphModule(torch.nn.Module(), graph)


def _as_tensors(values: Sequence[Any], keys: list[int]) -> list[torch.Tensor]:
    """Operands of a compiled program: a key as a tensor."""
    operands = list(values)
    for at in keys:
        operands[at] = torch.tensor(operands[at])
    return operands


class _Part:
    """Calls that may become one program. Of memory that it writes to and has not made, it knows one tensor only."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._made: set[Slot] = set()
        self._given: dict[Any, set[Slot]] = {}
        self._written: set[Any] = set()

    def take(self, call: Call, memory: dict[Slot, Any]) -> bool:
        """Add a call, if it may stand here."""
        given: dict[Any, set[Slot]] = {}
        for slot in call.reads() - self._made:
            given.setdefault(memory[slot], set()).add(slot)
        written = {memory[slot] for slot in _written(call)}
        known = {of: self._given.get(of, set()) | given.get(of, set()) for of in written | given.keys()}
        if any(len(slots) > 1 for of, slots in known.items() if of in written or of in self._written):
            return False
        self.calls.append(call)
        self._made |= call.makes()
        self._given |= known
        self._written |= written
        return True

    def is_worth_it(self) -> bool:
        """Whether a program of it is faster than its operators one by one."""
        return sum(not call.makes_view for call in self.calls) >= _FEWEST_CALLS

    def as_calls(self, compiler: Compiler, read_later: set[Slot], memory: dict[Slot, Any]) -> Iterator[Call]:
        """One call of a program, and the views of its results and operands that later calls read.

        A program hands out one tensor of each memory, since torch does not promise that several share it.
        """
        maker = {slot: call for call in self.calls for slot in call.makes()}
        leaving: dict[Any, list[Slot]] = {}
        for slot in maker:
            if slot in read_later:
                leaving.setdefault(memory[slot], []).append(slot)
        outputs: dict[Slot, None] = {}
        views: set[int] = set()
        for memory_of, slots in leaving.items():
            if len(slots) == 1 and memory_of in maker:
                outputs[slots[0]] = None
                continue
            for slot in slots:
                while slot in maker and maker[slot].makes_view:
                    views.add(id(maker[slot]))
                    slot = next(iter(slots_in(maker[slot].args[0])))
                if slot in maker:
                    outputs[slot] = None
        inputs = list(dict.fromkeys(slot for call in self.calls for slot in sorted(call.reads()) if slot not in maker))
        program = Program(compiler, inputs, self.calls, list(outputs))
        yield Call(
            program, tuple(inputs), {}, tuple(outputs), has_side_effect=True, name=f"compiled.{len(self.calls)}_calls"
        )
        yield from (call for call in self.calls if id(call) in views)


def _parts(calls: Sequence[Call], memory: dict[Slot, Any]) -> Iterator[_Part]:
    """The calls in their order; each that cannot be compiled is a part of its own."""
    keys = {slot for call in calls if call.draws and call.operator is None for slot in call.makes()}
    part = _Part()
    for call in calls:
        can_be = call.operator is not None and call.changes is None and not call.draws
        can_be = can_be and (not call.reads() & keys or has_key(call.operator))
        if can_be and part.take(call, memory):
            continue
        if part.calls:
            yield part
        part = _Part()
        if not (can_be and part.take(call, memory)):
            part.calls.append(call)
            yield part
            part = _Part()
    if part.calls:
        yield part


def _memory(trace: Trace) -> dict[Slot, Any]:
    """For every slot, something that tensors share if they lie in the same memory."""
    memory: dict[Slot, Any] = {slot: slot for slot in trace.inputs}
    memory |= {slot: value.untyped_storage()._cdata for slot, value in trace.constants.items()}
    for call in trace.calls:
        base = next(iter(slots_in(call.args[0])), None) if call.makes_view else None
        memory |= {slot: slot if base is None else memory[base] for slot in call.makes()}
    return memory


def _written(call: Call) -> set[Slot]:
    """The slots that an operator writes to."""
    if call.operator is None or not call.has_side_effect:
        return set()
    arguments = call.operator._schema.arguments
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    given = [value for value, is_written in zip(call.args, written, strict=False) if is_written]
    given += [call.kwargs[a.name] for a, is_w in zip(arguments, written, strict=True) if is_w and a.name in call.kwargs]
    return set(slots_in(given))
