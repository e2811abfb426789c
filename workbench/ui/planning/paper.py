"""A model that nobody trains: what the panel needs to know of it, counted on metadata, with no cluster at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.core.metrics import RunRecord
from workbench.core.model_costs import ModelCosts
from workbench.cost.hardware import Hardware
from workbench.errors import SessionError
from workbench.ui.runs.trainer import sample_shape_of

NO_ENGINES = "this panel has no engines: it predicts only. Give it a session to train with it."
_NUM_SAMPLES = 2


def costs_of(model_fn: Callable[[], Any], dataset: Any, loss_fn: Callable[..., Any] | None) -> ModelCosts:
    """Costs of a model's layers for samples of a data set; the model is made on metadata, and nothing is computed.

    Args:
        dataset: as for ``wb.Panel``, or the shape of a batch, ``(32, 128)``.
    """
    from workbench.session.planning import layer_costs

    if _is_shape(dataset):
        return layer_costs(model_fn, dataset)
    inputs, targets = first_samples(dataset)
    return layer_costs(model_fn, inputs, loss_fn, targets)


def measured(session: Any) -> Hardware:
    """The machine that a session's engines are on, calibrated."""
    from workbench.session.calibrating import calibrate

    found = calibrate(session)
    assert isinstance(found, Hardware)
    return found


def _is_shape(dataset: Any) -> bool:
    return isinstance(dataset, tuple) and all(isinstance(size, int) for size in dataset)


def first_samples(dataset: Any) -> tuple[Any, Any]:
    """A batch of two samples, ``(inputs, targets)`` as tensors."""
    import torch

    arrays = dataset if isinstance(dataset, tuple) else getattr(dataset, "tensors", None)
    if arrays is not None:
        first, second = (torch.as_tensor(array[:_NUM_SAMPLES]) for array in arrays)
        return first, second
    samples = [dataset[index] for index in range(_NUM_SAMPLES)]
    first, second = (torch.stack([torch.as_tensor(sample[place]) for sample in samples]) for place in (0, 1))
    return first, second


def optimizer_name(optimizer_fn: Callable[[Any], Any] | None) -> str:
    """What the cost model calls an optimizer; the one that runs take by default has momentum."""
    if optimizer_fn is None:
        return "momentum"
    import torch

    made = optimizer_fn([torch.nn.Parameter(torch.zeros(1))])
    name = type(made).__name__.lower()
    if name == "sgd":
        return "momentum" if made.defaults.get("momentum") else "sgd"
    return name if name in ("adam", "adamw") else "adamw"


class PaperTrainer:
    """Describes a model on ``num_ranks`` ranks that are not there."""

    def __init__(self, costs: ModelCosts, num_ranks: int, dataset: Any) -> None:
        self.layers, self.num_ranks = costs.layers, num_ranks
        self.sample_shape = tuple(dataset[1:]) if _is_shape(dataset) else sample_shape_of(dataset)
        self.baseline: RunRecord | None = None

    def start(self, *_args: Any) -> Any:
        """There is nothing to train on."""
        raise SessionError(f"panel.run(): {NO_ENGINES}")
