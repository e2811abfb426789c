"""``wb.planner.plan``: the best strategy for a model on a machine, and what its layers cost. No cluster is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.model_costs import ModelCosts
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
    from torch import Tensor, nn

    from workbench.training.batches import Batch

    Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
    Model = nn.Module | Callable[[], nn.Module]


def layer_costs(
    model: Model,
    inputs: Inputs,
    loss_fn: Callable[..., Tensor] | None = None,
    targets: Any = None,
    *,
    dtype: str | None = None,
) -> ModelCosts:
    """What a model's layers cost, counted without a cluster and without weights.

    Args:
        model: a module, or a function that makes it; nothing of it is computed.
        inputs: a batch: a tensor, several, or keyword arguments; or the shape of a tensor.
        loss_fn: ``(output, targets) -> scalar``; its functions are counted as a layer of their own. None: the model's
            own loss, or all that it returns.
        targets: what ``loss_fn`` compares with; None: a dict's ``labels``, as for ``wb.forward_backward``.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``; default as the model is.

    Returns:
        For every layer the operations, the bytes moved and those kept for backward, of one sample (``ModelCosts``).

    >>> [layer.name for layer in wb.planner.layer_costs(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (2, 4)).layers]
    ['0']
    """
    from workbench.training.costs.layer_costs import layer_costs as count

    return count(model, inputs, loss_fn, targets, dtype=dtype)


def first_batch(
    dataset: Any, loss_fn: Callable[..., Any] | None, collate_fn: Callable[[list[Any]], Any] | None = None
) -> Batch:
    """Two samples of a data set as a batch: what of them goes to the model, what to the loss, and their shape."""
    from workbench.training.datasets import first_batch as take

    return take(dataset, loss_fn, collate_fn=collate_fn)


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
    **constraints: Any,
) -> Plan:
    """The strategy that is predicted to be best for a model on a machine that need not be there.

    Args:
        model: a module or a function that makes it (traced with ``inputs``, nothing is allocated), costs that are known
            already, a ``Transformer``, or the name of one ("gpt3-175b", "llama2-7b", ...).
        hardware: a machine, its name ("a100-80g-selene"), or the path of a hardware file.
        num_ranks: how many there are.
        batch_size: samples per step, all ranks together.
        inputs, loss_fn, targets: a batch of any size, and the loss that is taken of it; for modules only.
        objective: "throughput", "memory" (the smallest peak) or "cost" (the fewest rank-seconds, on as many ranks
            or fewer).
        memory_bytes: that a rank may hold. None: all that the hardware has.
        precision: "fp32", "bf16" or "fp16". None: as the model is.
        optimizer: "adamw", "adam", "momentum" or "sgd".
        software: what the training program does; the engines of this package by default.
        constraints: what is decided already: ``pipeline=``, ``data=``, ``model=``, ``micro_batches=``, ``schedule=``,
            ``zero=`` (a value or several), ``recompute=``, ``sequence=`` (True or False), ``layers="head: data@1"``;
            ``heads=`` numbers that the model degree divides, where the model does not say its heads.

    Raises:
        StrategyError: constraints that contradict each other, a model that fits nowhere, a module without ``inputs``.

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
        software=software,
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
    return layer_costs(model, inputs, loss_fn, targets)


__all__ = ["first_batch", "layer_costs", "plan"]
