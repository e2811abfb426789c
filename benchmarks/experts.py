"""A training step of a mixture of experts whose experts are spread over 2 processes.

    python -m benchmarks.experts

4 layers of 16 experts with a router, of which each of 16 x 128 tokens takes the best two, with AdamW: experts spread,
with an all-to-all of tokens; all weights gathered for each use (ZeRO 3), which holds as much on each process; and a
dense model, data parallel, whose tokens do the same products. The two mixtures start from the same weights, which must
agree at the end.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import workbench as wb
from benchmarks.harness import interleave, is_launched, launch, medians, together
from benchmarks.reporting import Target, publish, side_by_side, table

NUM_PROCESSES = 2
WIDTH, INNER, EXPERTS, BEST, LAYERS = 256, 512, 16, 2, 4
BATCH, LENGTH = 16, 128
_LEARNING_RATE = 1e-4
_LARGEST_WEIGHT_DIFFERENCE = 1e-3
_SPREAD, _GATHERED, _DENSE = "*: expert", "*: data | zero=3", "dense, *: data"


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of shape (tokens, width), as ``x``."""
        order = chosen.flatten().argsort()
        counts = torch.histc(chosen.flatten().float(), self.num_experts, min=0, max=self.num_experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // chosen.shape[1]]
        inner = F.gelu(torch._grouped_mm(rows, self.up, offs=ends))
        results = torch._grouped_mm(inner, self.down, offs=ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // chosen.shape[1], results)


class Mixture(nn.Module):
    """A router and experts behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(BEST)
        return x + self.experts(tokens, chosen, weights).view_as(x)


class Dense(nn.Module):
    """The products that a token of ``Mixture`` does."""

    def __init__(self) -> None:
        super().__init__()
        inner = BEST * INNER
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Training:
    """A model and AdamW; call it for one step on the same batch."""

    def __init__(self, layer: type[nn.Module], strategy: str) -> None:
        torch.manual_seed(0)
        self.model = wb.parallelize(nn.Sequential(*(layer() for _ in range(LAYERS))), strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        self.batch = torch.randn((BATCH, LENGTH, WIDTH), generator=torch.Generator().manual_seed(1))

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def check_equal(one: nn.Module, other: nn.Module) -> None:
    """Raise unless two models have trained alike."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    wholes = ((a.full_tensor(), b.full_tensor()) for a, b in pairs)  # type: ignore[attr-defined]
    difference = max(float((a - b).detach().abs().max()) for a, b in wholes)
    if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
        raise AssertionError(f"the two did not train alike: weights differ by {difference:.1e}")


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    wb.init()
    trainings = {
        _SPREAD: Training(Mixture, _SPREAD),
        _GATHERED: Training(Mixture, _GATHERED),
        _DENSE: Training(Dense, "*: data"),
    }
    time_s = medians(interleave(trainings, rounds, calls, around=together))
    check_equal(trainings[_SPREAD].model, trainings[_GATHERED].model)
    if wb.rank() == 0:
        how = (
            f"{LAYERS} layers of {EXPERTS} experts {WIDTH} x {INNER} x {WIDTH}, best {BEST}, {BATCH} x {LENGTH} "
            f"tokens; AdamW, {NUM_PROCESSES} processes over {wb.init().transport_name}, one thread each; medians of "
            f"{rounds} rounds of {calls} steps."
        )
        body = f"{how}\n\n{table(['', 'step, ms'], [[name, f'{time * 1e3:.1f}'] for name, time in time_s.items()])}"
        judged = [
            side_by_side("experts spread", time_s[_SPREAD], "gathered", time_s[_GATHERED], Target(3.0, at_least=True)),
            side_by_side("step of a mixture", time_s[_SPREAD], "dense", time_s[_DENSE], Target(1.1)),
        ]
        publish(f"experts-{NUM_PROCESSES}", f"Experts spread over {NUM_PROCESSES} processes", body, judged)
    dist.barrier()


def main() -> int:
    """Launch, or work if this process has been launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=2, help="steps per round")
    args = parser.parse_args()
    if not is_launched():
        return launch("benchmarks.experts", NUM_PROCESSES, sys.argv[1:])
    work(args.rounds, args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
