"""Sums of gradients that start during backward, bucket by bucket, as gradients become ready.

No call says which backward is the last one before a step. The step before predicts it: if it came after n backwards,
sums start in the n-th again, and the others accumulate without communication. A wrong prediction costs time and never
changes numbers, because a sum is used only if its gradient has not changed since. Under ZeRO 2 and 3 every backward is
reduced.

Parameters may be frozen and unfrozen at any time: all are observed, and buckets wait for those that require a gradient
when a backward begins.

Buckets have the same order on all ranks. Each starts when its gradients and those of all earlier buckets are ready,
because the order in which gradients become ready may differ between ranks.

A backward may be interrupted, on each rank at another point. After the world has been rebuilt, every rank forgets its
sums in progress and its prediction, so that all ranks continue in the same state.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from workbench.core.sbp import Broadcast
from workbench.errors import CollectiveAborted, StrategyError
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain
from workbench.tensors.leaf_gradients import keep_grad_shard, read_grad
from workbench.tensors.tensor_state import gradient_state
from workbench.tensors.world import World, at_shutdown
from workbench.training.gradients.reduction import Finish, Term, cut_terms, keep, num_bytes, start_bucket, term_of
from workbench.training.gradients.shard import state_spec

_SMALLEST_BUCKET_BYTES = 2**19
_BUCKETS_PER_BACKWARD = 8
_BUCKETS_UNDER_WAY = 4
_reducers: weakref.WeakValueDictionary[int, GradientReducer] = weakref.WeakValueDictionary()
"""All that are alive, by their ids: simulated ranks are threads."""


class GradientReducer:
    """Observes the backwards of some parameters and starts the sums of their gradients.

    Args:
        parameters: in the order of the module.
        scatters: sum after every backward, and keep only this rank's shard of the gradient (ZeRO 2).
    """

    is_removed = False

    def __init__(self, parameters: Sequence[GlobalTensor], scatters: bool = False) -> None:
        self.scatters, self._given = scatters, parameters
        self.paused = False
        for parameter in parameters:
            _declare_shard(parameter, scatters)
        self._parameters = [p for p in reversed(parameters) if _can_be_summed(p)]
        self._start_over()
        self._handles = [self._hook(parameter) for parameter in self._order]
        _reducers[id(self)] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        """A copied module has copies of the parameters, and hooks on them."""
        return GradientReducer(copy.deepcopy(self._given, memo), self.scatters)

    def _start_over(self) -> None:
        """Reset to the initial state, also after the world was rebuilt: no sums in progress, no agreed order."""
        self._num_rebuilds = self._world_rebuilds()
        self._order = sorted(self._parameters, key=lambda parameter: not _learns(parameter))  # frozen ones are last
        self._has_agreed = False
        self._first_order: list[GlobalTensor] = []
        self._num_backwards, self._expected = 0, 0
        self._task: int | None = None
        self._is_active, self._is_recording = False, False
        self._under_way: deque[tuple[list[Term], Finish]] = deque()
        self._cut()

    def _world_rebuilds(self) -> int:
        return self._parameters[0]._spec.world.num_rebuilds if self._parameters else 0

    @staticmethod
    def of(parameter: GlobalTensor) -> GradientReducer | None:
        """The reducer of a parameter; None if there is none."""
        reducer: GradientReducer | None = parameter._reducer
        return reducer

    @staticmethod
    def of_all(parameters: Iterable[GlobalTensor]) -> list[GradientReducer]:
        """The reducers of parameters, each once."""
        return [reducer for reducer in dict.fromkeys(map(GradientReducer.of, parameters)) if reducer is not None]

    def remove(self) -> None:
        """Stop observing."""
        self.is_removed = True
        self.drain()
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            parameter._reducer = None

    def before_step(self) -> None:
        """Note the number of backwards since the last step; an optimizer is about to step.

        Of several optimizers that step one after the other, the first has the number.
        """
        self._check_rebuild()
        if self._num_backwards:
            self._expected, self._num_backwards = self._num_backwards, 0
        if not self._has_agreed and self._first_order:
            self._agree()

    def _hook(self, parameter: GlobalTensor) -> Any:
        """The first hook of the parameter. It does not hold the reducer, which holds the parameter: the collector sees
        no cycle through it.

            torch refuses hooks of parameters that are frozen, and keeps those of parameters that become so.
        """
        parameter._reducer, reference = self, weakref.ref(self)

        def ready(parameter: Any) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._ready(parameter)

        with local_torch():
            learns = parameter.requires_grad
            handle = parameter.requires_grad_().register_post_accumulate_grad_hook(ready)
            parameter.requires_grad_(learns)
        hooks = parameter._post_accumulate_grad_hooks
        for number in [number for number in hooks if number != handle.id]:
            hooks[number] = hooks.pop(number)  # those of the program, which change a gradient after it was sent
        return handle

    def _cut(self) -> None:
        """Buckets of terms in the agreed order; what their members' gradients are is filled in when they start."""
        total = sum(num_bytes(p) for p in self._order if _learns(p))
        size = max(_SMALLEST_BUCKET_BYTES, total // _BUCKETS_PER_BACKWARD)
        buckets = list(cut_terms([term_of(p, plain(p)) for p in self._order], size))
        place = {id(p): number for number, p in enumerate(self._order)}
        buckets.sort(key=lambda bucket: place[id(bucket[-1].owner)])
        self._buckets = [[term.owner for term in bucket] for bucket in buckets]
        self._bucket_of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}

    def _ready(self, parameter: Any) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
        if self._is_recording:
            self._first_order.append(parameter)
        self._missing[self._bucket_of[id(parameter)]] -= 1
        if self._is_active:
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._start_next()

    def _check_rebuild(self) -> None:
        if self._num_rebuilds != self._world_rebuilds():
            self._start_over()

    def _begin(self, task: int) -> None:
        self._check_rebuild()
        self._drop()  # no step has used an earlier backward's sums
        self._task = task
        self._num_backwards += 1
        self._next = 0
        self._missing = [sum(map(_learns, bucket)) for bucket in self._buckets]
        self._is_recording = not (self._has_agreed or self._first_order)
        self._keeps_terms = self.scatters and (torch.is_grad_enabled() or any(map(_has_history, self._parameters)))
        is_last = self._num_backwards == self._expected and not self.paused
        self._is_active = not self._keeps_terms if self.scatters else is_last
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _start_next(self) -> None:
        with torch.no_grad(), local_torch():
            members = [(p, p.grad) for p in self._buckets[self._next]]
            bucket = [term_of(p, plain(g)) for p, g in members if g is not None]
        self._next += 1
        for terms in cut_terms(bucket):  # one, unless the dtypes differ
            if len(self._under_way) == _BUCKETS_UNDER_WAY:
                self._finish_one()
            finish = functools.cache(start_bucket(terms))  # the step and the end of the backward ask for it
            keep(terms, finish)
            self._under_way.append((terms, finish))

    def _finish_one(self) -> None:
        terms, finish = self._under_way.popleft()
        sums = finish()
        if self.scatters:
            for term in terms:
                _accumulate_shard(term.owner, sums[term.owner])

    def _end(self) -> None:
        """The backward has ended; under ZeRO 2 nothing of its gradients stays but the shards. Those of
        ``create_graph=True`` stay, because shards have no history.
        """
        self._task = None
        if self._keeps_terms:
            self._add_shards()
        elif self.scatters:
            self._scatter_rest()

    def _add_shards(self) -> None:
        """Add what earlier backwards have scattered to the terms that stay."""
        with local_torch():
            both: list[Any] = [p for p in self._order if p._gradient.shard is not None and read_grad(p) is not None]
        with torch.enable_grad():
            for parameter in both:
                shard = box(parameter._gradient.shard, parameter._spec.layout.dual())
                parameter.grad = parameter.grad + shard

    def scatter(self) -> None:
        """The same for gradients that were not accumulated by a backward, but handed over after one."""
        self._check_rebuild()
        self._next = 0
        self._scatter_rest()

    def _scatter_rest(self) -> None:
        while self._next < len(self._buckets):
            self._start_next()
        self.drain()

    def drain(self) -> None:
        """Finish the sums in progress, and drop those that are not used."""
        self._check_rebuild()
        while self._under_way:
            self._finish_one()

    def _drop(self) -> None:
        """Receive the sums in progress, and use none. Those of a backward that has raised leave its gradients in place,
        as one device does: the user drops them, or the next backward adds to them.
        """
        while self._under_way:
            self._under_way.popleft()[1]()

    def _agree(self) -> None:
        """Set the order of buckets to that in which gradients became ready on the first rank of each group."""
        ready = {id(p): number for number, p in enumerate(self._first_order)}
        groups: dict[tuple[int, ...], list[GlobalTensor]] = {}
        for parameter in self._order:
            groups.setdefault(parameter._spec.term_ranks, []).append(parameter)
        ranks: dict[int, int] = {}
        for group, members in groups.items():
            mine = torch.tensor([ready.get(id(p), len(ready) + n) for n, p in enumerate(members)], dtype=torch.int64)
            ranks.update(zip(map(id, members), _from_first(members[0], group, mine), strict=True))
        self.drain()
        self._order.sort(key=lambda p: ranks[id(p)])
        self._has_agreed = True
        self._first_order = []
        self._cut()


def _from_first(parameter: GlobalTensor, group: tuple[int, ...], mine: torch.Tensor) -> list[int]:
    world = parameter._spec.world
    tag, header = world.context.next_sum_tag(group), "the order of gradients"
    if world.device.type == "meta":  # a dry run has no other ranks
        return list(map(int, mine.tolist()))
    mine = mine.to(world.device)
    if world.rank == group[0]:
        world.transport.exchange([(rank, mine) for rank in group[1:]], [], tag, header)
    else:
        world.transport.exchange([], [(group[0], mine)], tag, header)
    found: list[int] = mine.tolist()
    return found


def _accumulate_shard(owner: GlobalTensor, total: torch.Tensor) -> None:
    """Add a scattered gradient to the shard that is there; the gradient it came from is given back."""
    with torch.no_grad(), local_torch():
        before = owner._gradient.shard
        total = total if before is None else before.add_(total)
    keep_grad_shard(owner, total, state_spec(owner))


def _can_be_summed(parameter: GlobalTensor) -> bool:
    with local_torch():
        can_learn = (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()
        return can_learn and not parameter._spec.is_placeholder and len(parameter._spec.term_ranks) > 1


def _learns(parameter: GlobalTensor) -> bool:
    with local_torch():
        return parameter.requires_grad


def _has_history(parameter: GlobalTensor) -> bool:
    with local_torch():
        grad = read_grad(parameter)
        return grad is not None and grad.requires_grad


def _declare_shard(parameter: GlobalTensor, scatters: bool) -> None:
    """Let a placeholder know whether its owner will keep a shard of its gradient."""
    spec = parameter._spec
    sizes = zip(spec.layout.placement.shape, spec.layout.sbp, strict=True)
    has_copies = any(size > 1 and isinstance(entry, Broadcast) for size, entry in sizes)
    keeps_shard = scatters and spec.is_placeholder and has_copies
    gradient_state(parameter).shard_spec = (spec, state_spec(parameter)) if keeps_shard else None


def _end_unused_sums(world: World) -> None:
    """Receive those of a last backward, behind which no step has come: simulated ranks may end with no message left."""
    if world.transport.scope == "process":
        for reducer in filter(None, [reference() for reference in _reducers.valuerefs()]):
            if reducer._under_way and reducer._parameters[0]._spec.world is world:
                with contextlib.suppress(CollectiveAborted):
                    reducer.drain()


at_shutdown(_end_unused_sums)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Context in which backwards only accumulate gradients and start no sums over ranks.

    You rarely need it. Without it, the step before shows which backward is the last one, and an optimizer's step
    completes all missing sums. Under ``zero=2`` and ``zero=3``, each backward still scatters its gradients, because
    this saves the memory.

    Raises:
        StrategyError: the module has no parameters of ``wb.parallelize``.

    ``with wb.no_sync(model): loss_fn(model(x), y).backward()``
    """
    parameters = [p for p in module.parameters() if isinstance(p, GlobalTensor)]
    if not parameters:
        raise StrategyError(
            f"no_sync({type(module).__name__}): 0 of its {sum(1 for _ in module.parameters())} parameters are global "
            "tensors. Only gradients of global parameters are summed: call wb.parallelize(module, strategy) first."
        )
    reducers = GradientReducer.of_all(parameters)
    before = [reducer.paused for reducer in reducers]
    for reducer in reducers:
        reducer.paused = True
    try:
        yield
    finally:
        for reducer, paused in zip(reducers, before, strict=True):
            reducer.paused = paused
