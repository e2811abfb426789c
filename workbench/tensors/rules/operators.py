"""Operators of ``torch.library`` without a rule: they run on gathered plain tensors, as nobody knows their backward."""

from __future__ import annotations

from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any

import torch
from torch.utils._pytree import tree_map

from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.gradient_layout import with_whole_gradients
from workbench.tensors.dispatch.local_map import aliases
from workbench.tensors.dispatch.registry import RULES, USER_FUNCTION_NAMES, fold_name, handler
from workbench.tensors.global_tensor import GlobalTensor


class _OnPlainTensors:
    """An operator that gets plain tensors, for what it saves, and returns what it has written beside its results."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.__name__ = operator, fold_name(operator).folded
        arguments = operator._schema.arguments
        self.names = [argument.name for argument in arguments]
        self.num_positional = sum(not argument.kwarg_only for argument in arguments)
        self.written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.returned = [_alias(returned, arguments) for returned in operator._schema.returns]
        USER_FUNCTION_NAMES[self] = self.__name__
        self._signature = Signature([_parameter(a) for a in arguments], __validate_parameters__=False)

    def bind(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """A value for each argument of the schema.

        Raises:
            TypeError: an argument is missing, or is not in the schema.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.operator}: {error}. Its schema is {self.operator._schema}") from None
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.names)

    def with_operands(self, result: Any, given: tuple[Any, ...]) -> Any:
        """The results; those that are arguments by the schema, as in ``f_(Tensor(a!) x) -> Tensor(a!)``, are these."""
        if not any(position is not None for position in self.returned):
            return result
        results = result if isinstance(result, tuple) else (result,)
        found = [r if i is None else given[i] for r, i in zip(results, self.returned, strict=True)]
        return tuple(found) if isinstance(result, tuple) else found[0]

    def __call__(self, *args: Any) -> Any:
        given = [tree_map(_plain_copy if i in self.written else _plain, arg) for i, arg in enumerate(args)]
        by_name = dict(zip(self.names[self.num_positional :], given[self.num_positional :], strict=True))
        result = self.operator(*given[: self.num_positional], **by_name)
        return aliases(result), [given[i] for i in self.written]


_on_plain_tensors = lru_cache(maxsize=None)(_OnPlainTensors)


@handler("::")
def call_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator outside of ``aten``, and write into its operands what it writes by its schema, whatever its name
    says.
    """
    if isinstance(func, torch._ops.OpOverloadPacket):
        overloads = func.overloads()
        if len(overloads) != 1:
            return NotImplemented
        func = getattr(func, overloads[0])
    if fold_name(func).folded in RULES:
        return NotImplemented
    operator = _on_plain_tensors(func)
    given = operator.bind(args, kwargs)
    if torch.is_grad_enabled():
        result, written = with_whole_gradients(lambda *some: call_by_plan(operator, some, {}), given)
    else:
        result, written = call_by_plan(operator, given, {})
    with torch.no_grad():
        for position, value in zip(operator.written, written, strict=True):
            tree_map(_write, given[position], value)
    return operator.with_operands(result, given)


def _parameter(argument: Any) -> Parameter:
    kind = Parameter.KEYWORD_ONLY if argument.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD
    return Parameter(
        argument.name, kind, default=argument.default_value if argument.has_default_value() else Parameter.empty
    )


def _alias(returned: Any, arguments: Any) -> int | None:
    """The number of the argument that a result is, by its name in the schema."""
    if returned.alias_info is None:
        return None
    places = [
        i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.before_set & returned.alias_info.before_set
    ]
    return places[0] if places else None


def _write(target: Any, value: Any) -> Any:
    return target.copy_(value) if isinstance(target, torch.Tensor) else target


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(torch.Tensor) if isinstance(leaf, GlobalTensor) else leaf


def _plain_copy(leaf: Any) -> Any:
    return _plain(leaf).clone() if isinstance(leaf, torch.Tensor) else leaf
