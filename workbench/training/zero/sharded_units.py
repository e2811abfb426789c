"""ZeRO as a choice of sbp: which of a parameter's state, gradient and values are split over the ranks that share it.

    zero=1   the optimizer's state: gradients are summed to shards, the step works on these, parameters are gathered
    zero=2   gradients too: every backward ends with P -> S, and only the shard is kept (so accumulation communicates
             per micro-batch, and takes a shard's memory)
    zero=3   parameters too: they are whole only while a part of the model runs, gathered before its forward, and again
             for its backward

The axes on which a parameter is B give the ranks that share it. ``shard`` has the layouts of shards. With ``shards=``
the data axis is two axes: shards are B over groups of ranks, and S inside a group. Their gradients are terms over the
groups: stages 1 and 2 sum them with each scatter, and stage 3 once in a step, as data parallelism sums whole gradients.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020).

The part is a unit: a repeated block, or a layer outside of blocks. One exchange gathers all parameters of a unit, and
one returns their gradients. While a unit runs, the shards of the next one are sent, in the order of the model's last
call; in backward, those of the unit before. So a rank holds at most two units' parameters at a time.

``gathered_call`` says what autograd saves. Under autocast it saves no 16-bit weights either, and backward gathers 16
bits per element.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from workbench.errors import CollectiveAborted, StrategyError
from workbench.tensors.boxing.box import box
from workbench.tensors.boxing.bucketed import BoxingWork
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain, wrap
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.torch_patches.checkpoint import is_in_checkpoint
from workbench.tensors.torch_patches.compile_ddp_fsdp import refuse_scripted
from workbench.tensors.world import World, current
from workbench.training.gradients.overlap import GradientReducer
from workbench.training.gradients.shard import Shard, choose_shards, shard_of
from workbench.training.strategies.blocks import repeated_blocks
from workbench.training.strategies.state import ParallelState, layers_of, parameter_stages
from workbench.training.zero.gather_scatter import gather, start_gather
from workbench.training.zero.gathered_call import GatheredCall, ShardedParameter, autocast_dtype, casts_of, writes_to
from workbench.training.zero.regathering import Regathering, end_failed_backwards


class ExecutionOrder:
    """The units of one model, in the order in which its last call ran them.

    Attributes:
        active: the calls of units that have not ended, the innermost last.
        last: in the present call of the model, or backward, what backward gathers for the last call of a unit.
    """

    def __init__(self) -> None:
        self.active: list[GatheredCall] = []
        self.last: Regathering | None = None
        self._depth = 0
        self._order: list[ShardedUnit] = []
        self._now: list[ShardedUnit] = []
        self._pending: tuple[ShardedUnit, list[GlobalTensor], list[int], BoxingWork] | None = None
        self._recorded: weakref.WeakKeyDictionary[World, tuple[int, list[ShardedUnit]]] = weakref.WeakKeyDictionary()

    def hook(self, module: nn.Module) -> list[Any]:
        """Hook the model itself, after its units, so that its hook runs before theirs."""
        return [
            module.register_forward_pre_hook(self._begin, prepend=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def reset(self) -> None:
        """Put shards back after a call of the model that ended without its hooks."""
        while self.active:
            self.active.pop().put_back()
        self._depth, self._pending, self._now, self.last = 0, None, [], None

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self.reset()  # a recomputation in backward may have left something
            # A forward inside a backward: that backward may need the gathered tensors
            if torch._C._current_graph_task_id() == -1:
                with hidden_from_modes():
                    end_failed_backwards(current())
            self._order = self._agreed_order(current())
        self._depth += 1

    def _agreed_order(self, world: World) -> list[ShardedUnit]:
        """The order that all ranks know; empty if one knows none.

        Each of several stages on a rank learns its own, because its first call may be this rank's tenth. After an
        interrupted call and a rebuild of the world, some ranks know the order and others do not.
        """
        num_rebuilds, order = self._recorded.get(world, (0, []))
        return order if num_rebuilds == world.num_rebuilds else []

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            with contextlib.suppress(CollectiveAborted), hidden_from_modes():  # the call has reported the abort
                self._cancel_prefetch()
            world = current()
            self._recorded[world] = world.num_rebuilds, self._now
            self._now, self.last = [], None

    def follow(self, call: GatheredCall) -> None:
        """Link a call that backward will need to the one before it in the same call of the model.

        A recomputation follows others of the same backward. Units that are called directly follow none: parameters may
        change between them.
        """
        if self._depth or torch._C._current_graph_task_id() != -1:
            call.before, self.last = self.last, call.again

    def take_prefetched(
        self, unit: ShardedUnit, parameters: list[GlobalTensor], shards: list[Shard], tag: int
    ) -> BoxingWork | None:
        """The gathering that a unit needs now. A gathering in progress for another unit was a wrong guess, and ends."""
        if self._depth:
            self._now.append(unit)
        if self._pending is not None:
            of, known, writes, work = self._pending
            if of is unit and list(map(id, known)) == list(map(id, parameters)) and writes == writes_to(known):
                self._pending = None
                return work
            self._cancel_prefetch()
        return _start_gather(parameters, shards, tag)

    def prefetch(self, world: World) -> None:
        """Begin to gather for the next unit, if the last call of the model says which that is."""
        position = len(self._now)
        if not self._depth or position >= len(self._order) or self._order[position - 1] is not self._now[-1]:
            return
        tag = world.context.next_tag()
        unit = self._order[position]
        parameters, shards = unit.parameters_to_gather()
        work = _start_gather(parameters, shards, tag)
        if work is not None:
            self._pending = unit, parameters, writes_to(parameters), work

    def _cancel_prefetch(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending[-1].finish()


def _start_gather(parameters: list[GlobalTensor], shards: list[Shard], tag: int) -> BoxingWork | None:
    if not parameters:
        return None
    with torch.no_grad(), local_torch():
        return start_gather(shards, [plain(p) for p in parameters], tag)


class ShardedUnit:
    """Hooks of one module that make the parameters of its members whole during its call.

    A unit inside another one finds them whole and gathers nothing. It works where somebody calls its module alone.

    Args:
        module: the module that is called.
        members: its parameters and those of its parts.
        owners: the modules whose own forward runs in this call, which may cast parameters under autocast.
    """

    def __init__(
        self,
        module: nn.Module,
        members: list[ShardedParameter],
        execution_order: ExecutionOrder,
        owners: Sequence[nn.Module],
    ) -> None:
        self.module, self.members, self.execution_order = module, members, execution_order
        self._to_cast = [(owner, name) for owner in owners for name in casts_of(owner)]
        self._calls: list[tuple[GatheredCall | None, list[tuple[nn.Module, str, Any, int]]]] = []

    def hook(self) -> list[Any]:
        """Hook the module. Without the hooks its parameters stay shards."""
        return [
            self.module.register_forward_pre_hook(self._gather_parameters, prepend=True),
            self.module.register_forward_hook(self._free_parameters, always_call=True),
        ]

    def parameters_to_gather(self) -> tuple[list[GlobalTensor], list[Shard]]:
        """The parameters to gather that this rank holds, each once, and their shards."""
        current = [found for member in self.members if (found := member.current()) is not None]
        held = {id(parameter): (parameter, shard) for parameter, shard in current if not shard.spec.is_placeholder}
        return [parameter for parameter, _ in held.values()], [shard for _, shard in held.values()]

    def _gather_parameters(self, module: nn.Module, args: Any) -> None:
        present = [(member, *found) for member in self.members if (found := member.current()) is not None]
        with hidden_from_modes():
            call = self._gather(present) if present else None
        self._calls.append((call, self._cast() if self._to_cast else []))

    def _gather(self, present: list[tuple[ShardedParameter, GlobalTensor, Shard]]) -> GatheredCall:
        execution_order, world = self.execution_order, present[0][1]._spec.world
        tag, tag_again = world.context.next_tag(), world.context.next_tag()
        again = Regathering(tag_again, *self.parameters_to_gather())
        call = GatheredCall(world, again)
        work = execution_order.take_prefetched(self, again.parameters, again.shards, tag)
        once = {id(p): (p, shard) for _, p, shard in present}
        chosen, shards = [p for p, _ in once.values()], [shard for _, shard in once.values()]
        found = gather(chosen, shards, work, tag, again.release)
        wholes = dict(zip(once, found, strict=True))
        call.insert([(member, wholes[id(parameter)]) for member, parameter, _ in present])
        execution_order.active.append(call)
        # a checkpoint saves nothing, and gathers when it runs the layer again
        if torch.is_grad_enabled() and not is_in_checkpoint():
            execution_order.follow(call)
            call.save_references([(member, p) for member, p, _ in present], [wholes[id(p)] for p in again.parameters])
        execution_order.prefetch(world)
        return call

    def _free_parameters(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._calls:
            return
        call, casts = self._calls.pop()
        for owner, name, whole, address in casts:
            owner._parameters[name] = whole
            if self.execution_order.active:
                self.execution_order.active[-1].places.pop(address, None)
        # An interrupted call has put its parameters back already
        if call is None or call not in self.execution_order.active:
            return
        self.execution_order.active.remove(call)
        parameters = call.again.parameters
        with local_torch():
            learns = any(parameter.requires_grad for parameter in parameters)
        saves_references, written = call.saving is not None, call.written()
        call.put_back()
        if written:
            raise StrategyError(
                f"{type(module).__name__}: forward has written to {len(written)} of {len(parameters)} gathered "
                f"parameters ({', '.join(written[:4])}). Under zero=3 a whole parameter is gone when the call ends, "
                "and with it what was written. Change parameters between steps, or use zero=2."
            )
        if saves_references and parameters:
            call.hook_results(args, output, learns)

    def _cast(self) -> list[tuple[nn.Module, str, Any, int]]:
        """Cast weights to 16 bits before a layer does, so that autograd's saved tensors can be recognized."""
        call = self.execution_order.active[-1] if self.execution_order.active else None
        if call is None or call.saving is None or (dtype := autocast_dtype(call.world)) is None:
            return []
        done = []
        for owner, name in self._to_cast:
            whole: Any = owner._parameters.get(name)
            if whole is None or whole._is_param:
                continue
            with local_torch():
                number = call.places.get(whole.untyped_storage().data_ptr())
                if number is None or call.again.dtypes[number] != dtype or whole.dtype == dtype:
                    continue
                copy = wrap(whole.to(dtype), whole._spec)
                address = copy.untyped_storage().data_ptr()
            call.places[address] = number
            owner._parameters[name] = copy  # type: ignore[assignment]
            done.append((owner, name, whole, address))
        return done


_SMALL_BYTES = 2**20
"""A block of so many bytes is gathered at once whatever its share of the model is."""
_LARGEST_SHARE = 4
"""A larger block is gathered at once if the model has so many of them; else layer by layer, to hold less."""


def check(module: nn.Module, state: ParallelState) -> None:
    """Refuse layers whose calls would not read gathered parameters.

    Raises:
        StrategyError: under ``zero=3``, TorchScript has compiled a layer.
    """
    if state.strategy.options.zero == 3:
        for _, layer in layers_of(module):
            refuse_scripted(layer, "zero=3")


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Shard as ``zero=`` of the strategy says, and observe the module's gradients."""
    stage = state.strategy.options.zero
    parameters = [p for p in module.parameters() if isinstance(p, GlobalTensor)]
    for parameter in parameters:
        parameter._optimizer_shard = None  # an earlier strategy may have set it
    if stage:
        stages = parameter_stages(module, state.resolved)
        choose_shards(parameters, [state.resolved.shard_groups(stages[id(p)]) for p in parameters])
    handles: list[Any] = []
    if stage == 3:
        execution_order = ExecutionOrder()
        for unit in _units(module, state, _split_values(parameters), execution_order):
            handles += unit.hook()
        handles += execution_order.hook(module)
        state.on_interrupt.append(execution_order.reset)
    return [*handles, GradientReducer(parameters, scatters=stage == 2)]


def _split_values(parameters: Sequence[GlobalTensor]) -> dict[int, Shard]:
    """Reduce every rank's parameters to its shards. Returns the shards by the ids of the parameters."""
    shards: dict[int, Shard] = {}
    for parameter in parameters:
        if (shard := shard_of(parameter)) is not None:
            shards[id(parameter)] = shard
            with torch.no_grad():
                parameter._take_data(box(parameter.detach(), shard.spec.layout))
    return shards


def _units(
    module: nn.Module, state: ParallelState, shards: dict[int, Shard], execution_order: ExecutionOrder
) -> Iterator[ShardedUnit]:
    """The blocks whose parameters are gathered together, the layers outside of blocks, and layers that are called
    alone.

    torch's attention reads the parameters of its parts without calling them.
    """
    stages = parameter_stages(module, state.resolved)
    members: dict[nn.Module, list[ShardedParameter]] = {}
    for choice, (_, layer) in zip(state.resolved.layers, layers_of(module), strict=True):
        named = layer.named_parameters(recurse=False, remove_duplicate=False)
        own = [(name, p) for name, p in named if id(p) in shards]
        # Layout hooks box whole parameters of other stages here, around each use.
        here = [(name, p) for name, p in own if stages[id(p)] == choice.stage]
        members[layer] = [ShardedParameter(layer, name, shards[id(p)]) for name, p in here]

    def inside(part: nn.Module) -> list[ShardedParameter]:
        return [member for layer in part.modules() for member in members.get(layer, ())]

    largest = max(_SMALL_BYTES, _whole_bytes(inside(module)) / _LARGEST_SHARE)
    gathered = {block: inside(block) for block in repeated_blocks(module) if _whole_bytes(inside(block)) <= largest}
    in_attention: set[nn.Module] = set()
    for layer, found in members.items():
        if isinstance(layer, nn.MultiheadAttention):
            in_attention.update(part for part in layer.modules() if part is not layer)
            gathered.pop(layer, None)
            yield ShardedUnit(layer, inside(layer), execution_order, list(layer.modules()))
        elif layer not in in_attention:
            yield ShardedUnit(layer, gathered.pop(layer, found), execution_order, [layer])
    for block, found in gathered.items():
        yield ShardedUnit(block, found, execution_order, [])


def _whole_bytes(members: list[ShardedParameter]) -> int:
    return sum(4 * math.prod(member.shard.of.shape) for member in members)
