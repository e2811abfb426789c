"""Parts of a recorded step: torch's operators, one after the other, between two exchanges or optimizers.

A compiler makes one program of a part, and CUDA graphs launch it at once. Everything else stays a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workbench.training.capture.operators import written_arguments
from workbench.training.capture.optimizer_steps import OptimizerStep
from workbench.training.capture.trace import Call, Slot, Trace, slots_in

_FEWEST_CALLS = 3
"""A program costs more to call than so many operators."""
Make = Callable[[Sequence[Slot], list[Call], Sequence[Slot]], Callable[..., Any]]
"""Makes a program of its inputs, its calls and the slots that it hands out, in this order."""


def replace_parts(trace: Trace, calls: Sequence[Call], can_be: Callable[[Call], bool], make: Make, name: str) -> Trace:
    """The same trace with its parts as single calls of programs.

    Args:
        calls: those of the trace, in an order that may differ.
        can_be: whether a call may be in a part.
        make: makes a program of a part.
        name: of the programs, in listings.
    """
    memory = memory_of(trace)
    last_read = {slot: at for at, call in enumerate(calls) for slot in call.reads()}
    last_read |= dict.fromkeys(trace.outputs, len(calls))
    made: list[Call] = []
    end = 0
    for part in _parts(calls, memory, can_be):
        end += len(part.calls)
        read_later = {slot for slot, at in last_read.items() if at >= end}
        is_worth_it = sum(not call.makes_view for call in part.calls) >= _FEWEST_CALLS
        made += part.as_calls(make, name, read_later, memory) if is_worth_it else part.calls
    return Trace(trace.inputs, made, trace.outputs, trace.constants)


def keys_first(calls: Sequence[Call]) -> list[Call]:
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


def drawn_keys(calls: Sequence[Call]) -> set[Slot]:
    """The slots of keys of random numbers, which are Python's."""
    return {slot for call in calls if call.draws and call.operator is None for slot in call.makes()}


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
        written = {memory[slot] for slot in written_by(call)}
        known = {of: self._given.get(of, set()) | given.get(of, set()) for of in written | given.keys()}
        if any(len(slots) > 1 for of, slots in known.items() if of in written or of in self._written):
            return False
        self.calls.append(call)
        self._made |= call.makes()
        self._given |= known
        self._written |= written
        return True

    def as_calls(self, make: Make, name: str, read_later: set[Slot], memory: dict[Slot, Any]) -> Iterator[Call]:
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
        program = make(inputs, self.calls, list(outputs))
        name = f"{name}.{len(self.calls)}_calls"
        yield Call(program, tuple(inputs), {}, tuple(outputs), has_side_effect=True, name=name)
        yield from (call for call in self.calls if id(call) in views)


def _parts(calls: Sequence[Call], memory: dict[Slot, Any], can_be: Callable[[Call], bool]) -> Iterator[_Part]:
    """The calls in their order; each that cannot be in a part is one of its own."""
    part = _Part()
    for call in calls:
        fits = call.operator is not None and call.changes is None and not call.draws and can_be(call)
        if fits and part.take(call, memory):
            continue
        if part.calls:
            yield part
        part = _Part()
        if not (fits and part.take(call, memory)):
            part.calls.append(call)
            yield part
            part = _Part()
    if part.calls:
        yield part


def memory_of(trace: Trace) -> dict[Slot, Any]:
    """For every slot, something that tensors share if they lie in the same memory."""
    memory: dict[Slot, Any] = {slot: slot for slot in trace.inputs}
    memory |= {slot: value.untyped_storage()._cdata for slot, value in trace.constants.items()}
    for call in trace.calls:
        base = next(iter(slots_in(call.args[0])), None) if call.makes_view else None
        memory |= {slot: slot if base is None else memory[base] for slot in call.makes()}
    return memory


def written_by(call: Call) -> set[Slot]:
    """The slots that an operator writes to."""
    if call.operator is None or not call.has_side_effect:
        return set()
    return set(slots_in(written_arguments(call.operator, call.args, call.kwargs)))


def written_memory(trace: Trace) -> set[Any]:
    """The memory that the calls of a trace write to: operators, and optimizers to their parameters."""
    memory = memory_of(trace)
    stepped = (call for call in trace.calls if isinstance(call.function, OptimizerStep))
    written = set[Slot]().union(*map(written_by, trace.calls), *(slots_in(call.args[0]) for call in stepped))
    return {memory[slot] for slot in written}
