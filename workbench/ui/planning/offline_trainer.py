"""A model without engines: its costs are counted on meta tensors, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.metrics import RunRecord
from workbench.core.model_costs import ModelCosts
from workbench.core.rows import Layer
from workbench.cost.hardware import Hardware
from workbench.errors import SessionError
from workbench.session.planning import SentCounter, first_batch, layer_costs

if TYPE_CHECKING:
    from workbench.ui.planning.byte_counter import Counter  # a widget's; commands do without ipywidgets

NO_ENGINES = "this panel has no engines: it predicts only. Make one without num_ranks= to train."


def costs_of(
    model_fn: Callable[[], Any],
    dataset: Any,
    loss_fn: Callable[..., Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> ModelCosts:
    """Costs of a model's layers for samples of a data set, counted on meta tensors without computing.

    Args:
        dataset: as for ``wb.Panel``, or the shape of a batch, ``(32, 128)``.
        collate_fn: makes a batch of samples, as for ``wb.Panel``.
    """
    if is_shape(dataset):
        return layer_costs(model_fn, dataset)
    batch = first_batch(dataset, loss_fn, collate_fn)
    return layer_costs(model_fn, batch.inputs, loss_fn=loss_fn, targets=batch.targets)


def sent_counter(
    model_fn: Callable[[], Any],
    dataset: Any,
    loss_fn: Callable[..., Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_size: int,
    hardware: Hardware | None,
) -> Counter | None:
    """Counts the bytes that strategies of a model send; None without samples. ``hardware`` is None for engines."""
    if dataset is None or is_shape(dataset):
        return None
    return SentCounter(model_fn, dataset, loss_fn, collate_fn, batch_size, hardware).count


def measured(session: Any) -> Hardware:
    """The calibrated machine of a session's engines."""
    from workbench.session.calibration import calibrate

    found = calibrate(session)
    assert isinstance(found, Hardware)
    return found


def is_shape(dataset: Any) -> bool:
    """Whether it is the shape of a batch instead of samples."""
    return isinstance(dataset, tuple) and all(isinstance(size, int) for size in dataset)


def optimizer_name(optimizer_fn: Callable[[Any], Any] | None, layers: Sequence[Layer]) -> tuple[str, str]:
    """The cost model's name of an optimizer, and why it is another one than the run's; empty if it is not.

    The default optimizer of runs has momentum. ``optimizer_fn`` gets parameters like those of ``layers``, on meta.
    """
    if optimizer_fn is None:
        return "momentum", ""
    import torch

    shapes = [shape for layer in layers for shape in layer.shapes.values()]
    parameters = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    try:
        made = optimizer_fn(iter(parameters))
    except Exception as error:  # noqa: BLE001 - any function may fail on meta, and runs all the same
        return "adamw", f"For AdamW: optimizer_fn on meta tensors raised {type(error).__name__}: {error}"
    name = type(made).__name__
    if name == "SGD":
        return ("momentum" if made.defaults.get("momentum") else "sgd"), ""
    if name.lower() in ("adam", "adamw", "adamw8bit"):
        return name.lower(), ""
    return "adamw", f"For AdamW: what {name} takes is not known. Known are SGD, Adam, AdamW and AdamW8bit."


class OfflineTrainer:
    """Describes a model on ``num_ranks`` ranks for predictions only; ``start`` raises."""

    check_steps, compiles, seed = 0, False, 0

    def __init__(
        self, costs: ModelCosts, num_ranks: int, dataset: Any, loss_fn: Any = None, collate_fn: Any = None
    ) -> None:
        self.layers, self.num_ranks = costs.layers, num_ranks
        self.sample_shape = (
            tuple(dataset[1:]) if is_shape(dataset) else first_batch(dataset, loss_fn, collate_fn).sample_shape
        )
        self.baseline: RunRecord | None = None
        self.settings: Mapping[str, Any] = {}

    def start(self, *_args: Any) -> Any:
        """Raise ``SessionError``: there are no engines."""
        raise SessionError(f"panel.run(): {NO_ENGINES}")
