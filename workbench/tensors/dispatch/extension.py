"""``wb.register_rule``: an equation for a function of the user, so that it splits like torch's own; proved on
request.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.core.rules import Equation, Term
from workbench.errors import LayoutError
from workbench.tensors.dispatch.custom_function import name_of
from workbench.tensors.dispatch.dispatcher import forget_function
from workbench.tensors.dispatch.local_map import aliases, plain_alias
from workbench.tensors.dispatch.placeholder_calls import has_data
from workbench.tensors.dispatch.registry import (
    RULES,
    USER_FUNCTION_NAMES,
    VALUE_INDEPENDENT,
    Call,
    Resolution,
    fold_name,
)
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.late_imports import later
from workbench.tensors.world import current

_FORM = (
    'wb.register_rule("name", "b d, D -> b D"), wb.register_rule(function, "b d, D -> b D"), or '
    '@wb.register_rule("b d, D -> b D")'
)


_Function = TypeVar("_Function")


@overload
def register_rule(
    function: str, *, prove: Sequence[Any] | None = None, meta: Callable[..., Any] | None = None
) -> Callable[[_Function], _Function]:
    """As a decorator."""


@overload
def register_rule(
    function: _Function,
    equation: str,
    *,
    prove: Sequence[Any] | None = None,
    meta: Callable[..., Any] | None = None,
) -> _Function:
    """By the function or its name."""


def register_rule(
    function: Any,
    equation: str | None = None,
    *,
    prove: Sequence[Any] | None = None,
    meta: Callable[..., Any] | None = None,
) -> Any:
    """Give a function a rule, as an equation, by its name or as a decorator.

    ``wb.register_rule("mylib::scale", "b d, d -> b d")``, or ``@wb.register_rule("b d, d -> b d")``.

    The letters of an equation name the dims of the operands and of the result. A small letter is a dim that may be
    split; one that is missing in the result was summed over. A capital is a dim that must stay whole. ``...`` are
    leading dims, ``1`` is a dim of size one, ``+`` marks an addend of a sum. From the equation follow the layouts under
    which the function runs on shards without communication, the layout of its result, and its gradient.

    Args:
        function: the folded name of a torch function, ``"namespace::name"`` of an operator of ``torch.library``, the
            operator itself, a Python function, or the ``apply`` of a ``torch.autograd.Function``. As a decorator: the
            equation alone.
        equation: for one call, with one term per tensor among the arguments.
        prove: arguments of an example call. Every layout that the equation allows is run by brute force on two and
            three ranks. (``wb.debug.prove`` also finds missing layouts.)
        meta: for a Python function that does not run on tensors without data: takes the same arguments, returns empty
            results.

    Returns:
        For a Python function, a function that also takes global tensors; otherwise ``function``.

    Raises:
        LayoutError: the equation does not parse, does not fit a call, or is wrong by proof; then it is not registered.

    >>> @wb.register_rule("b D, D -> b D", prove=[torch.randn(5, 4), torch.randn(4)])
    ... def soft_scale(x, weight):
    ...     return torch.softmax(x, -1) * weight
    >>> x = wb.randn(5, 4, placement=wb.placement(ranks=[0, 1]), sbp="S(0)")
    >>> soft_scale(x, torch.ones(4)).sbp
    (S(0),)
    """
    if equation is None:
        if not isinstance(function, str) or "->" not in function:
            raise LayoutError(f"wb.register_rule({function!r}): there is no equation. Write {_FORM}.")
        return functools.partial(register_rule, equation=function, prove=prove, meta=meta)
    parsed = Equation.parse(equation)
    name, called = _register_name(function, meta)
    before, was_independent = RULES.get(name), name in VALUE_INDEPENDENT
    RULES[name] = functools.partial(_resolve, name, equation, parsed)
    VALUE_INDEPENDENT.add(name)
    forget_function(name, current().plans)
    if prove is not None:
        try:
            _prove(name, equation, called, prove)
        except BaseException:
            RULES.pop(name) if before is None else RULES.update({name: before})
            if not was_independent:
                VALUE_INDEPENDENT.discard(name)
            forget_function(name, current().plans)
            raise
    return function if isinstance(function, str) else called


def _register_name(function: Any, meta: Any) -> tuple[str, Any]:
    """The name under which dispatch will look for a rule, and what the user calls."""
    if isinstance(function, str):
        return function, _operator(function)
    operator = getattr(function, "_opoverload", function)  # torch.library.custom_op keeps its operator here
    if isinstance(operator, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return fold_name(operator).folded, function
    if not callable(function):
        raise LayoutError(f"wb.register_rule({function!r}): a {type(function).__name__} is no function. Write {_FORM}.")
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return name_of(owner), function
    if not inspect.isfunction(function) or function.__module__.startswith("torch"):
        return fold_name(function).folded, function
    return _dispatching(function, meta)


def _operator(name: str) -> Any:
    """The function that a name means: an operator of a library, or None for a folded name."""
    namespace, separator, short = name.partition("::")
    if not separator:
        return None
    library = getattr(torch.ops, namespace)
    if not hasattr(library, short):
        raise LayoutError(
            f"wb.register_rule({name!r}): torch.ops.{namespace} has no operator {short!r}. Define it first, with "
            f"torch.library.custom_op({name!r}, ...)."
        )
    return getattr(library, short)


def _dispatching(function: Callable[..., Any], meta: Callable[..., Any] | None) -> tuple[str, Callable[..., Any]]:
    """A Python function that asks modes and its global operands first, as torch's own do."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def dispatching(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch._C._is_torch_function_mode_enabled():
            return torch.overrides.handle_torch_function(dispatching, tensors, *args, **kwargs)
        is_users_call = torch._C._is_torch_function_enabled()
        if is_users_call and any(isinstance(tensor, GlobalTensor) for tensor in tensors):
            return later.dispatch(dispatching, args, kwargs)
        if meta is not None and not all(map(has_data, tensors)):
            return meta(*args, **kwargs)
        return function(*args, **kwargs) if is_users_call else _on_plain(function, args, kwargs)

    for known in (function, dispatching):
        USER_FUNCTION_NAMES[known] = name
    return name, dispatching


def _on_plain(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call with shards as plain tensors, so that a custom ``autograd.Function`` inside sees nothing else."""
    args, kwargs = tree_map(plain_alias, (args, kwargs))
    return aliases(function(*args, **kwargs))


def _resolve(name: str, equation: str, parsed: Equation, call: Call) -> Resolution:
    """The rule that an equation makes; errors say which argument does not fit."""
    shapes, terms = call.shapes, parsed.inputs
    if len(shapes) > len(terms):
        raise LayoutError(
            f"{name}: called with {len(shapes)} tensors, but its equation {equation!r} has {len(terms)} inputs. Give "
            "it one term per tensor."
        )
    for position, (term, shape) in enumerate(zip(terms, shapes, strict=False)):
        _check_term(name, equation, f"argument {position + 1}", term, shape)
    outputs = [shape for shape, _ in call.outputs]
    if len(parsed.outputs) not in (1, len(outputs)):
        raise LayoutError(
            f"{name}: returns {len(outputs)} tensors, but its equation {equation!r} has {len(parsed.outputs)} results. "
            "Give it one term per result."
        )
    for position, (term, shape) in enumerate(zip(parsed.outputs, outputs, strict=False)):
        _check_term(name, equation, f"result {position + 1}", term, shape)
    return Resolution(equation, _on_plain_shards)


def _on_plain_shards(call: Call, inputs: Any, outputs: Any, letters: Any) -> Callable[..., Any]:
    """What an operator saves for its own backward must be plain, as the gradients are that it meets there."""
    return lambda *args, **kwargs: _on_plain(call.func, args, kwargs)


def _check_term(name: str, equation: str, where: str, term: Term, shape: tuple[int, ...]) -> None:
    num_named = len([dim for dim in term.dims if dim != "."])
    if num_named > len(shape) or ("." not in term.dims and num_named != len(shape)):
        text = "".join("..." if dim == "." else dim for dim in term.dims)
        raise LayoutError(
            f"{name}: {where} has {len(shape)} dims {tuple(shape)}, but {text!r} in its equation {equation!r} names "
            f"{num_named}. A term has one letter per dim; ... stands for any number of leading dims."
        )


def _prove(name: str, equation: str, called: Any, arguments: Sequence[Any]) -> None:
    from workbench.tensors.proof import prove as prove_function  # it imports this module

    if called is None:
        raise LayoutError(
            f"wb.register_rule({name!r}, prove=...): a name alone cannot be called. Give the function itself: "
            f"wb.register_rule(function, {equation!r}, prove=[...])."
        )
    proof = prove_function(called, *arguments, finds_missing=False)
    if proof.wrong:
        listed = "\n".join(f"  {finding}" for finding in proof.wrong[:5])
        raise LayoutError(
            f"wb.register_rule({name!r}, {equation!r}): {len(proof.wrong)} of {proof.num_checked} layouts that the "
            f"equation allows give other numbers than one device:\n{listed}\nAn operand split at a letter must give "
            "that part of the result, or a term of it where the result lacks the letter. Write dims that the function "
            "needs whole as capitals."
        )
