"""The parameters that one call of a unit has gathered. Autograd saves references to them instead of values.

A reference names the parameter that a saved tensor is a view of; ``regathering`` says how backward has it again. The
dtype follows from the kinds of the layers: saved tensors may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.kept_for_backward import keep, unchanged
from workbench.tensors.tensor_state import version_of
from workbench.tensors.torch_patches.joined_rows import is_conv1d
from workbench.tensors.world import World
from workbench.training.gradients.shard import Shard
from workbench.training.zero.regathering import Regathering, versions_of


class ShardedParameter(NamedTuple):
    """An attribute of a module that is a sharded parameter."""

    owner: nn.Module
    name: str
    shard: Shard

    def current(self) -> tuple[GlobalTensor, Shard] | None:
        """The parameter there and its shard; None where a unit around this one has gathered it.

        A rank with several stages has a world for each, with a shard in it.
        """
        found: Any = self.owner._parameters.get(self.name)
        if not isinstance(found, GlobalTensor) or not found._is_param:
            return None
        shard: Shard = found._optimizer_shard or self.shard
        return (found, shard) if found._spec is shard.spec else None


def _memory_of(wholes: list[GlobalTensor]) -> list[tuple[int, int]]:
    with local_torch():
        return [(writes, whole.data_ptr()) for writes, whole in zip(writes_to(wholes), wholes, strict=True)]


@dataclass(eq=False)
class GatheredCall:
    """One call of a unit.

    Attributes:
        again: what backward gathers.
        kept: the sharded parameters of the modules, for ``put_back``.
        put: the whole parameters in their places, the writes to them and the addresses of their memory at that time.
        places: during the call, by address: the number of a gathered parameter, or of its 16-bit copy.
        before: of the call that ran before this one in the same call of the model.
        saving: the context in which autograd saves references; None without such a context.
    """

    world: World
    again: Regathering
    kept: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    put: tuple[list[GlobalTensor], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))
    places: dict[int, int] = field(default_factory=dict)
    before: Regathering | None = None
    saving: Any = None
    _first_node: int = 0

    def save_references(
        self, members: Sequence[tuple[ShardedParameter, GlobalTensor]], wholes: Sequence[torch.Tensor]
    ) -> None:
        """Let autograd save references to ``wholes``, the gathered parameters, until ``put_back``."""
        self.again.versions = versions_of(self.again.parameters)
        self.again.dtypes = _regather_dtypes(members, self.again.parameters)
        self._first_node = torch._C._autograd._get_sequence_nr()
        with local_torch():
            self.places = {whole.untyped_storage().data_ptr(): i for i, whole in enumerate(wholes) if whole.numel()}
        self.saving = _saving(self.again, self.places)
        self.saving.__enter__()

    def insert(self, places: Sequence[tuple[ShardedParameter, GlobalTensor]]) -> None:
        """Put whole parameters into the modules until ``put_back``."""
        for member, whole in places:
            self.kept.append((member.owner, member.name, member.owner._parameters[member.name]))
            member.owner._parameters[member.name] = whole  # type: ignore[assignment]
        wholes = [whole for _, whole in places]
        self.put = wholes, _memory_of(wholes)

    def written(self) -> list[str]:
        """Whole parameters that forward has written, or replaced (``layer.to(dtype)``)."""
        wholes, memory = self.put
        found = zip(self.kept, wholes, memory, _memory_of(wholes), strict=False)  # empty after put_back
        return [
            f"{name} of {type(owner).__name__}"
            for (owner, name, _), whole, before, now in found
            if now != before or id(owner._parameters.get(name)) != id(whole)
        ]

    def put_back(self) -> None:
        """Put the shards back into the modules; the call has ended."""
        if self.saving is not None:
            self.saving.__exit__(None, None, None)
            self.saving = None
        for owner, name, parameter in self.kept:
            if isinstance(owner, nn.RNNBase):
                setattr(owner, name, parameter)  # its list of weights would keep the whole one
            else:
                owner._parameters[name] = parameter
        self.kept.clear()
        self.put = [], []
        self.places.clear()

    def hook_results(self, inputs: Any, output: Any, learns: bool) -> None:
        """Hook the results, so that all ranks gather at the same point of the backward.

        The values are dropped when the gradients of the parameters leave. If no parameter takes a gradient, they are
        dropped when backward reaches the input of the unit.
        """
        with local_torch():
            nodes = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            for node in nodes:
                # An earlier node belongs to an input that the unit returns.
                if node is not None and node._sequence_nr() >= self._first_node:
                    self.again.awaits_backward = True
                    node.register_prehook(partial(self.again.begin_backward, self.before))
            if learns:
                return
            for leaf in tree_leaves(inputs):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(self.again.release)
                    return


class _SavedReference(NamedTuple):
    """Stands for a saved view of a gathered parameter."""

    again: Regathering
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def _saving(again: Regathering, places: dict[int, int]) -> Any:
    """Context in which autograd saves references in place of gathered values. Other tensors go to the outer hooks."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        with local_torch():
            is_strided = tensor.layout is torch.strided  # sparse tensors have no storage
            number = places.get(tensor.untyped_storage().data_ptr()) if is_strided and tensor.numel() else None
            if number is not None and tensor.dtype == again.dtypes[number]:
                return _SavedReference(again, number, tensor.size(), tensor.stride(), tensor.storage_offset())
        return outer[0](tensor) if outer is not None else keep(tensor)

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedReference):
            return saved.again.regather()[saved.number].as_strided(saved.size, saved.stride, saved.offset)
        found: torch.Tensor = outer[1](saved) if outer is not None else unchanged(saved)
        return found

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def writes_to(parameters: Iterable[GlobalTensor]) -> list[int]:
    """The number of writes to each, those through ``.data`` among them."""
    with local_torch():
        return list(map(version_of, parameters))


def autocast_dtype(world: World) -> torch.dtype | None:
    """The dtype that autocast casts to; None where it is off."""
    kind = world.autocast_type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


_LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def casts_of(layer: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that a layer of torch or ``transformers`` uses under autocast in 16 bits only.

    >>> casts_of(nn.Linear(2, 2)), casts_of(nn.LayerNorm(2))
    (('weight',), ())
    """
    kind = type(layer)
    if not getattr(layer.__dict__.get("forward"), "runs_its_class", "forward" not in layer.__dict__):
        return ()
    if kind is nn.MultiheadAttention:
        return _ATTENTION
    return ("weight",) if kind in _LINEAR or kind in _CONVOLUTIONS or is_conv1d(kind) else ()


def _regather_dtypes(
    members: Sequence[tuple[ShardedParameter, GlobalTensor]], parameters: Sequence[GlobalTensor]
) -> list[torch.dtype | None]:
    if not parameters:
        return []
    half = autocast_dtype(parameters[0]._spec.world)
    wanted: dict[int, set[torch.dtype]] = {id(parameter): set() for parameter in parameters}
    with local_torch():
        for (owner, name, _), parameter in members:
            if id(parameter) not in wanted or (type(owner) is nn.Embedding and "forward" not in owner.__dict__):
                continue  # an embedding's backward needs only the indices
            is_cast = half is not None and parameter.dtype == torch.float32 and name in casts_of(owner)
            wanted[id(parameter)].add(half if is_cast and half is not None else parameter.dtype)
        return [
            next(iter(found)) if len(found := wanted[id(p)]) == 1 else p.dtype if found else None for p in parameters
        ]
