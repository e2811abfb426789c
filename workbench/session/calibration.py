"""``wb.planner.calibrate``: measures this machine, as constants for planner and simulator."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from workbench.core.boxing import LinkCost
from workbench.cost.fitting import fit_link, fit_products
from workbench.cost.hardware import Hardware, Link
from workbench.cost.hardware_files import save_hardware
from workbench.errors import SessionError
from workbench.session.remote_call import finished
from workbench.tensors.boxing import calibration
from workbench.training.costs.machine_times import default_spans, measure
from workbench.training.costs.times import ExchangeTime, FunctionTime, RankTimes

if TYPE_CHECKING:
    from workbench.session.cluster import Session


def calibrate(
    session: Session | None = None, path: str | os.PathLike[str] | None = None, *, name: str | None = None
) -> Hardware | LinkCost:
    """Measure this machine: all of it from a notebook with a session, or the cost of exchanges from inside a rank.

    With a session, all engines measure at once, because they share cores, memory and links. They time matrix products
    by size and dtype, copies, the functions of models, the start of a function, and each kind of boxing in groups of 2,
    4, ... ranks. This takes about 10 s, longer where engines share cores. Nothing else should run on the machine.
    Without a session, all ranks call it, and from then on boxing decides with the measured link.

    Args:
        session: the engines to measure.
        path: a hardware file to write.
        name: of the machine in the file.

    Returns:
        The machine, with the source of every number; without a session, the ``LinkCost``.

    Raises:
        CellError: a rank failed.
        SessionError: a file or a name was asked for without a session.

    ``hardware = wb.planner.calibrate(session, "here.json")``, then ``wb.planner.plan(model, hardware, ...)``.
    """
    if session is None:
        if path is not None or name is not None:
            raise SessionError(
                f"calibrate(path={path!r}, name={name!r}): without a session only the cost of exchanges is measured, "
                "and no file is written. In a notebook: wb.planner.calibrate(wb.Session.current(), path)."
            )
        return calibration.calibrate()
    times: list[RankTimes] = finished(session.submit(measure, default_spans(session.num_engines)))
    hardware = hardware_from(times, name)
    if path is not None:
        save_hardware(hardware, Path(path))
    return hardware


def hardware_from(times: Sequence[RankTimes], name: str | None = None) -> Hardware:
    """Constants from the measurements of the ranks: exchanges from the slowest rank, rates as means."""
    first = times[0]
    rates, half_sizes, weight_rates = {}, {}, {}
    for dtype in sorted({product.dtype for product in first.products}):
        points = [
            (product.flops, float(product.inner), product.operand_bytes, product.time_s)
            for rank in times
            for product in rank.products
            if product.dtype == dtype
        ]
        rates[dtype], half_sizes[dtype], weight_rates[dtype] = fit_products(points)
    if _is_cpu(first):  # it emulates 8 bits by products of 32
        rates["fp8"] = rates["fp32"]
    usual = rates.get("bf16", rates["fp32"])  # for which a half size holds
    ranks_per_host = [sum(other.host == rank.host for other in times) for rank in times]
    exchanges = [exchange for rank in times for exchange in rank.exchanges]
    copied = mean(rank.copy_bytes_per_s for rank in times)
    return Hardware(
        name or f"{first.device}, {len(times)} engines",
        min(
            rank.memory_bytes / (count if _is_cpu(rank) else 1)
            for rank, count in zip(times, ranks_per_host, strict=True)
        ),
        copied,
        rates,
        half_sizes["fp32"] * usual / rates["fp32"],
        mean(rank.op_s for rank in times),
        _links(exchanges, copied),
        _function_rates(times, _moved_bytes),
        _function_rates(times, _flops),
        _exchanges(exchanges, copied),
        max(rank.crowding for rank in times),
        mean(rank.step_s for rank in times),
        weight_rates["fp32"],
        _sources(times),
        max(rank.one_shot_bytes for rank in times),
        _is_cpu(first),
        mean(rank.offload_bytes_per_s for rank in times),
    )


def _is_cpu(rank: RankTimes) -> bool:
    return rank.device.endswith("CPU")


def _links(exchanges: Sequence[ExchangeTime], copied: float) -> tuple[Link, ...]:
    """One link per span, for all kinds of exchange; ``copied`` is the memory's rate in bytes per second."""
    spans = sorted({exchange.span for exchange in exchanges})
    if not spans:  # a rank by itself
        return (Link(1, 0.0, copied),)
    return tuple(Link(span, *_fit((e for e in exchanges if e.span == span), copied)) for span in spans)


def _exchanges(exchanges: Sequence[ExchangeTime], copied: float) -> dict[str, tuple[float, float]]:
    """Exchanges by kind, among all ranks."""
    widest = max((exchange.span for exchange in exchanges), default=0)
    among_all = [exchange for exchange in exchanges if exchange.span == widest]
    kinds = dict.fromkeys(exchange.kind for exchange in among_all)
    return {kind: _fit((exchange for exchange in among_all if exchange.kind == kind), copied) for kind in kinds}


def _fit(exchanges: Iterable[ExchangeTime], copied: float) -> tuple[float, float]:
    slowest: dict[tuple[str, float], float] = defaultdict(float)
    for exchange in exchanges:
        key = exchange.kind, exchange.size_bytes
        slowest[key] = max(slowest[key], exchange.time_s)
    return fit_link([(size_bytes, time_s) for (_, size_bytes), time_s in slowest.items()], copied)


def _function_rates(times: Sequence[RankTimes], amount_of: Callable[[FunctionTime], float]) -> dict[str, float]:
    """The rate of each function that has an amount, by name, per second."""
    found: dict[str, list[float]] = defaultdict(list)
    for rank in times:
        for function in rank.functions:
            if amount_of(function):
                found[function.name].append(amount_of(function) / function.time_s)
    return {name: mean(rates) for name, rates in found.items()}


def _flops(function: FunctionTime) -> float:
    """Operations of forward and backward; the backward of a product has two products."""
    return 3 * function.flops


def _moved_bytes(function: FunctionTime) -> float:
    """Bytes moved by functions other than products."""
    return 0.0 if function.flops else function.moved_bytes


def _sources(times: Sequence[RankTimes]) -> dict[str, str]:
    first = times[0]
    day = datetime.now().astimezone().date().isoformat()
    run = f"calibrated {day}, torch {first.versions['torch']}, {len(times)} engines at once"
    link = f"{run}, transport {first.transport}"
    measured = ("memory_bandwidth_bytes_per_s", "matmul_flops_per_s", "matmul_half_size", "op_s", "step_s",
                "function_bytes_per_s", "function_flops_per_s", "alone_speedup", "weight_bytes_per_s",
                "offload_bytes_per_s")  # fmt: skip
    shared = "the host's memory, divided by its engines" if _is_cpu(first) else "the GPU's memory"
    return {
        "memory_bytes": f"{day}, {shared}",
        **dict.fromkeys(measured, run),
        "links": link,
        "exchanges": link,
        "one_shot_bytes": link,
        "exchanges_on_cores": f"{link}, on a {first.device}",
    }
