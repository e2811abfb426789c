"""How a trace is replayed: operator by operator, compiled, as CUDA graphs, within some memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from workbench.errors import CaptureWarning
from workbench.training.capture.compiled import Compiler, Tell, compile_parts
from workbench.training.capture.graphs import GraphMemories, graph_parts
from workbench.training.capture.trace import Trace
from workbench.training.capture.value_memory import limit_memory, peak_bytes
from workbench.units import format_bytes

BACKENDS = ("inductor", "cudagraphs", "inductor+cudagraphs")
"""Ways to run the operators between two exchanges at once."""


@dataclass(frozen=True)
class ReplayOptions:
    """See ``wb.capture``. ``tell``: is called before a program is compiled. ``memories``: of this step's graphs."""

    backend: str | None = None
    memory_bytes: int | None = None
    tell: Tell | None = None
    memories: GraphMemories = field(default_factory=GraphMemories)

    def check(self) -> None:
        """Refuse a backend that there is not, and no memory.

        Raises:
            ValueError: one of them.
        """
        if self.backend not in (None, *BACKENDS):
            ways = " or ".join(map(repr, BACKENDS))
            raise ValueError(f"capture(backend={self.backend!r}): write {ways}, or leave it out.")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(
                f"capture(memory_bytes={self.memory_bytes}): a replay needs memory. Write a number of bytes above 0."
            )

    def prepare(self, trace: Trace, num_results: int) -> Trace:
        """The trace that is replayed. ``num_results`` of its outputs are results of the step, the others gradients."""
        if self.memory_bytes is not None:
            needed = peak_bytes(trace)
            trace = limit_memory(trace, self.memory_bytes)
            least = peak_bytes(trace)
            if least > self.memory_bytes:
                warnings.warn(
                    f"capture(memory_bytes={self.memory_bytes}): the values of this step take {format_bytes(needed)} "
                    f"at a time, {format_bytes(least)} with all that is worth it computed again. They get so much.",
                    CaptureWarning,
                    stacklevel=2,
                )
        if self.backend == "inductor":
            return compile_parts(trace, self.tell)
        if self.backend is not None:
            compiler = Compiler(self.tell) if "inductor" in self.backend else None
            return graph_parts(trace, num_results, self.memories, compiler)
        return trace
