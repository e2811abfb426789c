"""Rows of times: what one rank has measured of the machine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Of ``rows x inner`` times ``inner x columns``."""

    dtype: str
    rows: int
    inner: int
    columns: int
    time_s: float

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.inner * self.columns

    @property
    def operand_bytes(self) -> float:
        """Of both factors and of what they make."""
        numbers = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return float(numbers * DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, slots=True)
class FunctionTime:
    """Of a function's forward and backward together: bytes moved, counted as those of models are, and seconds.

    ``flops`` are of its forward, 0 for what is no product.
    """

    name: str
    flops: float
    moved_bytes: float
    time_s: float


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """Of a boxing within groups of ``span`` neighbouring ranks, all groups at once.

    ``size_bytes`` is what its busiest rank sends or receives, ``time_s`` what it adds to ranks that come from work.
    """

    kind: str
    span: int
    size_bytes: float
    time_s: float


@dataclass(frozen=True)
class RankTimes:
    """All that one rank has measured.

    Attributes:
        host: its name in the network; ranks of one host share its memory.
        memory_bytes: of the host, or of this rank's GPU.
        copy_bytes_per_s: read and written together.
        one_shot_bytes: up to which the transport makes sums in one step; a property of it, not measured.
        crowding: threads of ranks for each core of the host, at least 1: how much faster a rank is while others wait.
        op_s: a step's time for each function that it starts, of a model so small that it is all overhead.
        step_s: what a step takes besides its functions.
    """

    host: str
    memory_bytes: float
    transport: str
    device: str
    products: tuple[ProductTime, ...]
    functions: tuple[FunctionTime, ...]
    exchanges: tuple[ExchangeTime, ...]
    copy_bytes_per_s: float
    one_shot_bytes: float
    crowding: float
    op_s: float
    step_s: float
    versions: dict[str, str] = field(default_factory=dict)


__all__ = ["DTYPES", "ExchangeTime", "FunctionTime", "ProductTime", "RankTimes"]
