"""Less memory for a recorded step: values that are read again much later are computed again before that.

A value is worth computing again if it is large and its operators are fast: most activations between two matrix products
are. One after the other, values leave the moment at which the most memory is held, until it is little enough: first
those that free the most bytes for the work of computing them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.training.capture.parts import memory_of, written_by
from workbench.training.capture.trace import Call, Slot, Trace, slots_in

_FLOPS_PER_BYTE = 10.0
"""Operations of a matrix product in 32 bits that take as long as to move a byte, roughly."""
_MOST_CALLS = 100
"""Computed again for one value."""


def peak_bytes(trace: Trace) -> int:
    """The most that values of a replay take at one time, in bytes; without inputs and constants."""
    return max(_Lifetimes(trace, {}).held, default=0)


def limit_memory(trace: Trace, memory_bytes: int) -> Trace:
    """The same trace, with as many values computed again as a peak of ``memory_bytes`` needs, or as is possible.

    Only values of the given trace are: two copies that need each other would be made again in turns without end.
    """
    known: dict[int, _Slots] = {}
    own = {slot for call in trace.calls for slot in call.makes()}
    while True:
        lifetimes = _Lifetimes(trace, known)
        if max(lifetimes.held, default=0) <= memory_bytes:
            return trace
        found = (each for each in lifetimes.candidates() if each.memory in own)
        chosen = max(found, key=lambda candidate: candidate.gain, default=None)
        if chosen is None:
            return trace
        trace = _computed_again(trace, lifetimes, chosen)


class _Slots(NamedTuple):
    """What a call reads, makes and writes to. It holds the call, so that no other one has its address."""

    call: Call
    read: set[Slot]
    made: set[Slot]
    written: set[Slot]

    @classmethod
    def of(cls, call: Call) -> _Slots:
        read = call.reads()
        is_exchange = call.operator is None and not call.draws  # or an optimizer: it may write to all that it gets
        return cls(call, read, call.makes(), read if is_exchange else written_by(call))


class _Candidate(NamedTuple):
    """A value that could be computed again.

    Attributes:
        memory: its slot.
        calls: the numbers of the calls that compute it, from values that are there.
        before: the number of the call before which they stand.
        gain: bytes freed at the peak, for each byte that they move.
    """

    memory: Slot
    calls: list[int]
    before: int
    gain: float


class _Lifetimes:
    """When each memory is made, written and read, by the numbers of the calls.

    Args:
        known: slots of calls that have been looked at, by the address of the call.

    Attributes:
        memory: for every slot, what tensors share that lie in the same memory.
        held: bytes that are held during each call.
    """

    def __init__(self, trace: Trace, known: dict[int, _Slots]) -> None:
        self.trace = trace
        self.memory = memory_of(trace)
        self.slots = [known.get(id(call)) or known.setdefault(id(call), _Slots.of(call)) for call in trace.calls]
        self._maker: dict[Slot, int] = {}
        self._uses: dict[Any, list[int]] = {}
        self._writes: dict[Any, list[int]] = {}
        for at, slots in enumerate(self.slots):
            self._maker.update(dict.fromkeys(slots.made, at))
            for memory in {self.memory[slot] for slot in slots.read}:
                self._uses.setdefault(memory, []).append(at)
            for memory in {self.memory[slot] for slot in slots.written}:
                self._writes.setdefault(memory, []).append(at)
        for slot in trace.outputs:
            self._uses.setdefault(self.memory[slot], []).append(len(trace.calls))
        self._made = [slot for slot in self._maker if self.memory[slot] == slot]
        self.held = list(self._held())

    def _held(self) -> Iterator[int]:
        changes = [0] * (len(self.trace.calls) + 2)
        for memory in self._made:
            changes[self._maker[memory]] += self._bytes(memory)
            changes[self._last_use(memory) + 1] -= self._bytes(memory)
        held = 0
        for change in changes[: len(self.trace.calls)]:
            held += change
            yield held

    def _bytes(self, memory: Any) -> int:
        return self.trace.sizes.get(memory, 0)

    def _last_use(self, memory: Any) -> int:
        return max(self._uses.get(memory, [-1])[-1], self._maker.get(memory, -1))

    def candidates(self) -> Iterator[_Candidate]:
        """The values that are held at the peak, are not used there, and can be computed again."""
        peak, end = self.held.index(max(self.held)), len(self.trace.calls)
        for memory in self._made:
            made, uses = self._maker[memory], self._uses.get(memory, [])
            if made >= peak or not uses or uses[-1] in (end, peak) or uses[-1] < peak or not self._bytes(memory):
                continue
            before = next(at for at in uses if at >= peak)
            calls = [] if before == peak else self._calls_for(memory, before)
            if calls:
                work = sum(self._work(at) for at in calls)
                yield _Candidate(memory, calls, before, self._bytes(memory) / max(work, 1.0))

    def _calls_for(self, memory: Slot, before: int) -> list[int]:
        """The calls that compute a value again before another call, from what is held until then; none if that is
        impossible.
        """
        wanted, calls = [memory], set[int]()
        while wanted:
            at = self._maker.get(wanted.pop())
            if at in calls:
                continue
            if at is None or not self._can_repeat(at, before) or len(calls) == _MOST_CALLS:
                return []
            calls.add(at)
            wanted += [slot for slot in self.slots[at].read if not self._is_there(slot, before)]
        return sorted(calls)

    def _can_repeat(self, at: int, before: int) -> bool:
        """Whether a call gives the same when it stands before a later one."""
        call, slots = self.trace.calls[at], self.slots[at]
        if call.operator is None or call.has_side_effect or call.draws or call.changes is not None:
            return False
        memories = {self.memory[slot] for slot in (*slots.read, *slots.made)}
        return not any(at < write < before for memory in memories for write in self._writes.get(memory, ()))

    def _is_there(self, slot: Slot, before: int) -> bool:
        """Whether a value is held until a call anyway; numbers, inputs and constants always are."""
        memory = self.memory[slot]
        return slot not in self._maker or not self._bytes(memory) or self._last_use(memory) >= before

    def _work(self, at: int) -> float:
        """What a call costs, as bytes that it moves."""
        call, slots = self.trace.calls[at], self.slots[at]
        moved = sum(self._bytes(slot) for slot in (*slots.read, *slots.made))
        return 0.0 if call.makes_view else moved + call.flops / _FLOPS_PER_BYTE


def _computed_again(trace: Trace, lifetimes: _Lifetimes, chosen: _Candidate) -> Trace:
    """The trace in which later calls read a copy that is made before the first of them."""
    memory, calls, slots = lifetimes.memory, trace.calls, lifetimes.slots
    later = {slot for each in slots[chosen.before :] for slot in each.read if memory[slot] == chosen.memory}
    again = set(chosen.calls)
    wanted = set(later)
    for at in reversed(range(chosen.calls[-1] + 1, chosen.before)):
        if calls[at].makes_view and slots[at].made & wanted:
            again.add(at)
            wanted |= {slot for slot in slots[at].read if memory[slot] == chosen.memory}
    used = later.union(*(slots[at].read for at in again))
    remade = sorted(slot for at in again for slot in slots[at].made if slot in used)
    number = max(slot.number for slot in memory)
    renamed = {slot: Slot(number + place) for place, slot in enumerate(remade, 1)}
    made = [replace(_reading(calls[at], renamed), result=_result(calls[at].result, renamed)) for at in sorted(again)]
    of_value = {slot: new for slot, new in renamed.items() if memory[slot] == chosen.memory}
    rest = [
        _reading(call, of_value) if each.read & of_value.keys() else call
        for call, each in zip(calls[chosen.before :], slots[chosen.before :], strict=True)
    ]
    sizes = trace.sizes | {new: trace.sizes.get(slot, 0) for slot, new in renamed.items()}
    return Trace(trace.inputs, [*calls[: chosen.before], *made, *rest], trace.outputs, trace.constants, sizes)


def _result(result: Any, renamed: dict[Slot, Slot]) -> Any:
    """What a call makes, of which only the renamed slots are used."""
    if isinstance(result, tuple):
        return tuple(_result(part, renamed) for part in result)
    return renamed.get(result) if isinstance(result, Slot) else None


def _reading(call: Call, renamed: dict[Slot, Slot]) -> Call:
    """The call, with other slots among its arguments."""

    def put(value: Any) -> Any:
        if isinstance(value, Slot):
            return renamed.get(value, value)
        has_slots = type(value) in (list, tuple) and any(True for _ in slots_in(value))
        return type(value)(map(put, value)) if has_slots else value

    changes = None if call.changes is None else put(call.changes)
    return replace(call, args=put(call.args), kwargs={k: put(v) for k, v in call.kwargs.items()}, changes=changes)
