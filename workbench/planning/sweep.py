"""``wb.planner.simulate``: predicts any strategy on any machine. Lists of values give a table of all combinations."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from workbench.core.model_costs import ModelCosts
from workbench.core.presets import StrategyLike, strategy_of
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware import Hardware
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import WORKBENCH, Software
from workbench.cost.transformer import Transformer, transformer_costs
from workbench.errors import StrategyError
from workbench.planning.published_models import transformer_by_name
from workbench.planning.strategy_comparison import PARTS
from workbench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

Model = ModelCosts | Transformer | str
SweptStrategy = StrategyLike | ResolvedStrategy
HardwareLike = Hardware | str | PathLike[str]
BEST = "best"
"""As a strategy: the planner finds one for every point."""


@dataclass(frozen=True)
class Point:
    """One combination of values, and the prediction of its step.

    Attributes:
        values: by name: gpus, batch_size, hardware, and the other arguments.
        strategy: the resolved strategy; None if there is none.
        estimate: None if the point is impossible.
        machine: the hardware of one GPU.
        flops: operations of a step, without recomputation.
        error: why the point is impossible, else empty.
    """

    values: Mapping[str, Any]
    machine: Hardware
    strategy: ResolvedStrategy | None = None
    estimate: Estimate | None = None
    flops: float = 0.0
    error: str = ""

    def row(self) -> dict[str, Any]:
        """Values for a table, in bytes and seconds; None if there is no estimate."""
        known, strategy = self.estimate, self.strategy
        row: dict[str, Any] = dict(self.values)
        row["degrees"] = "x".join(map(str, strategy.degrees)) if strategy else None
        for name in ("samples_per_s", "step_s", *PARTS, "peak_bytes", "boxed_bytes"):
            row[name] = getattr(known, name, None)
        row["flops_per_s_per_gpu"] = self.flops / known.step_s / self.values["gpus"] if known else None
        row["fits"] = known.peak_bytes <= self.machine.memory_bytes if known else None
        row["error"] = self.error
        return row


@dataclass(frozen=True)
class Sweep:
    """All points of a simulation; the values of the last list vary fastest.

    Attributes:
        points: one for every combination.
        swept: names of the arguments that were lists.
    """

    points: tuple[Point, ...]
    swept: tuple[str, ...] = ()

    @property
    def table(self) -> pd.DataFrame:
        """One row per point: its values, throughput, seconds by part, bytes of the fullest rank, whether it fits."""
        import pandas

        return pandas.DataFrame([point.row() for point in self.points])

    @property
    def estimate(self) -> Estimate:
        """The estimate of the only point.

        Raises:
            StrategyError: there are several points.
        """
        if len(self.points) != 1 or self.points[0].estimate is None:
            raise StrategyError(f"simulate: {len(self.points)} points have no single estimate. Use .points or .table.")
        return self.points[0].estimate

    def _repr_html_(self) -> str:
        table = self.table if any(point.error for point in self.points) else self.table.drop(columns="error")
        return str(table.to_html(index=False, float_format=lambda value: f"{value:.4g}"))

    def __repr__(self) -> str:
        if len(self.points) == 1 and self.points[0].estimate is not None:
            known = self.points[0].estimate
            return (
                f"a step takes {format_seconds(known.step_s)} ({known.samples_per_s:.4g} samples/s), of which "
                f"{known.bubble_s / known.step_s:.0%} is waiting for other stages; a rank holds at most "
                f"{format_bytes(known.peak_bytes)}"
            )
        return (
            f"Sweep of {len(self.points)} points over {', '.join(self.swept) or 'nothing'}:\n{self.table.to_string()}"
        )


def simulate(
    model: Model | Callable[..., Model],
    strategy: SweptStrategy | Callable[..., SweptStrategy],
    hardware: HardwareLike | Sequence[HardwareLike],
    *,
    gpus: int | Sequence[int],
    batch_size: int | Sequence[int],
    optimizer: str = "adamw",
    software: Software = WORKBENCH,
    with_timeline: bool = False,
    **sizes: Any,
) -> Sweep:
    """Predict a training step, without devices. A list of values for any argument makes a sweep.

    Args:
        model: costs of its layers (``wb.planner.layer_costs``), a ``Transformer`` or the name of one, or a function of
            ``sizes`` that returns one of these.
        strategy: a text, a ``wb.Strategy``, ``"best"`` for the planner's choice, or a function of any of ``gpus``,
            ``batch_size`` and ``sizes``.
        hardware: a machine, its name or its file.
        gpus: number of ranks.
        batch_size: samples per step.
        optimizer: "adamw", "adam", "adamw8bit", "momentum" or "sgd".
        software: properties of the training program.
        with_timeline: keep the schedule action by action in the estimates.
        sizes: arguments of the functions: ``sequence=[1024, 2048]``, ``layers=...``. An array counts as its list.

    Returns:
        A ``Sweep``: ``.table`` (pandas), ``.points``, and ``.estimate`` of a single point.
        ``workbench.ui.planning.sweep_figures`` draws it.

    Raises:
        StrategyError: the only point is impossible. In a sweep, the row of the point has the error.
        HardwareError: no such machine, or a file with a wrong number.

    GPT-3 on 1536 and on 3072 GPUs:

    >>> from workbench.cost.gpt3 import GPT3, gpt3_strategy
    >>> sweep = simulate(GPT3, gpt3_strategy, "a100-80g-selene", gpus=[1536, 3072], batch_size=1536)
    >>> [(row["gpus"], row["degrees"]) for row in (point.row() for point in sweep.points)]
    [(1536, '64x3x8'), (3072, '64x6x8')]
    """
    given = {"hardware": hardware, "gpus": gpus, "batch_size": batch_size, **sizes}
    given = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in given.items()}
    swept = tuple(name for name, value in given.items() if isinstance(value, Sequence) and not isinstance(value, str))
    empty = [name for name in swept if not len(given[name])]
    if empty:
        raise StrategyError(
            f"simulate({empty[0]}={given[empty[0]]!r}): no value, so there is no point; give at least 1."
        )
    columns = [list(value) if name in swept else [value] for name, value in given.items()]
    settings = _Settings(model, strategy, optimizer, software, with_timeline)
    points = tuple(settings.point(dict(zip(given, values, strict=True))) for values in itertools.product(*columns))
    if len(points) == 1 and points[0].error:
        raise StrategyError(points[0].error)
    return Sweep(points, swept)


@dataclass(frozen=True)
class _Settings:
    """The arguments that all points share."""

    model: Model | Callable[..., Model]
    strategy: SweptStrategy | Callable[..., SweptStrategy]
    optimizer: str
    software: Software
    with_timeline: bool

    def point(self, values: dict[str, Any]) -> Point:
        """The estimate of one combination, or the reason that there is none."""
        given = values["hardware"]
        machine = given if isinstance(given, Hardware) else load_hardware(given)
        values = {**values, "hardware": machine.name}
        try:
            costs = _costs(_called(self.model, values))
            resolved = self._resolved(costs, machine, values)
            found = estimate(
                costs,
                resolved,
                machine,
                values["batch_size"],
                optimizer=self.optimizer,
                software=self.software,
                with_timeline=self.with_timeline,
            )
        except StrategyError as error:
            return Point(values, machine, error=str(error))
        return Point(values, machine, resolved, found, values["batch_size"] * costs.training_flops)

    def _resolved(self, costs: ModelCosts, machine: Hardware, values: Mapping[str, Any]) -> ResolvedStrategy:
        strategy = _called(self.strategy, values)
        if strategy == BEST:
            from workbench.planning.search import search

            return search(
                costs, machine, values["gpus"], values["batch_size"], optimizer=self.optimizer, software=self.software
            ).resolved
        if not isinstance(strategy, ResolvedStrategy):
            return strategy_of(strategy, costs.layers, values["gpus"]).resolve(costs.layers, values["gpus"])
        if strategy.num_ranks != values["gpus"]:
            raise StrategyError(
                f"simulate: a strategy of {strategy.num_ranks} ranks on {values['gpus']} GPUs: all are used. Give a "
                "function of gpus, or a strategy without degrees."
            )
        return strategy


def _called(value: Any, values: Mapping[str, Any]) -> Any:
    """The result of a function for the values that it names (all, if it takes any); other values unchanged."""
    if not callable(value) or hasattr(value, "named_parameters"):
        return value
    parameters = inspect.signature(value).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}
    return value(**{name: given for name, given in values.items() if takes_any or name in named})


def _costs(model: Any) -> ModelCosts:
    if isinstance(model, Transformer | str):
        return transformer_costs(transformer_by_name(model) if isinstance(model, str) else model)
    if not isinstance(model, ModelCosts):
        raise StrategyError(
            f"simulate(model={type(model).__name__}): costs of layers are needed. Count them first: "
            "wb.planner.layer_costs(model, inputs, loss_fn=loss_fn, targets=targets)."
        )
    return model
