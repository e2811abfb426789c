"""Properties in which training programs differ, as flags. No flag is a factor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from workbench.errors import StrategyError

ITEMSIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}
"""Bytes of an activation's element, by precision. fp8 is for products only: between them activations have 16 bits."""


def itemsize_of(dtype: str) -> int:
    """Bytes of an element, by a precision or torch's name of a dtype.

    >>> itemsize_of("bf16"), itemsize_of("float64"), itemsize_of("uint8")
    (2, 8, 1)
    """
    bits = re.search(r"\d+", dtype)
    return ITEMSIZES.get(dtype) or (int(bits[0]) // 8 if bits else 1)


class OptimizerBytes(NamedTuple):
    """Bytes for one weight: of the optimizer's state, and those that its update reads and writes."""

    state: float
    update: float


OPTIMIZERS = {
    "adamw": OptimizerBytes(8, 28),
    "adam": OptimizerBytes(8, 28),
    # Two moments of 8 bits, with a scale of 32 bits for 256 of each: torchao.optim.AdamW8bit
    "adamw8bit": OptimizerBytes(2 + 2 * 4 / 256, 16),
    "momentum": OptimizerBytes(4, 20),
    "sgd": OptimizerBytes(0, 12),
}
"""The optimizers that predictions know."""


def optimizer_of(name: str) -> OptimizerBytes:
    """The bytes of an optimizer.

    Raises:
        StrategyError: none of ``OPTIMIZERS`` has this name.
    """
    if name not in OPTIMIZERS:
        raise StrategyError(f"optimizer={name!r}: it is one of {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[name]


@dataclass(frozen=True, slots=True)
class Software:
    """A generation of a training program.

    Attributes:
        name: its name in tables.
        has_master_weights: weights and activations have 16 bits, and the optimizer has its own weights of 32 bits. Else
            weights, gradients and optimizer have the model's own dtype, and forward casts (autocast).
        hides_gradients_of_pipelines: with more than one stage, too, gradients are summed while backward runs; else
            after it.
        hides_gathers: under ZeRO 1 and 2 parameters are gathered beside forward of a step's first micro-batches; else
            before it.
        bucket_weights: number of weights of a bucket of gradients or parameters, or 1/40 of it for each data rank if
            that is more; 0: a stage has eight buckets.
        hides_tensor_parallel: the exchanges of the model axis in backward that run beside the products for the weights:
            "none", the "sums" of gradients, or "all".
        fuses_accumulation: for which weights a product adds to the gradient of earlier micro-batches itself: "none",
            "large" ones as in ``cost.accumulation``, or "all". For others another pass over memory does (read the new
            one in 16 bits, read and write the sum: 6 bytes per weight in 16 bits), and a second gradient is there.
        scatters_between_stages: a stage sends each slice of an activation once; else every rank gets the whole
            activation from its counterpart.
        sums_shared: gradients of weights that all ranks of the model axis have (norms) are terms there; else every rank
            of the axis computes them whole.
        hides_sends: a stage computes during its sends; else it waits for each, in both directions.
        uses_all_adapters: a ring through several ranks of a host uses the adapters of all of them; else of one.
        gathers_again: under ZeRO 3 parameters are gathered for recomputation, freed, and gathered again for backward.
        copies_tied: a stage that uses a weight of another stage has its own copy, with gradient and optimizer; else the
            weight is sent for each use.
        keeps_gathered: after a gather of the sequence the gathered activation is saved; else its slice, which backward
            gathers again.
        keeps_gradients: memory for all gradients exists all the time, and they are summed in place; else backward makes
            them, and their sums take more memory.
        keeps_exponentials: with a vocabulary split over the model axis, the loss keeps logits and exponentials; else
            its kept bytes are counted with the model.
        has_first_flash: flash attention takes as long as a product with the width of a head as its inner size; else it
            has the machine's own rate, if its file has one.
        fuses: functions between two products are one program, as in a compiled step: a result that only they read is
            not written.
        recompute: what ``recompute`` of a strategy computes again: "full" blocks, or the "selective" scores of
            attention.
    """

    name: str = "workbench"
    has_master_weights: bool = False
    hides_gradients_of_pipelines: bool = False
    hides_gathers: bool = False
    bucket_weights: int = 0
    hides_tensor_parallel: str = "none"
    fuses_accumulation: str = "large"
    scatters_between_stages: bool = False
    sums_shared: bool = True
    hides_sends: bool = True
    uses_all_adapters: bool = True
    gathers_again: bool = False
    copies_tied: bool = False
    keeps_gathered: bool = True
    keeps_gradients: bool = False
    keeps_exponentials: bool = True
    has_first_flash: bool = False
    fuses: bool = False
    recompute: str = "full"

    def __post_init__(self) -> None:
        if self.recompute not in ("full", "selective"):
            raise StrategyError(f"recompute of software is 'full' or 'selective', not {self.recompute!r}.")

    def __repr__(self) -> str:
        """By its name only, as signatures show it."""
        return f"Software({self.name!r})"

    def parameter_bytes(self, precision: str) -> int:
        """Bytes of one weight, without master weights of one of 32 bits."""
        return 2 if self.has_master_weights and precision != "fp32" else 4

    def gradient_bytes(self, precision: str) -> int:
        """Bytes of one weight's gradient. With bf16 weights it has 32 bits: bf16 has too few digits for sums."""
        return 2 if self.has_master_weights and precision == "fp16" else 4

    def optimizer_bytes(self, precision: str, optimizer: str) -> float:
        """Bytes of the optimizer's state for one weight."""
        return optimizer_of(optimizer).state + (4 if self.has_master_weights and precision != "fp32" else 0)


WORKBENCH = Software()
"""The engines of this package."""
COMPILED = Software("workbench, compiled", fuses=True)
"""The same, with the step compiled."""


def megatron(year: int, recompute: str = "full") -> Software:
    """Megatron-LM of a year: 2021 as in arXiv 2104.04473, 2022 as in 2205.05198, with overlap from 2023 on.

    From 2024 on with ``--overlap-grad-reduce`` and ``--overlap-param-gather`` as in Megatron-Core 0.8: a finished
    gather starts that of the next bucket, ``bucket_size = max(40000000, 1000000 * dp)``, and the gradients of a model
    chunk are summed after its last backward (``delay_grad_reduce``). Flash attention is then the GPU's own kernel, such
    as cuDNN's for Hopper. ``--tp-comm-overlap`` in forward is not a flag: products that share a GPU with an exchange
    get slower, and with it as free as in backward the runs of h100-sxm-ib are predicted 12% too short.
    """
    return Software(
        name=f"megatron-{year}",
        has_master_weights=True,
        hides_gradients_of_pipelines=year >= 2023,
        hides_gathers=year >= 2024,
        bucket_weights=40_000_000 if year >= 2024 else 0,
        hides_tensor_parallel="none" if year < 2022 else "sums" if year < 2023 else "all",
        fuses_accumulation="all" if year >= 2022 else "none",
        scatters_between_stages=True,
        sums_shared=False,
        hides_sends=year >= 2023,
        uses_all_adapters=year >= 2023,
        gathers_again=year < 2023,
        copies_tied=True,
        keeps_gathered=False,
        keeps_gradients=True,
        keeps_exponentials=False,
        has_first_flash=year < 2024,
        recompute=recompute,
    )
