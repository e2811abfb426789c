"""How torch.distributed.checkpoint sees a global tensor: one chunk per rank of the placement, none on a placeholder.

torch asks a tensor class for three methods (its protocol ``_Checkpointable``, which DTensor has too). With them
``torch.distributed.checkpoint.save`` and ``load`` themselves take global tensors, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workbench.errors import CheckpointError
from workbench.tensors.global_tensor import GlobalTensor, local_torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


def chunk_list(tensor: GlobalTensor) -> list[ChunkStorageMetadata]:
    """What this rank holds: one chunk, or none."""
    # torch.distributed.checkpoint takes longer to import than all of workbench, so only saving imports it.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    spec = tensor._spec
    if spec.layout.has_partial:
        raise CheckpointError(
            f"a checkpoint of a tensor {tuple(spec.shape)} that lies as {spec.layout}: P holds terms of a sum, but "
            "files hold slices. Save x.to_global(sbp=wb.sbp.broadcast), or split it."
        )
    if spec.is_placeholder:
        return []
    region = spec.layout.region(spec.shape, spec.world.rank)
    offsets, sizes = (start for start, _ in region), (stop - start for start, stop in region)
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    if 0 in spec.shape:  # the rank with offsets zero holds an empty tensor's only chunk
        return [] if any(chunk.offsets) else [ChunkStorageMetadata(chunk.offsets, torch.Size(spec.shape))]
    return [] if 0 in chunk.sizes else [chunk]


def write_items(tensor: GlobalTensor, name: str) -> list[WriteItem]:
    """What this rank could write; of equal chunks on several ranks torch's planner chooses one."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    with local_torch():
        properties = TensorProperties(dtype=tensor.dtype)
    size = torch.Size(tensor._spec.shape)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, size),
        )
        for chunk in chunk_list(tensor)
    ]
