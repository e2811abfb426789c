"""An all-to-all of rows between ranks, of sizes that depend on values, as one differentiable function.

Each rank sends some of its rows to each rank of a group. The backward is the same exchange in the other direction. It
is a boxing of tokens that no layout describes: rows lie where their experts are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.core.layout import Layout, Shape
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.world import World
from workbench.transport.base import do_nothing


@dataclass(frozen=True, slots=True)
class Account:
    """The bytes of an exchange that has no boxing plan, with the attributes of one, for traces. Where they depend on
    values, ``bytes_sent`` has those of this rank only.
    """

    source: Layout
    destination: Layout
    shape: Shape
    bytes_sent: dict[int, int]
    kind: str = "rows"


KIND = "all-to-all"


@dataclass(frozen=True)
class RowExchange:
    """What this rank sends and receives.

    Attributes:
        world: of this rank.
        group: the ranks, this one among them.
        sent, received: numbers of rows to and from each of them.
        of_all: for traces, by rank, the rows that it sends to others and gets from them; empty where sizes depend on
            values, which this rank knows of itself only.
        layout, shape: of the tensor that the rows are of, for traces.
        tag: of its messages; several exchanges one after the other may have one.
        name: the layer that needs it.
        site: its line in traces.
    """

    world: World
    group: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    of_all: Mapping[int, tuple[int, int]]
    layout: Layout
    shape: Shape
    tag: int
    name: str
    site: Any = None

    def reversed(self) -> RowExchange:
        """The same rows back."""
        of_all = {rank: (received, sent) for rank, (sent, received) in self.of_all.items()}
        return replace(self, sent=self.received, received=self.sent, of_all=of_all)

    @property
    def _place(self) -> int:
        return self.group.index(self.world.rank)

    def account(self, row: torch.Tensor) -> Account:
        """The bytes, for rows like ``row``."""
        size, own = row.numel() * row.element_size(), sum(self.sent) - self.sent[self._place]
        sent = {self.world.rank: own} | {rank: rows for rank, (rows, _) in self.of_all.items()}
        num_bytes = {rank: rows * size for rank, rows in sent.items()}
        return Account(self.layout, self.layout, self.shape, num_bytes, KIND)

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that this rank gets, in the order of the group. ``rows`` lie in the order of the group, too."""
        with hidden_from_modes():
            started, world = self.world.traffic.now(), self.world
            result = rows.new_empty(sum(self.received), *rows.shape[1:])
            pieces, places = rows.contiguous().split(self.sent), result.split(self.received)
            others = [place for place, rank in enumerate(self.group) if rank != world.rank]
            sends = [(self.group[i], pieces[i]) for i in others if self.sent[i]]
            receives = [(self.group[i], places[i]) for i in others if self.received[i]]
            wait: Callable[[], None] = do_nothing
            if sends or receives:
                header = f"rows of {self.name} between ranks {', '.join(map(str, self.group))}{world.context.of_batch}"
                wait = world.transport.start_exchange(sends, receives, self.tag, header)
            places[self._place].copy_(pieces[self._place])  # while others' rows arrive
            wait()
            world.traffic.add(KIND, sum(piece.numel() * piece.element_size() for _, piece in sends), started)
        return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.run(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        exchange: RowExchange = ctx.exchange
        back = replace(exchange.reversed(), tag=exchange.tag | 1)
        return exchange_rows(grads[0], back, "backward"), None


def exchange_rows(rows: torch.Tensor, exchange: RowExchange, direction: str = "forward") -> torch.Tensor:
    """This rank's rows after the exchange, with a gradient. All ranks of the group call it."""
    tracer = exchange.world.context.tracer
    if tracer is not None:
        exchange = replace(exchange, site=exchange.site or tracer.site(exchange.name))
        row = rows.new_empty(rows.shape[1:], device="meta")
        tracer.add(exchange.site, direction, exchange.account(row), rows.dtype)
    if torch.is_grad_enabled() and rows.requires_grad:
        made: torch.Tensor = _Exchange.apply(rows, exchange)
        return made
    return exchange.run(rows)
