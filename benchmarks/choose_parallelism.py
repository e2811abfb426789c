"""Data or model parallelism for one layer, by its shape: time of forward and backward, and the bytes that each moves.

    python -m benchmarks.choose_parallelism

A layer ``out = x @ w`` in the middle of a network, on two processes. Data parallel: rows of ``x`` are split, the weight
is whole, its gradient is summed. Model parallel: columns of ``w`` are split; ``x`` comes with split columns, as a model
parallel layer before this one leaves it, and is gathered, its gradient scattered. Both compute the gradients of ``x``
and ``w`` and as many products; they differ in what they move: twice the weight, or twice the input. So by bytes data
parallelism wins where there are more rows in a batch than columns in a weight. Convolutions are products of
(images x positions, channels x kernel) with (channels x kernel, channels).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import workbench as wb
from benchmarks.harness import Action, interleave, launch_or_work, medians, together
from benchmarks.reporting import Comparison, Target, publish, table
from workbench.tensors.world import current
from workbench.units import format_bytes

TITLE = "Data or model parallelism, by layer shape"
NUM_PROCESSES = 2
BYTE_RULE = Target(0.8, at_least=True)
CLEAR = 1.1
"""A side wins if it is so much faster; else it is a draw."""


@dataclass(frozen=True)
class Shape:
    """Rows of a batch, columns of the input, columns of the output, and what such a layer is found in."""

    batch: int
    inputs: int
    outputs: int
    what: str = ""

    def __str__(self) -> str:
        return f"{self.batch} x {self.inputs} x {self.outputs}"


SHAPES = (
    Shape(32768, 27, 32, "convolution, 3 channels to 32"),
    Shape(8192, 144, 64, "convolution, 16 channels to 64"),
    Shape(4096, 256, 256, "wide batch"),
    Shape(512, 512, 512, "as many rows as columns"),
    Shape(100, 784, 512, "perceptron, hidden"),
    Shape(100, 512, 10, "perceptron, output"),
    Shape(128, 1024, 1024, "fully connected"),
    Shape(64, 2048, 2048, "fully connected, large"),
    Shape(16, 4096, 4096, "fully connected, small batch"),
)


class Layer:
    """Both ways to split one layer; an action is a forward, a backward, and the gradients brought where they belong."""

    def __init__(self, shape: Shape) -> None:
        ranks = wb.placement(current().device.type, ranks=list(range(current().world_size)))
        wb.manual_seed(0)
        x = wb.randn(shape.batch, shape.inputs, placement=ranks, sbp="B")
        w = wb.randn(shape.inputs, shape.outputs, placement=ranks, sbp="B") / shape.inputs**0.5
        seed = wb.randn(shape.batch, shape.outputs, placement=ranks, sbp="B")
        self._data = [self._leaf(x, "S(0)"), self._leaf(w, "B"), seed.to_global(sbp="S(0)")]
        self._model = [self._leaf(x, "S(1)"), self._leaf(w, "S(1)"), seed.to_global(sbp="S(1)")]
        self.actions: dict[str, Action] = {"data": self.data, "model": self.model}

    @staticmethod
    def _leaf(tensor: wb.GlobalTensor, sbp: str) -> Any:
        return tensor.to_global(sbp=sbp).detach().clone().requires_grad_()

    def data(self) -> tuple[Any, ...]:
        """Result and gradients of x and w."""
        x, w, seed = self._data
        x.grad = w.grad = None
        out = x @ w
        out.backward(seed)
        return out, x.grad, w.grad.to_global(sbp="B")

    def model(self) -> tuple[Any, ...]:
        """Result and gradients of x and w."""
        x, w, seed = self._model
        x.grad = w.grad = None
        out = x.to_global(sbp="B") @ w
        out.backward(seed)
        return out, x.grad, w.grad

    def predicted(self) -> dict[str, int]:
        """Bytes that all ranks together will move, from the plans."""
        x, w = self._model[0], self._data[1]
        whole = x.layout_on_ranks.broadcast()
        there = wb.debug.boxing_plan(x.layout_on_ranks, whole, x.shape)
        back = wb.debug.boxing_plan(whole.dual(), x.layout_on_ranks, x.shape)
        gradient = wb.debug.boxing_plan(w.layout_on_ranks.dual(), w.layout_on_ranks, w.shape)
        return {"data": gradient.wire_bytes, "model": there.wire_bytes + back.wire_bytes}

    def check(self) -> dict[str, int]:
        """Both give the same numbers, and move what was predicted; returns the bytes."""
        found, moved = {}, {}
        for name, action in self.actions.items():
            with wb.debug.trace() as trace:
                found[name] = action()
            moved[name] = trace.wire_bytes
        if moved != self.predicted():
            raise AssertionError(f"moved {moved}, but the plans say {self.predicted()}")
        for a, b in zip(found["data"], found["model"], strict=True):  # type: ignore[call-overload]
            one, other = a.full_tensor(), b.full_tensor()
            if not one.allclose(other, rtol=1e-4, atol=1e-4):
                raise AssertionError(f"data and model parallelism differ by {(one - other).abs().max():.1e}")
        return moved


def winner(values: dict[str, float]) -> str:
    """The smaller one's name; ``"even"`` where they are close."""
    data, model = values["data"], values["model"]
    if max(data, model) < CLEAR * min(data, model):
        return "even"
    return "data" if data < model else "model"


def row(shape: Shape, moved: dict[str, int], time_s: dict[str, float]) -> list[str]:
    """A line of the table."""
    return [
        f"{shape} {shape.what}".rstrip(),
        *(format_bytes(moved[name]) for name in ("data", "model")),
        winner({name: float(value) for name, value in moved.items()}),
        *(f"{time_s[name] * 1e3:.2f}" for name in ("data", "model")),
        f"{time_s['model'] / time_s['data']:.2f}",
        winner(time_s),
    ]


HEADER = [
    "batch x in x out", "data moves", "model moves", "fewer bytes",
    "data, ms", "model, ms", "model / data", "faster",
]  # fmt: skip


def byte_rule(rows: Sequence[Sequence[str]]) -> Comparison:
    """Of the shapes whose bytes and times both differ clearly, how many are faster where fewer bytes move."""
    pairs = [(cells[3], cells[7]) for cells in rows if "even" not in (cells[3], cells[7])]
    right = sum(fewer == faster for fewer, faster in pairs)
    return Comparison(
        f"what moves fewer bytes is faster: {right} of {len(pairs)} shapes", right / len(pairs), BYTE_RULE
    )


def measure(shape: Shape, rounds: int, calls: int) -> list[str]:
    """The line of one shape."""
    layer = Layer(shape)
    moved = layer.check()
    return row(shape, moved, medians(interleave(layer.actions, rounds, calls, around=together)))


def work(rounds: int, calls: int) -> None:
    """What each of the processes runs; the first one prints."""
    wb.init()
    rows = [measure(shape, rounds, calls) for shape in SHAPES]
    if wb.rank() == 0:
        how = (
            f"Forward and backward of one layer, {NUM_PROCESSES} processes over {wb.init().transport_name}, one thread "
            f"each; medians of {rounds} rounds of {calls} calls in which the two take turns. Bytes are those of all "
            "ranks, planned and counted. An even pair differs by less than a tenth."
        )
        publish("choose-parallelism", TITLE, f"{how}\n\n{table(HEADER, rows)}", [byte_rule(rows)])
    dist.barrier()


if __name__ == "__main__":
    sys.exit(launch_or_work("benchmarks.choose_parallelism", __doc__, [NUM_PROCESSES], work, rounds=15, calls=2))
