"""A captured training step against the same local torch calls without global tensors, in turns.

    python -m benchmarks.capture

Forward, backward and AdamW of transformers without dropout, on one rank and data parallel on two. "local torch" is
plain torch on the rank's part of the batch; on two ranks it sums its gradients by the same transport, in one bucket.
"as written" is the parallelized model uncaptured. All three train alike; at the end their weights must agree.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import workbench as wb
from benchmarks.harness import interleave, launch_or_work, medians, together
from benchmarks.reporting import Target, publish, side_by_side, table
from workbench.tensors.world import World, current

MODELS = {"12 x 64": (12, 64, 8, 32), "8 x 256": (8, 256, 8, 64)}
"""Blocks, width, batch and length."""
TARGET = Target(1.05)
STEPS_BEFORE = 4
"""After these, steps are recorded and compiled."""
_LARGEST_WEIGHT_DIFFERENCE = 1e-4
Step = Callable[[], object]


class Block(nn.Module):
    """Causal attention of heads of 16 and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


def make_model(num_blocks: int, width: int) -> nn.Module:
    """The same weights on every call and every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num_blocks)))


def step_of(
    model: nn.Module, num_parts: int = 1, reduce: Step = lambda: None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """One step of AdamW on a batch that is one of ``num_parts`` of the whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean() / num_parts
        loss.backward()
        reduce()
        optimizer.step()
        return loss.detach()

    return step


def sum_of_gradients(model: nn.Module, world: World) -> Step:
    """The sum over all ranks of a plain model's gradients, by the transport that boxing uses."""
    parameters = list(model.parameters())

    def reduce() -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        group = tuple(range(world.world_size))
        tag = world.context.next_sum_tag(group)
        total = world.transport.start_all_reduce(grads, group, "sum", tag, "gradients")()
        pieces = total.split([grad.numel() for grad in grads])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape)

    return reduce if world.world_size > 1 else lambda: None


def candidates(
    world: World, num_blocks: int, width: int, rows: int, length: int, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[nn.Module, Step]]:
    """The three ways to make one step, on the world's device."""
    batch = torch.randn(rows, length, width, generator=torch.Generator().manual_seed(1)).to(world.device, dtype)
    parts = world.world_size
    plain, written, captured = (make_model(num_blocks, width).to(world.device, dtype) for _ in range(3))
    written, captured = (wb.parallelize(model, f"*: data | 1x{parts}x1") for model in (written, captured))
    local = step_of(plain, parts, sum_of_gradients(plain, world))
    own, decompose, replayed = batch.chunk(parts)[world.rank], step_of(written), wb.capture(step_of(captured))
    return {
        "local torch": (plain, lambda: local(own)),
        "as written": (written, lambda: decompose(batch)),
        "captured": (captured, lambda: replayed(batch)),
    }


def train_in_turns(
    ways: dict[str, tuple[nn.Module, Step]], rounds: int, calls: int, around: Callable[[], AbstractContextManager[Any]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of seconds per step, and the seconds of what comes before: steps that run, record and compile.

    Raises:
        AssertionError: the ways do not train alike.
    """
    first_s = {}
    for way, (_, step) in ways.items():
        start = time.perf_counter()
        for _ in range(STEPS_BEFORE):
            step()
        first_s[way] = time.perf_counter() - start
    times = interleave({way: step for way, (_, step) in ways.items()}, rounds, calls, around=around)
    difference = largest_difference(ways)
    if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
        raise AssertionError(f"{', '.join(ways)} did not train alike: weights differ by {difference:.1e}")
    return medians(times), first_s


def largest_difference(ways: dict[str, tuple[nn.Module, Step]]) -> float:
    """Between the weights of the first and the others."""
    first, *others = ([_whole(p) for p in model.parameters()] for model, _ in ways.values())
    return max(float((a - b).abs().max()) for other in others for a, b in zip(first, other, strict=True))


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, wb.GlobalTensor | DTensor) else parameter).detach()


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    torch.set_num_threads(1)
    wb.init()
    world = current()
    rows, judged = [], []
    for name in MODELS:
        ways = candidates(world, *MODELS[name])
        around = together if world.world_size > 1 else nullcontext
        time_s, _ = train_in_turns(ways, rounds, calls, around)
        judged.append(side_by_side(name, time_s["captured"], "local torch", time_s["local torch"], TARGET))
        rows.append([name, *(f"{time * 1e3:.2f}" for time in time_s.values()), f"{judged[-1].value:.3f}"])
    if world.rank == 0:
        how = (
            f"{world.world_size} processes, one thread each; medians of {rounds} rounds of {calls} steps, ms; the "
            "ratio is of captured to local torch."
        )
        body = f"{how}\n\n{table(['blocks x width', 'local torch', 'as written', 'captured', 'ratio'], rows)}"
        name = f"capture-{world.world_size}"
        publish(
            name,
            f"A captured step against local torch, {world.world_size} process{'es' * (world.world_size > 1)}",
            body,
            judged,
        )
    if world.world_size > 1:
        dist.barrier()


if __name__ == "__main__":
    sys.exit(launch_or_work("benchmarks.capture", __doc__, (1, 2), work, rounds=30, calls=3))
