"""A machine in numbers: constants come back from the times that a machine with these constants would take."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

import workbench as wb
from workbench.core.boxing import LinkCost
from workbench.cost.compute import Rates
from workbench.cost.hardware import Hardware
from workbench.cost.hardware_files import load_hardware, save_hardware
from workbench.errors import SessionError
from workbench.session.calibration import hardware_from
from workbench.testing import run_ranks
from workbench.training.costs import machine_times
from workbench.training.costs.machine_times import PRODUCTS, default_spans
from workbench.training.costs.stopwatch import Stopwatch
from workbench.training.costs.times import ExchangeTime, FunctionTime, ProductTime, RankTimes

RATE, HALF, OPERANDS, LATENCY_S, BANDWIDTH = 5e10, 40.0, 7e9, 2e-5, 3e9


def test_without_a_session_there_is_no_machine_to_write(tmp_path):
    """No file came, and nothing said so."""
    with pytest.raises(SessionError, match=r"path=.*here\.json.*In a notebook"):
        wb.planner.calibrate(path=tmp_path / "here.json")


def rank_times(slower: float = 1.0, host: str = "a", crowding: float = 1.0) -> RankTimes:
    """What a rank of a known machine measures; exchanges may be slower than on the others."""
    products = [
        ProductTime("fp32", m, k, n, 2.0 * m * k * n * (1 + HALF / k) / RATE + 4 * (m * k + k * n + m * n) / OPERANDS)
        for m, k, n in PRODUCTS
    ]
    exchanges = [
        ExchangeTime(kind, span, size, slower * (LATENCY_S * span + size / BANDWIDTH))
        for kind in ("all-gather", "all-reduce")
        for span in (2, 4)
        for size in (1e3, 1e5, 1e7)
    ]
    functions = [FunctionTime("gelu", 0.0, 2.5e6, 2.5e-3), FunctionTime("conv2d", 1e9, 1e6, 0.3)]
    return RankTimes(host, 16e9, "shared", "x86 CPU", tuple(products), tuple(functions), tuple(exchanges),
                     8e9, 2.0**16, crowding, 1e-5, 3e-4, 2e9, {"torch": "2.13"})  # fmt: skip


def test_constants_come_back():
    hardware = hardware_from([rank_times() for _ in range(4)])
    assert hardware.matmul_flops_per_s["fp32"] == pytest.approx(RATE)
    assert hardware.matmul_half_size == pytest.approx(HALF)
    assert hardware.weight_bytes_per_s == pytest.approx(OPERANDS)
    assert hardware.one_shot_bytes == 2**16
    assert [link.span for link in hardware.links] == [2, 4]
    for link in hardware.links:
        assert link.latency_s == pytest.approx(LATENCY_S * link.span)
        assert link.bandwidth_bytes_per_s == pytest.approx(BANDWIDTH)
    assert hardware.exchanges["all-gather"] == pytest.approx((4 * LATENCY_S, BANDWIDTH))
    assert hardware.function_bytes_per_s == {"gelu": pytest.approx(1e9)}
    assert hardware.function_flops_per_s == {"conv2d": pytest.approx(1e10)}
    assert hardware.offload_bytes_per_s == 2e9
    assert (hardware.op_s, hardware.step_s, hardware.alone_speedup) == pytest.approx((1e-5, 3e-4, 1.0))


def test_constants_hold_at_both_precisions_where_16_bits_are_slower():
    """A CPU that emulates them. Functions are timed in 32 bits only."""
    times = rank_times()
    emulated = [replace(product, dtype="bf16", time_s=6 * product.time_s) for product in times.products]
    hardware = hardware_from([replace(times, products=(*times.products, *emulated))])
    for precision, slower in (("fp32", 1), ("bf16", 6)):
        rates = Rates.of(hardware, precision, 1.0)
        assert rates.product_s(1e9, 64, 0.0, "conv2d") - hardware.op_s == pytest.approx(slower * 0.1)
        if precision == "fp32":
            assert rates.product_s(1e9, 64, 0.0) - hardware.op_s == pytest.approx(1e9 * (1 + HALF / 64) / RATE)


def test_ranks_that_share_cores_are_faster_alone():
    assert hardware_from([rank_times(crowding=crowding) for crowding in (1.0, 2.0)]).alone_speedup == 2.0


def test_ranks_of_a_host_share_its_memory():
    assert hardware_from([rank_times() for _ in range(4)]).memory_bytes == 4e9
    assert hardware_from([rank_times(host=host) for host in "aabb"]).memory_bytes == 8e9


def test_the_slowest_rank_tells_what_an_exchange_takes():
    hardware = hardware_from([rank_times(), rank_times(slower=3.0)])
    assert hardware.links[0].bandwidth_bytes_per_s == pytest.approx(BANDWIDTH / 3)


def test_every_number_has_a_source():
    hardware = hardware_from([rank_times()], "here")
    assert hardware.name == "here" and "4 engines" not in hardware.sources["links"]
    assert set(hardware.sources) == {field.name for field in fields(Hardware)} - {"name", "sources", "fp32_is_tf32"}
    assert all("20" in source for source in hardware.sources.values())


def test_a_file_brings_the_machine_back(tmp_path):
    hardware = hardware_from([rank_times() for _ in range(2)])
    save_hardware(hardware, tmp_path / "here.json")
    assert load_hardware(tmp_path / "here.json") == hardware


@pytest.mark.parametrize(("num_ranks", "spans"), [(1, []), (2, [2]), (4, [2, 4]), (6, [2, 6]), (3, [3])])
def test_groups_of_ranks(num_ranks, spans):
    assert default_spans(num_ranks) == spans


@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_ranks_measure_together(monkeypatch, num_ranks):
    """On simulated ranks, with small sizes: rows of all kinds, and a machine that can be."""
    monkeypatch.setattr(machine_times, "PRODUCTS", ((8, 4, 8), (8, 64, 8)))
    monkeypatch.setattr(machine_times, "WEIGHT_BYTES", 2**14)
    monkeypatch.setattr(machine_times, "EXCHANGE_BYTES", (2**12, 2**14))
    monkeypatch.setattr(machine_times, "COPY_BYTES", 2**16)
    monkeypatch.setattr(machine_times, "ROWS", {"cpu": 64})
    monkeypatch.setattr(machine_times, "FUNCTION_BYTES", 2**18)
    monkeypatch.setattr(machine_times, "Stopwatch", lambda *about: Stopwatch(*about, window_s=0.0))
    before = torch.get_rng_state()
    times = run_ranks(machine_times.measure, num_ranks)
    assert torch.equal(torch.get_rng_state(), before)  # by time, functions draw more numbers on one rank than on others
    assert {exchange.kind for exchange in times[0].exchanges} == (
        {*machine_times.KINDS, "gradients", *["send"] * (num_ranks == 2)} if num_ranks > 1 else set()
    )
    hardware = hardware_from(times)
    assert hardware.matmul_flops_per_s["fp32"] > 0 and hardware.op_s >= 0 and hardware.links[-1].span == num_ranks
    assert {"gelu", "layer_norm"} <= hardware.function_bytes_per_s.keys()
    assert {"conv2d", "scaled_dot_product_attention"} <= hardware.function_flops_per_s.keys()


def test_inside_a_rank_it_is_the_links_cost():
    assert all(isinstance(cost, LinkCost) for cost in run_ranks(wb.planner.calibrate, 2))


@pytest.mark.slow
@pytest.mark.engines
def test_engines_are_measured_and_the_machine_is_kept(session, tmp_path):
    hardware = wb.planner.calibrate(session, tmp_path / "here.json", name="here")
    assert load_hardware(tmp_path / "here.json") == hardware
    assert hardware.name == "here" and hardware.links[-1].span == session.num_engines
    assert 1e9 < hardware.matmul_flops_per_s["fp32"] < 1e14
    assert 1e-7 < hardware.op_s < 1e-2
