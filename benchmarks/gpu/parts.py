"""The parts, in their order: what must be right comes before what should be fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.gpu import engines, exchanges, kernels, nccl, offloaded, steps, tests_on_gpu
from benchmarks.gpu.place import Found, Place


class Part(NamedTuple):
    """A part of the run.

    Attributes:
        limit_s: seconds after which it is killed.
        program: finds one thing after the other.
        needs_gpu: it can do nothing at a place without one.
    """

    name: str
    limit_s: float
    program: Callable[[Place], Iterator[Found]]
    needs_gpu: bool = False


PARTS = (
    Part("versions", 15, tests_on_gpu.versions),
    Part("kernel-tests", 105, tests_on_gpu.kernel_tests, needs_gpu=True),
    Part("script", 40, engines.script),
    Part("1-engine", 55, engines.compared_on_1),
    Part("2-engines", 60, engines.compared_on_2),
    Part("4-engines", 60, engines.compared_on_4),
    Part("interrupt-and-kill", 50, engines.interrupt_and_kill),
    Part("nccl", 30, nccl.alone, needs_gpu=True),
    Part("other-tests", 165, tests_on_gpu.other_tests, needs_gpu=True),
    Part("bandwidth", 25, kernels.bandwidth),
    Part("loss", 25, kernels.loss),
    Part("dropout", 25, kernels.dropout),
    Part("attention", 60, kernels.attention),
    Part("step", 100, steps.times),
    Part("compiled", 110, steps.compiled),
    Part("offload", 35, offloaded.offload),
    Part("waits", 60, steps.waits, needs_gpu=True),
    Part("trace", 30, steps.trace),
    Part("exchanges", 75, exchanges.between_processes),
    Part("sanitizer", 75, tests_on_gpu.sanitizer, needs_gpu=True),
)
"""All of them end within 20 minutes. The limits are at least 1.3 times what an H100 took."""
