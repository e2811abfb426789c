"""The calls of layers in the order in which they run, for models that call some layers several times; the layers that
read an activation, to whose stages it is sent; and what functions read and write if neighbours are one program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from workbench.core.model_costs import AttentionSize, Extent, LayerCall, LayerCost, OpCost, SkipConnection
from workbench.core.rows import Layer


@dataclass
class Entry:
    """One function of the batch; ``layer`` is None before the first one begins."""

    layer: str | None
    is_own: bool
    name: str = "saved"
    flops: float = 0.0
    moved_bytes: float = 0.0
    inner: int = 0
    saved_bytes: float = 0.0
    backward_bytes: float = 0.0
    again_bytes: float = 0.0
    passing_bytes: float = 0.0
    attention: AttentionSize | None = None
    fused_bytes: float = 0.0
    fused_backward_bytes: float = 0.0
    backward_products: tuple[bool, bool] = (True, True)

    def add_fused(self, size_bytes: float, is_backward: bool) -> None:
        """Count what it reads or writes where it is one program with its neighbours."""
        if is_backward:
            self.fused_backward_bytes += size_bytes
        else:
            self.fused_bytes += size_bytes

    def work(self, num_samples: int) -> OpCost:
        """The work of one sample."""
        return OpCost(
            self.name,
            self.flops / num_samples,
            self.moved_bytes / num_samples,
            self.inner,
            self.saved_bytes / num_samples,
            backward_bytes=self.backward_bytes / num_samples,
            again_bytes=self.again_bytes / num_samples,
            passing_bytes=self.passing_bytes / num_samples,
            attention=self.attention,
            fused_bytes=(self.fused_bytes / num_samples, self.fused_backward_bytes / num_samples),
            backward_products=self.backward_products,
        )

    @property
    def is_work(self) -> bool:
        """Whether it takes time or memory: a view takes none, unless its backward does (of slices: their gradient)."""
        return bool(self.flops or self.moved_bytes or self.saved_bytes or self.backward_bytes)


@dataclass(eq=False)
class _Call:
    layer: str
    input: torch.Tensor | None = None
    source: int | None = None
    output: torch.Tensor | None = None
    results: Sequence[torch.Tensor] = ()
    first_made: torch.Tensor | None = None
    entries: list[Entry] = field(default_factory=list)
    number: int | None = None


class LayerCalls:
    """Records calls of layers, and for each the call whose result it takes.

    The result of a function between layers belongs to the latest call from which one of its operands comes.
    """

    def __init__(self) -> None:
        self._begun: dict[str, _Call] = {}  # the latest call of each layer
        self._calls: list[_Call] = []  # that have run a function of their own, in the order of these
        self._made: dict[int, int] = {}  # by address: the call of which it comes
        self._latest: _Call | None = None

    def begin(self, layer: str, taken: torch.Tensor | None) -> None:
        """Record that a layer is called with ``taken``."""
        source = None if taken is None else self._made.get(taken.untyped_storage()._cdata)
        self._begun[layer] = _Call(layer, taken, source)

    def end(self, layer: str, output: torch.Tensor | None, results: Sequence[torch.Tensor]) -> None:
        """Record that the layer returns ``results``. ``output`` is None if it is not one tensor."""
        self._begun[layer].output, self._begun[layer].results = output, results

    def record(self, entry: Entry, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]) -> None:
        """Record the tensors (by address) that a function reads and makes."""
        maker: int | None = None
        made = {address: tensor for address, tensor in outputs.items() if address not in inputs}
        if entry.layer is not None and entry.is_own:
            self._latest = call = self._begun.setdefault(entry.layer, _Call(entry.layer))
            if call.number is None:
                call.number = len(self._calls)
                self._calls.append(call)
            call.first_made = call.first_made if call.first_made is not None else next(iter(made.values()), None)
            maker = call.number
        else:
            maker = max((self._made[address] for address in inputs if address in self._made), default=None)
        if self._latest is not None:
            self._latest.entries.append(entry)
        if maker is not None:
            self._made |= dict.fromkeys(made, maker)

    def of(
        self,
        layers: Mapping[str, Layer],
        pieces: Mapping[str, tuple[int, ...]],
        num_samples: int,
        extent: Callable[[torch.Tensor | None], Extent | None],
        gradients: Callable[[str, torch.Tensor | None, Sequence[torch.Tensor]], tuple[bool, bool]],
    ) -> tuple[LayerCall, ...]:
        """All calls; none if no layer was called twice."""
        if len({call.layer for call in self._calls}) == len(self._calls):
            return ()
        numbers: dict[int, int] = {}
        found = []
        for call in self._calls:
            output = call.output if call.output is not None else call.first_made
            work = [(entry.is_own, entry.work(num_samples)) for entry in call.entries if entry.is_work]
            row = LayerCost(
                layers[call.layer],
                tuple(cost for is_own, cost in work if is_own),
                tuple(cost for is_own, cost in work if not is_own),
                extent(output),
                4 if output is None else output.element_size(),
                pieces=pieces.get(call.layer, ()),
                input_extent=extent(call.input),
                has_gradients=gradients(call.layer, call.input, call.results or ([] if output is None else [output])),
            )
            number = numbers.setdefault(id(call.input), len(numbers))
            itemsize = 4 if call.input is None else call.input.element_size()
            found.append(LayerCall(row, number, call.source, itemsize))
        return tuple(found)


class ActivationReads:
    """Activations that the functions of one layer make, and those of other layers read: those with gradients, and in
    a model with frozen weights those that would have one if all weights were trained.

    A function between layers runs where its operands are. For this count it belongs to the latest layer that makes one
    of them.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._made: dict[int, str] = {}  # by address: the layer
        self._made_by: dict[str, dict[int, torch.Tensor]] = {}
        self._readers: dict[int, dict[str, None]] = {}  # layers in their order
        self._entered: dict[int, dict[str, None]] = {}
        self._of_weights: set[int] = set()  # by address, in a model with frozen weights: what comes from any weights
        self._with_gradient: set[int] = set()

    def record(
        self, layer: str | None, is_own: bool, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor],
        weights: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Record the tensors (by address) that a function reads and makes.

        Args:
            layer: its layer, or the last one before it.
            is_own: whether it is the layer's own.
            inputs, outputs: the tensors.
            weights: addresses of the weights, if some of them are frozen.
        """
        if layer is None:
            return
        if any(address in weights or address in self._of_weights for address in inputs):
            self._of_weights.update(address for address, tensor in outputs.items() if tensor.is_floating_point())
        self._places.setdefault(layer, len(self._places))
        makers = [self._made[address] for address in inputs if address in self._made]
        if makers and not is_own:
            layer = max(makers, key=self._places.__getitem__)
        for address, tensor in inputs.items():
            if tensor.requires_grad:
                self._with_gradient.add(address)
            is_sent = tensor.requires_grad or address in self._of_weights
            if is_sent and self._made.get(address, layer) != layer:
                self._readers.setdefault(address, {})[layer] = None
        for address, tensor in outputs.items():
            if address not in inputs:  # neither a view nor written in place
                self._made[address] = layer
                self._made_by.setdefault(layer, {})[address] = tensor

    def record_input(self, layer: str, tensor: torch.Tensor | None) -> None:
        """Record a layer's inputs."""
        if tensor is not None:
            self._entered.setdefault(tensor.untyped_storage()._cdata, {})[layer] = None

    def of(self, layer: str, place: Mapping[str, int], num_samples: int) -> tuple[SkipConnection, ...]:
        """The activations of one layer that others read, in the order in which they were made. ``place``: of layers."""
        return tuple(
            SkipConnection(
                tensor.numel() * tensor.element_size() / num_samples,
                tuple(place[name] - place[layer] for name in self._readers[address] if name in place),
                tuple(place[name] - place[layer] for name in self._entered.get(address, ()) if name in place),
                address in self._with_gradient,
            )
            for address, tensor in self._made_by.get(layer, {}).items()
            if self._made[address] == layer and layer in place and address in self._readers
        )


@dataclass(eq=False)
class _Result:
    """A tensor that a program has made, and not written as long as nobody else reads it."""

    maker: Entry
    is_backward: bool
    program: int
    size_bytes: float
    is_written: bool = False
    is_read: bool = False


@dataclass
class Fusion:
    """Counts the functions of one forward and backward, in their order, as in a compiled step: those between two matrix
    products run together. A result that only they read is never written, and what several of them read is read once.
    """

    _program: int = 0
    _results: dict[int, _Result] = field(default_factory=dict)  # by address
    _taken: set[int] = field(default_factory=set)  # addresses that the present program has read

    def record_product(self, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        """A matrix product ends the program before it, and reads what that has written."""
        self._program += 1
        self._taken.clear()
        for address in inputs:
            self._write(address)
        for address in outputs:
            self._results.pop(address, None)

    def record(self, entry: Entry, is_backward: bool, reads: Mapping[int, float], makes: Mapping[int, float]) -> None:
        """A function that only moves memory.

        Args:
            entry: where its bytes are counted, in forward or backward.
            is_backward: which of both.
            reads, makes: bytes of its operands and results, by address; 0 for those that do not count.
        """
        for address, size in reads.items():
            made = self._results.get(address)
            if made is not None and made.program == self._program:
                made.is_read = True
                continue
            self._write(address)
            if address not in self._taken:
                self._taken.add(address)
                entry.add_fused(size, is_backward)
        for address, size in makes.items():
            self._results[address] = _Result(entry, is_backward, self._program, size)

    def end(self) -> None:
        """Write what nobody has read: it is a result of the step."""
        for address, made in self._results.items():
            if not made.is_read:
                self._write(address)

    def _write(self, address: int) -> None:
        made = self._results.get(address)
        if made is not None and not made.is_written:
            made.is_written = True
            made.maker.add_fused(made.size_bytes, made.is_backward)
