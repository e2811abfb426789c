"""A training step of a mixture of experts whose experts are spread over 2 processes.

    python -m benchmarks.experts

4 layers, each with a router; every token takes two experts in turn, so that all have as many. AdamW is fused: each
process updates twice the weights of the dense model, which in torch's other forms takes longer than tokens on their
way. With many experts and few tokens, experts spread (an all-to-all of tokens) are compared with all weights gathered
for each use, by torch (FSDP2) and by ZeRO 3, which hold as much on each process; the three start from the same weights,
which must agree at the end. All update as many weights, so their gradients alone are compared, too. With few experts
and many tokens, of two widths, they are compared with a dense model, data parallel, whose tokens do the same products,
and both with themselves in one process, on its share of the tokens: what a mixture costs before it is spread. What it
does beside the products (to sort tokens, to weigh results) grows with the width, the products with its square.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import workbench as wb
from benchmarks.harness import interleave, launch_or_work, medians, together
from benchmarks.reporting import Target, publish, side_by_side, table

NUM_PROCESSES = 2
BEST, LAYERS = 2, 4
NARROW, WIDE = (256, 512), (768, 2048)
"""Width of a token, and of an expert inside."""
MANY_EXPERTS, FEW_TOKENS = (32, 128), (4, 64)
FEW_EXPERTS, MANY_TOKENS = 8, (16, 128)
_LEARNING_RATE = 1e-4
_LARGEST_WEIGHT_DIFFERENCE = 1e-3
_SPREAD, _GATHERED, _FSDP, _DENSE = "*: expert", "*: data | zero=3", "FSDP2", "dense, *: data"
_BESIDE = {_FSDP: "FSDP2", _GATHERED: "gathered"}
"""What experts spread are held against."""
_ONE_MIXTURE, _ONE_DENSE = "one process", "dense, one process"


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)

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

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = Experts(experts, width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        tokens = self.norm(x).flatten(0, 1)
        chosen = torch.arange(BEST * len(tokens)).view(-1, BEST) % self.router.out_features
        weights = self.router(tokens).softmax(-1).gather(1, chosen)
        return x + self.experts(tokens, chosen, weights).view_as(x)


class Dense(nn.Module):
    """The products that a token of ``Mixture`` does."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, BEST * inner), nn.Linear(BEST * inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, length, width), as ``x``."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Training:
    """A model of layers and AdamW; call it for one step on the same batch of tokens.

    Args:
        strategy: None for one process; "FSDP2" for torch's, layer by layer.
        updates: whether a step has an update, or ends with its gradients.
    """

    def __init__(
        self, layer: Callable[[], nn.Module], strategy: str | None, tokens: tuple[int, int], updates: bool = True
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer() for _ in range(LAYERS)))
        width = model[0].get_parameter("norm.weight").numel()
        self.batch = torch.randn((*tokens, width), generator=torch.Generator().manual_seed(1))
        if strategy == _FSDP:
            self.batch = self.batch.chunk(dist.get_world_size())[dist.get_rank()]
            for part in (*model, model):
                fully_shard(part)
        self.model = model if strategy in (None, _FSDP) else wb.parallelize(model, strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=True)
        self.updates = updates

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        if self.updates:
            self.optimizer.step()


def check_equal(one: nn.Module, other: nn.Module) -> None:
    """Raise unless two models have trained alike; all processes gather their weights for it."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    wholes = ((a.full_tensor(), b.full_tensor()) for a, b in pairs)  # type: ignore[attr-defined]
    difference = max(float((a - b).detach().abs().max()) for a, b in wholes)
    if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
        raise AssertionError(f"the two did not train alike: weights differ by {difference:.1e}")


def beside_gathered(experts: int, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Seconds of a step with many experts, spread or gathered, and of its gradients alone."""
    size = f"{experts} experts, {FEW_TOKENS[0]} x {FEW_TOKENS[1]} tokens"
    found = dict[str, dict[str, float]]()
    for what, updates in ((size, True), (f"{size}, forward and backward", False)):
        layer = partial(Mixture, experts, *NARROW)
        mixtures = {name: Training(layer, name, FEW_TOKENS, updates) for name in (_SPREAD, *_BESIDE)}
        found[what] = medians(interleave(mixtures, rounds, calls, around=together))
        for name in _BESIDE if updates else ():
            check_equal(mixtures[_SPREAD].model, mixtures[name].model)
    return found


def beside_dense(sizes: tuple[int, int], rounds: int, calls: int) -> dict[str, float]:
    """Seconds of a step with few experts of these sizes, and of the dense model, on 2 processes and on one."""
    share = MANY_TOKENS[0] // NUM_PROCESSES, MANY_TOKENS[1]
    mixture, dense = partial(Mixture, FEW_EXPERTS, *sizes), partial(Dense, *sizes)
    trainings = {
        _SPREAD: Training(mixture, _SPREAD, MANY_TOKENS), _DENSE: Training(dense, "*: data", MANY_TOKENS),
        _ONE_MIXTURE: Training(mixture, None, share), _ONE_DENSE: Training(dense, None, share),
    }  # fmt: skip
    return medians(interleave(trainings, rounds, calls, around=together))


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    wb.init()
    found_s = dict[str, dict[str, float]]()
    for experts, number in zip(MANY_EXPERTS, (rounds, max(1, rounds // 4)), strict=True):
        found_s |= beside_gathered(experts, number, calls)
    few_tokens = list(found_s)
    few_rounds = {NARROW: rounds, WIDE: max(1, rounds // 4)}  # a step of wide experts takes seconds
    dense_s = {sizes: beside_dense(sizes, number, calls) for sizes, number in few_rounds.items()}
    if wb.rank() == 0:
        many_tokens = {
            sizes: f"{FEW_EXPERTS} experts of {sizes[0]} x {sizes[1]}, {MANY_TOKENS[0]} x {MANY_TOKENS[1]} tokens"
            for sizes in dense_s
        }
        found_s |= {many_tokens[sizes]: s for sizes, s in dense_s.items()}
        rows = [[f"{size}: {name}", f"{s * 1e3:.1f}"] for size, found in found_s.items() for name, s in found.items()]
        how = (
            f"{LAYERS} layers, whose tokens take {BEST} experts of {NARROW[0]} x {NARROW[1]} if nothing "
            f"else is said; fused AdamW, {NUM_PROCESSES} processes over {wb.init().transport_name}, one thread each; "
            f"medians of {rounds} rounds of {calls} steps; of wide and of {MANY_EXPERTS[-1]} experts "
            f"of {few_rounds[WIDE]} rounds."
        )
        faster = Target(3.0, at_least=True)
        judged = [
            side_by_side(size, found_s[size][_SPREAD], theirs, found_s[size][name], faster)
            for name, theirs in _BESIDE.items()
            for size in few_tokens
        ]
        for sizes, found in dense_s.items():
            beside_one = Target(1.1 * found[_ONE_MIXTURE] / found[_ONE_DENSE])
            for what, target in (("", Target(1.1)), (", 1.1 times one process", beside_one)):
                pair = found[_SPREAD], "dense", found[_DENSE]
                judged.append(side_by_side(many_tokens[sizes] + what, *pair, target))
        title = f"Experts spread over {NUM_PROCESSES} processes"
        publish(f"experts-{NUM_PROCESSES}", title, f"{how}\n\n{table(['', 'step, ms'], rows)}", judged)
    dist.barrier()


if __name__ == "__main__":
    sys.exit(launch_or_work("benchmarks.experts", __doc__, [NUM_PROCESSES], work, rounds=20, calls=2))
