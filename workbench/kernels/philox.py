"""Philox4x32-10, a counter-based generator: random numbers addressed by position, not by order of drawing.

Element ``i`` of a stream is word ``i % 4`` of counter ``i // 4`` under a 64-bit key, so any slice of a tensor can be
made without the rest of it, on any rank, with the same bits. (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011.) This is the reference in numpy.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_words(key: int, counters: np.ndarray) -> np.ndarray:
    """Four 32-bit words for each 64-bit counter.

    Args:
        key: 64 bits.
        counters: uint64, shape (n,).

    Returns:
        uint32, shape (n, 4).

    >>> hex(philox_words(0, np.zeros(1, np.uint64))[0, 0])
    '0x6627e8d5'
    """
    counters = counters.astype(np.uint64)
    words = [counters & _MASK, counters >> _HALF, np.zeros_like(counters), np.zeros_like(counters)]
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
    return np.stack(words, axis=1).astype(np.uint32)


def _by_position(key: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The four words of each position's counter, and which of them is the position's own."""
    positions = positions.astype(np.uint64).reshape(-1)
    if positions.size and positions[-1] - positions[0] + 1 == positions.size:  # consecutive: each counter once
        first = positions[0] // np.uint64(4)
        counters = np.arange(first, positions[-1] // np.uint64(4) + np.uint64(1), dtype=np.uint64)
        words = np.repeat(philox_words(key, counters), 4, axis=0)
        offset = int(positions[0] - first * np.uint64(4))
        words = words[offset : offset + positions.size]
    else:
        words = philox_words(key, positions // np.uint64(4))
    return words, (positions % np.uint64(4)).astype(np.intp)


def uniform(key: int, positions: np.ndarray) -> np.ndarray:
    """float32 in [0, 1) with 24 random bits, at these positions of the stream."""
    words, own = _by_position(key, positions)
    picked = words[np.arange(len(own)), own]
    return ((picked >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)).reshape(positions.shape)


def normal(key: int, positions: np.ndarray) -> np.ndarray:
    """Standard normal float64 by Box-Muller: the words of a counter make two pairs, each pair two numbers."""
    words, own = _by_position(key, positions)
    rows = np.arange(len(own))
    pair = own & ~1
    radius = (words[rows, pair].astype(np.float64) + 1.0) * 2.0**-32
    angle = words[rows, pair + 1].astype(np.float64) * (2.0 * np.pi * 2.0**-32)
    wave = np.where(own & 1, np.sin(angle), np.cos(angle))
    return (np.sqrt(-2.0 * np.log(radius)) * wave).reshape(positions.shape)


def integers(key: int, positions: np.ndarray, low: int, high: int) -> np.ndarray:
    """int64 in [low, high), from 64 random bits each (two words of the position's counter)."""
    words, own = _by_position(key, positions)
    rows = np.arange(len(own))
    bits = words[rows, own].astype(np.uint64) << _HALF | words[rows, own ^ 1].astype(np.uint64)
    return (low + (bits % np.uint64(high - low)).astype(np.int64)).reshape(positions.shape)
