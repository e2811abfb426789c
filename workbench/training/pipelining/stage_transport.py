"""The transport of one of several stages on a rank: messages between stages of the rank stay in its memory.

Stage ranks have numbers of their own. Over NCCL, which matches messages by order, some pairs of stages get channels.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from workbench.core.options import V_SCHEDULES
from workbench.core.placement import Placement
from workbench.core.strategy import ResolvedStrategy
from workbench.errors import CollectiveAborted, StrategyError
from workbench.tensors.execution_context import ExecutionContext
from workbench.tensors.world import World
from workbench.training.strategies.state import layers_of, parameter_stages
from workbench.transport.base import PeerShape, PeerTensor, Received, Transport, do_nothing

MessageQueues = dict[tuple[int, int, int], deque[torch.Tensor]]
"""(source, destination, tag) -> messages between stages of one rank."""


class Numbering:
    """The ranks of stages: those of stage 0 first, in the stage's order, then those of stage 1, and so on."""

    def __init__(self, resolved: ResolvedStrategy, device_type: str) -> None:
        members = [resolved.stage_ranks(stage) for stage in range(resolved.num_stages)]
        self.rank_of = [rank for ranks in members for rank in ranks]
        self.stage_of = [stage for stage, ranks in enumerate(members) for _ in ranks]
        self.first = [sum(map(len, members[:stage])) for stage in range(len(members))]
        self._members, self._device_type = members, device_type

    def of(self, stage: int, rank: int) -> int:
        """The number of a rank as a member of a stage."""
        return self.first[stage] + self._members[stage].index(rank)

    def placement(self, stage: int, like: Placement) -> Placement:
        """The placement of a stage in terms of stage ranks, of the same shape as the one in terms of ranks."""
        return Placement(like.device_type, tuple(self.of(stage, rank) for rank in like), like.shape)

    def everywhere(self) -> Placement:
        """All ranks of all stages."""
        return Placement.of(self._device_type, list(range(len(self.rank_of))))


class StageTransport(Transport):
    """The transport of a stage rank, over that of its rank. ``context`` is that of the stage rank's world."""

    context: ExecutionContext

    def __init__(self, rank_world: World, own: int, numbering: Numbering, queues: MessageQueues) -> None:
        self.rank_world, self.own, self.queues = rank_world, own, queues
        self.rank_of, self._stage_of = numbering.rank_of, numbering.stage_of
        self.channels: dict[tuple[int, int], str] = {}
        self.rank, self.world_size = own, len(self.rank_of)
        self.name, self.cost = self.base.name, self.base.cost

    @property
    def base(self) -> Transport:
        """The transport of the rank."""
        return self.rank_world.transport

    def overlaps(self, ranks: Collection[int]) -> bool:
        return self.base.overlaps([self.rank_of[rank] for rank in ranks])

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        away, in_order = self._send(sends, [source for source, _ in receives], tag, header)
        from_away = [(self.rank_of[source], out) for source, out in receives if not self._is_here(source)]
        receive: Callable[[], None] = do_nothing
        if away or from_away:
            with in_order:
                receive = self.base.start_exchange(away, from_away, tag, header)

        def finish() -> None:
            receive()
            for source, out in receives:
                if self._is_here(source):
                    out.copy_(self._take(source, tag, header))

        return finish

    def start_exchange_in_place(
        self, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
    ) -> Callable[[], Received]:
        away, in_order = self._send(sends, [other for other, _ in wanted], tag, header)
        from_away = [(self.rank_of[other], shape) for other, shape in wanted if not self._is_here(other)]
        receive: Callable[[], Received] = lambda: ([], do_nothing)  # noqa: E731
        if away or from_away:
            with in_order:
                receive = self.base.start_exchange_in_place(away, from_away, dtype, tag, header)

        def finish() -> Received:
            pieces, release = receive()
            received = iter(pieces)
            return [
                self._take(other, tag, header) if self._is_here(other) else next(received) for other, _ in wanted
            ], release

        return finish

    def _send(
        self, sends: Sequence[PeerTensor], sources: Sequence[int], tag: int, header: str
    ) -> tuple[list[PeerTensor], AbstractContextManager[None]]:
        """Keep what goes to stages of this rank; returns what goes to other ranks, and in which channel."""
        for others in ({other for other, _ in sends}, set(sources)):
            self._check_peers(others, header)
        pairs = [*((self.own, other) for other, _ in sends), *((other, self.own) for other in sources)]
        in_order = self._in_order(pairs, header)
        for destination, tensor in sends:
            if self._is_here(destination):
                kept = tensor.clone(memory_format=torch.contiguous_format)
                self.queues.setdefault((self.own, destination, tag), deque()).append(kept)
        return [(self.rank_of[other], tensor) for other, tensor in sends if not self._is_here(other)], in_order

    def is_of_this_stage(self, other: int) -> bool:
        """Whether a stage rank is one of this one's stage."""
        return self._stage_of[other] == self._stage_of[self.own]

    def _is_here(self, other: int) -> bool:
        return self.rank_of[other] == self.rank_of[self.own]

    def _take(self, source: int, tag: int, header: str) -> torch.Tensor:
        waiting = self.queues.get((source, self.own, tag))
        if not waiting:
            if torch._C._current_graph_task_id() >= 0:
                raise StrategyError(
                    f"{header}: a backward on rank {self.rank_of[self.own]} takes a tensor of another of its stages, "
                    "which does not run now. A block that runs again asks for what it took in its forward, and a plain "
                    "tensor with a gradient that is no leaf (inputs with requires_grad) for the terms of all stages. "
                    "Leave recompute out, give inputs without a gradient, or use a schedule with 1 stage per rank: "
                    "1f1b, zero_bubble, gpipe."
                )
            raise CollectiveAborted(
                f"{header}: rank {self.rank_of[self.own]} would wait for itself: the stage that sends this runs "
                f"later in its table. Stages hand over forward only; use the schedule gpipe with one stage per rank."
            )
        return waiting.popleft()

    def _check_peers(self, others: Collection[int], header: str) -> None:
        """Refuse an exchange of stages that share a rank, and one of a tensor that a program has kept of a step."""
        ranks = [self.rank_of[other] for other in others]
        is_in_step = self.context.running is not None
        if not is_in_step or len(set(ranks)) < len(ranks):
            what = f"an exchange with {len(ranks)} stages on {len(set(ranks))} ranks"
            raise StrategyError(
                f"{header}: {what if is_in_step else 'an exchange outside of the step that made the tensor'}. With "
                "several stages per rank, a tensor of a step goes from one to one other. Read parameters, their "
                "gradients and the step's loss after the step, take other values (a metric that a loss_fn has kept, "
                "the result of a layer in a hook) from the result of wb.evaluate, or use 1f1b."
            )

    def _in_order(self, pairs: Sequence[tuple[int, int]], header: str) -> AbstractContextManager[None]:
        """Context of one exchange. NCCL matches messages by their order, in which stages that are no neighbours, and
        those on the two sides of a V, call in unlike ways: they have channels (``open_channels``) or are refused.
        """
        apart = [(a, b) for a, b in pairs if self.rank_of[a] != self.rank_of[b]]
        stages = sorted({(self._stage_of[a], self._stage_of[b]) for a, b in apart})
        if not self.base.matches_by_order or not stages:
            return nullcontext()
        if len(stages) == 1 and stages[0] in self.channels:
            return self.base.in_channel(self.channels[stages[0]])
        distant = [pair for pair in stages if abs(pair[0] - pair[1]) > 1]
        if not distant:
            return nullcontext()
        first, last = sorted(distant[0])
        raise StrategyError(
            f"{header}: a tensor goes between stages {first} and {last}, past {last - first - 1} others. Over NCCL, "
            "with several stages per rank, tensors go between neighbours, or stages that share a weight. Use 1f1b, "
            "with 1 stage per rank, or WORKBENCH_TRANSPORT=gloo."
        )

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        self._check_peers(group, header)
        return self.base.start_all_reduce(tensors, [self.rank_of[other] for other in group], reduction, tag, header)

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        raise StrategyError(
            f"{header}: a call of all ranks inside a step whose ranks have several stages each, which run at their own "
            f"times. Make it outside of the step, or use a schedule with 1 stage per rank."
        )

    def flush(self) -> None:
        self.base.flush()

    def abort(self, reason: str) -> None:
        self.base.abort(reason)

    def close(self) -> None:
        pass


def open_channels(module: nn.Module, resolved: ResolvedStrategy, world: World) -> dict[tuple[int, int], str]:
    """By source and destination, channels over NCCL between stages that are no neighbours and share a weight, and
    between the stages of a V behind its turn, whose ranks also exchange for those before it. Each goes one way.
    """
    home, channels = parameter_stages(module, resolved), dict[tuple[int, int], str]()
    if not world.transport.matches_by_order:
        return channels
    for choice, (_, layer) in zip(resolved.layers, layers_of(module), strict=True):
        for parameter in layer.parameters(recurse=False):
            first = home[id(parameter)]
            if choice.stage - first > 1:
                pairs = (first, choice.stage), (choice.stage, first)
                channels |= {pair: f", stage {pair[0]} -> {pair[1]}" for pair in pairs}
    for (source, destination), name in sorted(channels.items()):
        peers = itertools.product(resolved.stage_ranks(source), resolved.stage_ranks(destination))
        world.transport.open_channel(name, [pair for pair in peers if pair[0] != pair[1]])
    if resolved.schedule in V_SCHEDULES:
        behind = range(resolved.degrees[0], resolved.num_stages)
        for name, stages in ((", forward behind the turn", behind), (", backward behind the turn", behind[::-1])):
            world.transport.open_channel(name, [])
            channels |= dict.fromkeys(itertools.pairwise(stages), name)
    return channels
