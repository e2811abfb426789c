"""Measurements of this machine, on all ranks of the world at once: they share cores, caches, memory and links.

The result is rows of this rank's times; ``cost`` computes constants from them. A barrier separates measurements, so
that no rank computes while others wait, unless the measurement asks for it.
"""

from __future__ import annotations

import itertools
import math
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from workbench.core.boxing_path import BoxingPath, find_boxing_path
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Sbp, broadcast, partial_sum, split
from workbench.tensors import default_generator
from workbench.tensors.boxing.box import box_to
from workbench.tensors.global_tensor import local_torch, new_placeholder, spec_of, wrap
from workbench.tensors.program_state import undrawn
from workbench.tensors.simulated import Simulated, world_of_one
from workbench.tensors.world import World, barrier, current
from workbench.training.costs.stopwatch import Stopwatch
from workbench.training.costs.times import DTYPES, ExchangeTime, FunctionTime, ProductTime, RankTimes
from workbench.training.costs.work_counter import WorkCounter
from workbench.training.offload.host_memory import host_memory
from workbench.training.parallel import parallelize
from workbench.training.pipelining.step import forward_backward

PRODUCTS = ((512, 32, 512), (512, 64, 512), (256, 128, 512), (256, 256, 512), (512, 512, 512), (256, 1024, 512),
            (64, 256, 1024), (1024, 64, 256), (16, 1024, 1024), (32, 1536, 1536), (128, 1024, 1024))  # fmt: skip
"""(rows, inner, columns) of the matrix products that are timed. Few rows show the time of reading the weights."""
WEIGHT_BYTES = 2**26
"""Bytes of the weights, and of the results, that products use in turn. In a step no cache holds them either."""
EXCHANGE_BYTES = (2**12, 2**18, 2**22)
"""Bytes of the logical tensors whose boxings are timed."""
FUNCTION_BYTES, _FEW_TIMES = 2**25, 3
"""Of the activations that functions take by turns, all forward and then all backward, since a step finds few of its own
in a cache; that is so often in itself that a few times are enough."""
COPY_BYTES = 2**26
ROWS = {"cpu": 512, "cuda": 16384}
"""Of the activations on which functions are timed, each 512 wide."""
NUM_WORDS = 2048
"""Losses take time if classes are words: rows of scores are much wider than activations."""
_MOST_BUCKETS = 64
_MOST_BYTES = 10**12
"""Means "of any size"."""
_WIDTH, _DEPTHS, _NUM_SAMPLES, _LENGTH = 8, (1, 6), 4, 4


def measure(spans: Sequence[int] = ()) -> RankTimes:
    """Time products, functions, copies, overheads and boxings. All ranks of the world call it; it takes seconds. Random
    numbers then go on as if it had not been called: functions draw some, until a time has passed.

    Args:
        spans: sizes of groups of neighbouring ranks within which boxings are timed, each a divisor of the number of
            ranks; by default its doublings from 2 on, and all ranks.
    """
    world = current()
    with undrawn(world.device):
        barrier()  # simulated ranks share a generator
        return _measured(world, spans)


def _measured(world: World, spans: Sequence[int]) -> RankTimes:
    """See ``measure``."""
    host = socket.gethostname()
    watch = Stopwatch(world, host)
    products = tuple(_time_products(watch))
    functions = tuple(_time_function(watch, *row) for row in _functions(world.device))
    copy_bytes_per_s = _time_copy(watch)
    op_s, step_s = _time_overhead(watch)
    return RankTimes(
        host,
        _memory_bytes(world),
        world.transport_name,
        _device_name(world),
        products,
        functions,
        tuple(_time_exchanges(watch, spans or default_spans(world.world_size))),
        copy_bytes_per_s,
        float(min(world.transport.cost.one_shot_bytes, _MOST_BYTES)),
        watch.crowding,
        op_s,
        step_s,
        time_offload(watch),
        {"torch": torch.__version__},
    )


def default_spans(num_ranks: int) -> list[int]:
    """2, 4, 8 and so on if they divide the number of ranks, and all ranks.

    >>> default_spans(6)
    [2, 6]
    """
    spans = [2**power for power in range(1, num_ranks.bit_length()) if num_ranks % 2**power == 0]
    return sorted({*spans, num_ranks} - {1})


def _dtypes(world: World) -> list[str]:
    """The dtypes to measure. A CPU without products in half precision emulates them, too slowly for training."""
    return list(DTYPES) if world.device.type == "cuda" else ["fp32", "bf16"]


def _time_products(watch: Stopwatch) -> Iterator[ProductTime]:
    """Time products as in a step: each operand was last used many operands ago, and results are kept.

    One of a layer's three products adds a bias.
    """
    device = watch.world.device
    scale = 8 if device.type == "cuda" else 1
    largest = (
        scale * scale * 4 * max(rows * inner + inner * columns + rows * columns for rows, inner, columns in PRODUCTS)
    )
    read, written = (torch.ones(max(WEIGHT_BYTES, largest) // 4, device=device) for _ in range(2))
    for name in _dtypes(watch.world):
        for rows, inner, columns in PRODUCTS:
            rows, columns = scale * rows, scale * columns
            xs, weights = _cycle_matrices(read, name, rows, inner), _cycle_matrices(read, name, columns, inner)
            results, bias = _cycle_matrices(written, name, rows, columns), read.view(DTYPES[name])[:columns]
            layer = partial(_multiply, xs, weights, results, bias)
            yield ProductTime(name, rows, inner, columns, watch.own_s(layer) / 3)


def _cycle_matrices(memory: torch.Tensor, dtype: str, rows: int, columns: int) -> Iterator[torch.Tensor]:
    """Cycle through matrices that lie side by side in memory."""
    of_dtype = memory.view(DTYPES[dtype])
    number = of_dtype.numel() // (rows * columns)
    return itertools.cycle(of_dtype[: number * rows * columns].view(number, rows, columns))


def _multiply(
    xs: Iterator[torch.Tensor], weights: Iterator[torch.Tensor], results: Iterator[torch.Tensor], bias: torch.Tensor
) -> None:
    torch.addmm(bias, next(xs), next(weights).t(), out=next(results))
    for _ in range(2):
        torch.mm(next(xs), next(weights).t(), out=next(results))


def _time_copy(watch: Stopwatch) -> float:
    source = torch.ones(COPY_BYTES // 4, device=watch.world.device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / watch.own_s(lambda: target.copy_(source))


def _functions(device: torch.device) -> Iterator[tuple[str, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Functions of models besides products with weights, by torch's names, on activations of a usual size."""
    rows = ROWS[device.type]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    def weight(*shape: int) -> torch.Tensor:
        return nn.Parameter(torch.randn(*shape, device=device))

    x, classes = tensor(rows, 512), torch.arange(rows, device=device) % 512
    scores = tensor(rows, NUM_WORDS)
    heads = [tensor(rows // 64, 8, 64, 64) for _ in range(3)]
    image, small = tensor(rows // 16, 16, 28, 28), tensor(rows // 16, 16, 28, 28)
    for name, function in (("relu", torch.relu), ("gelu", F.gelu), ("silu", F.silu), ("tanh", torch.tanh)):
        yield name, function, (x,)
    yield "add", torch.add, (x, tensor(rows, 512))
    yield "mul", torch.mul, (x, tensor(rows, 512))
    yield "softmax", lambda x: torch.softmax(x, -1), (x,)
    yield "layer_norm", lambda x, w, b: F.layer_norm(x, (512,), w, b), (x, weight(512), weight(512))
    yield "cross_entropy", lambda x: F.cross_entropy(x, classes), (scores,)
    yield "embedding", lambda w: F.embedding(classes, w), (weight(rows, 512),)
    yield "dropout", lambda x: F.dropout(x, 0.1), (x,)
    yield "max_pool2d", lambda x: F.max_pool2d(x, 2), (small,)
    yield "batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (image, weight(16), weight(16))
    yield "conv2d", lambda x, w: F.conv2d(x, w, padding=1), (image, weight(32, 16, 3, 3))
    yield "scaled_dot_product_attention", _attend, (heads[0], heads[1], heads[2])
    yield "matmul", torch.matmul, (heads[0], heads[1])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _time_function(
    watch: Stopwatch, name: str, function: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...]
) -> FunctionTime:
    weights = [operand for operand in operands if isinstance(operand, nn.Parameter)]
    owners = {weight.untyped_storage()._cdata: ["weight"] for weight in weights}
    counter = WorkCounter(owners, 1, [tuple(weight.shape) for weight in weights])
    with counter.watch({}):
        counter.go_backward(function(*operands))
    works = [work for work in counter.works() if work.name == name]
    moved = sum(work.moved_bytes + (work.backward_bytes or 0.0) for work in works)
    size = sum(operand.numel() * operand.element_size() for operand in operands)
    rows = [[_copy(operand) for operand in operands] for _ in range(max(1, FUNCTION_BYTES // size))]
    grad = torch.ones_like(function(*operands))

    def there_and_back() -> None:
        results = [(function(*row), row) for row in rows]
        for result, row in reversed(results):
            torch.autograd.grad(result, row, grad)

    time_s = watch.own_s(there_and_back, _FEW_TIMES) / len(rows)
    return FunctionTime(name, sum(work.flops for work in works), moved, time_s)


def _copy(operand: torch.Tensor) -> torch.Tensor:
    return operand if isinstance(operand, nn.Parameter) else operand.detach().clone().requires_grad_()


KINDS: dict[str, tuple[Sbp, Sbp]] = {
    "all-gather": (split(0), broadcast),
    "reduce-scatter": (partial_sum, split(0)),
    "all-to-all": (split(0), split(1)),
    "all-reduce": (partial_sum, broadcast),
}
"""Boxings on one placement by kind, as (from, to)."""


def _time_exchanges(watch: Stopwatch, spans: Sequence[int]) -> Iterator[ExchangeTime]:
    world, rows = watch.world, ROWS[watch.world.device.type]
    x, weight = (torch.ones(size, 512, device=world.device) for size in (rows, 512))
    work = partial(F.linear, x, weight)

    def timed(kind: str, span: int, size_bytes: float, exchange: Callable[[], Any]) -> ExchangeTime:
        return ExchangeTime(kind, span, size_bytes, watch.together_s(exchange, work))

    for span in spans:
        first = world.rank // span * span
        group = list(range(first, first + span))
        for size_bytes in EXCHANGE_BYTES:
            shape = (8 * span, max(8 * span, size_bytes // 4 // (8 * span)))
            for kind, source, target in _boxings(world.device.type, group):
                yield timed(kind, span, *_boxing(world, source, target, shape))
            yield timed("gradients", span, *_sum(world, group, math.prod(shape)))


def _boxings(device_type: str, group: list[int]) -> Iterator[tuple[str, Layout, Layout]]:
    """For each kind of boxing, its source and target layouts."""
    placement = Placement.of(device_type, group)
    for kind, (source, target) in KINDS.items():
        yield kind, Layout(placement, (source,)), Layout(placement, (target,))
    if len(group) % 2 == 0:
        parts = [Placement.of(device_type, half) for half in (group[: len(group) // 2], group[len(group) // 2 :])]
        yield "send", Layout(parts[0], (split(0),)), Layout(parts[1], (split(0),))


def _boxing(world: World, source: Layout, target: Layout, shape: Any) -> tuple[float, Callable[[], Any]]:
    """The bytes that the busiest rank sends or receives, and a function that boxes as a model's forward does."""
    before, after = (spec_of(world, layout, shape) for layout in (source, target))
    plan = find_boxing_path(source, target, before.shape, 4, world.transport.cost)
    steps = plan.steps if isinstance(plan, BoxingPath) else (plan,)
    size = sum(max(*step.bytes_sent.values(), *step.bytes_received.values()) for step in steps)
    with local_torch():
        make = partial(new_placeholder, shape) if before.is_placeholder else partial(torch.zeros, before.local_shape)
        local = make(dtype=torch.float32, device=world.device).requires_grad_()
    return size, partial(box_to, wrap(local, before), after, "calibration")


def _sum(world: World, group: list[int], numel: int) -> tuple[float, Callable[[], Any]]:
    """Bytes and function of a sum of gradient buckets, which no cache holds."""
    number = max(1, WEIGHT_BYTES // 4 // (4 * numel))
    buckets = itertools.cycle([torch.ones(numel, device=world.device)] for _ in range(min(number, _MOST_BUCKETS)))

    def reduce() -> None:
        tag = world.context.next_sum_tag(tuple(group))
        world.transport.start_all_reduce(next(buckets), tuple(group), "sum", tag, "calibration of sums")()

    return 2 * (len(group) - 1) * numel * 4 / len(group), reduce


def _time_overhead(watch: Stopwatch) -> tuple[float, float]:
    """Seconds of a step per function, and seconds besides, of a transformer with very little to compute.

    Every rank trains its own, without exchanges.
    """
    alone = world_of_one(watch.world.device)
    alone.context.generator = torch.Generator().manual_seed(0)
    steps = [_tiny_step(alone, depth) for depth in _DEPTHS]
    with Simulated(alone):
        for step in steps:
            step()
        rounds = [[watch.repeated_s(step) for step in steps] for _ in range(3)]
    times = [median(column) for column in zip(*rounds, strict=True)]
    block_s = max(times[1] - times[0], 0.0) / (_DEPTHS[1] - _DEPTHS[0])
    return block_s / _STARTS_PER_BLOCK, max(times[0] - _DEPTHS[0] * block_s, 0.0)


class _Block(nn.Module):
    """A typical block: norms, linear layers, attention, an activation function, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(_attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


_STARTS_PER_BLOCK = (2 + 4 + 1 + 1 + 2) + (2 + 2 * 4 + 2 + 1 + 1)
"""Functions as costs count them. Forward: norms, products, attention, GELU, sums; backward: norms, two products for
one, two halves of attention, GELU, the slices of queries, keys and values put together."""


def _tiny_step(world: World, depth: int) -> Callable[[], Any]:
    with Simulated(world), default_generator.restored():
        model = parallelize(nn.Sequential(*(_Block() for _ in range(depth))), "*: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    inputs = torch.ones(_NUM_SAMPLES, _LENGTH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        forward_backward(model, F.mse_loss, inputs, inputs)
        optimizer.step()

    return step


def _memory_bytes(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    return float(psutil.virtual_memory().total)


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return str(torch.cuda.get_device_name(world.device))
    return f"{platform.machine()} CPU"


_BYTES = 2**26


def time_offload(watch: Stopwatch) -> float:
    """Bytes per second. Of a CPU: those that a change of pages that were given back takes longer than of others."""
    device = watch.world.device
    memory = host_memory(device)
    there = memory.allocate(_BYTES)
    here = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    if device.type != "cpu":

        def copy() -> None:
            here.copy_(there, non_blocking=True)
            there.copy_(here, non_blocking=True)

        return 2 * _BYTES / watch.own_s(copy)

    def change() -> None:
        memory.will_read(there)
        there.add_(1)
        memory.release(there)

    return 2 * _BYTES / max(watch.own_s(change) - watch.own_s(lambda: here.add_(1)), 1e-6)
