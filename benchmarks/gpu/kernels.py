"""Kernels: moving blocks against a plain copy of as many bytes, the loss, dropout and attention against torch's own.

Bandwidth counts bytes read and written. The loss is forward and backward of a cross entropy over 32,000 classes. Times
are the GPU's own, of its work alone: it is given other work first, which pushes what was there out of its caches and
lasts until Python has launched what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.gpu.place import Finding, Found, Place
from benchmarks.reporting import Comparison, Target, side_by_side
from workbench.kernels.blocks import move_blocks, pack
from workbench.kernels.cross_entropy_terms import cross_entropy_terms
from workbench.kernels.random_slice import dropout_slice
from workbench.tensors.rules.attention import with_dropout
from workbench.transport.traffic import DeviceClock, seconds
from workbench.units import format_bytes, format_seconds

SIZES_BYTES = (64 * 2**20, 256 * 2**20)
ROWS, CLASSES = 4096, 32_000
DROPPED_BYTES, DROPPED = 256 * 2**20, 0.1
ROUNDS = 50
BANDWIDTH_TARGET, LOSS_TARGET = Target(0.85, at_least=True), Target(1.5, at_least=True)
DROPOUT_TARGET, MEMORY_TARGET = Target(1.1), Target(1.0)
ATTENTION, ATTENTION_TARGET = (4, 16, 2048, 128), Target(2.0, at_least=True)
"""Batch, heads, rows and width."""
OTHER_WORK_BYTES, OTHER_WORK_TIMES = 2**30, 8
"""Written before every timed action: 2 ms at 4 TB/s."""
Action = Callable[[], object]


def median_s(actions: dict[str, Action], place: Place) -> dict[str, float]:
    """Median seconds of each action, in turns, by the device's own clock."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    now = DeviceClock(torch.device(place.device)).now
    other_work = torch.empty(OTHER_WORK_BYTES if place.is_gpu else 1, dtype=torch.uint8, device=place.device)
    for round_number in range((ROUNDS if place.is_gpu else 2) + 1):
        for name, action in actions.items():
            for _ in range(OTHER_WORK_TIMES):
                other_work.zero_()
            start = now()
            action()
            stop = now()
            if round_number:
                times[name].append(seconds(stop) - seconds(start))
    return {name: median(values) for name, values in times.items()}


def moves(num_bytes: int, device: str) -> dict[str, tuple[Action, int]]:
    """Ways to move blocks, and how many bytes each reads and writes."""
    side = int((num_bytes / 4) ** 0.5) // 64 * 64
    source = torch.randn(side, side, device=device)
    out, size = torch.empty_like(source), source.nbytes
    terms = [torch.randn(side * 2 // 5, side, device=device) for _ in range(4)]
    total = torch.empty_like(terms[0])  # four terms and their sum are as many bytes as both sides of the copy
    columns, places = source.chunk(4, 1), list(out.chunk(4, 1))
    pieces = pack(columns)
    return {
        "plain copy": (partial(out.copy_, source), 2 * size),
        "pull of 4 slices": (lambda: move_blocks(list(out.chunk(4)), list(source.chunk(4)), [1] * 4, "none"), 2 * size),
        "pull and sum of 4": (lambda: move_blocks([total], terms, [4], "sum"), 5 * total.nbytes),
        "pack by columns": (lambda: pack(columns), 2 * size),
        "unpack by columns": (lambda: move_blocks(places, pieces, [1] * 4, "none"), 2 * size),
    }


def losses(rows: int, classes: int, device: str) -> dict[str, Action]:
    """Forward and backward of the same loss: torch's, and ours over all classes as one slice of them."""
    logits = torch.randn(rows, classes, device=device, requires_grad=True)
    target = torch.randint(classes, (rows,), device=device)

    def ours() -> tuple[torch.Tensor, ...]:
        lse, picked, _ = cross_entropy_terms(logits, target, 0)
        return torch.autograd.grad((lse - picked).mean(), logits)

    return {"torch": lambda: torch.autograd.grad(F.cross_entropy(logits, target), logits), "cross_entropy_terms": ours}


def dropouts(num_bytes: int, device: str) -> dict[str, Action]:
    """Dropout of as many bytes: torch's, and ours, whose mask does not depend on how the tensor lies."""
    x = torch.randn(num_bytes // 4 // 1024, 1024, device=device)
    return {
        "torch": lambda: F.dropout(x, DROPPED),
        "dropout_slice": lambda: dropout_slice(x, 7, 0, list(x.stride()), DROPPED),
    }


def attentions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Action]:
    """Forward and backward of causal attention: with dropout by our kernel, in blocks and by torch, and without any."""

    def with_gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    def ours() -> tuple[torch.Tensor, ...]:
        seed = with_dropout.Seed(7)
        return with_gradients(with_dropout.scaled_dot_product_attention(q, k, v, None, DROPPED, True, None, seed))

    def in_blocks() -> tuple[torch.Tensor, ...]:
        with patch.object(with_dropout, "fits_kernel", return_value=False):
            return ours()

    def torchs(probability: float) -> tuple[torch.Tensor, ...]:
        return with_gradients(F.scaled_dot_product_attention(q, k, v, dropout_p=probability, is_causal=True))

    return {
        "ours": ours,
        "in blocks": in_blocks,
        "torch": partial(torchs, DROPPED),
        "torch without dropout": partial(torchs, 0.0),
    }


def peak_bytes(action: Action) -> int:
    """Most memory that an action allocates above what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def bandwidth(place: Place) -> Iterator[Found]:
    """Blocks moved by a kernel against a plain copy."""
    worst = []
    for num_bytes in SIZES_BYTES if place.is_gpu else (2**18,):
        every = moves(num_bytes, place.device)
        time_s = median_s({name: action for name, (action, _) in every.items()}, place)
        rates = {name: size / time_s[name] for name, (_, size) in every.items()}
        best = rates["plain copy"]
        worst.append(min(rate for name, rate in rates.items() if name != "plain copy") / best)
        for name, rate in rates.items():
            seen = f"{format_seconds(time_s[name])}, {format_bytes(rate)}/s, {rate / best:.2f} of a copy"
            yield Finding(f"{format_bytes(num_bytes)}, {name}", seen)
    yield Comparison("slowest of all, bandwidth / copy", min(worst), BANDWIDTH_TARGET)


def loss(place: Place) -> Iterator[Found]:
    """Cross entropy over many classes, both ways."""
    actions = losses(*(ROWS, CLASSES) if place.is_gpu else (8, 100), place.device)
    time_s = median_s(actions, place)
    yield side_by_side("loss, time", time_s["cross_entropy_terms"], "torch", time_s["torch"], LOSS_TARGET)
    if place.is_gpu:
        ours, theirs = (peak_bytes(actions[name]) for name in ("cross_entropy_terms", "torch"))
        words = format_bytes(ours), f"torch {format_bytes(theirs)}"
        yield Comparison("loss, memory", ours / theirs, MEMORY_TARGET, *words)


def dropout(place: Place) -> Iterator[Found]:
    """Dropout by position against torch's, which draws in the order of its calls."""
    time_s = median_s(dropouts(DROPPED_BYTES if place.is_gpu else 2**14, place.device), place)
    yield side_by_side("dropout", time_s["dropout_slice"], "torch", time_s["torch"], DROPOUT_TARGET)


def attention(place: Place) -> Iterator[Found]:
    """Attention that drops by position, in a flash kernel, against the same in blocks.

    Raises:
        AssertionError: its results are not those of the blocks in 32 bits, within the rounding of its own type.
    """
    for dtype, most in ((torch.bfloat16, 0.02), (torch.float16, 0.004), (torch.float32, 1e-5)):
        shape, name = ATTENTION if place.is_gpu else (1, 2, 8, 16), str(dtype).removeprefix("torch.")
        operands = [torch.randn(shape, dtype=dtype, device=place.device).requires_grad_() for _ in range(3)]
        actions = attentions(*operands)
        exact: Any = attentions(*(x.detach().float().requires_grad_() for x in operands))["in blocks"]()
        found: Any = actions["ours"]()
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))
        time_s = median_s(actions, place)
        seen = ", ".join(f"{way} {format_seconds(time)}" for way, time in time_s.items())
        yield Finding(f"attention in {name}", f"{seen}; ours is {apart:.1e} from blocks in 32 bits")
        yield side_by_side(f"attention in {name}", time_s["ours"], "in blocks", time_s["in blocks"], ATTENTION_TARGET)
        assert apart <= most, f"attention in {name}: {apart:.1e} from blocks in 32 bits, at most {most:g}"
