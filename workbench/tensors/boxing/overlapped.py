"""A product in pieces of rows: the boxing of one piece overlaps with the product of the next, forward and backward.

Over NCCL an exchange runs on a stream of its own, over gloo on threads of its own. Where ranks copy by themselves
(shared memory, CUDA IPC) nothing would overlap, and ``is_overlapped`` says so.

    forward     product 0, send 0, product 1, send 1, ..., receive 0, receive 1, ...
    backward    send the gradients of all pieces, receive the last one, its products, receive the one before, ...

Backward takes the pieces in reverse, the order in which autograd visits their products. The gradient of a piece is
received by a hook that runs just before its product's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from workbench.core.row_pieces import RowPieces, exchanging_groups
from workbench.tensors.boxing.box import box_gradient, box_placeholder, plan_of
from workbench.tensors.boxing.exchange import Exchange, exchange_between, without_view_relations
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, spec_of, wrap
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.tensor_state import spread_zero

Pair = tuple[Spec, Spec]
"""Where a piece comes from and where it goes."""


def product_of_pieces(
    product: Callable[[GlobalTensor], GlobalTensor],
    rows: GlobalTensor,
    pieces: RowPieces,
    target: Spec,
    function: str = "",
) -> GlobalTensor:
    """``product(rows)``, boxed to ``target``. All ranks of the world call it.

    Args:
        product: of rows, each by itself. Its result is a sum of terms, or has another layout that is boxed.
        rows: (rows..., features).
        pieces: of the rows, for the layouts of the result and of ``target``.
        target: of the whole result.
        function: the function that needs the boxing, for traces.
    """
    context = target.world.context
    tags = [context.next_tag() for _ in pieces.sizes]
    if target.is_placeholder:  # as many calls as elsewhere: each may count exchanges, such as of a bias
        placeholders = [product(rows) for _ in tags]
        return box_placeholder(placeholders[-1], target, tags[0])
    boxed = _BoxedPieces(pieces.dim, target, context.tracer.site(function) if context.tracer is not None else None)
    for part in _cut(rows, pieces):
        boxed.add(product(part), tags[len(boxed.pairs)])
    return boxed.join()


def is_overlapped(source: Spec, target: Spec, dtype: torch.dtype) -> bool:
    """Whether a boxing is one exchange that goes on while its ranks compute, for one of its groups of ranks at least:
    all ranks cut the same pieces.
    """
    exchange = exchange_between(source, target, dtype)
    if not isinstance(exchange, Exchange) or exchange.plan.is_local:
        return False
    return any(map(source.world.transport.overlaps, exchanging_groups(source.layout, target.layout)))


def _cut(rows: GlobalTensor, pieces: RowPieces) -> list[GlobalTensor]:
    spec = rows._spec
    specs = [spec_of(spec.world, spec.layout, shape) for shape in pieces.shapes(spec.shape)]
    with local_torch():
        parts = rows.split([each.local_shape[pieces.dim] for each in specs], pieces.dim)
    return [wrap(part, each) for part, each in zip(parts, specs, strict=True)]


class _BoxedPieces:
    """The boxings of the pieces of one result, and of their gradients. ``site`` is its line in traces."""

    def __init__(self, dim: int, target: Spec, site: Any) -> None:
        self.dim, self.target, self.site = dim, target, site
        self.pairs: list[Pair] = []
        self.tags: list[int] = []
        self._pieces: list[GlobalTensor] = []
        self._in_forward: list[Callable[[], torch.Tensor]] = []
        self._in_backward: dict[int, Callable[[], torch.Tensor]] = {}

    def add(self, piece: GlobalTensor, tag: int) -> None:
        """Send this rank's part of a piece."""
        target = spec_of(self.target.world, self.target.layout, piece._spec.shape)
        with local_torch():
            if piece.requires_grad and torch.is_grad_enabled():
                piece.register_hook(partial(self._receive_gradient, len(self.pairs)))
            self._in_forward.append(self._start((piece._spec, target), piece.detach(), tag, "forward"))
        self.pairs.append((piece._spec, target))
        self.tags.append(tag)
        self._pieces.append(piece)

    def join(self) -> GlobalTensor:
        """Receive all pieces."""
        pieces, self._pieces = self._pieces, []
        with local_torch():
            if torch.is_grad_enabled() and any(piece.requires_grad for piece in pieces):
                return wrap(_Join.apply(self, *pieces), self.target)
            return wrap(self.receive(), self.target)

    def receive(self) -> torch.Tensor:
        """This rank's shard of the whole result."""
        with hidden_from_modes():
            received, self._in_forward = [finish() for finish in self._in_forward], []
            return torch.cat(received, self.dim)

    def send_gradients(self, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        """Send the parts of the gradient of the whole result; zeros stand for those of the pieces until their hooks
        receive them. If they are differentiated again, they are received at once.
        """
        duals = [(target.dual, source.dual) for source, target in self.pairs]
        parts = grad.split([incoming.local_shape[self.dim] for incoming, _ in duals], self.dim)
        given = list(zip(duals, parts, self.tags, strict=True))
        if torch.is_grad_enabled():
            return [box_gradient(part, *pair, tag | 1, self.site) for pair, part, tag in given]
        for number in reversed(range(len(given))):
            pair, part, tag = given[number]
            self._in_backward[number] = self._start(pair, part, tag | 1, "backward")
        return [spread_zero(outgoing.local_shape, grad.dtype, grad.device) for _, outgoing in duals]

    def _receive_gradient(self, number: int, grad: torch.Tensor) -> torch.Tensor:
        # A backward in two parts comes by twice, the second time with the gradient that the first one has received
        finish = self._in_backward.pop(number, None)
        return grad if finish is None else finish()

    def _start(self, pair: Pair, local: torch.Tensor, tag: int, direction: str) -> Callable[[], torch.Tensor]:
        exchange = exchange_between(*pair, local.dtype)
        tracer = self.target.world.context.tracer
        if tracer is not None:
            tracer.add(self.site or tracer.site(), direction, plan_of(*pair, local), local.dtype)
        if isinstance(exchange, Exchange) and not exchange.plan.is_local:
            return exchange.start(local, tag)
        boxed = exchange.run(local, tag)
        return lambda: boxed


class _Join(torch.autograd.Function):
    """The whole result of the boxed pieces. Every rank of its placement has the node, others a boxing's."""

    @staticmethod
    def forward(ctx: Any, boxed: _BoxedPieces, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.boxed, ctx.dtype = boxed, pieces[0].dtype
        with without_view_relations():
            return boxed.receive()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        target, grad = ctx.boxed.target, grads[0]
        if grad is None:  # this rank adds zeros
            grad = spread_zero(target.dual.local_shape, ctx.dtype, target.world.device)
        with local_torch():
            return None, *ctx.boxed.send_gradients(grad)
