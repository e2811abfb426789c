"""The state that ``parallelize`` keeps on a module, and the module's layers in the form that a strategy needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from workbench.core.placement import Placement
from workbench.core.rows import Layer
from workbench.core.sharding_plan import ShardingPlan
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy, Strategy
from workbench.core.weight_splits import IMAGE_KINDS, known_kind
from workbench.errors import StrategyError
from workbench.tensors.agreement import check_same_batch
from workbench.training.batches import LossFunction, named_tensors
from workbench.training.mean_losses import check_mean, identity_of
from workbench.training.recorded_actions import RecordedAction
from workbench.training.strategies.blocks import module_around, numbered_blocks, repeated_blocks
from workbench.training.strategies.call_order import Calls
from workbench.training.strategies.fused_experts import count_experts
from workbench.training.strategies.layouts import LayoutsInUse, StageLayouts
from workbench.training.strategies.listed_experts import listed_experts

STATE, PLAN = "_workbench_parallel", "plan"
ROOT = "(root)"
"""Row name of parameters that belong to the model itself and to no layer of it."""
_MOST_CHECKED = 8
"""How many kinds of batches, and how many losses, a module checks: the host waits for the device in each check."""


@dataclass(eq=False)
class ParallelState:
    """The strategy on a module, with its hooks and caches.

    Attributes:
        in_use: the placements of the stages, and the layouts of layers on them.
        handles: hooks; each has ``remove()``.
        placements: the ranks of every stage.
        forward_caches: caches of modules that this rank's only stage calls: of other stages, and of its own.
        stage_ranks: for a rank with several stages, each stage's view of the module.
        spans: the times of this rank's actions in the last scheduled step.
        on_interrupt: called when an interrupt ends a call of the module, for which torch calls no hooks.
        compared: kinds of calls whose first batches the ranks have compared.
        num_rebuilds: how often the world had been rebuilt when the module was called last.
        mean_losses: the identities of the losses that were found to be means over samples.
        preset: a preset whose stages follow the order of calls, until a batch has shown this order.
        without_values: the names of tensors from meta, as long as nothing has given values to all of them.
    """

    strategy: Strategy
    resolved: ResolvedStrategy
    in_use: LayoutsInUse
    handles: list[Any] = field(default_factory=list)
    placements: tuple[Placement, ...] = ()
    forward_caches: Any = None
    stage_ranks: Any = None
    spans: list[RecordedAction] = field(default_factory=list)
    on_interrupt: list[Callable[[], None]] = field(default_factory=list)
    compared: set[Any] = field(default_factory=set)
    num_rebuilds: int = 0
    mean_losses: set[Any] = field(default_factory=set)
    preset: str | None = None
    without_values: list[str] = field(default_factory=list)

    def compare_first_batch(self, batch: Any, call: str, leaves: Iterable[Any] | None = None) -> None:
        """The ranks compare the plain tensors of the first batch of a kind that the module gets. All ranks call it.

        Headers of exchanges show later batches that differ. A call without gradients may exchange nothing and gives
        its ``leaves``: of these, the first batch of each of the first 8 combinations of shapes is compared.

        Raises:
            LayoutError: the tensors differ.
        """
        num_rebuilds = self.layouts.world.num_rebuilds
        if self.num_rebuilds != num_rebuilds:  # perhaps a first call has ended on some ranks only: it begins anew
            self.num_rebuilds = num_rebuilds
            self.compared.clear()
            self.layouts.plan.forget_calls()
            self.forward_caches = None  # a call that they replay shows no order
        plain = [leaf for leaf in leaves or () if type(leaf) is torch.Tensor]
        kind = None if leaves is None else tuple([(tensor.shape, tensor.dtype) for tensor in plain])
        if kind not in self.compared and (kind is None or len(self.compared) < _MOST_CHECKED):
            check_same_batch(named_tensors(batch), self.layouts.world, call)
            self.compared.add(kind)

    def check_loss(self, loss_fn: LossFunction, output: Any, targets: Any, num_micro_batches: int) -> None:
        """Check that a loss is a mean over samples, before its first use with several micro-batches.

        Only of the first 8 losses. Not in a dry run: it computes no losses, and may run beside a program that draws
        random numbers.

        Raises:
            RunError: it is not such a mean.
        """
        known, identity = self.mean_losses, identity_of(loss_fn)
        if identity not in known and len(known) < _MOST_CHECKED and self.layouts.world.device.type != "meta":
            check_mean(loss_fn, output, targets, num_micro_batches)
            known.add(identity)

    @property
    def layouts(self) -> StageLayouts:
        """The present layouts."""
        return self.in_use.layouts

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies of the module, without the objects that steps have made. A copy's steps make its own."""
        return {**self.__dict__, "forward_caches": None, "stage_ranks": None, "spans": [], "mean_losses": set()}


def describe(model: nn.Module, calls: Calls | None = None) -> list[Layer]:
    """The layers of a model for a strategy: the modules that own parameters, in the order of registration. A model
    without parameters is one layer.

    ``calls`` are the calls in a forward. A layer that is not called (a weight that another module uses) belongs to the
    layer before it.

    Raises:
        StrategyError: a lazy module has no shapes yet.
    """
    owners: dict[int, str] = {}
    holders: dict[int, str] = {}
    found: list[Layer] = []
    where: tuple[int, int] | None = None
    listed = listed_experts(model)
    for path, module in layers_of(model):
        if calls is not None:
            where = calls.get(path, (where[0], where[0]) if where else (0, 0))
        own, name = dict(module.named_parameters(recurse=False)), path or ROOT
        if lazy := [short for short, p in own.items() if nn.parameter.is_lazy(p)]:
            raise StrategyError(
                f"layer {name!r} ({type(module).__name__}): {', '.join(lazy)} of {len(own)} parameters have no shape "
                "yet. A strategy needs the shapes of all layers. Call the model on a batch first, after "
                "wb.manual_seed(0) on all ranks."
            )
        owner = owners.setdefault(id(own["weight"]), name) if "weight" in own else name
        elsewhere = tuple(short for short, p in own.items() if holders.setdefault(id(p), name) != name)
        shapes = {short: tuple(parameter.shape) for short, parameter in own.items()}
        num_parameters = sum(parameter.numel() for parameter in own.values())
        kind = known_kind([base.__name__ for base in type(module).__mro__])
        groups = getattr(module, "groups", 1) if kind in IMAGE_KINDS else 1
        tied_to, frozen = owner if owner != name else None, tuple(k for k, p in own.items() if not p.requires_grad)
        itemsize, itemsizes = _itemsizes(own)
        number, experts = listed.get(module_around(path, listed)) or (None, count_experts(module))
        found.append(
            Layer(
                name, kind, shapes, num_parameters, tied_to, where, groups, itemsize, experts, number,
                itemsizes=itemsizes, frozen=frozen, elsewhere=elsewhere,
            )
        )  # fmt: skip
    return _with_blocks(model, found)


def _with_blocks(model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
    """The layers with their blocks; in a model without blocks each part is one."""
    count = sum(1 for _ in repeated_blocks(model))
    if count:
        numbers = numbered_blocks(model, [layer.name for layer in layers])
    else:
        parts = {name: number for number, name in enumerate(layer.name for layer in layers if layer.name != ROOT)}
        count, numbers = len(parts), tuple(parts.get(layer.name, -1) for layer in layers)
    numbered = zip(layers, numbers, strict=True)
    return [replace(layer, block=(number, count)) for layer, number in numbered]


def _itemsizes(own: Mapping[str, nn.Parameter]) -> tuple[int, dict[str, int]]:
    """Bytes of an element of the first parameter with a gradient, else of the first one; and of others that differ."""
    first = max(own.values(), key=lambda p: p.requires_grad, default=torch.empty(0)).dtype.itemsize
    return first, {name: p.dtype.itemsize for name, p in own.items() if p.dtype.itemsize != first}


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that own parameters, with their paths. A model without parameters is one layer."""
    owners = (each for each in model.named_modules() if any(True for _ in each[1].parameters(recurse=False)))
    first = next(owners, ("", model))
    return itertools.chain((first,), owners)


def parameter_owners(module: nn.Module, resolved: ResolvedStrategy) -> dict[nn.Parameter, ResolvedLayer]:
    """The layer of every parameter. A parameter that several layers share is on the earliest of their stages.

    Raises:
        StrategyError: the module has got or lost layers since it was parallelized.
    """
    owners: dict[nn.Parameter, ResolvedLayer] = {}
    layers = {name or ROOT: layer for name, layer in layers_of(module)}
    chosen = {choice.name: choice for choice in resolved.layers}
    if changed := [*(layers.keys() - chosen.keys()), *(chosen.keys() - layers.keys())]:
        raise StrategyError(
            f"{type(module).__name__} has {len(layers)} layers, and its strategy is for {len(chosen)}: "
            f"{', '.join(sorted(changed)[:3])} came or went after wb.parallelize. Change the layers before it, or call "
            "it again."
        )
    for name, layer in layers.items():
        choice = chosen[name]
        for parameter in layer.parameters(recurse=False):
            if choice.stage < owners.setdefault(parameter, choice).stage:
                owners[parameter] = choice
    return owners


def parameter_stages(module: nn.Module, resolved: ResolvedStrategy) -> dict[int, int]:
    """The stage of every parameter by its id."""
    return {id(parameter): choice.stage for parameter, choice in parameter_owners(module, resolved).items()}


def state_of(module: nn.Module) -> ParallelState:
    """The state of a parallelized module. Raises ``StrategyError`` for other modules."""
    if STATE not in module.__dict__:
        raise StrategyError(
            f"{type(module).__name__} is not parallelized. Call wb.parallelize(module, strategy) first."
        )
    state: ParallelState = module.__dict__[STATE]
    return state


def unhook(module: nn.Module) -> None:
    """Remove the hooks of earlier calls of ``parallelize``, of the module and of parts of it: they would box inputs and
    sum gradients a second time. Parameters stay global tensors.
    """
    for part in module.modules():
        state = part.__dict__.pop(STATE, None)
        if isinstance(part.__dict__.get(PLAN), ShardingPlan):
            del part.__dict__[PLAN]
        for handle in state.handles if state else []:
            handle.remove()
