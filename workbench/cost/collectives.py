"""Seconds of exchanges: the bytes that the busiest rank receives, over the bandwidth of its group.

Between layers, the layout of an activation on the model axis changes; backward changes between the dual layouts. With A
bytes of the whole activation (of one data-parallel rank) on t ranks, each rank receives

    P -> B   2 A (t - 1) / t     all-reduce
    P -> S   A (t - 1) / t       reduce-scatter
    S -> B   A (t - 1) / t       all-gather
    S -> S'  A (t - 1) / t^2     all-to-all
    B -> S, B -> P, S -> P  0    each rank keeps its part
"""

from __future__ import annotations

from workbench.core.boxing_path import WORTHWHILE
from workbench.core.layer_layouts import Entry
from workbench.cost.hardware import Hardware

_BY_PAIRS = ("all-to-all", "ring")
"""Kinds in which the bytes that a rank receives come from each of the others. In a ring of attention, the rank that has
a block sends it to those that need it.
"""


def received_parts(source: Entry, target: Entry, num_ranks: int) -> float:
    """What a rank receives when an entry changes, as a part of the whole activation.

    >>> received_parts("P", "B", 4), received_parts("samples", "features", 2), received_parts("B", "samples", 2)
    (1.5, 0.25, 0.0)
    """
    if source == target or source == "B" or target == "P" or num_ranks == 1:
        return 0.0
    others = (num_ranks - 1) / num_ranks
    if target == "B":
        return 2 * others if source == "P" else others
    return others if source == "P" else others / num_ranks


def summed_bytes(hardware: Hardware, num_bytes: float, num_ranks: int) -> float:
    """The bytes that a rank receives for a sum of ``num_bytes``, as the runtime makes it.

    For a small sum, each rank adds all terms itself: more bytes, but one start.
    """
    others, link = (num_ranks - 1) * num_bytes, hardware.link(num_ranks)
    two_steps = 2 * link.latency_s + 2 * others / num_ranks / link.bandwidth_bytes_per_s
    one_step = link.latency_s + others / link.bandwidth_bytes_per_s
    is_one_shot = num_ranks == 2 or two_steps >= WORTHWHILE * one_step
    if num_bytes <= hardware.one_shot_bytes and is_one_shot:
        return others
    return received_parts("P", "B", num_ranks) * num_bytes


def kind_of(source: Entry, target: Entry) -> str:
    """The kind of the exchange that changes an entry, as in boxing plans."""
    if target == "B":
        return "all-reduce" if source == "P" else "all-gather"
    return "reduce-scatter" if source == "P" else "all-to-all"


def group_link(hardware: Hardware, size: int, stride: int = 1, all_adapters: bool = True) -> tuple[float, float]:
    """(latency, bytes per second that each rank receives) in a group of ``size`` ranks, ``stride`` ranks apart.

    If a group has several ranks inside a span, a ring enters and leaves the span once. It then has the bandwidth of all
    their adapters on the wider link (without ``all_adapters``, of one), up to the bandwidth of the narrower link. Few
    ranks never have more bandwidth than as many neighbours: any two GPUs of a DGX-1 share at most one link.
    """
    link = hardware.link((size - 1) * stride + 1)
    bandwidth = link.bandwidth_bytes_per_s
    for inner in hardware.links if all_adapters else ():
        num_inside = min(size, inner.span // stride)
        if inner.span < link.span and num_inside > 1:
            bandwidth = max(bandwidth, min(inner.bandwidth_bytes_per_s, num_inside * link.bandwidth_bytes_per_s))
    neighbours = hardware.link(size)
    if neighbours.span < link.span:
        bandwidth = min(bandwidth, neighbours.bandwidth_bytes_per_s)
    return link.latency_s, bandwidth


def pair_bandwidth(hardware: Hardware, size: int, stride: int = 1) -> float:
    """Bytes per second that each rank of a group receives if each pair of ranks exchanges as much: between hosts, every
    rank sends for itself, and has its own adapter only.

    >>> from workbench.cost.hardware import Link
    >>> hosts = Hardware("", 0, 0, {}, 0, 0, (Link(8, 0, 200.0), Link(64, 0, 20.0)))
    >>> pair_bandwidth(hosts, 8), round(pair_bandwidth(hosts, 16), 1)
    (200.0, 37.5)
    """
    bandwidth, before = group_link(hardware, size, stride)[1], 1
    for link in hardware.links:
        inside = size if link is hardware.links[-1] else min(size, max(1, link.span // stride))
        if inside > before:
            bandwidth = min(bandwidth, link.bandwidth_bytes_per_s * (size - 1) / (inside - before))
        before = inside
    return bandwidth


def exchange_s(
    hardware: Hardware, num_bytes: float, size: int, stride: int = 1, kind: str = "", all_adapters: bool = True
) -> float:
    """Seconds until every rank of the group has received ``num_bytes``.

    A ring passes all its ranks once; for a sum that all ranks get, twice. In the kinds of ``_BY_PAIRS`` each pair of
    ranks exchanges its own bytes. Kinds that were measured among all ranks have their own rates there.
    """
    if num_bytes <= 0 or size == 1:
        return 0.0
    link = hardware.link((size - 1) * stride + 1)
    if kind in hardware.exchanges and link is hardware.links[-1]:
        latency, bandwidth = hardware.exchanges[kind]
        return latency + num_bytes / bandwidth
    latency, bandwidth = group_link(hardware, size, stride, all_adapters)
    if kind in _BY_PAIRS:
        bandwidth = pair_bandwidth(hardware, size, stride)
    num_hops = (size - 1) * (2 if kind in ("all-reduce", "gradients") else 1)
    return latency + num_hops * link.hop_s + num_bytes / bandwidth
