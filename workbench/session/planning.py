"""``wb.planner.plan``: the best strategy for a model on a machine, and the costs of its layers. Needs no cluster."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.model_costs import ModelCosts
from workbench.cost.estimate import SentBytes
from workbench.cost.hardware import Hardware
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import WORKBENCH, Software
from workbench.cost.transformer import Transformer, transformer_costs
from workbench.errors import StrategyError
from workbench.planning.plan import Plan
from workbench.planning.problem import Constraints, check_constraint_names
from workbench.planning.published_models import transformer_by_name
from workbench.planning.search import search

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from workbench.training.batches import Batch

    Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
    Model = nn.Module | Callable[[], nn.Module]


def layer_costs(
    model: Model,
    inputs: Inputs,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    targets: Any = None,
    dtype: str | torch.dtype | None = None,
) -> ModelCosts:
    """The costs of a model's layers, counted on metadata: no cluster, no weights.

    Args:
        model: a module, or a function that makes it. Nothing is computed.
        inputs: a batch: a tensor, several, or keyword arguments; or the shape of a tensor.
        loss_fn: ``(output, targets) -> scalar``; counted as a layer of its own. None: the model's own loss, or all its
            results.
        targets: the second argument of ``loss_fn``. None: a dict's ``labels``, as for ``wb.forward_backward``.
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or the dtype of torch; default: the model's.

    Returns:
        For each layer the operations, the bytes moved and the bytes kept for backward, for one sample (``ModelCosts``).

    Raises:
        StrategyError: another dtype, no parameters, or a forward that fails or depends on values.

    >>> [layer.name for layer in wb.planner.layer_costs(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (2, 4)).layers]
    ['0']
    """
    from workbench.training.costs.layer_costs import layer_costs as count

    return count(model, inputs, loss_fn=loss_fn, targets=targets, dtype=dtype)


def first_batch(
    dataset: Any, loss_fn: Callable[..., Any] | None, collate_fn: Callable[[list[Any]], Any] | None = None
) -> Batch:
    """The first two samples of a data set as a batch: inputs of the model, targets of the loss, and their shapes."""
    from workbench.tensors.program_state import undrawn
    from workbench.training.datasets import first_batch as take

    with undrawn():
        return take(dataset, loss_fn, collate_fn=collate_fn)


class CountEnded(Exception):
    """A count was ended by the one who asked for it."""


class SentCounter:
    """Counts the bytes that all ranks send in a step of a job, by a dry run: the real program, on metadata.

    Args:
        model_fn, dataset, loss_fn, collate_fn: as for ``wb.Panel``.
        batch_size: samples per step.
        hardware: the machine whose link decides how sums are made; None for the engines of one host.
    """

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        dataset: Any,
        loss_fn: Callable[..., Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        batch_size: int,
        hardware: Hardware | None = None,
    ) -> None:
        self._make, self._dataset, self._loss_fn, self._collate_fn = model_fn, dataset, loss_fn, collate_fn
        self._batch_size, self._hardware = batch_size, hardware
        self._model: nn.Module | None = None
        self._batch: Batch | None = None

    def count(self, strategy: str, num_ranks: int, is_ended: Callable[[], bool]) -> SentBytes:
        """The bytes of a strategy.

        Raises:
            CountEnded: ``is_ended`` said so.
            StrategyError: the strategy does not fit, or the forward reads values, which metadata does not have.
        """
        from workbench.training.costs.dry_run import DryRunEnded, dry_run
        from workbench.training.costs.layer_costs import made_on_meta
        from workbench.transport.shared.transport import SharedTransport

        if self._model is None or self._batch is None:
            self._model, self._batch = made_on_meta(self._make), self._whole_batch()
        model, batch = self._model, self._batch
        cost = SharedTransport.cost if self._hardware is None else self._hardware.link_cost
        try:
            found = dry_run(
                lambda: copy.deepcopy(model), strategy, num_ranks, batch.inputs, batch.targets, self._loss_fn,
                cost=cost, is_ended=is_ended,
            )  # fmt: skip
        except DryRunEnded as error:
            raise CountEnded from error
        weights = sum(found.by_kind.get(kind, 0) for kind in ("gradients", "parameters"))
        return SentBytes(found.boxed_bytes - weights, weights)

    def _whole_batch(self) -> Batch:
        """A batch of a step without its data: a panel keeps it."""
        import torch
        from torch.utils._pytree import tree_map_only

        from workbench.training.batches import Batch
        from workbench.training.datasets import num_samples_of, take

        indices = torch.arange(min(self._batch_size, num_samples_of(self._dataset)))
        whole = Batch.of(take(self._dataset, indices, self._collate_fn), self._loss_fn)
        data = whole.inputs, whole.targets
        inputs, targets = tree_map_only(torch.Tensor, lambda leaf: leaf.to("meta"), data)
        return replace(whole, inputs=inputs, targets=targets)


def plan(
    model: Model | ModelCosts | Transformer | str,
    /,
    hardware: Hardware | str | Path,
    num_ranks: int,
    batch_size: int,
    *,
    inputs: Inputs | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    targets: Any = None,
    objective: str = "throughput",
    memory_bytes: float | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    software: Software = WORKBENCH,
    compile: bool = False,
    **constraints: Any,
) -> Plan:
    """The strategy with the best prediction for a model on a machine. The machine need not exist here.

    Args:
        model: a module or a function that makes it (traced with ``inputs``, without allocating weights), known costs of
            layers, a ``Transformer``, or the name of one ("gpt3-175b", "llama2-7b", ...).
        hardware: a machine, its name ("a100-80g-selene"), or the path of a hardware file.
        num_ranks: number of ranks.
        batch_size: samples per step, all ranks together.
        inputs, loss_fn, targets: for modules: a batch of any size, and its loss.
        objective: "throughput" (the shortest step), "memory" (the smallest peak) or "cost" (the fewest rank-seconds, on
            all ranks or fewer).
        memory_bytes: the most bytes that a rank may hold. None: the hardware's memory.
        precision: "fp32", "bf16", "fp16" or "fp8". None: the model's.
        optimizer: "adamw", "adam", "adamw8bit", "momentum" or "sgd".
        software: properties of the training program; default: the engines of this package.
        compile: the step is compiled (``wb.capture``): functions between two products are one program. Costs of a
            ``Transformer`` are the same with it.
        constraints: limits on the search: ``pipeline=``, ``data=``, ``model=``, ``micro_batches=``, ``schedule=``,
            ``zero=``, ``shards=``, ``context=`` (one value or several), ``recompute=`` (True, "attention",
            "cheap", a number of blocks, or "none"), ``offload=`` ("optimizer", "activations", "optimizer+activations",
            "none", or several to let the search choose), ``sequence=`` (True or False), ``overlap=`` (one number or
            several), ``layers="head: data@1"``, and ``heads=``, numbers that the model degree must divide, for a model
            that does not name its heads.

    Raises:
        StrategyError: constraints that conflict, a model that fits nowhere, or a module without ``inputs``.

    >>> plan("gpt2", "a100-80g-selene", 8, 64, precision="bf16", model=1, pipeline=1).resolved.degrees
    (1, 8, 1)
    """
    check_constraint_names("plan", constraints)
    return search(
        _costs(model, inputs, loss_fn, targets),
        hardware if isinstance(hardware, Hardware) else load_hardware(hardware),
        num_ranks,
        batch_size,
        objective=objective,
        memory_bytes=memory_bytes,
        precision=precision,
        optimizer=optimizer,
        software=replace(software, fuses=True) if compile else software,
        constraints=Constraints(**constraints),
    )


def _costs(model: Any, inputs: Inputs | None, loss_fn: Callable[..., Tensor] | None, targets: Any) -> ModelCosts:
    if isinstance(model, ModelCosts):
        return model
    if isinstance(model, str | Transformer):
        return transformer_costs(transformer_by_name(model) if isinstance(model, str) else model)
    if inputs is None:
        raise StrategyError(
            "plan(model): a module is traced with a batch, but inputs is None. Give one, e.g. inputs=(2, 784) for the "
            "shape of 2 samples, or inputs={'input_ids': ids}."
        )
    return layer_costs(model, inputs, loss_fn=loss_fn, targets=targets)
