"""What this machine can do, measured on all ranks of the world at once: they share cores, caches, memory and links.

Plain rows of times come out, of this rank; what constants follow from them is arithmetic elsewhere. Between two
measurements the ranks meet, so that none of them computes while others wait, except where that is what is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Sbp, broadcast, partial_sum, split
from workbench.runtime.counting import Counter
from workbench.runtime.exchange import exchange_between
from workbench.runtime.parallel import parallelize
from workbench.runtime.pipelining.step import forward_backward
from workbench.runtime.tensor import local_torch, spec_of
from workbench.runtime.transport.threads import ThreadHub, ThreadTransport
from workbench.runtime.world import Simulated, World, barrier, current

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCTS = ((512, 32, 512), (512, 64, 512), (256, 128, 512), (256, 256, 512), (512, 512, 512), (256, 1024, 512),
            (64, 256, 1024), (1024, 64, 256))  # fmt: skip
"""(rows, inner, columns) of the matrix products that are timed."""
TYPICAL = 4
"""The product that is also timed on one rank while the others wait."""
EXCHANGE_BYTES = (2**12, 2**16, 2**19, 2**22)
"""Of the logical tensors whose boxings are timed."""
COPY_BYTES = 2**26
ROWS = {"cpu": 512, "cuda": 16384}
"""Of the activations on which functions are timed, each 512 wide."""
_NUM_TIMES = 7
_WINDOW_S = 0.06
"""How long work that needs no other rank is repeated: several time slices, so that those who share a core notice."""
_WIDTH, _DEPTHS, _NUM_SAMPLES = 8, (4, 20), 8


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Of ``rows x inner`` times ``inner x columns``."""

    dtype: str
    rows: int
    inner: int
    columns: int
    time_s: float

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True, slots=True)
class FunctionTime:
    """Of a function's forward and backward; flops and bytes are of its forward, counted as those of models are."""

    name: str
    flops: float
    moved_bytes: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """Of a boxing within groups of ``span`` neighbouring ranks, all groups at once.

    ``size_bytes`` is what its busiest rank sends or receives.
    """

    kind: str
    span: int
    size_bytes: float
    time_s: float


@dataclass(frozen=True)
class RankTimes:
    """All that one rank has measured.

    Attributes:
        host: its name in the network; ranks of one host share its memory.
        memory_bytes: of the host, or of this rank's GPU.
        copy_bytes_per_s: read and written together.
        together_s, alone_s: a product on all ranks at once, and on this one while the others wait.
        layer_s: a step's time for one linear layer and its activation, so small that it is all overhead.
        step_s: what a step takes besides its layers.
    """

    host: str
    memory_bytes: float
    transport: str
    device: str
    products: tuple[ProductTime, ...]
    functions: tuple[FunctionTime, ...]
    exchanges: tuple[ExchangeTime, ...]
    copy_bytes_per_s: float
    together_s: float
    alone_s: float
    layer_s: float
    step_s: float
    versions: dict[str, str] = field(default_factory=dict)


def measure(spans: Sequence[int] = ()) -> RankTimes:
    """Time products, functions, copies, overheads and boxings. All ranks of the world call it; it takes seconds.

    Args:
        spans: sizes of groups of neighbouring ranks within which boxings are timed, each a divisor of the number of
            ranks; by default its doublings from 2 on, and all ranks.
    """
    world = current()
    products = [_time_product(world, name, *size) for name in _dtypes(world) for size in PRODUCTS]
    layer_s, step_s = _time_overhead(world)
    return RankTimes(
        _host(),
        _memory_bytes(world),
        world.transport_name,
        _device_name(world),
        tuple(products),
        tuple(_time_function(world, *row) for row in _functions(world.device)),
        tuple(_time_exchanges(world, spans or default_spans(world.world_size))),
        _time_copy(world),
        products[TYPICAL].time_s,
        _time_alone(world),
        layer_s,
        step_s,
        {"torch": torch.__version__},
    )


def default_spans(num_ranks: int) -> list[int]:
    """2, 4, 8 and so on as far as they divide the ranks, and all ranks.

    >>> default_spans(6)
    [2, 6]
    """
    spans = [2**power for power in range(1, num_ranks.bit_length()) if num_ranks % 2**power == 0]
    return sorted({*spans, num_ranks} - {1})


def time_of(world: World, action: Callable[[], Any], num_times: int = _NUM_TIMES) -> float:
    """Median seconds of an action that all ranks begin together, after one that does not count."""
    action()
    barrier()
    return _median_time(world, action, num_times)


def steady_time_of(world: World, action: Callable[[], Any]) -> float:
    """Mean seconds of an action that all ranks begin together and repeat for as long as one another.

    A median would be that of a rank with a core to itself: most runs are shorter than a time slice.
    """
    action()
    barrier()
    return _mean_time(world, action)


def _mean_time(world: World, action: Callable[[], Any]) -> float:
    _wait_for_device(world)
    number, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < _WINDOW_S or number < _NUM_TIMES:
        action()
        _wait_for_device(world)
        number += 1
    return passed / number


def _median_time(world: World, action: Callable[[], Any], num_times: int) -> float:
    times = []
    for _ in range(num_times):
        _wait_for_device(world)
        started = time.perf_counter()
        action()
        _wait_for_device(world)
        times.append(time.perf_counter() - started)
    return median(times)


def _wait_for_device(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _dtypes(world: World) -> list[str]:
    """Half precision products on a CPU are emulated where it cannot do them; nobody trains with those."""
    return list(DTYPES) if world.device.type == "cuda" else ["fp32", "bf16"]


def _time_product(world: World, dtype: str, rows: int, inner: int, columns: int) -> ProductTime:
    scale = 8 if world.device.type == "cuda" else 1
    rows, columns = scale * rows, scale * columns
    a = torch.ones(rows, inner, dtype=DTYPES[dtype], device=world.device)
    b = torch.ones(inner, columns, dtype=DTYPES[dtype], device=world.device)
    return ProductTime(dtype, rows, inner, columns, steady_time_of(world, lambda: a @ b))


def _time_alone(world: World) -> float:
    """Of one product on this rank, while the others wait for it; the ranks take turns."""
    mine = 0.0
    _, rows, inner, columns = (0, *PRODUCTS[TYPICAL])
    scale = 8 if world.device.type == "cuda" else 1
    a, b = torch.ones(scale * rows, inner, device=world.device), torch.ones(inner, scale * columns, device=world.device)
    for rank in range(world.world_size):
        barrier()
        if rank == world.rank:
            mine = _mean_time(world, lambda: a @ b)
        barrier()
    return mine


def _time_copy(world: World) -> float:
    source = torch.ones(COPY_BYTES // 4, device=world.device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / steady_time_of(world, lambda: target.copy_(source))


def _functions(device: torch.device) -> Iterator[tuple[str, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]:
    """What models are made of besides products with weights, by torch's names, on activations of a usual size."""
    rows = ROWS[device.type]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    x, classes = tensor(rows, 512), torch.arange(rows, device=device) % 512
    heads = [tensor(rows // 64, 8, 64, 64) for _ in range(3)]
    image, small = tensor(rows // 16, 16, 28, 28), tensor(rows // 16, 16, 28, 28)
    for name, function in (("relu", torch.relu), ("gelu", F.gelu), ("silu", F.silu), ("tanh", torch.tanh)):
        yield name, function, (x,)
    yield "add", torch.add, (x, tensor(rows, 512))
    yield "mul", torch.mul, (x, tensor(rows, 512))
    yield "softmax", lambda x: torch.softmax(x, -1), (x,)
    yield "layer_norm", lambda x, w, b: F.layer_norm(x, (512,), w, b), (x, tensor(512), tensor(512))
    yield "cross_entropy", lambda x: F.cross_entropy(x, classes), (x,)
    yield "embedding", lambda w: F.embedding(classes, w), (x,)
    yield "dropout", lambda x: F.dropout(x, 0.1), (x,)
    yield "max_pool2d", lambda x: F.max_pool2d(x, 2), (small,)
    yield "batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (image, tensor(16), tensor(16))
    yield "conv2d", lambda x, w: F.conv2d(x, w, padding=1), (image, tensor(32, 16, 3, 3))
    yield "scaled_dot_product_attention", _attend, (heads[0], heads[1], heads[2])
    yield "matmul", torch.matmul, (heads[0], heads[1])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _time_function(
    world: World, name: str, function: Callable[..., torch.Tensor], operands: tuple[torch.Tensor, ...]
) -> FunctionTime:
    counter = Counter({}, 1)
    with counter.watch({}):
        result = function(*operands)
    works = [work for work in counter.works() if work.name == name]
    grad = torch.ones_like(result)
    forward_s = steady_time_of(world, lambda: function(*operands))
    both_s = steady_time_of(world, lambda: torch.autograd.grad(function(*operands), operands, grad))
    flops, moved = sum(work.flops for work in works), sum(work.moved_bytes for work in works)
    return FunctionTime(name, flops, moved, forward_s, max(both_s - forward_s, 0.0))


KINDS: dict[str, tuple[Sbp, Sbp]] = {
    "all-gather": (split(0), broadcast),
    "reduce-scatter": (partial_sum, split(0)),
    "all-to-all": (split(0), split(1)),
    "all-reduce": (partial_sum, broadcast),
}
"""Boxings on one placement by kind, as (from, to)."""


def _time_exchanges(world: World, spans: Sequence[int]) -> Iterator[ExchangeTime]:
    for span in spans:
        first = world.rank // span * span
        group = list(range(first, first + span))
        for size_bytes in EXCHANGE_BYTES:
            shape = (8 * span, max(8 * span, size_bytes // 4 // (8 * span)))
            for kind, (source, target) in KINDS.items():
                placement = Placement.of(world.device.type, group)
                yield _time_boxing(world, kind, span, Layout(placement, (source,)), Layout(placement, (target,)), shape)
            halves = [Placement.of(world.device.type, half) for half in (group[: span // 2], group[span // 2 :])]
            if span % 2 == 0:
                source_layout, target_layout = (Layout(half, (split(0),)) for half in halves)
                yield _time_boxing(world, "send", span, source_layout, target_layout, shape)
            yield _time_sum(world, group, math.prod(shape))


def _time_boxing(world: World, kind: str, span: int, source: Layout, target: Layout, shape: Any) -> ExchangeTime:
    exchange = exchange_between(spec_of(world, source, shape), spec_of(world, target, shape), torch.float32)
    plan = getattr(exchange, "plan", None)
    with local_torch():
        local = torch.zeros(spec_of(world, source, shape).local_shape, device=world.device)
        time_s = time_of(world, lambda: exchange.run(local, world.next_tag()))
    steps = [plan] if plan is not None else [e.plan for e in exchange._exchanges]  # type: ignore[union-attr]
    size = sum(max(*step.bytes_sent.values(), *step.bytes_received.values()) for step in steps)
    return ExchangeTime(kind, span, size, time_s)


def _time_sum(world: World, group: list[int], numel: int) -> ExchangeTime:
    """Of a bucket of gradients."""
    gradients = [torch.zeros(numel, device=world.device)]

    def reduce() -> None:
        tag = world.next_sum_tag(tuple(group))
        world.transport.start_all_reduce(gradients, tuple(group), "sum", tag, "calibration of sums")()

    size = 2 * (len(group) - 1) * numel * 4 / len(group)
    return ExchangeTime("gradients", len(group), size, time_of(world, reduce))


def _time_overhead(world: World) -> tuple[float, float]:
    """Seconds of a step per layer, and besides, of a network that has next to nothing to compute.

    Every rank trains one of its own: exchanges are measured elsewhere.
    """
    alone = World(0, 1, world.device, ThreadTransport(ThreadHub(1), 0))
    alone.generator = torch.Generator().manual_seed(0)
    steps = [_tiny_step(alone, depth) for depth in _DEPTHS]
    with Simulated(alone):
        for step in steps:
            step()
        rounds = [[_mean_time(world, step) for step in steps] for _ in range(3)]
    times = [median(column) for column in zip(*rounds, strict=True)]
    layer_s = max(times[1] - times[0], 0.0) / (_DEPTHS[1] - _DEPTHS[0])
    return layer_s, max(times[0] - _DEPTHS[0] * layer_s, 0.0)


def _tiny_step(world: World, depth: int) -> Callable[[], Any]:
    with Simulated(world), torch.random.fork_rng(devices=[]):
        layers = [module for _ in range(depth) for module in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
        model = parallelize(nn.Sequential(*layers), "*: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    inputs = torch.ones(_NUM_SAMPLES, _WIDTH)
    targets = torch.zeros(_NUM_SAMPLES, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        forward_backward(model, F.cross_entropy, inputs, targets)
        optimizer.step()

    return step


def _host() -> str:
    import socket

    return socket.gethostname()


def _memory_bytes(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    import psutil

    return float(psutil.virtual_memory().total)


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return str(torch.cuda.get_device_name(world.device))
    import platform

    return f"{platform.machine()} CPU"


__all__ = ["ExchangeTime", "FunctionTime", "ProductTime", "RankTimes", "default_spans", "measure", "time_of"]
