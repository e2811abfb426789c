"""The layers that read an activation. Where they lie on other stages, the activation is sent there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from workbench.core.model_costs import SkipConnection


class ActivationReads:
    """Activations with gradients that the functions of one layer make, and those of other layers read.

    A function between layers runs where its operands are. For this count it belongs to the latest layer that makes one
    of them.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._made: dict[
            int, tuple[str, torch.Tensor]
        ] = {}  # by address; holding a tensor keeps its address from being used again
        self._readers: dict[int, list[str]] = {}
        self._entered: dict[int, list[str]] = {}

    def record(
        self, layer: str | None, is_own: bool, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]
    ) -> None:
        """Record the tensors (by address) that a function reads and makes; ``layer`` is its layer, or the last one
        before it.
        """
        if layer is None:
            return
        self._places.setdefault(layer, len(self._places))
        makers = [self._made[address][0] for address in inputs if address in self._made]
        if makers and not is_own:
            layer = max(makers, key=self._places.__getitem__)
        for address, tensor in inputs.items():
            if address in self._made and self._made[address][0] != layer and tensor.requires_grad:
                _add(self._readers, address, layer)
        for address, tensor in outputs.items():
            if address not in inputs:  # neither a view nor written in place
                self._made[address] = layer, tensor

    def record_input(self, layer: str, tensor: torch.Tensor | None) -> None:
        """Record a layer's inputs."""
        if tensor is not None:
            _add(self._entered, tensor.untyped_storage()._cdata, layer)

    def of(self, layer: str, order: Sequence[str], num_samples: int) -> tuple[SkipConnection, ...]:
        """The activations of one layer that others read, in the order in which they were made."""
        place = {name: index for index, name in enumerate(order)}
        return tuple(
            SkipConnection(
                tensor.numel() * tensor.element_size() / num_samples,
                tuple(place[name] - place[layer] for name in self._readers[address] if name in place),
                tuple(place[name] - place[layer] for name in self._entered.get(address, ()) if name in place),
            )
            for address, (maker, tensor) in self._made.items()
            if maker == layer and layer in place and address in self._readers
        )


def _add(found: dict[int, list[str]], address: int, layer: str) -> None:
    names = found.setdefault(address, [])
    if layer not in names:
        names.append(layer)
