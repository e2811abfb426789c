"""A training step under the strategy ``data`` against torch's DistributedDataParallel, on the same two processes.

    python -m benchmarks.data_parallel

Both train the digits network from the same weights on the same batches, with gloo and one thread per process; at the
end their weights must agree. Each process of DistributedDataParallel is given its half of the batch, the workbench
cuts the whole one itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from benchmarks.harness import Target, interleave, is_launched, launch, medians, publish, table, together
from workbench.cli.demo import digits, make_mlp

NUM_PROCESSES = 2
BATCH_SIZE = 128
TARGET = Target(0.9, at_least=True)
_LARGEST_WEIGHT_DIFFERENCE = 1e-4


class Training:
    """A model, its optimizer and a fixed sequence of batches; call it for one step."""

    def __init__(self, wrap: Callable[[torch.nn.Module], torch.nn.Module], part: slice) -> None:
        torch.manual_seed(0)
        self.model = wrap(make_mlp())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.images, self.classes = digits()
        self.part = part
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self) -> None:
        chosen = torch.randint(len(self.images), (BATCH_SIZE,), generator=self.generator)[self.part]
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.images[chosen]), self.classes[chosen]).backward()
        self.optimizer.step()


def make_trainings() -> dict[str, Training]:
    """The two ways to train; the world must have been joined."""
    half = BATCH_SIZE // NUM_PROCESSES
    mine = slice(wb.rank() * half, (wb.rank() + 1) * half)
    return {
        "DistributedDataParallel": Training(DistributedDataParallel, mine),
        "workbench, data": Training(lambda model: wb.parallelize(model, "*: data"), slice(None)),
    }


def largest_difference(ours: torch.nn.Module, theirs: torch.nn.Module) -> float:
    """Between the weights of a parallelized and a wrapped model, the largest absolute difference."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((full(a) - b.detach()).abs().max()) for a, b in pairs)


def full(parameter: torch.Tensor) -> torch.Tensor:
    """The logical value of a global tensor."""
    assert isinstance(parameter, wb.GlobalTensor)
    return parameter.full_tensor().detach()


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    wb.init()
    trainings = make_trainings()
    theirs, ours = trainings
    time_s = medians(interleave(trainings, rounds, calls, around=together))
    difference = largest_difference(trainings[ours].model, trainings[theirs].model)
    if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
        raise AssertionError(f"the two did not train alike: weights differ by {difference:.1e}")
    if wb.rank() == 0:
        rows = [[name, f"{time * 1e3:.2f}", f"{BATCH_SIZE / time:.0f}"] for name, time in time_s.items()]
        how = (
            f"The digits network (batch {BATCH_SIZE}) on {NUM_PROCESSES} processes, gloo, one thread each; medians of "
            f"{rounds} rounds of {calls} steps; afterwards the weights differ by {difference:.0e}."
        )
        body = f"{how}\n\n{table(['', 'step, ms', 'samples/s'], rows)}"
        publish("data-parallel", "Data parallel against torch", body, time_s[theirs] / time_s[ours], TARGET)
    torch.distributed.barrier()


def main() -> int:
    """Launch, or work if this process has been launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=5, help="steps per round")
    args = parser.parse_args()
    if not is_launched():
        return launch("benchmarks.data_parallel", NUM_PROCESSES, sys.argv[1:])
    work(args.rounds, args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
