"""Records what a step does below autograd: torch's operators on this rank's tensors, exchanges, draws.

Autograd, global tensors and modules are Python and C++ that decide which operators run; a replay runs the operators. So
the recorder is a dispatch mode: it sees forward, backward and everything else as operators on plain tensors, and
knows each tensor by identity. A call of the transport is one entry, and so is a draw of a random key.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from workbench.errors import CaptureError
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain
from workbench.tensors.world import World
from workbench.training.aten_functions import matmul_work
from workbench.training.capture.gradients import held_grad
from workbench.training.capture.operators import check_operator, devices_of, draws, written_arguments
from workbench.training.capture.optimizer_steps import OptimizerStep, parts_of, settings_of
from workbench.training.capture.trace import Call, Slot, Trace
from workbench.training.capture.unwritten_memory import UnwrittenMemory
from workbench.transport.traffic import TrafficCount

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
"""Operators that give another tensor object for the same values, which only autograd tells apart."""


def _lstm_on_cpus(*args: Any) -> Any:
    """torch's LSTM on CPUs. What its backward reads it makes where gradients are enabled only."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return _aten.mkldnn_rnn_layer.default(*args)


_BY_THEMSELVES: dict[Any, Callable[..., Any]] = {_aten.mkldnn_rnn_layer.default: _lstm_on_cpus}
"""What a replay calls in place of operators, which are then no part of a compiled program."""
_IN_C: dict[Any, Callable[..., Any]] = {
    _aten.add_.Tensor: torch.Tensor.add_,
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.mm.default: torch.mm,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.view.default: torch.Tensor.view,
}
"""Functions of torch that run one operator and parse their arguments in half the time: those that steps are full of."""
_SETS_UP = {_aten.as_strided_.default}
"""Operators that set where their first operand lies: skipped unless the operand is used (placeholders seldom are)."""
_SMALLEST_KEY = 1 << 24
"""Keys are 63 random bits, so an integer argument that equals one is one."""


class Recorder(TorchDispatchMode):
    """The recording of one run.

    Args:
        world: this rank's world.
        arguments: what the caller has handed in.
        inputs: its tensors as the step gets them; no other code may hold them.
        grads: gradients that leaves have already; the step may add to them.
        optimizers: those that the step is known to step.

    Attributes:
        originals: tensors that the step did not make; a replay works on the same memory.
        steps: the optimizers' steps.
        placeholders: leaves of other ranks that have a gradient there.
        counted_by_calls: exchanges that replays of recorded calls count by themselves.
    """

    def __init__(
        self,
        world: World,
        arguments: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        optimizers: Sequence[Optimizer],
    ) -> None:
        super().__init__()
        self.world = world
        self.originals: list[torch.Tensor] = []
        self.steps: list[OptimizerStep] = []
        self.placeholders: list[GlobalTensor] = []
        self.counted_by_calls: list[TrafficCount] = []
        self._slots: Any = WeakTensorKeyDictionary()
        # Slots of tensors that the step made, by memory and place; None for memory that existed before the step.
        # The weak reference shows that the address still belongs to the same memory.
        self._memory: dict[int, tuple[StorageWeakRef, dict[Any, Slot] | None]] = {}
        self._arguments = {id(argument): argument for argument in arguments if isinstance(argument, torch.Tensor)}
        self._unwritten = UnwrittenMemory()
        self._num_slots = 0
        self._keys: dict[int, Slot] = {}
        self._keys_used: set[int] = set()
        self._is_paused = 0
        self._settings = {optimizer: settings_of(optimizer) for optimizer in optimizers}
        self._stepping: OptimizerStep | None = None
        self._copies: list[Call] = []
        self._inputs = [*inputs, *grads]
        self._boxed: list[weakref.ref[GlobalTensor]] = []
        self._sizes: dict[Slot, int] = {}
        self.trace = Trace([self._new(tensor) for tensor in self._inputs], [], [], sizes=self._sizes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with local_torch():
            if self._is_paused:
                return func(*args, **kwargs)
            if func is _aten.lift_fresh.default and self._is_fresh(args[0]):
                out = func(*args)
                self._make_anew(out)
                return out
            check_operator(func, args)
            given, options = self._known(args), {k: self._known(v) for k, v in kwargs.items()}
            out = func(*args, **kwargs)
            if func in _SAME:
                self._slots[out] = self._slot(args[0])
                return out
            written, is_draw = written_arguments(func, args, kwargs), draws(func, args, kwargs)
            is_write, result = bool(written), self._made(out)
            returns = func._schema.returns
            first = returns[0].alias_info if returns else None
            makes_view = first is not None and not first.is_write and not is_write
            self._unwritten.add(func, (args, kwargs), written, out, makes_view)
            self.trace.calls.append(
                Call(
                    _BY_THEMSELVES.get(func) or _IN_C.get(func) or getattr(func, "_op", func), given, options, result,
                    has_side_effect=(is_write and func not in _SETS_UP) or is_draw,
                    makes_view=makes_view,
                    changes=given[0] if func in _SETS_UP else None,
                    name=str(func).removesuffix(".default"),
                    operator=None if func in _BY_THEMSELVES else func,
                    draws=is_draw,
                    devices=devices_of(args, kwargs, out),
                    flops=matmul_work(func, args, kwargs, out)[0],
                )
            )  # fmt: skip
            return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded."""
        self._is_paused += 1
        try:
            yield
        finally:
            self._is_paused -= 1

    def depends_on(self, tensor: torch.Tensor) -> None:
        """Let a replay be refused if the memory of this tensor has moved: the step works on it with another spec."""
        self.originals.append(tensor)

    def keeps_boxings(self, tensor: GlobalTensor) -> None:
        """Note that a tensor keeps what the step has boxed it to, until the step ends."""
        self._boxed.append(weakref.ref(tensor))

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record the call."""
        return function(*args, **kwargs) if self._is_paused else self._call(name, function, (), args, kwargs)

    def _call(self, name: str, function: Callable[..., Any], made_by: tuple[Slot, ...], args: Any, kwargs: Any) -> Any:
        """``made_by``: the slot of the function, if a recorded call has made it."""
        given, options = self._known(args), {k: self._known(v) for k, v in kwargs.items()}
        with self.paused():
            made = function(*args, **kwargs)
        self._unwritten.write((args, kwargs))
        result, handed_out = self._taken(name, made)
        called: Callable[..., Any] = operator.call if made_by else function
        self.trace.calls.append(Call(called, (*made_by, *given), options, result, has_side_effect=True, name=name))
        return handed_out

    def _taken(self, name: str, made: Any) -> tuple[Any, Any]:
        """The structure of a call's result, and what the caller gets: functions among the results are recorded too."""
        if isinstance(made, list | tuple):
            parts = [self._taken(name, part) for part in made]
            return tuple(part[0] for part in parts), type(made)(part[1] for part in parts)
        if isinstance(made, torch.Tensor) or not callable(made):
            return self._made(made), made
        slot = self._next()
        return slot, lambda *args, **kwargs: self._call(f"{name} ends", made, (slot,), args, kwargs)

    def draw(self, function: Callable[..., int], *args: Any, is_used: bool = True) -> int:
        """Record the draw of a random key; every replay draws its own. A key that was drawn before is that of a
        recomputation, which has set the generator back. ``is_used``: this rank makes numbers from it.
        """
        with self.paused():
            key = function(*args)
        if key in self._keys:
            return key
        slot = self._keys[key] = self._next()
        if not is_used:
            self._keys_used.add(key)
        self.trace.calls.append(Call(function, args, {}, slot, has_side_effect=True, name="draw_key", draws=True))
        return key

    def seed(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function that seeds a generator, and record the call: it keeps its place among the draws."""
        self.call("seed", function, *args)
        if not self._is_paused:
            self.trace.calls[-1].draws = True

    def optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step: the parts, with their gradients, are in the places of the parameters. Pause
        the recording until ``optimizer_ends``; a replay calls the optimizer.
        """
        step = OptimizerStep(optimizer, args, kwargs, self._settings.get(optimizer))
        parts = parts_of(optimizer)
        self._stepping = step
        self.steps.append(step)
        with self.paused(), local_torch():
            grads = [part.grad for part in parts]
            self._unwritten.check(f"{type(optimizer).__name__}.step", grads)
        self.trace.calls.append(
            Call(step, (self._known(parts), self._known(grads)), {}, None, has_side_effect=True,
                 name=f"{type(optimizer).__name__}.step")
        )  # fmt: skip
        self._is_paused += 1

    def optimizer_ends(self) -> None:
        """It has changed the parts, and nothing else has run since: resume the recording."""
        if self._stepping is not None:
            self._stepping = None
            self._is_paused -= 1

    def finish(self, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[int | None]:
        """Complete the program with the step's outputs: its results, and the gradients that it leaves.

        Returns:
            for each leaf, the number of the output that is its gradient; None where the gradient has not changed, or is
            missing.
        """
        self._check_end()
        slots = [self._slot(output) for output in outputs]
        left: list[int | None] = []
        inputs = set(self.trace.inputs)
        with local_torch():
            grads = [held_grad(leaf) for leaf in leaves]
            self._unwritten.check("the caller of the step", (outputs, grads))
        for grad in grads:
            slot = None if grad is None else self._slots.get(grad)
            if slot is None or slot in inputs or slot in self.trace.constants:
                left.append(None)
            else:
                left.append(len(slots))
                slots.append(slot)
        self.trace.outputs = slots
        self._check_leftovers(set(slots))
        self._drop_copies()
        return left

    def _check_end(self) -> None:
        unused = [key for key in self._keys if key not in self._keys_used]
        if unused:
            raise CaptureError(
                f"capture: {len(unused)} of {len(self._keys)} random draws of the step were made by a function whose "
                "numbers a replay cannot draw again (binomial, gamma, Dirichlet, permutations). Draw them outside of "
                "the captured function, and hand them in as tensors."
            )
        for step in self.steps:
            step.check_settings()

    def _check_leftovers(self, known: set[Slot]) -> None:
        known |= {self._slots[tensor] for tensor in self._inputs} | self.trace.constants.keys()
        for source in self._boxed:
            if (boxed := source()) is not None:
                boxed._boxings = None
        gc.collect()  # graphs and their functions may form cycles
        # A replay need not make placeholders again
        made = [t for t, slot in self._slots.items() if slot not in known and not getattr(t, "is_placeholder", False)]
        kept = _referred_to(made)
        if kept:
            with local_torch():
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in kept[:4])
            raise CaptureError(
                f"capture: {len(kept)} tensor{'s' * (len(kept) > 1)} of shape {shapes}{', ...' * (len(kept) > 4)} that "
                "the step made outlives it without being returned. A replay makes new ones and renews nobody's "
                "references. Return them, alone or in tuples, lists and dicts, and read what each call returns, or "
                "write to tensors that are there already (x.copy_(...))."
            )

    def _next(self) -> Slot:
        self._num_slots += 1
        return Slot(self._num_slots)

    def _new(self, tensor: torch.Tensor) -> Slot:
        slot = self._slots[tensor] = self._next()
        storage = tensor.untyped_storage()
        _, places = self._memory.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
        if places is not None:
            places[_place_of(tensor)] = slot
        with local_torch():
            self._sizes[slot] = tensor.numel() * tensor.element_size()
        return slot

    def _slot(self, tensor: torch.Tensor) -> Slot:
        """The slot of a tensor; a tensor that the step did not make becomes a constant."""
        slot: Slot | None = self._slots.get(tensor)
        if slot is None and id(tensor) in self._arguments:
            with local_torch():
                shape = tuple(tensor.shape)
            raise CaptureError(
                f"capture: the step reads its input of shape {shape} also from outside: a variable or an object holds "
                "the same tensor. A replay gets other inputs, and what is outside stays. Read it from the argument "
                "only, or hand in a copy (x.clone())."
            )
        if slot is None and (slot := self._made_before(tensor)) is not None:
            self._slots[tensor] = slot
        if slot is None:
            slot = self._slots[tensor] = self._next()
            self.originals.append(tensor)
            storage = tensor.untyped_storage()
            self._memory[storage._cdata] = StorageWeakRef(storage), None
            with self.paused():
                self.trace.constants[slot] = plain(tensor)
        return slot

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether ``torch.tensor`` has just made it, in memory of its own: not in that of an array, for example."""
        return tensor not in self._slots and tensor.untyped_storage().resizable()

    def _make_anew(self, tensor: torch.Tensor) -> None:
        """Let every replay begin with the numbers that the tensor has now: the step may write to it."""
        numbers, clone = self._next(), _aten.clone.default
        with self.paused():
            self.trace.constants[numbers] = tensor.clone()
        copy = Call(clone, (numbers,), {}, self._new(tensor), False, name="aten.clone", operator=clone,
                    devices=devices_of(tensor))  # fmt: skip
        self._copies.append(copy)
        self.trace.calls.append(copy)

    def _drop_copies(self) -> None:
        """Let operators that only read read the numbers themselves."""
        kept = set(self.trace.outputs)
        for call in self.trace.calls:
            if call.operator is None or call.has_side_effect or call.makes_view:
                kept |= call.reads()
        constants, dropped = self.trace.constants, set[int]()
        for copy in self._copies:
            if copy.result not in kept:
                constants[copy.result] = constants.pop(copy.args[0])
                dropped.add(id(copy))
        self.trace.calls = [call for call in self.trace.calls if id(call) not in dropped]

    def _made_before(self, tensor: torch.Tensor) -> Slot | None:
        """The slot of a tensor that the step made as another object: ``as_subclass`` and ``.data`` make one without an
        operator.
        """
        _, places = self._memory.get(tensor.untyped_storage()._cdata, (None, None))
        return None if places is None else places.get(_place_of(tensor))

    def _known(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._slot(value)
        if type(value) is int and value >= _SMALLEST_KEY and value in self._keys:
            self._keys_used.add(value)
            return self._keys[value]
        return type(value)(map(self._known, value)) if type(value) in (list, tuple) else value

    def _made(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return None if value in self._slots else self._new(value)
        return tuple(map(self._made, value)) if isinstance(value, list | tuple) else None


def _referred_to(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that Python objects hold. A graph of autograd that will soon be freed may hold others.

    It looks through all of Python's objects: once for all tensors, and once for each tensor that the error names.
    """

    if not _holders(tensors, tensors):
        return []
    return [tensor for tensor in tensors if _holders(tensors, [tensor])]


def _holders(tensors: list[torch.Tensor], some: list[torch.Tensor]) -> list[Any]:
    """Objects other than these two lists that hold one of ``some``."""
    ours = tuple(some)  # since Python 3.13 the arguments of the call are found too
    known = {id(tensors), id(some), id(ours)}
    return [holder for holder in gc.get_referrers(*ours) if id(holder) not in known]


def _place_of(tensor: torch.Tensor) -> Any:
    """Offset, shape, strides and dtype of a tensor in its memory; of a global one, those of this rank's shard."""
    with local_torch():
        return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
