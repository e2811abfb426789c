"""A machine in numbers, each with its source: a datasheet, or the calibration run that measured it.

SI units: bytes, seconds, floating point operations per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.core.boxing import LinkCost


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of connection between ranks.

    Attributes:
        span: number of neighbouring ranks that it joins: 8 inside a host of 8 GPUs. Groups inside one span use it.
        latency_s: seconds until the first byte of an exchange arrives.
        bandwidth_bytes_per_s: bytes per second that each rank receives while all of them exchange.
        hop_s: additional seconds for each further rank of a ring.
    """

    span: int
    latency_s: float
    bandwidth_bytes_per_s: float
    hop_s: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """One kind of machine, from the point of view of one rank.

    Attributes:
        name: such as "a100-80g-selene".
        memory_bytes: memory of one rank.
        memory_bandwidth_bytes_per_s: of a large copy, read and written bytes together.
        matmul_flops_per_s: by dtype ("fp32", "bf16", "fp16", "fp8"): the rate of large matrix products.
        matmul_half_size: inner size at which a product in 16 bits, or else in 32, reaches half that rate:
            ``k / (k + half size)``. At another precision it is as many times larger as the rate.
        op_s: seconds to start a function.
        links: ascending by span; the last one joins all ranks.
        function_bytes_per_s: bytes per second of functions that are slower than a copy, by ``OpCost.name``.
        function_flops_per_s: operations per second in fp32 of products by name ("conv2d",
            "scaled_dot_product_attention"), of any size. At another precision they are as many times faster as large
            products.
        exchanges: (latency, bandwidth) by kind of boxing among all ranks, for kinds that were measured separately.
        alone_speedup: how much faster a rank computes while all others wait. All other rates hold while all ranks work:
            four engines on two cores have half a core each, and a whole one while two of them wait.
        step_s: seconds of a step besides its functions.
        weight_bytes_per_s: the rate at which a product reads weights and activations that no cache holds, in addition
            to its operations. 0: it reads them while it computes.
        one_shot_bytes: up to this size, every rank makes a sum from all terms: one start, but p - 1 times the bytes. 0:
            a ring makes all sums.
        exchanges_on_cores: exchanges run on the cores that compute. None of them overlap with compute, and the start of
            each bucket counts.
        offload_bytes_per_s: of copies between a GPU and the host's memory, or a CPU and files mapped to memory. 0:
            assumed, see ``cost.offload``.
        fp32_is_tf32: the rate of fp32 is that of TF32, which torch takes after
            ``torch.set_float32_matmul_precision("high")``; before, its products in fp32 take several times as long.
        sources: the source of each number, by field name.
    """

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    matmul_flops_per_s: Mapping[str, float]
    matmul_half_size: float
    op_s: float
    links: tuple[Link, ...]
    function_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    function_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    exchanges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    alone_speedup: float = 1.0
    step_s: float = 0.0
    weight_bytes_per_s: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    one_shot_bytes: float = 0
    exchanges_on_cores: bool = False
    offload_bytes_per_s: float = 0.0
    fp32_is_tf32: bool = False

    @property
    def link_cost(self) -> LinkCost:
        """The narrowest link, for ``dry_run(cost=...)``."""
        last = self.links[-1]
        return LinkCost(last.latency_s, last.bandwidth_bytes_per_s, int(self.one_shot_bytes))

    def link(self, num_neighbours: int) -> Link:
        """The link that joins ``num_neighbours`` neighbouring ranks."""
        return next((link for link in self.links if num_neighbours <= link.span), self.links[-1])
