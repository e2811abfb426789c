"""Philox4x32-10, a counter-based generator: random numbers addressed by position, not by order of drawing.

Element ``i`` of a stream is word ``i % 4`` of counter ``i // 4`` under a 64-bit key, so any rank can compute any slice
of a tensor alone, with the same bits. (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.) This is
the reference in numpy.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_words(key: int, counters: np.ndarray, stream: int = 0) -> np.ndarray:
    """Four 32-bit words for each 64-bit counter.

    Args:
        key: 64 bits.
        counters: uint64, shape (n,).
        stream: 32 more bits of the counter, for further words at the same positions.

    Returns:
        uint32, shape (n, 4).

    >>> hex(philox_words(0, np.zeros(1, np.uint64))[0, 0])
    '0x6627e8d5'
    """
    counters = counters.astype(np.uint64)
    words = [counters & _MASK, counters >> _HALF, np.full_like(counters, stream), np.zeros_like(counters)]
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _HALF) ^ words[1] ^ np.uint64(low),
            second & _MASK,
            (first >> _HALF) ^ words[3] ^ np.uint64(high),
            first & _MASK,
        ]
        low, high = (low + _WEYL[0]) & 0xFFFFFFFF, (high + _WEYL[1]) & 0xFFFFFFFF
    out = np.empty((len(counters), 4), np.uint32)
    for column, word in enumerate(words):
        out[:, column] = word
    return out


def _pairs(key: int, positions: np.ndarray, stream: int = 0) -> tuple[np.ndarray, slice | np.ndarray]:
    """The pairs of words of the positions, shape (pairs, 2), and the indices of their own words in the flat pairs."""
    at = positions.astype(np.int64, copy=False).reshape(-1)
    if at.size and at[-1] - at[0] + 1 == at.size:  # consecutive positions: each counter is computed once
        first = int(at[0]) // 4
        words = philox_words(key, np.arange(first, int(at[-1]) // 4 + 1, dtype=np.uint64), stream)
        return words.reshape(-1, 2), slice(int(at[0]) - 4 * first, int(at[-1]) - 4 * first + 1)
    words = philox_words(key, at >> 2, stream)
    return words.reshape(-1, 2), np.arange(at.size) * 4 + (at & 3)


def _own_words(key: int, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    pairs, own = _pairs(key, positions, stream)
    return pairs.reshape(-1)[own]


def uniform(key: int, positions: np.ndarray, bits: int = 24) -> np.ndarray:
    """float32 in [0, 1) at these positions of the stream, multiples of ``2 ** -bits`` (at most 24)."""
    words = _own_words(key, positions)
    return ((words >> np.uint32(32 - bits)).astype(np.float32) * np.float32(2.0**-bits)).reshape(positions.shape)


def uniform64(key: int, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) with 53 random bits, the first 24 of which are those of ``uniform``."""
    high, low = (_own_words(key, positions, stream).astype(np.uint64) for stream in (0, 1))
    return (((high << _HALF | low) >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(positions.shape)


def normal(key: int, positions: np.ndarray) -> np.ndarray:
    """Standard normal float64 by Box-Muller: the words of a counter are two pairs, and each pair gives two numbers."""
    pairs, own = _pairs(key, positions)
    radius = np.sqrt(-2.0 * np.log((pairs[:, 0].astype(np.float64) + 1.0) * 2.0**-32))
    angle = pairs[:, 1].astype(np.float64) * (2.0 * np.pi * 2.0**-32)
    both = np.empty(pairs.shape)
    np.multiply(radius, np.cos(angle), out=both[:, 0])
    np.multiply(radius, np.sin(angle), out=both[:, 1])
    return both.reshape(-1)[own].reshape(positions.shape)


def integers(key: int, positions: np.ndarray, low: int, high: int) -> np.ndarray:
    """int64 in [low, high), from 64 random bits each (two words of the position's counter)."""
    pairs, own = _pairs(key, positions)
    words, partners = pairs.reshape(-1), pairs[:, ::-1].reshape(-1)
    bits = words[own].astype(np.uint64) << _HALF | partners[own].astype(np.uint64)
    if high - low < 2**64:
        bits %= np.uint64(high - low)
    return (bits + np.uint64(low % 2**64)).astype(np.int64).reshape(positions.shape)
