"""``torch.autograd.Function`` of users, applied to global tensors.

It runs on plain tensors: on the shards where it works element by element, which a run on small random operands tells
(``proof.elementwise``), or where ``wb.register_rule`` declares its dims; else on gathered operands, as every function
without a rule, with one warning. What it saves for its backward is then plain, as the gradients there are.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from workbench.errors import LayoutError
from workbench.tensors import default_generator
from workbench.tensors.dispatch.dispatcher import dispatch
from workbench.tensors.dispatch.function_trials import (
    Behavior,
    OnlyPlain,
    apply_plain,
    examine,
    keep,
    refuse_captured,
    unkeep,
    with_checked_backward,
    without_traces,
    writes_of,
)
from workbench.tensors.dispatch.gradient_layout import with_whole_gradients
from workbench.tensors.dispatch.local_map import aliases, plain_alias
from workbench.tensors.dispatch.placeholder_calls import has_data
from workbench.tensors.dispatch.planning import key_of
from workbench.tensors.dispatch.registry import RULES, USER_FUNCTION_NAMES, Call, Resolution
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.random import draw_key
from workbench.tensors.world import World
from workbench.transport.user_code import user_stacklevel


class PlainApply:
    """``cls.apply`` on plain tensors, without writes into its arguments: what dispatch calls."""

    def __init__(self, cls: type[Function], behavior: Behavior) -> None:
        self.cls, self.behavior = cls, behavior
        self._checked = with_checked_backward(cls)
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
        given = tuple(_copy(a) if i in copied else a for i, a in enumerate(unkeep(tree_map(plain_alias, args))))
        is_real = all(has_data(x) for x in tree_leaves(given) if isinstance(x, torch.Tensor))
        draws = _generator() if is_real and self.behavior.is_random else nullcontext()
        trial = nullcontext() if is_real else without_traces(self.cls, given)
        with trial, torch._C._EnableTorchFunction(), OnlyPlain(self.cls), draws:
            result = apply_plain(self._checked, *given)
        if any(isinstance(leaf, GlobalTensor) for leaf in tree_leaves(result)):
            refuse_captured(self.cls)
        if not self.behavior.is_known and (writes := writes_of(result, given)):
            raise LayoutError(
                f"{self.cls.__name__}.apply: writes into argument {writes[0][1] + 1} (ctx.mark_dirty). "
                "On operands that are gathered, the write must be known before, and the function raises on random "
                "operands that would tell. Return a new tensor instead, or use wb.local_map."
            )
        return aliases(result)

    def try_out(self, *args: Any) -> Any:
        """The results of a call that leaves nothing behind, for their shapes."""
        with without_traces(self.cls, args):
            return self(*args)


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
    args = keep(args)
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    world = next(tensor._spec.world for tensor in tensors if isinstance(tensor, GlobalTensor))
    function = _function_of(cls, args, tensors, world)
    if function.behavior.is_random:
        _drawn.key = draw_key(world)
    if function.behavior.is_linear or not torch.is_grad_enabled():
        result = dispatch(function, args, {})
    else:
        result = with_whole_gradients(lambda *given: dispatch(function, given, {}), args)
    if function.behavior.changes_state:
        _warn_of_state(cls, result, world)
    if not function.behavior.writes:
        return result
    leaves, structure = tree_flatten(result)
    for number, argument in function.behavior.writes:
        args[argument].copy_(leaves[number])
        leaves[number] = args[argument]
    return tree_unflatten(leaves, structure)


_warned: set[type[Function]] = set()


def _warn_of_state(cls: type[Function], result: Any, world: World) -> None:
    placements = [leaf._spec.layout.placement for leaf in tree_leaves(result) if isinstance(leaf, GlobalTensor)]
    if cls in _warned or not placements or len(inside := sorted(placements[0])) == world.world_size:
        return
    _warned.add(cls)
    outside = sorted(set(range(world.world_size)) - set(inside))
    warnings.warn(
        f"{cls.__name__}.apply: it changes what the program keeps, such as an attribute of an argument. Ranks "
        f"{outside} hold no part of its operands and do not run it: what they keep stays as it was. Read it on "
        f"ranks {inside}.",
        stacklevel=user_stacklevel(),
    )


def _function_of(cls: type[Function], args: Any, tensors: list[torch.Tensor], world: World) -> PlainApply:
    """The function to dispatch; one object per behavior, so that calls that behave alike share plans."""
    with local_torch():
        dtypes = tuple([tensor.dtype for tensor in tensors])
    shapes = [tuple(t._spec.shape) if isinstance(t, GlobalTensor) else tuple(t.shape) for t in tensors]
    switches = tuple(map(_switches_of, (cls, *args)))
    key: Any = ("custom function", cls, switches, *map(_static_key, args), dtypes, *shapes)
    try:
        found: PlainApply | None = world.plans.get(key)
    except TypeError:  # an argument that cannot be hashed
        key = found = None
    if found is None:
        given = cls, args, shapes, dtypes, world.device
        behavior = examine(*given) if key is None else behavior_of(*given)
        alike = "custom function", cls, behavior, switches
        found = world.plans.get(alike) or PlainApply(cls, behavior)
        world.plans.update({alike: found} if key is None else {alike: found, key: found})
    return found


def behavior_of(cls: type[Function], args: Any, shapes: Any, dtypes: Any, device: torch.device) -> Behavior:
    """``examine``, once in this process for arguments of these kinds: it depends on no world."""
    from workbench.tensors.proof.elementwise import small_shapes  # it knows all of dispatch

    static = (*map(_switches_of, (cls, *args)), *map(_static_key, args))
    small, full = ((*static, dtypes, str(device), *some) for some in (small_shapes(shapes), shapes))
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


def _switches_of(arg: Any) -> tuple[Any, ...]:
    """What an object or class says of how to compute, such as ``training``: the function may be another one then."""
    held = {} if isinstance(arg, torch.Tensor) else getattr(arg, "__dict__", {})
    return tuple([(name, str(v)) for name, v in held.items() if v is None or isinstance(v, (bool, str, Enum))])


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _signature_of(cls: type[Function]) -> inspect.Signature:
    """Of ``apply``: that of ``forward``, without ctx where there is a ``setup_context``."""
    parameters = list(inspect.signature(cls.forward).parameters.values())
    has_setup = cls.setup_context is not Function.setup_context
    return inspect.Signature(parameters if has_setup else parameters[1:])
