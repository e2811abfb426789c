"""Run one rank's part of an exchange by get: publish the shard, read the peers' slices straight into the new shard.

Peers read a shard that lies in the segment in place, and this rank waits for their acks, because the caller may write
to the shard right after. Any other shard is copied into a block, and no rank waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from workbench.kernels.blocks import slice_region
from workbench.transport.messaging.endpoint import Endpoint
from workbench.transport.messaging.link import Block, InPlaceBuffer, Message
from workbench.transport.messaging.shared_memory import contiguous_strides
from workbench.transport.messaging.strided_copy import copy_strided, strided_copy
from workbench.transport.messaging.transfer_plan import OutputSlice, Read, StridedSlice, TransferPlan
from workbench.transport.reduction import reduce_into
from workbench.transport.shared.segment import MIN_IN_PLACE_BYTES, Segment, is_byte_copyable

_copy_bytes = ctypes.memmove


def get(
    segment: Segment, endpoint: Endpoint, plan: TransferPlan, local: torch.Tensor, tag: int, header: bytes
) -> torch.Tensor | None:
    """Return the new shard of this rank; None if it only sends."""
    buffer = _publish(segment, endpoint, plan, local, tag, header) if plan.sends else None
    out = None
    if plan.out_shape is not None:
        out = segment.empty(plan.out_shape, plan.dtype)
        if plan.interleaves:
            _concat(endpoint, plan, local, tag, header, out)
        else:
            _fill(endpoint, plan, local, tag, header, out)
        endpoint.read_bytes += plan.read_bytes
    if buffer is not None:
        endpoint.wait_for_acks(buffer, [send[0] for send in plan.sends], header)
    return out


def _publish(
    segment: Segment, endpoint: Endpoint, plan: TransferPlan, local: torch.Tensor, tag: int, header: bytes
) -> InPlaceBuffer | None:
    """Send every reader the place of this rank's shard, or of a copy of it."""
    num_bytes, links = plan.shard_bytes, endpoint.links
    if plan.may_read_in_place and num_bytes >= MIN_IN_PLACE_BYTES:
        location = segment.locate(local, num_bytes)
        if location is not None:
            buffer = InPlaceBuffer(*location)
            for rank, _, _ in plan.sends:
                links[rank].send(tag, buffer, num_bytes, header)
            return buffer
    if plan.publishes_whole:
        block = segment.allocate(num_bytes, header)
        if is_byte_copyable(local):
            _copy_bytes(segment.chunks[block.chunk].address + block.offset, local.data_ptr(), num_bytes)
        else:
            segment.view(block, local.shape, plan.dtype).copy_(local.detach())
        for rank, _, _ in plan.sends:
            links[rank].send(tag, block, num_bytes, header)
        block.release()
        return None
    blocks: dict[object, Block | None] = {}
    for rank, region, part_bytes in plan.sends:
        if region not in blocks:
            blocks[region] = segment.publish(slice_region(local.detach(), region), header)
        links[rank].send(tag, blocks[region], part_bytes, header)
    for part in blocks.values():
        if part is not None:
            part.release()
    return None


def _fill(
    endpoint: Endpoint, plan: TransferPlan, local: torch.Tensor, tag: int, header: bytes, out: torch.Tensor
) -> None:
    """Fill the outputs one by one, as the messages arrive."""
    at = out.data_ptr()
    for output in plan.outputs:
        if len(output.reads) == 1:
            _copy(endpoint, plan, local, tag, header, output, out, at)
        else:
            _reduce(endpoint, plan, local, tag, header, output, out)


def _concat(
    endpoint: Endpoint, plan: TransferPlan, local: torch.Tensor, tag: int, header: bytes, out: torch.Tensor
) -> None:
    """Interleave the rows of all shards: each source is read, and the new shard written, from start to end."""
    slices, messages = _receive(endpoint, plan, local, tag, header, [output.reads[0] for output in plan.outputs])
    assert plan.concat_dim is not None
    torch.cat([slices[index] for index in plan.concat_order], plan.concat_dim, out=out)
    _acknowledge(endpoint, messages)


def _copy(
    endpoint: Endpoint,
    plan: TransferPlan,
    local: torch.Tensor,
    tag: int,
    header: bytes,
    output: OutputSlice,
    out: torch.Tensor,
    at: int,
) -> None:
    read, target, size = output.reads[0], output.slice, plan.dtype.itemsize
    if read.source == endpoint.rank:
        copy = strided_copy(target.shape, read.slice.strides, target.strides, size) if is_byte_copyable(local) else None
        if copy is not None:
            copy_strided(copy, local.data_ptr() + read.slice.start, at + target.start)
        else:
            _view(out, target).copy_(slice_region(local.detach(), read.region))
        return
    message = endpoint.receive(read.source, tag, header, read.shard_bytes, read.slice.num_bytes)
    is_whole, link = message.num_bytes == read.shard_bytes, endpoint.links[read.source]
    strides, start = (read.slice.strides, read.slice.start) if is_whole else (contiguous_strides(target.shape), 0)
    copy = strided_copy(target.shape, strides, target.strides, size)
    if copy is not None:
        copy_strided(copy, link.memory(message.chunk).address + message.offset + start, at + target.start)
    else:
        _view(out, target).copy_(endpoint.slice_view(read, message, plan.dtype))
    if message.wants_ack:
        link.acknowledge(message)


def _reduce(
    endpoint: Endpoint,
    plan: TransferPlan,
    local: torch.Tensor,
    tag: int,
    header: bytes,
    output: OutputSlice,
    out: torch.Tensor,
) -> None:
    terms, messages = _receive(endpoint, plan, local, tag, header, output.reads)
    target = out if output.slice.num_bytes == plan.out_bytes else _view(out, output.slice)
    reduce_into(terms, target, plan.reduction)
    _acknowledge(endpoint, messages)


def _receive(
    endpoint: Endpoint, plan: TransferPlan, local: torch.Tensor, tag: int, header: bytes, reads: Sequence[Read]
) -> tuple[list[torch.Tensor], list[tuple[int, Message]]]:
    """Views of the slices, of this rank's shard and of its peers', and the messages of these."""
    messages: list[tuple[int, Message]] = []
    slices: list[torch.Tensor] = []
    for read in reads:
        if read.source == endpoint.rank:
            slices.append(slice_region(local.detach(), read.region))
            continue
        message = endpoint.receive(read.source, tag, header, read.shard_bytes, read.slice.num_bytes)
        messages.append((read.source, message))
        slices.append(endpoint.slice_view(read, message, plan.dtype))
    return slices, messages


def _acknowledge(endpoint: Endpoint, messages: Sequence[tuple[int, Message]]) -> None:
    for source, message in messages:
        if message.wants_ack:
            endpoint.links[source].acknowledge(message)


def _view(out: torch.Tensor, part: StridedSlice) -> torch.Tensor:
    return out.as_strided(part.shape, part.strides, part.start // out.element_size())
