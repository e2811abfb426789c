"""A recorded step: a list of calls on numbered values, replayed as one straight Python function.

A value is an input, a constant (a parameter, a buffer, any tensor that the step did not make) or an earlier result.
The trace is compiled from generated source. A replay then costs a call and a local variable per entry, and frees every
value after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A numbered value of the program."""

    number: int

    def __str__(self) -> str:
        return f"v{self.number}"


@dataclass(slots=True)
class Call:
    """One entry.

    Attributes:
        function: the function that is called.
        args, kwargs: slots, constants, and lists and tuples of these.
        result: a slot, None (nothing is used), or tuples of these in the structure of the function's result.
        has_side_effect: whether the call has an effect besides its result: it writes to memory, exchanges, or draws.
        makes_view: whether its result is a view of its first argument.
        changes: a value that the call completes; the call is needed where the value is.
        name: for listings.
        operator: torch's operator that the function runs; None for exchanges, keys, samples and optimizers.
        draws: whether it changes a generator: it draws a key, which is a Python number, sets a seed, or is an operator
            that draws.
        devices: types of devices of the tensors that an operator takes and makes.
        flops: floating point operations of a matrix product; else 0.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    has_side_effect: bool
    makes_view: bool = False
    name: str = ""
    changes: Slot | None = None
    operator: Any = None
    draws: bool = False
    devices: frozenset[str] = frozenset()
    flops: float = 0.0

    def reads(self) -> set[Slot]:
        """The slots among its arguments."""
        return set(slots_in([self.args, list(self.kwargs.values())]))

    def makes(self) -> set[Slot]:
        """The slots among its results."""
        return set(slots_in(self.result))

    def __str__(self) -> str:
        given = [_listed(value) for value in self.args] + [f"{k}={_listed(v)}" for k, v in self.kwargs.items()]
        made = f"{_listed(self.result)} = " if self.makes() else ""
        return f"{made}{self.name}({', '.join(given)})"


def slots_in(value: Any) -> Iterable[Slot]:
    """The slots in nested lists and tuples."""
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from slots_in(item)


def _listed(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_listed, value))})"
    return str(value) if isinstance(value, Slot | int | float | bool | None | str) else f"<{type(value).__name__}>"


@dataclass(slots=True)
class Trace:
    """Calls in their order.

    Attributes:
        inputs: the slots of the step's tensors, in their order.
        constants: slots of tensors that the step did not make.
        outputs: the slots that a replay returns, in order.
        sizes: bytes of the tensors that the step made.
    """

    inputs: Sequence[Slot]
    calls: list[Call]
    outputs: Sequence[Slot]
    constants: dict[Slot, Any] = field(default_factory=dict)
    sizes: dict[Slot, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(map(str, self.calls))

    def reads(self) -> set[Slot]:
        """The slots that its calls read or that it returns."""
        return set(self.outputs).union(*(call.reads() for call in self.calls))

    def simplify(self) -> None:
        """Make views of constants once, now, and drop calls whose results nothing uses."""
        kept: list[Call] = []
        for call in self.calls:
            if call.makes_view and all(slot in self.constants for slot in call.reads()):
                made = call.function(*self._filled(call.args), **{k: self._filled(v) for k, v in call.kwargs.items()})
                self._fix(call.result, made)
            else:
                kept.append(call)
        needed = set(self.outputs)
        self.calls = []
        for call in reversed(kept):
            if call.has_side_effect or call.makes() & needed or call.changes in needed:
                needed |= call.reads()
                self.calls.append(call)
        self.calls.reverse()
        self.constants = {slot: value for slot, value in self.constants.items() if slot in needed}

    def _filled(self, value: Any) -> Any:
        if isinstance(value, Slot):
            return self.constants[value]
        return type(value)(map(self._filled, value)) if isinstance(value, list | tuple) else value

    def _fix(self, result: Any, made: Any) -> None:
        if isinstance(result, Slot):
            self.constants[result] = made
        elif result is not None:
            for part, value in zip(result, made, strict=True):
                self._fix(part, value)

    def compile(self) -> Callable[..., tuple[Any, ...]]:
        """The function that runs the calls: inputs in, outputs out."""
        return _Writer(self).function()


class _Writer:
    """Writes a trace as the source of one function."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.names: dict[str, Any] = {}
        self.by_id: dict[int, str] = {}

    def function(self) -> Callable[..., tuple[Any, ...]]:
        trace = self.trace
        for slot, value in trace.constants.items():
            self.names[str(slot)] = value
        last_use = self._last_uses()
        lines = [f"def replay({', '.join(map(str, trace.inputs))}):"]
        for index, call in enumerate(trace.calls):
            lines.append(f"    {self._line(call)}")
            done = last_use.get(index)
            if done:
                lines.append(f"    del {', '.join(map(str, done))}")
        lines.append(f"    return [{', '.join(map(str, trace.outputs))}]")
        exec(compile("\n".join(lines), "<captured step>", "exec"), self.names)
        made: Callable[..., tuple[Any, ...]] = self.names["replay"]
        return made

    def _last_uses(self) -> dict[int, list[Slot]]:
        stays = set(self.trace.outputs) | set(self.trace.constants)
        last: dict[Slot, int] = dict.fromkeys(self.trace.inputs, 0) if self.trace.calls else {}
        for index, call in enumerate(self.trace.calls):
            for slot in (*call.reads(), *call.makes()):
                last[slot] = index
        by_index: dict[int, list[Slot]] = {}
        for slot, index in last.items():
            if slot not in stays:
                by_index.setdefault(index, []).append(slot)
        return by_index

    def _line(self, call: Call) -> str:
        given = [self._text(value) for value in call.args] + [f"{k}={self._text(v)}" for k, v in call.kwargs.items()]
        text = f"{self._constant(call.function)}({', '.join(given)})"
        return f"{self._target(call.result)} = {text}" if call.makes() else text

    def _target(self, result: Any) -> str:
        if isinstance(result, Slot):
            return str(result)
        return "_" if result is None else f"[{', '.join(map(self._target, result))}]"

    def _text(self, value: Any) -> str:
        if isinstance(value, Slot):
            return str(value)
        if type(value) in (list, tuple) and any(True for _ in slots_in(value)):
            inner = ", ".join(map(self._text, value))
            return f"[{inner}]" if type(value) is list else f"({inner},)"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = self.by_id.get(id(value))
        if name is None:
            name = self.by_id[id(value)] = f"c{len(self.by_id)}"
            self.names[name] = value
        return name
