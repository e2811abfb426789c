"""``torch.autograd.Function`` of users, applied to global tensors.

It runs on plain tensors: on the shards where it works element by element, which a run on small random operands tells
(``proof.elementwise``), or where ``wb.register_rule`` declares its dims; else on gathered operands, as every function
without a rule, with one warning. What it saves for its backward is then plain, as the gradients there are.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from workbench.errors import LayoutError
from workbench.tensors import default_generator
from workbench.tensors.dispatch.checks import exchange_name
from workbench.tensors.dispatch.dispatcher import dispatch
from workbench.tensors.dispatch.gradient_layout import with_whole_gradients
from workbench.tensors.dispatch.placeholder_calls import autocast_state, has_data, saving_as_ever
from workbench.tensors.dispatch.planning import key_of
from workbench.tensors.dispatch.registry import RULES, USER_FUNCTION_NAMES, Call, Resolution
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.random import draw_key
from workbench.tensors.world import World

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
        is_known: False where no run succeeded.
    """

    is_elementwise: bool = False
    writes: tuple[tuple[int, int], ...] = ()
    is_random: bool = False
    is_linear: bool = False
    is_known: bool = True


class PlainApply:
    """``cls.apply`` on plain tensors, without writes into its arguments: what dispatch calls."""

    def __init__(self, cls: type[Function], behavior: Behavior) -> None:
        self.cls, self.behavior = cls, behavior
        self._checked = _with_checked_backward(cls)
        self.__name__ = name_of(cls)
        self.__signature__ = _signature_of(cls)
        USER_FUNCTION_NAMES[self] = self.__name__
        RULES.setdefault(self.__name__, _resolve)

    @property
    def how_to_declare(self) -> str:
        """What a user may write so that the function runs on shards."""
        name = f"{self.cls.__name__}.apply"
        return (
            f'the dims of its operands and results, e.g. wb.register_rule({name}, "b D -> b D") for a function that '
            f"works on each row by itself, or layouts: wb.local_map({name}, in_sbp=[...], out_sbp=...)"
        )

    def __call__(self, *args: Any) -> Any:
        copied = {argument for _, argument in self.behavior.writes}
        given = tuple(_copy(a) if i in copied else a for i, a in enumerate(tree_map(_plain, args)))
        draws = self.behavior.is_random and all(has_data(x) for x in tree_leaves(given) if isinstance(x, torch.Tensor))
        with torch._C._EnableTorchFunction(), _OnlyPlain(self.cls), _generator() if draws else nullcontext():
            result = apply_plain(self._checked, *given)
        if any(isinstance(leaf, GlobalTensor) for leaf in tree_leaves(result)):
            _refuse_captured(self.cls)
        if not self.behavior.is_known and _writes(result, given):
            raise LayoutError(
                f"{self.cls.__name__}.apply: writes into argument {_writes(result, given)[0][1] + 1} (ctx.mark_dirty). "
                "On operands that are gathered, the write must be known before, and the function raises on random "
                "operands that would tell. Return a new tensor instead, or use wb.local_map."
            )
        return result


_drawn = threading.local()
"""``key``: the seed of the random function that is running, equal on all ranks."""


@contextmanager
def _generator() -> Iterator[None]:
    """torch's random numbers are those of the key."""
    with default_generator.restored(), default_generator.seeded(_drawn.key):
        yield


def name_of(cls: type[Function]) -> str:
    """The folded name of a function: ``"package.module.Gelu.apply"``."""
    return f"{cls.__module__}.{cls.__qualname__}.apply"


def _resolve(call: Call) -> Resolution | None:
    if not (isinstance(call.func, PlainApply) and call.func.behavior.is_elementwise):
        return None
    return Resolution(f"{', '.join(['...'] * len(call.operands))} -> ...")


def apply_custom(cls: type[Function], args: tuple[Any, ...]) -> Any:
    """``cls.apply(*args)``, with global tensors among the arguments."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    world = next(tensor._spec.world for tensor in tensors if isinstance(tensor, GlobalTensor))
    function = _function_of(cls, args, tensors, world)
    if function.behavior.is_random:
        _drawn.key = draw_key(world)
    if function.behavior.is_linear or not torch.is_grad_enabled():
        result = dispatch(function, args, {})
    else:
        result = with_whole_gradients(lambda *given: dispatch(function, given, {}), args)
    if not function.behavior.writes:
        return result
    leaves, structure = tree_flatten(result)
    for number, argument in function.behavior.writes:
        args[argument].copy_(leaves[number])
        leaves[number] = args[argument]
    return tree_unflatten(leaves, structure)


def _function_of(cls: type[Function], args: Any, tensors: list[torch.Tensor], world: World) -> PlainApply:
    """The function to dispatch; one object per behavior, so that calls that behave alike share plans."""
    with local_torch():
        dtypes = tuple([tensor.dtype for tensor in tensors])
    shapes = [tuple(t._spec.shape) if isinstance(t, GlobalTensor) else tuple(t.shape) for t in tensors]
    key = ("custom function", cls, *map(_static_key, args), dtypes, *shapes)
    try:
        found: PlainApply | None = world.plans.get(key)
    except TypeError:  # an argument that cannot be hashed
        return PlainApply(cls, examine(cls, args, shapes, dtypes, world.device))
    if found is None:
        behavior = behavior_of(cls, args, shapes, dtypes, world.device)
        found = world.plans.setdefault(("custom function", cls, behavior), None) or PlainApply(cls, behavior)
        world.plans[key] = world.plans["custom function", cls, behavior] = found
    return found


def behavior_of(cls: type[Function], args: Any, shapes: Any, dtypes: Any, device: torch.device) -> Behavior:
    """``examine``, once in this process for arguments of these kinds: it depends on no world."""
    from workbench.tensors.proof.elementwise import small_shapes  # it knows all of dispatch

    small, full = ((*map(_static_key, args), dtypes, str(device), *some) for some in (small_shapes(shapes), shapes))
    with default_generator.restored():  # simulated ranks share this generator, and examine one after the other
        known = _known.setdefault(cls, {})
        for key in (full, small):
            if key in known and (known[key].is_known or key == full):
                return known[key]
        behavior = examine(cls, args, shapes, dtypes, device)
        known[full] = behavior
        return known.setdefault(small, behavior) if behavior.is_known else behavior


_known: weakref.WeakKeyDictionary[type[Function], dict[Any, Behavior]] = weakref.WeakKeyDictionary()


def bound_arguments(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments in the order of ``forward``, as ``Function.apply`` itself takes them by name."""
    bound = _signature_of(cls).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _static_key(arg: Any) -> Any:
    return torch.Tensor if isinstance(arg, torch.Tensor) else key_of(arg)


def examine(
    cls: type[Function], args: Any, shapes: Sequence[Any], dtypes: Sequence[torch.dtype], device: torch.device
) -> Behavior:
    """Run the function on random operands, forward and backward, and see what it does."""
    from workbench.tensors.proof.elementwise import small_shapes  # it knows all of dispatch

    cls = _with_checked_backward(cls)
    device = torch.device("cpu") if device.type == "meta" else device
    in_double = [torch.float64 if dtype.is_floating_point else dtype for dtype in dtypes]
    tried = [small_shapes(shapes)]
    if sum(map(_num_elements, shapes)) <= _FULL_SIZE and tried[0] != shapes:
        tried.append(list(shapes))
    found = []
    with _without_user_modes(), _OnlyPlain(cls), default_generator.restored():
        for some_shapes in tried:
            for some_dtypes in dict.fromkeys((tuple(in_double), tuple(dtypes))):
                try:
                    found.append(_observe(cls, args, some_shapes, some_dtypes, device))
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
    )


class _OnlyPlain(TorchFunctionMode):
    """Refuses global tensors and exchanges before ranks communicate: one rank at a time examines a function, and what
    ranks would exchange are shards, or copies of gathered operands.
    """

    def __init__(self, cls: type[Function]) -> None:
        super().__init__()
        self.cls = cls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, GlobalTensor) for kind in types):
            _refuse_captured(self.cls)
        if (exchange := exchange_name(func)) is not None:
            _refuse_exchanging(self.cls, exchange)
        return func(*args, **(kwargs or {}))


def _with_checked_backward(cls: type[Function]) -> type[Function]:
    """``cls``, whose backward refuses what its forward refuses."""

    def checked(backward: Callable[..., Any]) -> Any:
        @functools.wraps(backward)
        def call(*args: Any) -> Any:
            with torch._C._EnableTorchFunction(), _OnlyPlain(cls):
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


def _observe(cls: type[Function], args: Any, shapes: Any, dtypes: Any, device: torch.device) -> Behavior:
    from workbench.tensors.proof.elementwise import draw_operands, is_elementwise, is_linear_backward

    leaves, structure = tree_flatten(args)
    writes: tuple[tuple[int, int], ...] = ()

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal writes
        remaining = iter(operands)
        given = tree_unflatten([next(remaining) if isinstance(a, torch.Tensor) else a for a in leaves], structure)
        versions = [operand._version for operand in operands]
        result = apply_plain(cls, *given)
        writes = _writes(result, given)
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
            _refuse_captured(cls)
        return found

    verdicts, linear = [], []
    for scale, operands in draw_operands(shapes, dtypes, device):
        first, second = (run([operand.clone() for operand in operands]) for _ in range(2))
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
            return Behavior(False, writes, is_random=True)
        linear.append(_try(is_linear_backward, run, scale, operands))
        if False not in verdicts:
            verdicts.append(_try(is_elementwise, run, scale, operands))
    return Behavior(_agreed(verdicts), writes, is_linear=_agreed(linear))


def _agreed(verdicts: list[bool | None]) -> bool:
    return False not in verdicts and any(verdicts)


def _try(check: Callable[..., bool | None], *args: Any) -> bool | None:
    try:
        return check(*args)
    except LayoutError:
        raise
    except Exception:  # noqa: BLE001 - a function may accept the whole tensor and refuse a slice
        return False


def _writes(result: Any, given: Any) -> tuple[tuple[int, int], ...]:
    """Results that are arguments: torch gives these back only if they were marked as dirty."""
    return tuple(
        (number, argument)
        for number, leaf in enumerate(tree_leaves(result))
        for argument, value in enumerate(given)
        if isinstance(leaf, torch.Tensor) and leaf is value
    )


def _refuse_captured(cls: type[Function]) -> None:
    raise LayoutError(
        f"{cls.__module__}.{cls.__qualname__}.apply: its forward uses a global tensor that is not among its arguments. "
        "It runs on plain tensors (shards, or gathered operands), and backward must know all that it depends on. "
        "Hand the tensor over as an argument."
    )


def _refuse_exchanging(cls: type[Function], exchange: str) -> NoReturn:
    name = f"{cls.__module__}.{cls.__qualname__}.apply"
    raise LayoutError(
        f"{name}: it is given a global tensor, and calls {exchange}. It runs on plain tensors (shards, or gathered "
        "operands), and would add or join what is one tensor over its ranks already, with the value of one device. "
        "Leave the function out: its argument is the whole batch's. To exchange the ranks' parts yourself, write "
        f"wb.local_map({cls.__name__}.apply, in_sbp=[...], out_sbp=...)."
    )


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(torch.Tensor) if isinstance(leaf, GlobalTensor) else leaf


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _signature_of(cls: type[Function]) -> inspect.Signature:
    """Of ``apply``: that of ``forward``, without ctx where there is a ``setup_context``."""
    parameters = list(inspect.signature(cls.forward).parameters.values())
    has_setup = cls.setup_context is not Function.setup_context
    return inspect.Signature(parameters if has_setup else parameters[1:])
