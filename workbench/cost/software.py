"""Properties in which training programs differ: flags, never factors."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.errors import StrategyError

ITEMSIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}
"""Bytes of an activation's element, by precision. fp8 is for products alone: between them activations have 16 bits."""


@dataclass(frozen=True, slots=True)
class Software:
    """A generation of a training program.

    Attributes:
        name: its name in tables.
        has_master_weights: weights and activations are kept in 16 bits, the optimizer has weights of 32 bits of its
            own. Else weights, gradients and optimizer stay in 32 bits and forward casts (autocast).
        hides_gradients: gradients are summed while backward still runs; else after it.
        hides_gradients_of_pipelines: also where there is more than one stage.
        hides_tensor_parallel: which of backward's exchanges of the model axis run beside the products for the weights:
            "none", the "sums" of gradients, or "all".
        fuses_accumulation: a product adds to the gradient of earlier micro-batches by itself; else a pass over memory
            (read the new one in 16 bits, read and write the sum: 6 bytes per weight in 16 bits).
        scatters_between_stages: a stage sends each slice of an activation once; else every rank gets all of it from
            its like.
        sums_shared: gradients of weights that all ranks of the model axis have (norms) are terms there; else every rank
            of the axis computes them whole.
        hides_sends: a stage computes during its sends; else it waits for each, in both directions.
        uses_all_adapters: a ring through several ranks of a host has the adapters of all of them; else of one.
        gathers_again: under ZeRO 3 parameters are gathered for recomputation, let go, and gathered for backward.
        copies_tied: a stage that uses a weight of another stage has a copy of it, with gradient and optimizer; else it
            is sent there for each use.
        keeps_gathered: behind a gather of the sequence the gathered activation is saved; else its slice, which is
            gathered once more in backward.
        keeps_gradients: gradients lie in memory that is there all the time, and are summed in place; else backward
            makes them anew, and their sums lie beside them.
        keeps_exponentials: where words are split over the model axis, the loss keeps their logits and exponentials of
            these; else what it keeps is counted with the model.
        recompute: what ``recompute`` of a strategy computes again: "full" blocks, or the "selective" scores of
            attention.
    """

    name: str = "workbench"
    has_master_weights: bool = False
    hides_gradients: bool = True
    hides_gradients_of_pipelines: bool = False
    hides_tensor_parallel: str = "none"
    fuses_accumulation: bool = False
    scatters_between_stages: bool = False
    sums_shared: bool = True
    hides_sends: bool = True
    uses_all_adapters: bool = True
    gathers_again: bool = False
    copies_tied: bool = False
    keeps_gathered: bool = True
    keeps_gradients: bool = False
    keeps_exponentials: bool = True
    recompute: str = "full"

    def __post_init__(self) -> None:
        if self.recompute not in ("full", "selective"):
            raise StrategyError(f"recompute of software is 'full' or 'selective', not {self.recompute!r}.")

    def parameter_bytes(self, precision: str) -> int:
        """Of one weight."""
        return 2 if self.has_master_weights and precision != "fp32" else 4

    def gradient_bytes(self, precision: str) -> int:
        """Of one weight's gradient. Sums in bf16 are kept in 32 bits: it has too few digits for them."""
        return 2 if self.has_master_weights and precision == "fp16" else 4

    def optimizer_bytes(self, precision: str, optimizer: str) -> int:
        """Of what the optimizer keeps of one weight."""
        state = {"adamw": 8, "adam": 8, "momentum": 4, "sgd": 0}.get(optimizer)
        if state is None:
            raise StrategyError(f"optimizer {optimizer!r} is not known; known are adamw, adam, momentum, sgd.")
        return state + (4 if self.has_master_weights and precision != "fp32" else 0)


WORKBENCH = Software()
"""The engines of this package."""


def megatron(year: int, recompute: str = "full") -> Software:
    """Megatron-LM of a year: 2021 as in arXiv 2104.04473, 2022 as in 2205.05198, from 2023 on with overlap."""
    return Software(
        name=f"megatron-{year}",
        has_master_weights=True,
        hides_gradients=True,
        hides_gradients_of_pipelines=year >= 2023,
        hides_tensor_parallel="none" if year < 2022 else "sums" if year < 2023 else "all",
        fuses_accumulation=year >= 2022,
        scatters_between_stages=True,
        sums_shared=False,
        hides_sends=year >= 2023,
        uses_all_adapters=year >= 2023,
        gathers_again=year < 2023,
        copies_tied=True,
        keeps_gathered=False,
        keeps_gradients=True,
        keeps_exponentials=False,
        recompute=recompute,
    )


__all__ = ["ITEMSIZES", "WORKBENCH", "Software", "megatron"]
