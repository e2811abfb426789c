"""What ``parallelize`` did to a module, and the module's layers as a strategy sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from workbench.core.placement import Placement
from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy, Strategy
from workbench.core.weight_splits import known_kind
from workbench.errors import StrategyError
from workbench.pipeline.simulate import Span
from workbench.tensors.agreement import check_same_batch
from workbench.training.batches import LossFunction, named_tensors
from workbench.training.mean_losses import check_mean
from workbench.training.strategies.call_order import Calls
from workbench.training.strategies.layouts import LayoutsInUse, StageLayouts

STATE = "_workbench_parallel"
ROOT = "(root)"
"""Row name of parameters that belong to the model itself and to no layer of it."""


_recording = threading.local()


@contextmanager
def recorded_module_calls() -> Iterator[list[nn.Module]]:
    """While this lasts, the parallelized modules that this thread calls are put into a list."""
    _recording.modules = found = list[nn.Module]()
    try:
        yield found
    finally:
        _recording.modules = None


def record_module_call(module: nn.Module) -> None:
    """A parallelized module is being called."""
    found: list[nn.Module] | None = getattr(_recording, "modules", None)
    if found is not None:
        found.append(module)


@dataclass(eq=False)
class ParallelState:
    """The strategy in force on a module and what carries it.

    Attributes:
        in_use: where the stages lie, and what layers do there.
        handles: hooks; each has ``remove()``.
        placements: the ranks of every stage.
        after_backward: called after the backward of every micro-batch, on every rank.
        forward_caches: modules as this rank's only stage calls them: those of other stages, and those of its own.
        stage_ranks: where a rank has several stages, what each of them sees of the module.
        spans: what this rank's actions of the last scheduled step took.
        on_interrupt: called when a call of the module ends by an interruption, for which torch calls no hooks.
        has_compared_batch: whether the ranks have compared the plain tensors of a first batch.
        mean_loss: the code of the last loss that was found to be a mean over samples.
        preset: a preset whose stages are cut by the order of calls, as long as no batch has shown it.
    """

    strategy: Strategy
    resolved: ResolvedStrategy
    in_use: LayoutsInUse
    handles: list[Any] = field(default_factory=list)
    placements: tuple[Placement, ...] = ()
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    forward_caches: Any = None
    stage_ranks: Any = None
    spans: list[Span] = field(default_factory=list)
    on_interrupt: list[Callable[[], None]] = field(default_factory=list)
    has_compared_batch: bool = False
    mean_loss: Any = None
    preset: str | None = None

    def compare_first_batch(self, batch: Any, call: str) -> None:
        """The ranks compare the plain tensors of the first batch that the module gets. All ranks call it.

        Raises:
            LayoutError: they differ.
        """
        if not self.has_compared_batch:
            check_same_batch(named_tensors(batch), self.layouts.world, call)
            self.has_compared_batch = True

    def check_loss(self, loss_fn: LossFunction, output: Any, targets: Any, num_micro_batches: int) -> None:
        """Before the first use of a loss under several micro-batches: it must be a mean over samples.

        Raises:
            RunError: it is not.
        """
        code = getattr(loss_fn, "__code__", loss_fn)  # a lambda may be made anew in every step
        if code is not self.mean_loss:
            check_mean(loss_fn, output, targets, num_micro_batches)
            self.mean_loss = code

    @property
    def layouts(self) -> StageLayouts:
        """The layouts in use now."""
        return self.in_use.layouts

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the module: what steps have made of its modules and tensors is made anew of theirs."""
        return {**self.__dict__, "forward_caches": None, "stage_ranks": None, "spans": [], "mean_loss": None}


def describe(model: nn.Module, calls: Calls | None = None) -> list[Layer]:
    """The layers of a model as a strategy sees them: the modules that own parameters, in the order of registration.

    ``calls`` are those of a forward. A layer that is not called (a weight that another module uses) counts with the
    one before it.
    """
    owners: dict[int, str] = {}
    found: list[Layer] = []
    where: tuple[int, int] | None = None
    for path, module in layers_of(model):
        if calls is not None:
            where = calls.get(path, (where[0], where[0]) if where else (0, 0))
        own, name = dict(module.named_parameters(recurse=False)), path or ROOT
        owner = owners.setdefault(id(own["weight"]), name) if "weight" in own else name
        shapes = {short: tuple(parameter.shape) for short, parameter in own.items()}
        num_parameters = sum(parameter.numel() for parameter in own.values())
        kind = known_kind([base.__name__ for base in type(module).__mro__])
        found.append(Layer(name, kind, shapes, num_parameters, owner if owner != name else None, where))
    return found


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that own parameters, with their paths."""
    return (
        (name, module) for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    )


def parameter_owners(module: nn.Module, resolved: ResolvedStrategy) -> dict[nn.Parameter, ResolvedLayer]:
    """The layer of every parameter; one that several layers share lives on the earliest of their stages."""
    owners: dict[nn.Parameter, ResolvedLayer] = {}
    for choice, (_, layer) in zip(resolved.layers, layers_of(module), strict=True):
        for parameter in layer.parameters(recurse=False):
            if choice.stage < owners.setdefault(parameter, choice).stage:
                owners[parameter] = choice
    return owners


def parameter_stages(module: nn.Module, resolved: ResolvedStrategy) -> dict[int, int]:
    """The stage of every parameter by its id."""
    return {id(parameter): choice.stage for parameter, choice in parameter_owners(module, resolved).items()}


def state_of(module: nn.Module) -> ParallelState:
    """The strategy in force; raises ``StrategyError`` for a module that was never parallelized."""
    if STATE not in module.__dict__:
        raise StrategyError(
            f"{type(module).__name__} is not parallelized. Call wb.parallelize(module, strategy) first."
        )
    state: ParallelState = module.__dict__[STATE]
    return state


def unhook(module: nn.Module) -> None:
    """Remove the hooks of an earlier ``parallelize``; parameters stay global tensors."""
    state = module.__dict__.pop(STATE, None)
    for handle in state.handles if state else []:
        handle.remove()
