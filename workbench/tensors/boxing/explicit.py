"""Explicit mode: an implicit boxing that communicates is an error. The error names the line to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch.utils._pytree import tree_leaves

from workbench.core.boxing import describe_sbp_change
from workbench.core.boxing_path import find_boxing_path
from workbench.core.layout import Layout
from workbench.errors import ExplicitBoxingError
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.world import current
from workbench.transport.user_code import name_in_user_code, user_frame
from workbench.units import format_bytes


class Need(NamedTuple):
    """A tensor that has to change its layout, and its argument, e.g. ``"argument 2 (weight)"``."""

    argument: str
    tensor: GlobalTensor
    layout: Layout


@contextmanager
def explicit_boxing() -> Iterator[None]:
    """In this context, an implicit boxing that communicates is an error.

    Implicit boxings that move no data between ranks (B to S, B to P) stay allowed, and so do the backwards of explicit
    ones.

    Raises:
        ExplicitBoxingError: the code needs such a boxing. The message names the function, the argument, both layouts
            and the ``to_global`` to add.

    >>> p = wb.placement(ranks=[0, 1])
    >>> x, w = wb.ones(4, 6, placement=p, sbp="S(0)"), wb.ones(6, 2, placement=p, sbp="B")
    >>> with wb.debug.explicit_boxing():
    ...     y = x @ w                   # S(0) with B moves nothing
    >>> y.sbp
    (S(0),)
    """
    with current().context.temporarily(implicit_boxing_allowed=False):
        yield


def check_explicit(function: str, needs: Sequence[Need]) -> None:
    """Raise ``ExplicitBoxingError`` if any of the boxings communicates. The message names all of them."""
    given = _operands_of_users_call()
    texts = [text for need in needs if (text := _describe(need, given))]
    if texts:
        raise ExplicitBoxingError(
            f"{function}: needs a boxing {'; and '.join(texts)}. Under wb.debug.explicit_boxing() only boxings that "
            "move no data happen by themselves."
        )


def _describe(need: Need, given: list[GlobalTensor]) -> str | None:
    source = need.tensor._spec
    with local_torch():
        itemsize = need.tensor.element_size()
    plan = find_boxing_path(source.layout, need.layout, source.shape, itemsize, source.world.transport.cost)
    if plan.is_local or not plan.wire_bytes:  # for example a sum over one rank
        return None
    change = describe_sbp_change(source.layout, need.layout)
    moved = f"{tuple(source.shape)} on {source.layout.placement}"
    price = f"({plan.kind}, {format_bytes(plan.wire_bytes)})"
    cause = next((tensor for tensor in given if not tensor._spec.layout.is_broadcast), None)
    if cause is None or any(tensor is need.tensor for tensor in given):
        line = to_global_line(need.tensor, need.layout)
        return f"{change} of {need.argument}, {moved}, that the code does not write {price}: write {line}"
    line = to_global_line(cause, cause._spec.layout.broadcast())
    return (
        f"{change} of an intermediate result, {moved} {price}, because an operand has the layout "
        f"{cause._spec.layout}: with B, or a split along another dim, no data moves inside; write {line}"
    )


def _operands_of_users_call() -> list[GlobalTensor]:
    """The global tensors among the arguments of the torch function that the user's code called."""
    _, ours = user_frame()
    calls = [frame for frame in ours if frame.f_code.co_name == "__torch_function__"]
    if not calls:
        return []
    outermost = calls[-1].f_locals
    leaves = tree_leaves((outermost.get("args"), outermost.get("kwargs")))
    return [leaf for leaf in leaves if isinstance(leaf, GlobalTensor)]


def to_global_line(tensor: GlobalTensor, layout: Layout) -> str:
    """The call that boxes ``tensor`` to ``layout``, under its name in the user's code."""
    name = name_in_user_code(tensor, "x")
    placement = "" if tensor._spec.layout.placement == layout.placement else f"placement=wb.{layout.placement!r}, "
    return f'{name}.to_global({placement}sbp="{", ".join(map(repr, layout.sbp))}")'
