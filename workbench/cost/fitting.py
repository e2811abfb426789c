"""Constants of a machine from measured times: straight lines through points, by least relative error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SMALLEST = 1e-15


def fit_line(points: Sequence[tuple[float, float]], least_slope: float = 0.0) -> tuple[float, float]:
    """Offset (at least 0) and slope of ``y = offset + slope * x``, by least squares of the relative errors.

    Errors are relative because times of small and large exchanges differ by orders of magnitude and must count equally.

    Args:
        points: (x, y), with y above 0.
        least_slope: lower limit of the slope.

    >>> offset, slope = fit_line([(1, 3), (10, 12), (100, 102)])
    >>> round(offset, 6), round(slope, 6)
    (2.0, 1.0)
    """
    weights = [1 / (y * y) for _, y in points]
    s, sx, sy = sum(weights), 0.0, 0.0
    for w, (x, y) in zip(weights, points, strict=True):
        sx, sy = sx + w * x, sy + w * y
    sxx = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    sxy = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
    determinant = s * sxx - sx * sx
    if determinant > _SMALLEST * s * sxx:
        offset, slope = (sxx * sy - sx * sxy) / determinant, (s * sxy - sx * sy) / determinant
        if offset >= 0 and slope >= least_slope:
            return offset, slope
    through_zero = 0.0, max(least_slope, sxy / sxx if sxx else 0.0)
    least = max(0.0, (sy - least_slope * sx) / s), least_slope
    return min(through_zero, least, key=lambda line: _error(points, *line))


def _error(points: Sequence[tuple[float, float]], offset: float, slope: float) -> float:
    return sum(((offset + slope * x - y) / y) ** 2 for x, y in points)


def fit_products(products: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """Three constants of matrix products, ``flops / rate * (1 + half size / k) + operand bytes / operand rate``.

    Least squares of the relative errors; a term that would be negative is left out.

    Args:
        products: (flops, inner size k, bytes of operands and result, seconds) of measured products.

    Returns:
        flops per second of large products, the inner size at which half of that is reached, and bytes of operands per
        second (0: reading them takes no time besides the operations).

    >>> sizes = [(1e6, 16, 2e3), (1e8, 64, 5e5), (1e9, 512, 8e3)]
    >>> known = [(flops, k, w, flops * (1 + 50 / k) / 1e9 + w / 1e8) for flops, k, w in sizes]
    >>> [round(found) for found in fit_products(known)]
    [1000000000, 50, 100000000]
    """
    terms = np.array([(flops / s, flops / inner / s, weight / s) for flops, inner, weight, s in products])
    fits = []
    for others in ((1, 2), (1,), (2,), ()):
        columns = [0, *others]
        found = np.zeros(3)
        found[columns] = np.linalg.lstsq(terms[:, columns], np.ones(len(terms)), rcond=None)[0]
        if found[0] > 0 and (found >= 0).all():
            fits.append((float(((terms @ found - 1) ** 2).sum()), tuple(map(float, found))))
    per_flop, per_flop_and_size, per_byte = min(fits)[1]
    return 1 / per_flop, per_flop_and_size / per_flop, 1 / per_byte if per_byte else 0.0


def fit_link(exchanges: Sequence[tuple[float, float]], most_bytes_per_s: float) -> tuple[float, float]:
    """Latency and bandwidth from (bytes that a rank receives, seconds) of measured exchanges.

    Received bytes are written, so no link is faster than memory. A fit that says otherwise gives the difference to the
    latency.

    >>> latency_s, bandwidth = fit_link([(n, 1e-5 + n / 1e9) for n in (1e3, 1e5, 1e7)], 1e11)
    >>> round(latency_s * 1e6, 3), round(bandwidth / 1e9, 3)
    (10.0, 1.0)
    """
    latency_s, per_byte = fit_line(exchanges, 1 / most_bytes_per_s)
    return latency_s, 1 / per_byte
