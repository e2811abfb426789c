"""``flow.nn.Graph``: a training step, or an evaluation, as one call that cuts the batch and runs its stages."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from workbench.core.placement import Placement
from workbench.errors import StrategyError
from workbench.flow.local_tensor import local
from workbench.flow.nn.module_config import ModuleConfig as GraphModule  # noqa: F401 - as programs write it
from workbench.flow.nn.module_config import config_of, is_recomputed
from workbench.flow.world_join import join
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.training.batches import Batch
from workbench.training.joined_outputs import join as join_outputs
from workbench.training.pipelining.programs import forward_caches_for, run_program, train_program
from workbench.training.pipelining.timeline import timeline_of


class Graph(ABC):
    """A step of a model. Subclasses set modules in ``__init__`` and write ``build``. A call runs the step.

    With an optimizer a call trains. It cuts the batch into the micro-batches of
    ``config.set_gradient_accumulation_steps`` and runs ``build``, which calls ``loss.backward()``, on each. The
    gradients are those of the mean loss. The optimizers step once, then the gradients are dropped. The call returns the
    results of ``build`` without history: scalars as means over the samples, tensors joined along dim 0, which counts
    samples.

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
        clipped. A group's ``lr_scale`` multiplies the rate.

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
        parts, shares, sizes = _cut(inputs, self.config.num_micro_batches)
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
            joined = join_outputs(outputs, shares, sizes)
            self._step()
        finally:
            self._forget_gradients()
        return joined

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
            scaled = [(group, group["lr"]) for group in optimizer.param_groups if "lr_scale" in group]
            for group, rate in scaled:
                group["lr"] = rate * group["lr_scale"]
            try:
                if self._scaler is None:
                    optimizer.step()
                else:
                    self._scaler.step(optimizer)
            finally:
                for group, rate in scaled:
                    group["lr"] = rate
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

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a result of ``state_dict`` into the modules, as ``torch.nn.Module.load_state_dict`` does.

        Returns:
            ``missing_keys`` of the graph and ``unexpected_keys`` of the state; ``strict`` refuses both.
        """
        together = nn.Module()
        together._modules.update(self._modules())
        flat = {f"{name}.{key}": value for name, part in state.items() for key, value in part.items()}
        return together.load_state_dict(flat, strict)

    def __repr__(self) -> str:
        stages = disjoint_placements(stages_of(self._modules().values()))
        where = "".join(f", stage {stage} on {placement.ranks}" for stage, placement in enumerate(stages))
        return f"{type(self).__name__}({self.config.num_micro_batches} micro-batches{where})"


def _cut(inputs: Any, num_micro_batches: int) -> tuple[list[Any], list[float], list[int] | None]:
    """The inputs of micro-batches, their shares of the samples, and their numbers of samples. Parts of a global tensor
    have its layout.
    """
    if num_micro_batches == 1:
        return [inputs], [1.0], None
    batch = Batch(inputs)
    parts, num_samples = batch.cut(num_micro_batches), batch.num_samples
    sizes = None if batch.has_rows else [round(part.share * num_samples) for part in parts]
    return [tree_map(_in_layout_of, part.inputs, inputs) for part in parts], [part.share for part in parts], sizes


def _in_layout_of(part: Any, whole: Any) -> Any:
    if not isinstance(part, GlobalTensor):
        return part
    return GlobalTensor.to_global(part, whole.placement, whole.sbp)


_HINTS = frozenset(
    {
        "allow_fuse_add_to_output", "allow_fuse_cast_scale", "allow_fuse_model_update_ops",
        "enable_cudnn_conv_heuristic_search_algo", "enable_cudnn_fused_normalization_add_relu", "enable_fused_linear",
        "enable_multi_tensor_update", "enable_straighten_algorithm", "set_outputs_buffer_size",
    }
)  # fmt: skip
"""Settings of OneFlow's compiler that change no numbers: accepted, and without effect."""


class GraphConfig:
    """The settings in ``graph.config``.

    Attributes:
        num_micro_batches: the number of parts into which a training batch is cut.
        autocast: the dtype under which ``build`` runs; None for none.
        schedule: the order in which stages run micro-batches, e.g. ``"1f1b"`` or ``"gpipe"`` (an extension of OneFlow).
    """

    def __init__(self) -> None:
        self.num_micro_batches = 1
        self.autocast: torch.dtype | None = None
        self.schedule = "1f1b"

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Cut every training batch into ``value`` micro-batches along dim 0 (one per sample, if there are fewer)."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StrategyError(
                f"config.set_gradient_accumulation_steps({value!r}): a batch is cut into at least 1 part. Give a whole "
                "number, e.g. 2."
            )
        self.num_micro_batches = value

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Run ``build`` under autocast. With ``dtype=flow.float16`` give the graph a scaler (``set_grad_scaler``)."""
        self.autocast = dtype if mode else None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in _HINTS:
            return _without_effect
        known = sorted(n for n in {*dir(type(self)), *self.__dict__} if not n.startswith("_"))
        raise AttributeError(
            f"graph.config.{name}: no such setting; there are {', '.join(known)}. Settings of a strategy (zero, "
            "recompute, degrees) are options of wb.parallelize(module, strategy)."
        )


def _without_effect(*args: Any, **options: Any) -> None:
    pass


def stages_of(modules: Iterable[nn.Module]) -> dict[int, list[torch.Tensor]]:
    """The weights of every stage, in the order of stages. Empty if no module has a stage.

    A module without a stage belongs to that of the nearest module around it. A weight that several stages share belongs
    to the first of them that the walk finds.

    Raises:
        StrategyError: the stage ids leave out a number.
    """
    found: dict[int, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for module in modules:
        for stage, weights in _walk(module, None):
            if stage is not None:
                found.setdefault(stage, []).extend(w for w in weights if id(w) not in seen)
            seen.update(map(id, weights))
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise StrategyError(
            f"nn.Graph: stage ids {sorted(found)} leave out {missing[0]}. {len(found)} stages are numbered 0 to "
            f"{len(found) - 1}: set module.config.stage_id accordingly."
        )
    return dict(sorted(found.items()))


def _walk(module: nn.Module, stage: int | None) -> Iterator[tuple[int | None, list[torch.Tensor]]]:
    config = config_of(module)
    if config is not None and config.stage_id is not None:
        stage = config.stage_id
    yield stage, [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for child in module.children():
        yield from _walk(child, stage)


def disjoint_placements(stages: dict[int, list[torch.Tensor]]) -> tuple[Placement, ...]:
    """The placements of the stages, if each has global weights and its own ranks, so that they can run concurrently.

    Empty if there are fewer than two such stages.
    """
    placements: list[Placement] = []
    taken: set[int] = set()
    for weights in stages.values():
        on = [weight.placement if isinstance(weight, GlobalTensor) else None for weight in weights]
        ranks = {rank for placement in on if placement is not None for rank in placement}
        if not on or on[0] is None or None in on or ranks & taken:
            return ()
        taken |= ranks
        placements.append(on[0] if on[0].num_ranks == len(ranks) else Placement.of(on[0].type, sorted(ranks)))
    return tuple(placements) if len(placements) > 1 else ()
