"""A training step under the strategy ``data`` against torch's DistributedDataParallel, on the same 2 and 4 processes.

    python -m benchmarks.data_parallel

The digits network, a convolutional one on the same images, a GPT of 8 blocks of width 256 on 8 x 64 words; on two
processes, residual networks on 32 images of 32 x 32, with and without batch norm. Both train from the same weights on
the same batches, with one thread per process, and must agree. With batch norm they cannot: DistributedDataParallel's
sees the samples of one process, ours all of them (torch's SyncBatchNorm has no CPU kernels), and must agree with one
device. Each DistributedDataParallel process is given its part of the batch, the workbench cuts the whole one itself.
Both sides have SGD as a user gets it: torch's loops over the parameters, the workbench's goes through memory once
(`training/gradients/fused_steps`). Processes are started anew several times: launches differ by more than rounds of one
do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from benchmarks.harness import by_name, hand_in, interleave, launch_often_or_work, medians, together
from benchmarks.reporting import Target, over_launches, publish, ratios_side_by_side, table
from benchmarks.resnet import no_norm, resnet18, resnet_small
from workbench.cli.demo import digits, make_mlp

NUM_PROCESSES = (2, 4)
BATCH_SIZE = 128
NUM_WORDS, NUM_TEXTS, LENGTH = 256, 8, 64
NUM_PHOTOS, PHOTO_SIZE = 32, 32
_LARGEST_WEIGHT_DIFFERENCE = 1e-5
"""After so many steps. Over hundreds, a network of convolutions grows rounding (more than 2 terms of a sum are added in
another order) to the size of its weights: both are as far from a run in 64 bits as from each other then."""
_OURS, _THEIRS = "workbench, data", "DistributedDataParallel"
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its batches and its loss, and how often faster than DistributedDataParallel its step should be.

    Attributes:
        share_of_rounds: how many of the rounds it takes.
        learning_rate: of SGD with momentum.
        checked_steps: after so many the weights are compared.
        has_batch_norm: ours then is compared with one device, in 64 bits: in 32 its gradients are those of the order
            in which sums are made.
        num_processes: on how many it is measured.
    """

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[], Iterator[Batch]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    target: Target
    share_of_rounds: float = 1.0
    learning_rate: float = 0.1
    checked_steps: int = 20
    has_batch_norm: bool = False
    num_processes: tuple[int, ...] = NUM_PROCESSES


def make_cnn() -> nn.Module:
    """Two convolutions and two linear layers on images of 8 x 8."""
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, *head)


def images() -> Iterator[Batch]:
    """Digits and their classes, drawn in the same order by everybody."""
    pixels, classes = digits()
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(pixels), (BATCH_SIZE,), generator=generator)
        yield pixels[chosen], classes[chosen]


def texts() -> Iterator[Batch]:
    """Random words and the ones that follow."""
    generator = torch.Generator().manual_seed(0)
    while True:
        words = torch.randint(NUM_WORDS, (NUM_TEXTS, LENGTH + 1), generator=generator)
        yield words[:, :-1], words[:, 1:]


def photos() -> Iterator[Batch]:
    """Random images in three colours and classes for them."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(8 * NUM_PHOTOS, 3, PHOTO_SIZE, PHOTO_SIZE, generator=generator)
    classes = torch.randint(10, (len(pixels),), generator=generator)
    while True:
        yield from zip(pixels.split(NUM_PHOTOS), classes.split(NUM_PHOTOS), strict=True)


def residual(name: str, make: Callable[..., nn.Module], share_of_rounds: float) -> tuple[Task, Task]:
    """A residual network without norms and with batch norm, on two processes."""
    plain = Task(
        f"{name} without norms", lambda: make(no_norm), photos, F.cross_entropy, Target(1.0, at_least=True),
        share_of_rounds, learning_rate=0.01, checked_steps=3, num_processes=(2,),
    )  # fmt: skip
    with_norms = replace(
        plain, name=f"{name}, batch norm", make=make, target=Target(0.9, at_least=True), has_batch_norm=True
    )
    return plain, with_norms


TASKS = (
    Task("digits, perceptron", make_mlp, images, F.cross_entropy, Target(1.05, at_least=True)),
    Task("digits, convolutions", make_cnn, images, F.cross_entropy, Target(1.05, at_least=True)),
    Task(
        "GPT 8 x 256, 8 x 64 tokens",
        lambda: GPT(256, 8, NUM_WORDS, LENGTH),
        texts,
        next_word_loss,
        Target(1.05, at_least=True),
        share_of_rounds=0.3,
    ),
    *residual("ResNet, 16 to 64 channels", resnet_small, 0.5),
    *residual("ResNet-18", resnet18, 0.1),
)


class Training:
    """A model, its optimizer and a fixed sequence of batches; call it for one step."""

    def __init__(
        self,
        task: Task,
        wrap: Callable[[nn.Module], nn.Module],
        part: Callable[[int], slice] = lambda size: slice(None),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.loss, self.part = wrap(task.make().to(dtype)), task.loss, part
        self.batches = ((x.to(dtype) if x.is_floating_point() else x, y) for x, y in task.batches())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=task.learning_rate, momentum=0.9)

    def __call__(self) -> None:
        inputs, targets = next(self.batches)
        mine = self.part(len(inputs))
        self.optimizer.zero_grad()
        self.loss(self.model(inputs[mine]), targets[mine]).backward()
        self.optimizer.step()


def spread(model: nn.Module) -> nn.Module:
    """The model under the strategy that is measured."""
    return wb.parallelize(model, "*: data")


def make_trainings(task: Task) -> dict[str, Training]:
    """The two ways to train; the world must have been joined."""

    def mine(size: int) -> slice:
        share = size // wb.world_size()
        return slice(wb.rank() * share, (wb.rank() + 1) * share)

    return {
        _THEIRS: Training(task, DistributedDataParallel, mine),
        _OURS: Training(task, spread),
    }


def largest_difference(ours: torch.nn.Module, theirs: torch.nn.Module) -> float:
    """Between the weights of a parallelized and a plain or wrapped model, the largest absolute difference."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((full(a) - b.detach()).abs().max()) for a, b in pairs)


def full(parameter: torch.Tensor) -> torch.Tensor:
    """The logical value of a global tensor."""
    assert isinstance(parameter, wb.GlobalTensor)
    return parameter.full_tensor().detach()


def compare(task: Task, rounds: int, calls: int) -> dict[str, float]:
    """Seconds of a step of each way to train, which must train alike."""
    trainings = make_trainings(task)
    rounds = max(1, round(rounds * task.share_of_rounds))
    if task.has_batch_norm:
        ours, theirs = (Training(task, wrap, dtype=torch.float64) for wrap in (spread, lambda model: model))
    else:
        ours, theirs = trainings[_OURS], trainings[_THEIRS]
    for _ in range(task.checked_steps):
        ours()
        theirs()
    difference = largest_difference(ours.model, theirs.model)
    if not difference <= _LARGEST_WEIGHT_DIFFERENCE:
        raise AssertionError(f"{task.name}: the two did not train alike: weights differ by {difference:.1e}")
    return medians(interleave(trainings, rounds, calls, around=together))


def tasks_on(num: int) -> list[Task]:
    """What is measured on so many processes."""
    return [task for task in TASKS if num in task.num_processes]


def work(rounds: int, calls: int) -> None:
    """What each of the processes of a launch runs; the first one hands in."""
    wb.init()
    found = {task.name: compare(task, rounds, calls) for task in tasks_on(wb.world_size())}
    if wb.rank() == 0:
        hand_in(found)
    torch.distributed.barrier()


def report(launches: Sequence[Mapping[str, Mapping[str, float]]], num: int, rounds: int, calls: int) -> None:
    """Print and keep the table of what launches on ``num`` processes have handed in."""
    rows, judged = [], []
    for task in tasks_on(num):
        time_s = by_name([launch[task.name] for launch in launches])
        num_samples = len(next(task.batches())[0])
        for name, times in time_s.items():
            ratios = ratios_side_by_side(times, time_s[_THEIRS])
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            step_s = median(times)
            rows.append([f"{task.name}: {name}", f"{step_s * 1e3:.2f}", f"{num_samples / step_s:.0f}", span])
        judged.append(over_launches(task.name, time_s[_OURS], "DDP", time_s[_THEIRS], task.target))
    how = (
        f"SGD with momentum on {num} processes, one thread each; batches of {BATCH_SIZE} digits, {NUM_TEXTS} x "
        f"{LENGTH} tokens or {NUM_PHOTOS} images of {PHOTO_SIZE} x {PHOTO_SIZE}. {len(launches)} launches, in each "
        f"medians of up to {rounds} rounds of {calls} steps, in turns; below are medians over the launches, of times "
        "and of their ratios to DistributedDataParallel's in the same launch. The weights of both agree after some "
        f"steps within {_LARGEST_WEIGHT_DIFFERENCE:.0e}; of networks with batch norm, ours with one device's, in 64 "
        "bits: ours is over the whole batch, DistributedDataParallel's over the samples of each process."
    )
    body = f"{how}\n\n{table(['', 'step, ms', 'samples/s', 'speed / DDP, over launches'], rows)}"
    publish(f"data-parallel-{num}", f"Data parallel against torch, {num} processes", body, judged)


if __name__ == "__main__":
    sys.exit(launch_often_or_work("benchmarks.data_parallel", __doc__, NUM_PROCESSES, work, report, rounds=20, calls=5))
