"""Counts one forward and backward: every function below autograd, its layer, and the tensors that autograd saves.

A function is a layer's own if it reads a parameter of the layer, or runs inside the layer's forward before another
layer begins. Any other function counts with the layer that began last. A saved tensor belongs to the function whose
node saves it: nodes are numbered, and a node exists before its function runs and before it saves anything. The same
numbers match functions of backward with those of forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from workbench.core.model_costs import Extent, LayerCall, LayerCost, OpCost
from workbench.core.rows import Layer
from workbench.training.aten_functions import ATTENTION, BY_EXPERT, TO_COPY, attention_size, matmul_work, name_of
from workbench.training.costs.layer_calls import ActivationReads, Entry, Fusion, LayerCalls
from workbench.training.strategies.state import ROOT


class WorkCounter(TorchDispatchMode):
    """Counts what runs under ``watch``.

    Args:
        owners: layers by the address of their parameters' storages.
        num_samples: the number of samples in the batch.
        shapes: the shapes of parameters. A batch has their gradients once, so they do not count per sample.
        has_frozen: whether some parameters are frozen. Else all products count with a whole backward, that of the first
            layer too.
    """

    def __init__(
        self, owners: Mapping[int, list[str]], num_samples: int, shapes: Collection[tuple[int, ...]] = (),
        has_frozen: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._has_frozen = has_frozen
        self._owners, self._num_samples = dict(owners), num_samples
        self._shapes = {way for shape in shapes for way in (_without_ones(shape), _without_ones(shape)[::-1])}
        self._entries: list[Entry] = []
        self._entries_of: dict[str | None, list[Entry]] = {}  # by layer, when all have run
        self._by_node: dict[int, Entry] = {}
        self._early: dict[int, float] = {}  # saved for a node whose function has not run yet
        self._early_again: dict[int, float] = {}
        self._held: list[torch.UntypedStorage] = []  # of all results, so that no address is used again
        self._saved: dict[int, int] = {}  # by address, the node for which it was saved first
        self._active: list[str] = []
        self._last: str | None = None
        self._outputs: dict[str, torch.Tensor | None] = {}
        self._results: dict[str, list[torch.Tensor]] = {}  # all that a layer returns; of a container, its own results
        self._inputs: dict[str, torch.Tensor | None] = {}  # the first one; None where there is none
        self._containers: set[str] = set()  # layers in whose forward others run: what enters these is not theirs alone
        self._pieces: dict[str, tuple[int, ...]] = {}
        self._num_cast: dict[str, int] = {}  # of weights that autocast casts, by layer
        self._frozen_casts: dict[int, int] = {}  # numbers in casts of frozen weights, until one is saved for backward
        self._of_samples: set[int] = set()  # addresses of tensors that depend on the batch
        self._order: dict[str, int] = {}  # layers, and their places
        self._following: dict[str, str] = {}  # when all have run
        self._reads = ActivationReads()
        self._calls = LayerCalls()
        self._fusion = Fusion()
        self._is_paused = False
        self.heads: set[int] = set()
        """Of queries and of keys, as attention in one function was called."""
        self.chosen: dict[str, int] = {}
        """The last size of the second tensor that a layer takes: of fused experts, how many a token chooses."""
        self.computed_share = 1.0
        """Of the next product: masked blocks of attention are not computed."""

    @contextmanager
    def watch(self, layers: Mapping[str, nn.Module], batch: Any = None) -> Iterator[None]:
        """Context around forward and backward of a model with these layers; ``batch`` is None if it is unknown."""
        self._of_samples = set(_distinct(batch))
        handles = []
        for path, layer in layers.items():
            name = path or ROOT
            handles += [
                layer.register_forward_pre_hook(
                    lambda _, *given, name=name: self._begin_layer(name, given), with_kwargs=True
                ),
                layer.register_forward_hook(lambda layer, _, output, name=name: self._end_layer(name, layer, output)),
            ]
        try:
            with self, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()
        if self._entries:  # nodes without a function of their own
            self._entries[-1].saved_bytes += sum(self._early.values())
        self._fusion.end()
        for entry in self._entries:  # functions before all layers belong to the first one
            self._entries_of.setdefault(entry.layer or next(iter(self._order), None), []).append(entry)
        self._following = dict(pairwise(self._order))

    def go_backward(self, result: Any) -> None:
        """Run backward from every tensor of a result that takes gradients. The first gradients count for no layer."""
        ends = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        self._is_paused = True
        grads = [torch.ones_like(end) for end in ends]
        self._is_paused = False
        if ends:
            torch.autograd.backward(ends, grads)

    def where(self) -> str:
        """``in head`` while that layer runs, ``after head`` until the next one begins."""
        return f"{'in' if self._last in self._active else 'after'} {self._last}" if self._last else "in the model"

    def order(self, names: Sequence[str]) -> list[str]:
        """The layers in the order in which they ran. A layer that did not run follows the one listed before it."""
        place = -1
        places = {name: (place := self._order.get(name, place)) for name in names}
        return sorted(names, key=places.__getitem__)

    def row(self, layer: Layer) -> LayerCost:
        """The counts of a layer."""
        mine = [entry for entry in self._entries_of.get(layer.name, ()) if entry.is_work]
        own, after = ([e.work(self._num_samples) for e in mine if e.is_own is which] for which in (True, False))
        output = self._outputs.get(layer.name)
        itemsize = 4 if output is None else output.element_size()
        given, (passed, passed_itemsize) = self._extent(output), self._handed_on(layer.name)
        return LayerCost(
            layer, tuple(own), tuple(after), given, itemsize, None if passed == given else passed,
            self._pieces.get(layer.name, ()), None if passed_itemsize == itemsize else passed_itemsize,
            self._num_cast.get(layer.name, 0), self._input_extent(layer.name),
            self._reads.of(layer.name, self._order, self._num_samples),
            self._have_gradients(layer.name, self._inputs.get(layer.name), self._results.get(layer.name, ())),
        )  # fmt: skip

    def calls(self, layers: Sequence[Layer]) -> tuple[LayerCall, ...]:
        """All calls of layers in order; none if each was called once."""
        by_name = {layer.name: layer for layer in layers}
        return self._calls.of(by_name, self._pieces, self._num_samples, self._extent, self._have_gradients)

    def works(self) -> list[OpCost]:
        """All counted functions, in order, for one sample."""
        return [entry.work(self._num_samples) for entry in self._entries if entry.is_work]

    def _have_gradients(
        self, name: str, taken: torch.Tensor | None, results: Sequence[torch.Tensor]
    ) -> tuple[bool, bool]:
        """Whether backward computes the gradients of a layer's input and output; of what is unknown, it may."""
        if not self._has_frozen:
            return True, True
        is_unknown = name in self._containers or name not in self._inputs
        comes_out = not results or any(result.requires_grad for result in results)
        return comes_out and (is_unknown or (taken is not None and taken.requires_grad)), comes_out

    def _backward_products(self, name: str, operands: Sequence[Any]) -> tuple[bool, bool]:
        """Which of the two products of its backward a product has: for its input, and for its weight."""
        tensors = [one for one in operands if isinstance(one, torch.Tensor) and one.ndim > 1]
        if not self._has_frozen or not tensors:
            return True, True
        if name == ATTENTION:
            return (any(one.requires_grad for one in tensors),) * 2
        weights = [one for one in tensors if one.untyped_storage()._cdata in self._owners] or tensors[-1:]
        inputs = [one for one in tensors if all(one is not weight for weight in weights)]
        return any(one.requires_grad for one in inputs), any(one.requires_grad for one in weights)

    def _extent(self, tensor: torch.Tensor | None) -> Extent | None:
        """The size of an activation; None without one, or if the dim of its samples is unknown.

        Samples flattened into the first dim with others (tokens) are cut again.
        """
        if tensor is None:
            return None
        shape, count = tuple(tensor.shape), self._num_samples
        if self._of_samples and tensor.untyped_storage()._cdata not in self._of_samples:
            return Extent(shape, None)
        if count in shape:
            dim = shape.index(count)
            return Extent((*shape[:dim], *shape[dim + 1 :]), dim)
        return Extent((shape[0] // count, *shape[1:])) if shape and shape[0] % count == 0 else None

    def _handed_on(self, name: str) -> tuple[Extent, int] | tuple[None, None]:
        """Extent and bytes per element of the next layer's input; None if unknown."""
        taken = self._inputs.get(self._following.get(name, ""))
        found = self._extent(taken)
        if taken is None or found is None or found.is_batchless or not taken.is_floating_point():
            return None, None
        return found, taken.element_size()

    def _input_extent(self, name: str) -> Extent | None:
        """A layer's input; unknown for a container, whose forward runs others first, and without a call."""
        if name in self._containers or name not in self._inputs:
            return None
        taken = self._inputs[name]
        return Extent((), None) if taken is None else self._extent(taken)

    def _begin_layer(self, name: str, args: Any) -> None:
        self._containers.update(self._active)
        self._active.append(name)
        self._last = name
        given = tensors_in(args)
        first = given[0] if given else None
        self._inputs.setdefault(name, first)
        if len(given) > 1 and given[1].ndim:
            self.chosen[name] = given[1].shape[-1]
        self._reads.record_input(name, first)
        self._calls.begin(name, first)

    def _end_layer(self, name: str, layer: nn.Module, output: Any) -> None:
        self._active.pop()
        if name in self._containers:  # its output is that of its last layer; its own work is what it adds
            return
        tensors = tensors_in(output)
        self._outputs[name] = tensors[0] if len(tensors) == 1 else None
        if isinstance(layer, nn.MultiheadAttention):  # perhaps its shares are a second result
            self._outputs[name] = self._outputs[f"{name}.out_proj"] = tensors[0]
        self._results.setdefault(name, []).extend(tensors)
        self._calls.end(name, self._outputs[name], tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _on_metadata(func, args, kwargs or {})
        if func.namespace != "aten" or self._is_paused:  # the former are queries, such as a tensor's device
            return out
        inputs, outputs = _distinct((args, kwargs)), _distinct(out)
        self._held += [tensor.untyped_storage() for tensor in outputs.values()]
        node: Any = torch._C._current_autograd_node()  # None in forward
        if func is TO_COPY and self._is_cast_of_weight(node is None, inputs, out):
            return out
        if node is not None:
            self._add_backward(node, func, inputs, outputs)
            return out
        if any(address in self._of_samples for address in inputs):
            self._of_samples.update(outputs)
        self._record_pieces(args[0] if args else None, out)
        entry = self._place(inputs)
        self._reads.record(entry.layer, entry.is_own, inputs, outputs, self._owners if self._has_frozen else ())
        self._calls.record(entry, inputs, outputs)
        entry.name = name_of(func, inputs)
        if entry.name == ATTENTION:
            self.heads |= {tensor.shape[1] for tensor in args[:2] if tensor.ndim == 4}
            entry.attention = attention_size(func, args, kwargs or {})
        flops, entry.inner = matmul_work(func, args, kwargs or {}, out)
        entry.flops = flops * self.computed_share
        if entry.inner:
            entry.backward_products = self._backward_products(entry.name, args)
        entry.moved_bytes = self._moved(func, inputs, outputs)
        if entry.flops or entry.inner or entry.name == ATTENTION:
            self._fusion.record_product(inputs, outputs)
        elif entry.moved_bytes:
            self._fusion.record(entry, False, *self._counted(func, inputs, outputs))
        if entry.is_own and entry.layer is not None and not set(outputs) <= set(inputs):
            self._record_output(entry.layer, outputs)
        return out

    def _add_backward(
        self, node: Any, func: Any, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]
    ) -> None:
        """Count it with the function of whose backward it is part. Products follow from those of forward."""
        entry = self._by_node.get(node._sequence_nr())
        if entry is None:
            return
        of_weights = {at: one for at, one in outputs.items() if _without_ones(one.shape) in self._shapes}
        held = (of_weights, self._owners, self._saved)
        passing = [one for at, one in {**inputs, **outputs}.items() if not any(at in kept for kept in held)]
        entry.passing_bytes = max(entry.passing_bytes, float(sum(map(_bytes, passing))))
        is_product = func._overloadpacket in flop_registry or func._overloadpacket is BY_EXPERT
        if is_product or name_of(func, inputs) == ATTENTION:
            self._fusion.record_product(inputs, outputs)
            return
        moved = self._moved(func, inputs, outputs)
        entry.backward_bytes += max(0.0, moved - sum(map(_bytes, of_weights.values())))
        if moved:
            reads, makes = self._counted(func, inputs, outputs)
            makes = {at: 0.0 if at in of_weights else size for at, size in makes.items()}
            self._fusion.record(entry, True, reads, makes)

    def _is_cast_of_weight(self, is_forward: bool, inputs: Mapping[int, torch.Tensor], out: torch.Tensor) -> bool:
        """Whether autocast casts a weight or its gradient, which a batch has once. The copy counts as the layer's
        weight.

        Backward needs the copies of products' weights, not those of biases.
        """
        if not is_forward:
            return _without_ones(out.shape) in self._shapes
        readers = [name for address in inputs for name in self._owners.get(address, ())]
        if not readers:
            return False
        self._owners[out.untyped_storage()._cdata] = readers
        if out.ndim > 1 and not next(iter(inputs.values())).requires_grad:
            self._frozen_casts[out.untyped_storage()._cdata] = out.numel()
        elif out.ndim > 1:
            for name in readers:
                self._num_cast[name] = self._num_cast.get(name, 0) + out.numel()
        return True

    def _record_pieces(self, source: Any, pieces: Any) -> None:
        """Record where a layer's output is cut along its features: queries, keys and values of one weight."""
        output = self._outputs.get(self._last or "")
        is_cut = isinstance(source, torch.Tensor) and isinstance(pieces, list | tuple) and len(pieces) > 1
        if output is None or not is_cut or source.shape != output.shape:
            return
        is_its = source.untyped_storage()._cdata == output.untyped_storage()._cdata
        if is_its and all(isinstance(p, torch.Tensor) and p.shape[:-1] == output.shape[:-1] for p in pieces):
            self._pieces.setdefault(self._last or "", tuple(piece.shape[-1] for piece in pieces))

    def _record_output(self, name: str, outputs: Mapping[int, torch.Tensor]) -> None:
        """Record an output. A container, or a layer whose parameters others read, gives the first result of them."""
        if name in self._containers or name not in self._inputs:
            self._outputs.setdefault(name, next(iter(outputs.values())))
            self._results.setdefault(name, []).extend(outputs.values())

    def _place(self, inputs: Mapping[int, torch.Tensor]) -> Entry:
        """The entry of a function that reads these storages."""
        readers = [name for storage in inputs for name in self._owners.get(storage, ())]
        if readers:
            near = [*self._active[-1:], self._last]
            self._last = next((name for name in near if name in readers), readers[0])
        is_own = bool(readers) or bool(self._active and self._active[-1] == self._last)
        if is_own and self._last is not None:
            self._order.setdefault(self._last, len(self._order))
        entry = Entry(self._last, is_own or self._last is None)
        self._entries.append(entry)
        node = torch._C._autograd._get_sequence_nr() - 1
        if self._by_node.setdefault(node, entry) is entry:
            entry.saved_bytes += self._early.pop(node, 0.0)
            entry.again_bytes += self._early_again.pop(node, 0.0)
        return entry

    def _moved(self, func: Any, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]) -> float:
        """Bytes read and written, without parameters; a view and an empty tensor move none."""
        is_written = func._schema.is_mutable
        if "empty" in func.__name__ or (not is_written and set(outputs) <= set(inputs)):
            return 0.0
        reads, makes = self._counted(func, inputs, outputs)
        return sum(reads.values()) + sum(makes.values())

    def _counted(
        self, func: Any, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Bytes of what a function reads, parameters left out, and of what it makes, by address."""
        reads = {address: float(_bytes(one)) for address, one in inputs.items() if address not in self._owners}
        times = 2 if name_of(func, inputs) == "embedding" else 1
        return reads, {address: float(times * _bytes(one)) for address, one in outputs.items()}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a saved tensor as ``ActivationMeter`` does: distinct storages, no parameters, expanded tensors too."""
        if torch._C._current_autograd_node() is not None:  # of what a checkpoint computes again
            return tensor
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        for name in self._owners[address] if address in self._frozen_casts else ():
            self._num_cast[name] = self._num_cast.get(name, 0) + self._frozen_casts[address]
        self._frozen_casts.pop(address, None)
        if address in self._owners or tensor.numel() * tensor.element_size() > size:
            return tensor
        node = torch._C._autograd._get_sequence_nr() - 1
        if address in self._saved:
            if self._saved[address] != node:
                self._add_saved(node, "again_bytes", self._early_again, size)
            return tensor
        self._held.append(storage)
        self._saved[address] = node
        self._add_saved(node, "saved_bytes", self._early, size)
        return tensor

    def _add_saved(self, node: int, kind: str, early: dict[int, float], size: int) -> None:
        if node in self._by_node:
            entry = self._by_node[node]
            setattr(entry, kind, getattr(entry, kind) + size)
        else:
            early[node] = early.get(node, 0.0) + size


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors that something holds."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _on_metadata(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function. On metadata, torch has products by expert for operands of type bfloat16 only."""
    if func._overloadpacket is not BY_EXPERT or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    rows, weights = (operand.to(torch.bfloat16) for operand in args[:2])
    return func(rows, weights, *args[2:], **kwargs).to(args[0].dtype)


def _distinct(values: Any) -> dict[int, torch.Tensor]:
    """Tensors by the address of their storage."""
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors_in(values)}


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """A bias's gradient is summed with its dims kept."""
    return tuple(size for size in shape if size != 1)


def _bytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
