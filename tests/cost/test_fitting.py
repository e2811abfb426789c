"""Constants come back from times that were made with them, also from noisy ones."""

import random

import pytest

from workbench.cost.fitting import fit_line, fit_link, fit_products


@pytest.mark.parametrize(("rate", "half", "weights"), [(1e9, 0.0, 0.0), (5e10, 64.0, 8e9), (3e14, 200.0, 2e12)])
def test_constants_of_products_come_back(rate, half, weights):
    sizes = [(m, k, n) for m in (8, 64, 512) for k in (32, 128, 1024) for n in (256, 1024)]
    points = [
        (
            2.0 * m * k * n,
            k,
            4.0 * k * n,
            2.0 * m * k * n * (1 + half / k) / rate + (4 * k * n / weights if weights else 0),
        )
        for m, k, n in sizes
    ]
    assert fit_products(points) == pytest.approx((rate, half, weights), rel=1e-6, abs=1e-3)


def test_products_that_get_faster_with_small_sizes_have_one_rate():
    """What would be negative is left out: no size costs less than nothing, and weights without bytes have no rate."""
    points = [(2e6 * k, float(k), 0.0, 2e6 * k * (1 - 10 / k) / 1e9) for k in (32, 64, 128, 1024)]
    rate, half, weights = fit_products(points)
    assert 1e9 < rate < 1.3e9 and (half, weights) == (0.0, 0.0)


@pytest.mark.parametrize(("latency_s", "bandwidth"), [(1e-6, 1e11), (5e-5, 2e9), (1e-3, 1e8)])
def test_link_constants_come_back_from_noisy_times(latency_s, bandwidth):
    rng = random.Random(0)
    sizes = [2.0**power for power in range(10, 25)]
    points = [(n, (latency_s + n / bandwidth) * rng.uniform(0.97, 1.03)) for n in sizes]
    found = fit_link(points, 1e12)
    assert found[0] == pytest.approx(latency_s, rel=0.1)
    assert found[1] == pytest.approx(bandwidth, rel=0.1)


def test_nothing_is_negative():
    """Times that fall with size, or a line that would start below zero."""
    assert fit_line([(1, 3), (2, 2), (3, 1)])[1] == 0.0
    offset, slope = fit_line([(1, 0.5), (2, 2), (4, 5)])
    assert offset == 0.0 and slope > 0


def test_one_size_gives_a_bandwidth():
    latency_s, bandwidth = fit_link([(1e6, 1e-3), (1e6, 1e-3)], 1e11)
    assert latency_s >= 0 and 1e6 / bandwidth + latency_s == pytest.approx(1e-3)


@pytest.mark.parametrize("points", [[(1e3, 2e-3), (1e6, 1e-3)], [(1e3, 1e-3), (1e6, 1e-3 + 1e-9)]])
def test_no_link_is_faster_than_memory(points):
    """Noise of small exchanges can hide what large ones take longer."""
    latency_s, bandwidth = fit_link(points, 1e10)
    assert bandwidth == pytest.approx(1e10)
    assert latency_s > 0.5e-3
