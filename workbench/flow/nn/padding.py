"""Padding of windows in the notation of older programs: ``"SAME"``, ``"VALID"``, or numbers per dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

Pads = Sequence[Sequence[int]]
"""(before, after) for height and width, or for each of the four dims in the order of the data format."""


@dataclass(frozen=True)
class WindowPadding:
    """Rows and columns added around an image: (height, width)."""

    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def is_even(self) -> bool:
        """Whether both sides get the same number of rows and columns."""
        return self.before == self.after

    @property
    def is_zero(self) -> bool:
        """Whether nothing is added."""
        return not any(self.before) and not any(self.after)


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """One number for both dims, or two.

    Raises:
        ValueError: another number of numbers.
    """
    if isinstance(value, int):
        return value, value
    if len(value) != 2:
        raise ValueError(
            f"{value!r}: {len(value)} numbers for height and width. Give two, (height, width), or one for both."
        )
    return int(value[0]), int(value[1])


def edges(
    padding: str | Pads,
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    data_format: str,
) -> WindowPadding:
    """The rows and columns that ``padding`` adds to an image.

    >>> edges("SAME", (28, 28), (5, 5), (1, 1), (1, 1), "NCHW")
    WindowPadding(before=(2, 2), after=(2, 2))

    Raises:
        ValueError: a padding of another name; pads of another number of dims, or of dims other than height and width.
    """
    if not isinstance(padding, str):
        return _of_image(padding, data_format)
    if padding.upper() == "VALID":
        return WindowPadding((0, 0), (0, 0))
    if padding.upper() not in ("SAME", "SAME_UPPER", "SAME_LOWER"):
        raise ValueError(f"padding={padding!r}: known are 'SAME', 'SAME_LOWER', 'VALID', and ((before, after), ...).")
    totals = [
        max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        for size, width, stride, dilation in zip(sizes, window, strides, dilations, strict=True)
    ]
    smaller, larger = pair([total // 2 for total in totals]), pair([total - total // 2 for total in totals])
    return WindowPadding(larger, smaller) if padding.upper() == "SAME_LOWER" else WindowPadding(smaller, larger)


def _of_image(pads: Pads, data_format: str) -> WindowPadding:
    """The pads of height and width among those of all dims."""
    try:
        pairs = [(int(before), int(after)) for before, after in pads]
    except (TypeError, ValueError):
        pairs = []
    named = dict(zip("HW" if len(pairs) == 2 else data_format, pairs, strict=False))
    if len(pairs) not in (2, 4) or named.get("N", (0, 0)) != (0, 0) or named.get("C", (0, 0)) != (0, 0):
        raise ValueError(
            f"padding={pads!r} with data_format={data_format!r}: a padding in numbers is 4 pairs (before, after) in "
            f"the order {data_format}, with (0, 0) for N and C, or 2 pairs for height and width. For one row or column "
            f"all around write {[(int(dim in 'HW'),) * 2 for dim in data_format]}."
        )
    (top, bottom), (left, right) = named["H"], named["W"]
    return WindowPadding((top, left), (bottom, right))


def pad_window(x: Any, around: WindowPadding, value: float) -> Any:
    """The image with ``value`` around it."""
    (top, left), (bottom, right) = around.before, around.after
    return F.pad(x, (left, right, top, bottom), value=value)


def to_channels_first(x: Any, data_format: str) -> Any:
    """The images as (rows, channels, height, width), from either format.

    Raises:
        ValueError: the format is neither ``"NCHW"`` nor ``"NHWC"``.
    """
    if data_format not in ("NCHW", "NHWC"):
        raise ValueError(f"data_format={data_format!r}: known are 'NCHW' and 'NHWC'.")
    return x.permute(0, 3, 1, 2) if data_format == "NHWC" else x


def to_channels_last(x: Any, data_format: str) -> Any:
    """The images in the format, from (rows, channels, height, width)."""
    return x.permute(0, 2, 3, 1) if data_format == "NHWC" else x
