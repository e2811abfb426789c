"""Compiled parts of a recorded step: torch's operators between two exchanges become one program of Inductor.

A recorded step is a list of calls. Those that run operators, one after the other, are a part: forward, backward and
what lies between, up to the next exchange or optimizer. A part becomes a graph of FX, which Inductor compiles when the
first replay has its operands at hand. Everything else stays a call. Keys of random numbers are drawn before the
programs that use them, and are operands like tensors.
"""

from __future__ import annotations

import fcntl
import hashlib
import operator
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from workbench.errors import CaptureWarning
from workbench.kernels.operators import has_key, keyed
from workbench.tensors.fake_mode import keep_device_guard
from workbench.training.capture.channels_last import with_channels_last
from workbench.training.capture.parts import drawn_keys, keys_first, replace_parts
from workbench.training.capture.trace import Call, Slot, Trace

_one_at_a_time = threading.Lock()
"""Simulated ranks are threads, and Inductor compiles for one at a time."""

_shared: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Compiled programs in use, by their code and their kinds of operands."""


Tell = Callable[[int, int], object]
"""Gets the number of a program and how many there are."""


def compile_parts(trace: Trace, tell: Tell | None = None) -> Trace:
    """The same trace with its parts as single calls, which compile themselves when a replay first calls them."""
    calls = keys_first(trace.calls)
    keys = drawn_keys(calls)

    def can_be(call: Call) -> bool:
        return not call.reads() & keys or has_key(call.operator)

    return replace_parts(trace, calls, can_be, partial(Program, Compiler(tell)), "compiled")


class Compiler:
    """Inductor, for the programs of one trace.

    Args:
        tell: is called before a program is compiled, with its number and how many there are.

    Attributes:
        is_missing: whether there turned out to be no compiler on this machine.
        num_programs: of the trace.
    """

    def __init__(self, tell: Tell | None = None) -> None:
        self._tell, self._num_begun = tell, 0
        self.is_missing, self.num_programs = False, 0

    def begin(self) -> None:
        """Say that one more program is compiled."""
        self._num_begun += 1
        if self._tell is not None:
            self._tell(self._num_begun, self.num_programs)

    def __call__(self, graph: fx.GraphModule, values: list[Any]) -> Callable[..., Sequence[torch.Tensor]]:
        """The graph compiled for such values. Equal programs of blocks and of simulated ranks are compiled once, and
        Inductor keeps what it makes on disk, for other ranks and later runs.
        """
        given = [(tuple(value.shape), value.stride(), value.dtype, value.device) for value in values]
        text = f"{graph.code}{given}"
        with _one_at_a_time, one_process(text):
            made = _shared.get(text)
            if made is None:
                made = _shared[text] = _compile(with_channels_last(graph, values), values)
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

    keep_device_guard()

    def attempt() -> Any:
        with _warnings_are_no_errors():
            return torch._inductor.standalone_compile(graph, values, dynamic_shapes="from_example_inputs")

    try:
        return attempt()
    except Exception as error:
        broken = broken_library(error)
        if broken is None:
            raise
        broken.unlink(missing_ok=True)
    return attempt()


@contextmanager
def _warnings_are_no_errors() -> Iterator[None]:
    """Whoever makes warnings errors means those of the program, not what the compiler says of itself or the machine."""
    with warnings.catch_warnings():
        warnings.filters = [("default" if kind[0] == "error" else kind[0], *kind[1:]) for kind in warnings.filters]
        yield


class Program:
    """A part as a function of tensors; its first call compiles it.

    Attributes:
        is_compiled: whether it has been compiled; False before the first call, and where Inductor failed.
        problem: why Inductor failed; else empty.
    """

    def __init__(self, compiler: Compiler, inputs: Sequence[Slot], calls: list[Call], outputs: Sequence[Slot]) -> None:
        self._compiler, self._inputs, self._calls, self._outputs = compiler, inputs, calls, outputs
        self._run: Callable[..., Sequence[torch.Tensor]] | None = None
        self.is_compiled, self.problem = False, ""
        compiler.num_programs += 1

    def __call__(self, *values: torch.Tensor | int) -> Sequence[torch.Tensor]:
        """Results of the part for these inputs: tensors, and keys of random numbers."""
        if self._run is None:
            self._run = self._compiled(values)
        return self._run(*values)

    def _compiled(self, values: Sequence[torch.Tensor | int]) -> Callable[..., Sequence[torch.Tensor]]:
        """Compiled for such values; the operators one by one if that fails."""
        keys = [at for at, value in enumerate(values) if isinstance(value, int)]
        if not self._compiler.is_missing:
            self._compiler.begin()
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


_LIBRARY = re.compile(r"(/[^\s:'\"]+\.so)\b")


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

    return Path(cache_dir())


@contextmanager
def one_process(program: str) -> Iterator[None]:
    """Context that one process at a time enters for a program. The next ones find on disk what the first has made."""
    folder = _folder() / "workbench"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{hashlib.sha256(program.encode()).hexdigest()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a process that is killed lets go of it
        yield


def broken_library(error: Exception) -> Path | None:
    """The library in the cache that an error names, if it does: one that cannot be loaded."""
    found = _LIBRARY.search(str(error))
    path = Path(found[1]) if found else None
    return path if path is not None and path.is_relative_to(_folder()) and path.exists() else None
