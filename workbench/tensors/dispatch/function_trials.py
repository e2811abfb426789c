"""What runs on random operands tell of a user's ``torch.autograd.Function``. They leave nothing behind."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from workbench.errors import LayoutError
from workbench.tensors import default_generator
from workbench.tensors.dispatch.checks import exchange_name
from workbench.tensors.dispatch.placeholder_calls import autocast_state, saving_as_ever
from workbench.tensors.dispatch.planning import key_of
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.program_state import ProgramState

_OWN_APPLY = Function.__dict__["apply"]


def apply_plain(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """torch's own ``Function.apply``: a class method, since torch 2.14 of C."""
    return _OWN_APPLY.__get__(None, cls)(*args, **kwargs)


_FULL_SIZE = 1 << 16
"""Elements up to which operands of their own shapes are tried, where small ones do not fit the function."""


@dataclass(frozen=True)
class Behavior:
    """What a run on random operands tells of a function.

    Attributes:
        is_elementwise: whether it gives on shards what it gives on the whole.
        writes: pairs of the numbers of a result and of the argument that is this result, written in place.
        is_random: whether it gives other numbers each time.
        is_linear: whether its backward is linear in the gradient, and may be given terms of one.
        changes_state: whether it changes what the program keeps: objects among its arguments, or around it. Then it is
            not known to be ``is_elementwise``: what it keeps may be of the whole.
        is_known: False where no run succeeded.
    """

    is_elementwise: bool = False
    writes: tuple[tuple[int, int], ...] = ()
    is_random: bool = False
    is_linear: bool = False
    changes_state: bool = False
    is_known: bool = True


class Kept:
    """A list or dict without tensors among the arguments, which the function gets itself: it may write there."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(key_of(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and bool(key_of(self.value) == key_of(other.value))


def keep(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with lists and dicts without tensors as ``Kept``: torch's trees would copy them."""
    return tuple(Kept(a) if isinstance(a, (list, dict, deque)) and not _tensors_in(a) else a for a in args)


def unkeep(args: Any) -> tuple[Any, ...]:
    """What the function itself is to get."""
    return tuple(a.value if isinstance(a, Kept) else a for a in args)


def _tensors_in(value: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@contextmanager
def without_traces(cls: type[Function], args: Any) -> Iterator[ProgramState]:
    """What the function's code reaches, and its arguments have, is afterwards as it was."""
    with default_generator.restored():
        with _disable_current_modes():
            state = ProgramState((), torch.device("cpu"), code=[cls, *unkeep(args)])
        try:
            yield state
        finally:
            with _disable_current_modes():
                state.put_back()


def examine(
    cls: type[Function], args: Any, shapes: Sequence[Any], dtypes: Sequence[torch.dtype], device: torch.device
) -> Behavior:
    """Run the function on random operands, forward and backward, and see what it does."""
    from workbench.tensors.proof.elementwise import small_shapes  # it knows all of dispatch

    own, cls = cls, with_checked_backward(cls)
    device = torch.device("cpu") if device.type == "meta" else device
    in_double = [torch.float64 if dtype.is_floating_point else dtype for dtype in dtypes]
    tried = [small_shapes(shapes)]
    if sum(map(_num_elements, shapes)) <= _FULL_SIZE and tried[0] != shapes:
        tried.append(list(shapes))
    found = []
    with _without_user_modes(), without_traces(own, args) as state, OnlyPlain(cls):
        for some_shapes in tried:
            for some_dtypes in dict.fromkeys((tuple(in_double), tuple(dtypes))):
                try:
                    found.append(_observe(cls, args, some_shapes, some_dtypes, device, state))
                except LayoutError:
                    raise
                except Exception:  # noqa: BLE001 - a function may refuse random operands
                    continue
            if found:
                break
    if not found:
        return Behavior(is_known=False)
    return Behavior(
        all(behavior.is_elementwise for behavior in found),
        found[0].writes,
        any(behavior.is_random for behavior in found),
        all(behavior.is_linear for behavior in found),
        any(behavior.changes_state for behavior in found),
    )


class OnlyPlain(TorchFunctionMode):
    """Refuses global tensors and exchanges before ranks communicate: one rank at a time examines a function, and what
    ranks would exchange are shards, or copies of gathered operands.
    """

    def __init__(self, cls: type[Function]) -> None:
        super().__init__()
        self.cls = cls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, GlobalTensor) for kind in types):
            refuse_captured(self.cls)
        if (exchange := exchange_name(func)) is not None:
            _refuse_exchanging(self.cls, exchange)
        return func(*args, **(kwargs or {}))


def with_checked_backward(cls: type[Function]) -> type[Function]:
    """``cls``, whose backward refuses what its forward refuses."""

    def checked(backward: Callable[..., Any]) -> Any:
        @functools.wraps(backward)
        def call(*args: Any) -> Any:
            with torch._C._EnableTorchFunction(), OnlyPlain(cls):
                return backward(*args)

        return staticmethod(call)

    own = [name for name in ("backward", "vjp") if getattr(cls, name) is not getattr(Function, name)]
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**named, **{name: checked(getattr(cls, name)) for name in own}})


def _num_elements(shape: Any) -> int:
    return torch.Size(shape).numel()


@contextmanager
def _without_user_modes() -> Iterator[None]:
    """No modes, hooks or autocast of the program that is running: none of them is to see this."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saving_as_ever())
        stack.enter_context(_disable_current_modes())
        for kind in ("cpu", "cuda") if autocast_state() else ():
            stack.enter_context(
                torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
            )
        yield


def _observe(
    cls: type[Function], args: Any, shapes: Any, dtypes: Any, device: torch.device, state: ProgramState
) -> Behavior:
    from workbench.tensors.proof.elementwise import draw_operands, is_elementwise, is_linear_backward

    leaves, structure = tree_flatten(args)
    writes: tuple[tuple[int, int], ...] = ()
    changes = False

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal writes, changes
        remaining = iter(operands)
        given = unkeep(
            tree_unflatten([next(remaining) if isinstance(a, torch.Tensor) else a for a in leaves], structure)
        )
        versions = [operand._version for operand in operands]
        result = apply_plain(cls, *given)
        writes = writes_of(result, given)
        changes = changes or not state.has_same_objects()
        state.put_back_objects()
        marked = [id(given[argument]) for _, argument in writes]
        for number, (operand, version) in enumerate(zip(operands, versions, strict=True)):
            if operand._version != version and id(operand) not in marked:
                raise LayoutError(
                    f"{cls.__name__}.apply: writes into operand {number + 1} without ctx.mark_dirty. If the operand "
                    "is a global tensor, the write may go to a gathered copy and be lost. Call ctx.mark_dirty(tensor) "
                    "and return it, or write into a clone."
                )
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(leaf, GlobalTensor) for leaf in found):
            refuse_captured(cls)
        return found

    verdicts, linear = [], []
    for scale, operands in draw_operands(shapes, dtypes, device):
        first, second = (run([operand.clone() for operand in operands]) for _ in range(2))
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
            return Behavior(False, writes, is_random=True, changes_state=changes)
        linear.append(_try(is_linear_backward, run, scale, operands))
        if False not in verdicts:
            verdicts.append(_try(is_elementwise, run, scale, operands))
    return Behavior(_agreed(verdicts) and not changes, writes, is_linear=_agreed(linear), changes_state=changes)


def _agreed(verdicts: list[bool | None]) -> bool:
    return False not in verdicts and any(verdicts)


def _try(check: Callable[..., bool | None], *args: Any) -> bool | None:
    try:
        return check(*args)
    except LayoutError:
        raise
    except Exception:  # noqa: BLE001 - a function may accept the whole tensor and refuse a slice
        return False


def writes_of(result: Any, given: Any) -> tuple[tuple[int, int], ...]:
    """Results that are arguments: torch gives these back only if they were marked as dirty."""
    return tuple(
        (number, argument)
        for number, leaf in enumerate(tree_leaves(result))
        for argument, value in enumerate(given)
        if isinstance(leaf, torch.Tensor) and leaf is value
    )


def refuse_captured(cls: type[Function]) -> None:
    """Raise for a function that computes with a global tensor of its own."""
    raise LayoutError(
        f"{cls.__module__}.{cls.__qualname__}.apply: its forward uses a global tensor that is not among its arguments. "
        "It runs on plain tensors (shards, or gathered operands), and backward must know all that it depends on. "
        "Hand the tensor over as an argument, and compute with this argument: a module computes with its own "
        "parameters, also where these are handed over beside it. Where the function calls a module, as the adjoint of "
        "an ODE does, let autograd go through the module (odeint for odeint_adjoint, torch.utils.checkpoint)."
    )


def _refuse_exchanging(cls: type[Function], exchange: str) -> NoReturn:
    name = f"{cls.__module__}.{cls.__qualname__}.apply"
    raise LayoutError(
        f"{name}: it is given a global tensor, and calls {exchange}. It runs on plain tensors (shards, or gathered "
        "operands), and would add or join what is one tensor over its ranks already, with the value of one device. "
        "Leave the function out: its argument is the whole batch's. To exchange the ranks' parts yourself, write "
        f"wb.local_map({cls.__name__}.apply, in_sbp=[...], out_sbp=...)."
    )
