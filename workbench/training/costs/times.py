"""Rows of times that one rank has measured."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ProductTime:
    """The time of a product ``rows x inner`` times ``inner x columns``."""

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
        """Bytes of both factors and of the product."""
        numbers = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return float(numbers * DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, slots=True)
class FunctionTime:
    """Bytes moved and seconds of a function's forward and backward together.

    ``flops`` are those of the forward; 0 for functions other than products.
    """

    name: str
    flops: float
    moved_bytes: float
    time_s: float


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """The time of a boxing within groups of ``span`` neighbouring ranks, all groups at once.

    ``size_bytes`` is what its busiest rank sends or receives, ``time_s`` what it adds to ranks that come from work.
    """

    kind: str
    span: int
    size_bytes: float
    time_s: float


@dataclass(frozen=True)
class RankTimes:
    """All times that one rank has measured.

    Attributes:
        host: its name in the network; ranks of one host share its memory.
        memory_bytes: of the host, or of this rank's GPU.
        copy_bytes_per_s: of a copy, bytes read and written together.
        one_shot_bytes: the largest sum that the transport makes in one step; not measured.
        crowding: threads of ranks per core of the host, at least 1. A rank is so much faster while others wait.
        op_s: a step's time per function, of a model so small that overhead is all of it.
        step_s: a step's time besides its functions.
        offload_bytes_per_s: of copies to the host's memory or a file, and back.
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
    offload_bytes_per_s: float
    versions: dict[str, str] = field(default_factory=dict)
