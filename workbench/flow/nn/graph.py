"""``flow.nn.Graph``: a training step, or an evaluation, as one call that cuts the batch and runs its stages."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from workbench.core.placement import Placement
from workbench.errors import StrategyError
from workbench.flow.local_tensor import local
from workbench.flow.nn.graph_config import GraphConfig
from workbench.flow.nn.module_config import ModuleConfig as GraphModule
from workbench.flow.nn.module_config import is_recomputed
from workbench.flow.nn.stages import disjoint_placements, stages_of
from workbench.flow.world_join import join
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.training.batches import Batch
from workbench.training.batches import join as join_outputs
from workbench.training.pipelining.programs import forward_caches_for, run_program, train_program
from workbench.training.pipelining.timeline import timeline_of


class Graph(ABC):
    """A step of a model. Subclasses set modules in ``__init__`` and write ``build``. A call runs the step.

    With an optimizer a call trains. It cuts the batch into the micro-batches of
    ``config.set_gradient_accumulation_steps`` and runs ``build``, which calls ``loss.backward()``, on each. The
    gradients are those of the mean loss. The optimizers step once, then the gradients are dropped. The call returns the
    results of ``build`` without history: scalars as means over the samples, tensors joined along dim 0.

    Without an optimizer a call evaluates: ``build`` runs once on the whole batch, without gradients.

    Modules with ``config.stage_id`` are pipelined if the stages' weights are on different ranks. The stages then work
    on different micro-batches at the same time, by the 1F1B schedule (``config.schedule`` names another). If two stages
    share a rank, or no stages are set, micro-batches run one after the other through all layers. The numbers are the
    same in both cases: those of the micro-batches in order on one device.

    The schedule runs ``backward()`` later than ``build`` calls it, so there are no gradients yet after that line.

    >>> class Step(flow.nn.Graph):
    ...     def __init__(self, model):
    ...         self.model = model
    ...
    ...     def build(self, x):
    ...         return self.model(x)
    >>> Step(flow.nn.Linear(4, 2))(flow.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    config: GraphConfig

    def __new__(cls, *args: Any, **kwargs: Any) -> Graph:
        if cls.__abstractmethods__:
            raise StrategyError(
                f"{cls.__name__} has 0 build methods: a graph is what its build does with a batch. Write "
                f"`def build(self, x, y):` in {cls.__name__}."
            )
        graph = super().__new__(cls)
        graph.config, graph._optimizers, graph._scaler, graph.spans = GraphConfig(), [], None, []
        graph._forward_caches = [], (), []
        return graph

    _optimizers: list[tuple[torch.optim.Optimizer, Any]]
    _scaler: torch.amp.GradScaler | None
    _forward_caches: tuple[list[nn.Parameter], tuple[Placement, ...], list[Any]]
    spans: list[Any]
    """The times of this rank's actions in the last training call."""

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The work of the graph on a (micro-)batch. A training graph calls ``backward()`` on its loss here."""

    def add_optimizer(self, optim: torch.optim.Optimizer, *, lr_sch: Any = None) -> None:
        """Let calls train: after the micro-batches ``optim`` steps once, then ``lr_sch``, a scheduler of its rate.

        Before that, the gradients of parameter groups with ``clip_grad_max_norm`` (and ``clip_grad_norm_type``) are
        clipped.

        Raises:
            StrategyError: ``optim`` is no optimizer, or ``lr_sch`` belongs to another optimizer.
        """
        if not isinstance(optim, torch.optim.Optimizer):
            raise StrategyError(
                f"add_optimizer({type(optim).__name__}): an optimizer is wanted. Write e.g. "
                "self.add_optimizer(flow.optim.SGD(model.parameters(), lr=0.1))."
            )
        if lr_sch is not None and getattr(lr_sch, "optimizer", None) is not optim:
            raise StrategyError(
                f"add_optimizer(lr_sch={type(lr_sch).__name__}): it schedules another optimizer than "
                f"{type(optim).__name__}, the 1 that is added. Make it with this optimizer."
            )
        self._optimizers.append((optim, lr_sch))

    def set_grad_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Scale losses for fp16 by a ``torch.amp.GradScaler``. If a rank overflows, all ranks skip the step."""
        self._scaler = scaler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. All ranks of the world call it with the same batch."""
        join()
        inputs = tree_map(lambda leaf: local(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        if not self._optimizers:
            return self._evaluate(inputs)
        self._check_optimizers()
        stages = stages_of(self._modules().values())
        placements = disjoint_placements(stages)
        parts, shares = _cut(inputs, self.config.num_micro_batches)
        weigh = None if self._scaler is None else self._scaler.scale
        self._forget_gradients()
        try:
            outputs, self.spans = train_program(
                self._build,
                parts,
                shares,
                placements=placements,
                schedule=self.config.schedule,
                forward_caches=self._forward_caches_for(stages, placements) if placements else (),
                weigh=weigh,
            )
            self._step()
        finally:
            self._forget_gradients()
        return join_outputs(outputs, shares)

    def _build(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        dtype = self.config.autocast
        with nullcontext() if dtype is None else torch.autocast(join().device.type, dtype=dtype):
            return self.build(*inputs[0], **inputs[1])

    def _evaluate(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        output, num_losses = run_program(self._build, inputs)
        if num_losses:
            raise StrategyError(
                f"{type(self).__name__}.build calls backward() on {num_losses} loss(es), but the graph has 0 "
                "optimizers, so no weight would change. Call self.add_optimizer(optimizer) in __init__, or leave "
                "backward out."
            )
        return output

    def _forward_caches_for(
        self, stages: dict[int, list[torch.Tensor]], placements: tuple[Placement, ...]
    ) -> list[Any]:
        """Forward caches of blocks, kept while the weights and their layouts stay the same."""
        modules = list(self._modules().values())
        stage_of = {id(weight): stage for stage, weights in stages.items() for weight in weights}
        parameters = [parameter for module in modules for parameter in module.parameters()]
        if any(id(p) not in stage_of for p in parameters) or any(map(is_recomputed, modules)):
            return []
        known, where, found = self._forward_caches
        if where != placements or len(known) != len(parameters) or not all(map(operator.is_, known, parameters)):
            found = forward_caches_for(modules, stage_of, placements)
            self._forward_caches = parameters, placements, found
        return found

    def _step(self) -> None:
        for optimizer, schedule in self._optimizers:
            clipped = [group for group in optimizer.param_groups if "clip_grad_max_norm" in group]
            if clipped and self._scaler is not None:
                self._scaler.unscale_(optimizer)
            for group in clipped:
                norm_type = group.get("clip_grad_norm_type", 2.0)
                nn.utils.clip_grad_norm_(group["params"], group["clip_grad_max_norm"], norm_type)
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
            if schedule is not None:
                schedule.step()
        if self._scaler is not None:
            self._scaler.update()

    def _parameters(self) -> list[torch.Tensor]:
        modules = self._modules().values()
        own = [value for value in self.__dict__.values() if isinstance(value, torch.Tensor)]
        return [*own, *(parameter for module in modules for parameter in module.parameters())]

    def _forget_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _modules(self) -> dict[str, nn.Module]:
        return {name: value for name, value in self.__dict__.items() if isinstance(value, nn.Module)}

    def _check_optimizers(self) -> None:
        own = set(map(id, self._parameters()))
        for optimizer, _ in self._optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            foreign = [tuple(p.shape) for p in parameters if id(p) not in own]
            if foreign:
                raise StrategyError(
                    f"{type(self).__name__}: {len(foreign)} of the {len(parameters)} parameters of its "
                    f"{type(optimizer).__name__} are in no module of the graph (the first has shape {foreign[0]}; the "
                    f"graph's modules: {', '.join(self._modules()) or 'none'}). Set the module in __init__, e.g. "
                    "self.model = model, and make the optimizer after model.to_global(...)."
                )

    def timeline(self) -> Any:
        """The times of every rank's actions in the last training call, see ``wb.debug.timeline``. All ranks call it."""
        return timeline_of(self.spans)

    def state_dict(self) -> dict[str, Any]:
        """The state of the graph's modules, by their attribute names in the graph."""
        return {name: module.state_dict() for name, module in self._modules().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a result of ``state_dict`` into the modules."""
        for name, module in self._modules().items():
            module.load_state_dict(state[name], strict=strict)

    def __repr__(self) -> str:
        stages = disjoint_placements(stages_of(self._modules().values()))
        where = "".join(f", stage {stage} on {placement.ranks}" for stage, placement in enumerate(stages))
        return f"{type(self).__name__}({self.config.num_micro_batches} micro-batches{where})"


def _cut(inputs: Any, num_micro_batches: int) -> tuple[list[Any], list[float]]:
    """The inputs of micro-batches, and their shares of the samples. Parts of a global tensor have its layout."""
    if num_micro_batches == 1:
        return [inputs], [1.0]
    parts = Batch(inputs).cut(num_micro_batches)
    return [tree_map(_in_layout_of, part.inputs, inputs) for part in parts], [part.share for part in parts]


def _in_layout_of(part: Any, whole: Any) -> Any:
    if not isinstance(part, GlobalTensor):
        return part
    return GlobalTensor.to_global(part, whole.placement, whole.sbp)


__all__ = ["Graph", "GraphModule"]
