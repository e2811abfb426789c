"""Causal attention on a split sequence, against torch's context parallelism, on the same 2 and 4 processes.

    python -m benchmarks.context_parallel

Forward and backward of attention alone, on slices of one long text. torch runs its balanced ring
(``torch.distributed.tensor.experimental``, rows dealt out in zig-zag), the workbench what its rule chooses: a ring, or
slices of the heads. Both call the same kernel on blocks of scores. Results and gradients must agree.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

import workbench as wb
from benchmarks.harness import by_name, hand_in, interleave, launch_often_or_work, medians, together
from benchmarks.reporting import Target, over_launches, publish, ratios_side_by_side, table

NUM_PROCESSES = (2, 4)
_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_THEIRS, _OURS = "torch's ring", "workbench"
_LARGEST_DIFFERENCE = 1e-4
_TARGET = Target(1.2, at_least=True)


@dataclass(frozen=True)
class Size:
    """Heads of queries, heads of keys and values, and length of the text."""

    heads: int
    key_heads: int
    length: int
    width: int = 64
    target: Target = _TARGET

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.key_heads} of keys, {self.length} positions"

    def operands(self) -> list[torch.Tensor]:
        """Queries, keys, values, and the gradient of the result; the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        heads = self.heads, self.key_heads, self.key_heads, self.heads
        return [torch.randn(1, each, self.length, self.width, generator=generator) for each in heads]


SIZES = (Size(8, 8, 1024), Size(8, 8, 2048), Size(6, 6, 2048), Size(16, 2, 2048))
"""Four ranks have whole heads of 8, not of 6. torch's ring passes keys and values for all heads of the queries."""


class _Ring(torch.autograd.Function):
    """torch's ring with the kernel for CPUs: its own table has kernels for GPUs only."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        run: Any = theirs._templated_ring_attention
        op = partial(_FORWARD, dropout_p=0.0)
        out, lse, *_ = run(dist.group.WORLD, 2, op, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        run: Any = theirs._templated_ring_attention_backward
        op = partial(_BACKWARD, dropout_p=0.0)
        return run(dist.group.WORLD, 2, op, grad, "grad_out", *ctx.saved_tensors, is_causal=True)[:3]


class Theirs:
    """Attention on torch's ring; call it for one forward and backward."""

    def __init__(self, size: Size) -> None:
        parts = torch.arange(size.length).chunk(2 * wb.world_size())
        self.rows = torch.cat([parts[wb.rank()], parts[2 * wb.world_size() - 1 - wb.rank()]])
        *operands, self.grad = (x[:, :, self.rows].contiguous() for x in size.operands())
        self.operands = [x.requires_grad_() for x in operands]

    def __call__(self) -> list[torch.Tensor]:
        query, *others = self.operands
        out = _Ring.apply(query, *(x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in others))
        return [out.detach(), *torch.autograd.grad(out, self.operands, self.grad)]


class Ours:
    """Attention on global tensors; call it for one forward and backward."""

    def __init__(self, size: Size) -> None:
        p = wb.placement.all("cpu")
        *operands, self.grad = (wb.to_global(x, placement=p, sbp="B").to_global(sbp="S(2)") for x in size.operands())
        self.operands = [x.detach().requires_grad_() for x in operands]

    def __call__(self) -> list[torch.Tensor]:
        query, key, value = self.operands
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, self.operands, self.grad)]


def largest_difference(ours: Ours, other: Theirs) -> float:
    """Between the results and the gradients of the two."""
    wholes = [x.full_tensor() for x in ours()]  # type: ignore[attr-defined]
    pairs = zip(wholes, other(), strict=True)
    return max(float((whole[:, :, other.rows] - part).abs().max()) for whole, part in pairs)


def compare(size: Size, rounds: int) -> dict[str, float]:
    """Seconds of a forward and backward of both, in turns."""
    ours, other = Ours(size), Theirs(size)
    difference = largest_difference(ours, other)
    if not difference <= _LARGEST_DIFFERENCE:
        raise AssertionError(f"{size}: the two differ by {difference:.1e}")
    return medians(interleave({_THEIRS: other, _OURS: ours}, rounds, 1, around=together))


def work(rounds: int) -> None:
    """What each of the processes of a launch runs; the first one hands in."""
    wb.init()
    found = {str(size): compare(size, rounds) for size in SIZES}
    if wb.rank() == 0:
        hand_in({"times": found, "transport": wb.init().transport_name})
    dist.barrier()


def report(launches: Sequence[Mapping[str, Any]], num: int, rounds: int) -> None:
    """Print and keep the table of what launches on ``num`` processes have handed in."""
    rows, judged = [], []
    for size in SIZES:
        time_s = by_name([launch["times"][str(size)] for launch in launches])
        ratios = ratios_side_by_side(time_s[_THEIRS], time_s[_OURS])
        for name, span in ((_THEIRS, ""), (_OURS, f"{min(ratios):.2f} to {max(ratios):.2f}")):
            rows.append([f"{size}: {name}", f"{median(time_s[name]) * 1e3:.1f}", span])
        judged.append(over_launches(str(size), time_s[_OURS], "torch", time_s[_THEIRS], size.target))
    how = (
        f"Forward and backward in 32 bits, {num} processes, one thread each; {len(launches)} launches, in each medians "
        f"of {rounds} rounds; below are medians over the launches, and of our time beside torch's in the "
        "same launch the least and the most. torch exchanges over gloo, the workbench over "
        f"{launches[0]['transport']}. Results and gradients "
        f"agree within {_LARGEST_DIFFERENCE:.0e}."
    )
    body = f"{how}\n\n{table(['', 'forward and backward, ms', 'time / torch, over launches'], rows)}"
    publish(f"context-parallel-{num}", f"Attention on a split sequence against torch, {num} processes", body, judged)


if __name__ == "__main__":
    sys.exit(launch_often_or_work("benchmarks.context_parallel", __doc__, NUM_PROCESSES, work, report, rounds=15))
