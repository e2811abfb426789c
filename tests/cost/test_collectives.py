"""What groups of ranks have of a machine's links."""

from __future__ import annotations

import pytest

from workbench.cost.collectives import exchange_s, group_link, kind_of, received_parts
from workbench.cost.hardware import Hardware, Link
from workbench.cost.hardware_files import load_hardware

HOSTS = Hardware("hosts of 8", 1e10, 1e12, {"fp32": 1e13}, 0, 0, (Link(8, 0.0, 200.0), Link(1024, 0.0, 20.0)))


@pytest.mark.parametrize(
    ("size", "stride", "bandwidth"),
    [
        (8, 1, 200),  # one host
        (2, 8, 20),  # one rank of each of two hosts: its own adapter
        (16, 1, 160),  # two whole hosts: eight adapters each
        (8, 4, 40),  # two ranks of each of four hosts
    ],
)
def test_a_ring_has_the_adapters_of_its_ranks_in_a_host(size: int, stride: int, bandwidth: float) -> None:
    assert group_link(HOSTS, size, stride)[1] == bandwidth
    assert group_link(HOSTS, size, stride, all_adapters=False)[1] == (200 if size * stride == 8 else 20)


@pytest.mark.parametrize(
    ("size", "stride", "bandwidth"),
    [
        (8, 1, 200),  # one host
        (16, 1, 20 * 15 / 8),  # 8 of 15 others are in the other host, beyond the rank's own adapter
        (4, 4, 20 * 3 / 2),  # two ranks of each of two hosts
        (2, 8, 20),
    ],
)
def test_ranks_that_exchange_in_pairs_have_their_own_adapters_only(size: int, stride: int, bandwidth: float) -> None:
    for kind in ("all-to-all", "ring"):
        assert exchange_s(HOSTS, 1000, size, stride, kind) == pytest.approx(1000 / bandwidth)


def test_any_two_gpus_of_a_dgx1_have_one_link() -> None:
    machine = load_hardware("v100-dgx1")
    assert group_link(machine, 2)[1] == group_link(machine, 2, 2)[1] == group_link(machine, 2, 4)[1] < 25e9


def test_all_reduce_is_a_reduce_scatter_and_a_gather() -> None:
    parts = [received_parts(*change, 4) for change in (("P", "samples"), ("samples", "B"), ("P", "B"))]
    assert parts[0] + parts[1] == parts[2]
    assert received_parts("B", "samples", 4) == received_parts("samples", "P", 4) == received_parts("P", "B", 1) == 0


def test_hops_and_latency_come_before_the_bytes() -> None:
    machine = Hardware("ring", 1e10, 1e12, {"fp32": 1e13}, 0, 0, (Link(8, 1.0, 10.0, 0.5),))
    assert exchange_s(machine, 20, 4) == 1.0 + 3 * 0.5 + 2.0
    assert exchange_s(machine, 20, 4, kind=kind_of("P", "B")) == 1.0 + 6 * 0.5 + 2.0
    assert exchange_s(machine, 20, 1) == exchange_s(machine, 0, 4) == 0


def test_kinds_that_were_measured_among_all_ranks_have_their_own_rate_there() -> None:
    machine = Hardware(
        "measured", 1e10, 1e12, {"fp32": 1e13}, 0, 0, (Link(2, 0.0, 10.0), Link(4, 0.0, 10.0)),
        exchanges={"all-gather": (1.0, 20.0)},
    )  # fmt: skip
    gather, scatter = kind_of("samples", "B"), kind_of("P", "samples")
    assert exchange_s(machine, 20, 4, kind=gather) == 2.0
    assert exchange_s(machine, 20, 2, kind=gather) == 2.0 == exchange_s(machine, 20, 4, kind=scatter)
