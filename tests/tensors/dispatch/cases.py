"""Calls of torch functions, each with its operands: the table that the sweep over layouts walks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Case:
    """A function of tensors, with the shapes of its operands; ``make`` overrides how operands are made."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[[torch.Generator], list[torch.Tensor]] | None = None

    def operands(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(len(self.name))
        if self.make is not None:
            return self.make(generator)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]


def _case(name: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> Case:
    return Case(name, function, shapes)


def _labels(generator: torch.Generator) -> list[torch.Tensor]:
    targets = torch.randint(0, 6, (7,), generator=generator)
    targets[2] = -100
    return [torch.randn(7, 6, generator=generator), targets]


def _pixels(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(3, 4, 2, 2, generator=generator), torch.randint(0, 4, (3, 2, 2), generator=generator)]


def _ids(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(0, 10, (5, 3), generator=generator), torch.randn(10, 6, generator=generator)]


def _mask(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.rand(5, 4, generator=generator) > 0.5, torch.randn(5, 4, generator=generator)]


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 1.5
    z += y
    z.mul_(2).sub_(0.25)
    z[1:3] = 0.5
    return z


UNARY = (
    "relu",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "exp",
    "abs",
    "neg",
    "softplus",
    "square",
    "sin",
    "leaky_relu",
    "floor",
    "clone",
)
CASES = [
    *[_case(name, getattr(F, name, None) or getattr(torch, name), (5, 4)) for name in UNARY],
    _case("add", torch.add, (5, 4), (5, 4)),
    _case("add broadcast", torch.add, (5, 4), (4,)),
    _case("add column", torch.add, (5, 1), (5, 4)),
    _case("add alpha", lambda x, y: torch.add(x, y, alpha=-0.5), (5, 4), (5, 4)),
    _case("add number", lambda x: x + 1, (5, 4)),
    _case("rsub", lambda x: 2 - x, (5, 4)),
    _case("sub", lambda x, y: x - y, (5, 4), (5, 4)),
    _case("mul", lambda x, y: x * y, (5, 4), (5, 4)),
    _case("mul number", lambda x: 3 * x, (5, 4)),
    _case("div", lambda x, y: x / (y.abs() + 1), (5, 4), (4,)),
    _case("div number", lambda x: x / 4, (5, 4)),
    _case("rdiv", lambda x: 1 / (x + 10), (5, 4)),
    _case("pow", lambda x: x**2, (5, 4)),
    _case("floor divide", lambda x: x.detach() // 0.3, (5, 4)),
    _case("compare", lambda x, y: (x > y) & (x != 0), (5, 4), (5, 4)),
    _case("maximum", torch.maximum, (5, 4), (5, 4)),
    _case("clamp", lambda x: x.clamp(-0.5, 0.5), (5, 4)),
    _case("lerp", torch.lerp, (5, 4), (5, 4), (5, 4)),
    _case("lerp by a number", lambda x, y: torch.lerp(x, y, 0.3), (5, 4), (5, 4)),
    Case("where", lambda m, x: torch.where(m, x, -x), (), _mask),
    Case("masked_fill", lambda m, x: x.masked_fill(m, 7.0), (), _mask),
    _case("sum", lambda x: x.sum(), (5, 4)),
    _case("sum dim", lambda x: x.sum(0), (5, 4, 3)),
    _case("sum keepdim", lambda x: x.sum((0, 2), keepdim=True), (5, 4, 3)),
    _case("mean", lambda x: x.mean(), (5, 4)),
    _case("mean dim", lambda x: x.mean(-1, keepdim=True), (5, 4)),
    _case("mean batch", lambda x: torch.mean(x, 0), (5, 4)),
    _case("amax", lambda x: x.amax(1), (5, 4)),
    _case("max", lambda x: x.max(), (5, 4)),
    _case("max dim", lambda x: x.max(1)[0], (5, 4)),
    _case("argmax", lambda x: x.argmax(-1), (5, 4)),
    _case("var", lambda x: x.var(), (5, 4)),
    _case("std dim", lambda x: torch.std(x, 1), (5, 4)),
    _case("logsumexp", lambda x: torch.logsumexp(x, 1), (5, 4)),
    _case("norm", lambda x: torch.linalg.vector_norm(x), (5, 4)),
    _case("softmax", lambda x: F.softmax(x, dim=-1), (5, 4)),
    _case("log_softmax", lambda x: x.log_softmax(0), (5, 4)),
    _case("cumsum", lambda x: x.cumsum(1), (5, 4)),
    _case("matmul", lambda x, y: x @ y, (5, 4), (4, 3)),
    _case("matmul batch", lambda x, y: x @ y, (2, 5, 4), (2, 4, 3)),
    _case("matmul broadcast", lambda x, y: torch.matmul(x, y), (3, 5, 4), (4, 3)),
    _case("matmul vector", lambda x, y: x @ y, (5, 4), (4,)),
    _case("dot", torch.dot, (5,), (5,)),
    _case("mm t", lambda x, y: x.mm(y.t()), (5, 4), (3, 4)),
    _case("bmm", torch.bmm, (3, 5, 4), (3, 4, 2)),
    _case("addmm", torch.addmm, (3,), (5, 4), (4, 3)),
    _case("outer", torch.outer, (5,), (4,)),
    _case("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (3, 5, 4), (3, 4, 2)),
    _case("einsum sum", lambda x, y: torch.einsum("ij,ik->jk", x, y), (5, 4), (5, 3)),
    _case("linear", F.linear, (5, 4), (3, 4), (3,)),
    _case("linear 3d", lambda x, w: F.linear(x, w), (2, 5, 4), (3, 4)),
    _case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (3, 4, 5, 5), (6, 4, 3, 3), (6,)),
    _case("conv2d stride", lambda x, w: F.conv2d(x, w, stride=2), (3, 4, 5, 5), (6, 4, 2, 2)),
    _case("conv2d groups", lambda x, w: F.conv2d(x, w, groups=2), (3, 4, 5, 5), (6, 2, 3, 3)),
    _case("conv1d", F.conv1d, (3, 4, 7), (6, 4, 3)),
    _case("max_pool2d", lambda x: F.max_pool2d(x, 2), (3, 4, 4, 4)),
    _case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), (3, 4, 4, 4)),
    _case("adaptive pool", lambda x: F.adaptive_avg_pool2d(x, 1), (3, 4, 4, 4)),
    _case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (5, 3, 4), (4,), (4,)),
    _case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), (5, 3, 4), (4,)),
    _case("batch_norm", _norm, (5, 4), (4,), (4,)),
    _case("batch_norm 2d", _norm, (5, 4, 3, 3), (4,), (4,)),
    _case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (5, 4, 3), (4,), (4,)),
    Case("cross_entropy", F.cross_entropy, (), _labels),
    Case("cross_entropy sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), (), _labels),
    Case("cross_entropy smoothing", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (), _labels),
    Case("cross_entropy pixels", F.cross_entropy, (), _pixels),
    Case("nll_loss", lambda x, t: F.nll_loss(x.log_softmax(-1), t), (), _labels),
    _case("mse_loss", F.mse_loss, (5, 4), (5, 4)),
    _case("l1 sum", lambda x, y: F.l1_loss(x, y, reduction="sum"), (5, 4), (5, 4)),
    _case("bce logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (5, 4), (5, 4)),
    Case("embedding", F.embedding, (), _ids),
    _case("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[(2, 3, 5, 4)] * 3),
    _case("view", lambda x: x.view(4, 6), (2, 2, 6)),
    _case("view heads", lambda x: x.view(3, 5, 2, 4).transpose(1, 2), (3, 5, 8)),
    _case("reshape", lambda x: x.reshape(5, -1), (5, 2, 6)),
    _case("flatten", lambda x: x.flatten(1), (5, 2, 2)),
    _case("permute", lambda x: x.permute(2, 0, 1), (5, 4, 3)),
    _case("transpose", lambda x: x.transpose(0, -1), (5, 4, 3)),
    _case("T", lambda x: x.T, (5, 4)),
    _case("unsqueeze", lambda x: x.unsqueeze(1), (5, 4)),
    _case("squeeze", lambda x: x.squeeze(1), (5, 1, 4)),
    _case("expand", lambda x: x.expand(3, 5, 4), (5, 4)),
    _case("chunk", lambda x: x.chunk(2, dim=-1)[1], (5, 4)),
    _case("split", lambda x: torch.split(x, [1, 3], dim=1)[1], (5, 4)),
    _case("unbind", lambda x: x.unbind(0)[2], (5, 4)),
    _case("cat", lambda x, y: torch.cat([x, y], dim=1), (5, 4), (5, 2)),
    _case("cat rows", lambda x, y: torch.cat([x, y]), (5, 4), (3, 4)),
    _case("stack", lambda x, y: torch.stack([x, y], dim=1), (5, 4), (5, 4)),
    _case("index", lambda x: x[1:4, None, 2], (5, 4)),
    _case("index keep", lambda x: x[:, ..., 1:], (5, 3, 4)),
    _case("index list", lambda x: x[[0, 3, 1]], (5, 4)),
    _case("tril", lambda x: x.tril(), (5, 4)),
    _case("pad", lambda x: F.pad(x, (1, 2), value=3.0), (5, 4)),
    _case("to double", lambda x: x.double() * 2, (5, 4)),
    _case("to other", lambda x, y: x.to(y.double()), (5, 4), (3,)),
    _case("type as", lambda x, y: (x * 2).type_as(y), (5, 4), (3,)),
    _case("detach", lambda x: x.detach() + x, (5, 4)),
    _case("in place", _in_place, (5, 4), (5, 4)),
    _case("sort falls back", lambda x: x.sort(0)[0], (5, 4)),
    _case("flip", lambda x: x.flip(0), (5, 4)),
    _case("roll falls back", lambda x: x.roll(1, 0), (5, 4)),
    _case("scalar", lambda x: x * 2 + 1, ()),
    _case("empty", lambda x: (x * 2).sum(), (0, 4)),
    _case("residual", lambda x, w, v: x + F.relu(x @ w) @ v, (5, 4), (4, 6), (6, 4)),
]
