"""An optimizer's state in host memory: ``offload=optimizer`` of a strategy.

An elementwise step of all parameters is the same as steps of some parameters after others. So the state comes and goes
with buckets of parameters. For a GPU it lies in pinned memory, and one bucket steps while another stream copies the
state before it back, and the state after it in. For a CPU it lies in a mapped file, on which the step works itself; the
process gives back the pages of a bucket that has stepped. (Ren et al., ZeRO-Offload, 2021, steps on the CPU instead,
whose numbers are not a GPU's.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch.optim import Optimizer

from workbench.core.offload_kinds import BUCKET_BYTES
from workbench.errors import StrategyError
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.training.gradients.nested_steps import step_without_hooks
from workbench.training.gradients.optimizer_kinds import closure_of
from workbench.training.offload.host_memory import host_memory, is_offloaded, rounded
from workbench.training.offload.staging import Staging

_ALIGNMENT = 256
Step = Callable[[Any], Any]
"""The step of an optimizer's class, without hooks."""


class _Place:
    """Where a tensor of the state lies between steps, ``host``, and within one, ``here``."""

    __slots__ = ("here", "host", "start")

    def __init__(self, host: torch.Tensor, start: int) -> None:
        self.host = self.here = host
        self.start = start


class _Bucket:
    """Parameters that step together, by their numbers, and the places of their state, by number and name."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.places: dict[tuple[int, str], _Place] = {}
        self.memory: list[torch.Tensor] = []
        self.num_bytes = 0
        self.buffer: torch.Tensor | None = None
        self.slot: int | None = None

    def bind(self, buffer: torch.Tensor) -> None:
        """Let the places within a step be in a buffer."""
        if buffer is not self.buffer:
            self.buffer = buffer
            for place in self.places.values():
                place.here = _view(buffer, place.start, place.host)


class StateOnHost:
    """The state of one optimizer with given parameters, between its steps. ``device`` is the parameters'."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = host_memory(device)
        self._staging = None if device.type == "cpu" else Staging(device)
        self._buckets: list[_Bucket] = []
        self._sizes: list[int] = []

    def in_closure(
        self, optimizer: Optimizer, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of ``optimizer.step`` with a closure that takes the step, behind all hooks before it.

        torch's step calls the closure first, and then finds groups without parameters.
        """
        update = UpdateClosure(self, optimizer, step, closure_of(args, kwargs))
        return (args[0], *args[2:]), {**kwargs, "closure": update}

    def waiting(self, state: Any) -> Any:
        """The state as a mapping whose readers wait for copies that are under way."""
        if self._staging is None or (isinstance(state, WaitingState) and state.staging is self._staging):
            return state
        return WaitingState(self._staging, state)

    def free(self) -> None:
        """Give the memory back, in which no state lies any more. The next step takes new memory."""
        self._memory, self._buckets, self._sizes = host_memory(self._device), [], []

    def update(self, optimizer: Optimizer, step: Step) -> None:
        """Step on the parameters of ``optimizer.param_groups``, bucket by bucket; leaves the groups without any."""
        groups, state = optimizer.param_groups, optimizer.state
        bounds = list(accumulate((len(group["params"]) for group in groups), initial=0))
        parts = list(chain.from_iterable(group["params"] for group in groups))
        self._cut(parts)
        buckets = [b for b in self._buckets if any(parts[number].grad is not None for number in b.numbers)]
        try:
            with torch.no_grad():
                for index, bucket in enumerate(buckets):
                    for near in buckets[index : index + 2]:
                        if near.slot is None:
                            self._bring_in(near, buckets.index(near) % 2, parts, state)
                    if self._staging is not None:
                        self._staging.wait(index % 2)
                    for group, first, stop in zip(groups, bounds, bounds[1:], strict=False):
                        group["params"] = [parts[number] for number in bucket.numbers if first <= number < stop]
                    step_without_hooks(optimizer, step)
                    self._take_out(bucket, parts, state)
        finally:
            for group in groups:
                group["params"] = []
            for bucket in buckets:
                if bucket.slot is not None:
                    self._take_out(bucket, parts, state)

    def _cut(self, parts: list[torch.Tensor]) -> None:
        sizes = [part.nbytes for part in parts]
        if sizes == self._sizes:
            return
        self._sizes, self._buckets, numbers, total = sizes, [], list[int](), 0
        for number, size in enumerate(sizes):
            if numbers and total + size > BUCKET_BYTES:
                self._buckets.append(_Bucket(numbers))
                numbers, total = [], 0
            numbers, total = [*numbers, number], total + size
        self._buckets.append(_Bucket(numbers))

    def _bring_in(self, bucket: _Bucket, slot: int, parts: list[torch.Tensor], state: Any) -> None:
        """Begin to bring the state of a bucket to the device. Nothing waits for it yet."""
        if self._staging is None:
            bucket.slot = slot
            for memory in bucket.memory:
                self._memory.will_read(memory)
            return
        bucket.bind(self._staging.buffer(slot, bucket.num_bytes))  # there may be no memory for it
        bucket.slot = slot
        self._staging.fill(slot, bucket.memory)
        for number, values, key, value in _of_elements(bucket, parts, state):
            place = bucket.places.get((number, key))
            values[key] = place.here if place is not None and value is place.host else value.to(self._device)

    def _take_out(self, bucket: _Bucket, parts: list[torch.Tensor], state: Any) -> None:
        """Begin to bring the state of a bucket back, with what a step has added to it."""
        new: list[tuple[int, dict[str, Any], str, torch.Tensor]] = []
        for number, values, key, value in _of_elements(bucket, parts, state):
            place = bucket.places.get((number, key))
            if place is None or place.host.shape != value.shape or place.host.dtype != value.dtype:
                new.append((number, values, key, value))
                continue
            if value is not place.here:  # loaded since the last step
                place.here.copy_(value)
            values[key] = place.host
        memory = self._place(bucket, new)
        slot, bucket.slot = bucket.slot, None
        if self._staging is not None and slot is not None:
            self._staging.empty(slot, bucket.memory[: len(bucket.memory) - memory])
            return
        for each in bucket.memory:
            self._memory.release(each)

    def _place(self, bucket: _Bucket, new: list[tuple[int, dict[str, Any], str, torch.Tensor]]) -> int:
        """Give new tensors of the state places; returns the number of blocks of memory for them, 0 or 1."""
        if not new:
            return 0
        starts = list(accumulate((rounded(value.nbytes, _ALIGNMENT) for *_, value in new), initial=0))
        memory = self._memory.allocate(starts[-1])
        for (number, values, key, value), start in zip(new, starts, strict=False):
            host = _view(memory, start, value)
            host.copy_(value, non_blocking=True)
            values[key] = host
            bucket.places[number, key] = _Place(host, bucket.num_bytes + start)
        bucket.memory.append(memory)
        bucket.num_bytes += starts[-1]
        bucket.buffer = None
        return 1


def state_on_host(optimizer: Optimizer, parameters: Sequence[GlobalTensor], is_of_torch: bool) -> StateOnHost | None:
    """Where the state of an optimizer lies; None if it stays on the device, to which this brings it.

    Args:
        optimizer: a new one, or one whose parameters have changed.
        parameters: its global parameters.
        is_of_torch: whether its step is an elementwise one of torch.

    Raises:
        StrategyError: its step is another one.
    """
    chosen = [parameter for parameter in parameters if parameter._keeps_state_on_host]
    if not chosen:
        bring_back(optimizer)
        return None
    if not is_of_torch:
        raise StrategyError(
            f"offload=optimizer: {type(optimizer).__name__} over {len(chosen)} parameters. The state comes to the "
            "device for some parameters at a time, and each step works on these alone, as the 11 elementwise "
            "optimizers of torch can (SGD, Adam, AdamW, Adagrad, RMSprop and others). Use one of them, or leave "
            "offload=optimizer out of the strategy."
        )
    return StateOnHost(chosen[0]._spec.world.device)


class UpdateClosure:
    """The closure that a step calls first: it gives the loss of the user's closure, and takes the step."""

    def __init__(self, on_host: StateOnHost, optimizer: Optimizer, step: Step, given: Callable[[], Any] | None) -> None:
        self._on_host, self._optimizer, self._step, self.given = on_host, optimizer, step, given

    def __call__(self) -> Any:
        """Take the step."""
        loss = None if self.given is None else self.given()
        self._on_host.update(self._optimizer, self._step)
        return loss


def closure_of_user(argument: Any) -> Any:
    """An argument of a step as the user gave it."""
    return argument.given if isinstance(argument, UpdateClosure) else argument


class WaitingState(defaultdict[torch.Tensor, dict[str, Any]]):
    """An optimizer's state in pinned memory. Readers wait for copies to it; ``dict.get(state, parameter)`` does not."""

    def __init__(self, staging: Staging, state: Any) -> None:
        super().__init__(dict, state.items())
        self.staging = staging

    def __getitem__(self, key: torch.Tensor) -> dict[str, Any]:
        self.staging.synchronize()
        return super().__getitem__(key)

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """``dict.get``."""
        self.staging.synchronize()
        return super().get(key, default)

    def items(self) -> Any:
        """``dict.items``."""
        self.staging.synchronize()
        return super().items()

    def values(self) -> Any:
        """``dict.values``."""
        self.staging.synchronize()
        return super().values()

    def __reduce__(self) -> Any:
        self.staging.synchronize()
        return defaultdict, (dict,), None, None, iter(self.items())


def bring_back(optimizer: Optimizer) -> None:
    """Bring state from host memory, which is free then, to plain memory of the parameters' device."""
    state = optimizer.state
    with torch.no_grad(), local_torch():
        for parameter, values in state.items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if type(value) is torch.Tensor and value.numel() and is_offloaded(value):
                    values[key] = value.to(parameter.device, copy=True)
    if isinstance(state, WaitingState):
        optimizer.state = defaultdict(dict, state)
    swap: Any = optimizer.__dict__.get("_workbench_swap")
    if swap is not None and swap.on_host is not None:
        swap.on_host.free()


def _of_elements(
    bucket: _Bucket, parts: list[torch.Tensor], state: Any
) -> Iterator[tuple[int, dict[str, Any], str, torch.Tensor]]:
    """(number of the parameter, its state, name, tensor) of a bucket's state, without single numbers."""
    for number in bucket.numbers:
        values: dict[str, Any] = dict.get(state, parts[number]) or {}
        for key, value in list(values.items()):
            if isinstance(value, torch.Tensor) and value.dim() and value.numel():
                yield number, values, key, value


def _view(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from ``start`` on as a contiguous tensor of the shape and dtype of ``like``."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
