"""Lets GPUs compute as exactly as the dtypes say, so that two runs differ by rounding of these dtypes only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

_MATMUL, _CUDNN = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
_EXACT = (
    (_MATMUL, "fp32_precision", "ieee"),
    (_CUDNN.conv, "fp32_precision", "ieee"),
    (_CUDNN.rnn, "fp32_precision", "ieee"),
    (_MATMUL, "allow_fp16_reduced_precision_reduction", False),
    (_MATMUL, "allow_bf16_reduced_precision_reduction", False),
)


_has_gpu = torch.cuda.is_available
_turn = threading.Lock()
_inside: list[list[Any]] = []
"""The user's settings, once for each thread inside: simulated ranks may be inside together."""


@contextmanager
def exact_sums() -> Iterator[None]:
    """A context without TF32, which keeps 10 bits of the factors in products of float32 and is cuDNN's default, and
    without sums in 16 bits. Afterwards torch has the user's settings. Without a GPU nothing changes.

    >>> with exact_sums():
    ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
    """
    if not _has_gpu():
        yield
        return
    with _turn:
        before = _inside[0] if _inside else [getattr(place, name) for place, name, _ in _EXACT]
        _inside.append(before)
        _set([value for _, _, value in _EXACT])
    try:
        yield
    finally:
        with _turn:
            _inside.pop()
            if not _inside:
                _set(before)


def _set(values: list[Any]) -> None:
    for (place, name, _), value in zip(_EXACT, values, strict=True):
        setattr(place, name, value)
