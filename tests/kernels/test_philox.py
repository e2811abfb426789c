"""Philox against the known answers of its paper's library, and against itself by position."""

import numpy as np
import pytest

from workbench.kernels import philox


def test_known_answers():
    # Random123, kat_vectors: philox 4x32 10.
    zero = philox.philox_words(0, np.zeros(1, np.uint64))[0]
    assert [hex(word) for word in zero] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize(
    "sampler", [philox.uniform, philox.uniform64, philox.normal, lambda k, at: philox.integers(k, at, -5, 100)]
)
def test_any_slice_is_computed_alone(sampler):
    whole = sampler(7, np.arange(1000))
    assert np.array_equal(whole[123:777], sampler(7, np.arange(123, 777)))
    scattered = np.array([[3, 999], [500, 4]])
    assert np.array_equal(whole[scattered], sampler(7, scattered))


def test_distributions():
    at = np.arange(200_000)
    uniform, normal = philox.uniform(1, at), philox.normal(2, at)
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.005
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01
    integers = philox.integers(3, at, 10, 20)
    assert integers.min() == 10 and integers.max() == 19
    assert np.abs(np.bincount(integers - 10) / len(at) - 0.1).max() < 0.005


def test_streams_of_other_keys_differ():
    assert not np.array_equal(philox.uniform(1, np.arange(100)), philox.uniform(2, np.arange(100)))


def test_an_empty_slice():
    assert philox.uniform(0, np.empty((0, 3), dtype=np.int64)).shape == (0, 3)


def test_precisions_agree_in_their_common_bits():
    at = np.arange(1000)
    double, single, half = philox.uniform64(9, at), philox.uniform(9, at), philox.uniform(9, at, bits=8)
    assert np.array_equal(np.floor(double * 2**24) * 2.0**-24, single)
    assert np.array_equal(np.floor(single * 2**8) * 2.0**-8, half) and half.max() < 1
    assert len(np.unique(double * 2**53 % 2**20)) > 990


def test_integers_over_all_of_int64():
    found = philox.integers(2, np.arange(1000), -(2**63), 2**63)
    assert (found < -(2**62)).any() and (found > 2**62).any()
