"""Explicit mode: a boxing that communicates and that nobody wrote is an error that says what to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from workbench.core.boxing import describe_sbp_change, plan_boxing
from workbench.core.layout import Layout
from workbench.errors import ExplicitBoxingError
from workbench.runtime.caller import name_in_user_code
from workbench.runtime.tensor import GlobalTensor, local_torch
from workbench.runtime.world import current
from workbench.units import format_bytes


class Need(NamedTuple):
    """A tensor that has to change its layout, and the argument it was given as, e.g. ``"argument 2 (weight)"``."""

    argument: str
    tensor: GlobalTensor
    layout: Layout


@contextmanager
def explicit_boxing() -> Iterator[None]:
    """In this context, a boxing that communicates and that the code did not write raises.

    Boxings that move nothing between ranks (B to S, B to P) stay implicit, and so do the backwards of written ones.

    Raises:
        ExplicitBoxingError: names the function, the argument, both layouts and the ``to_global`` to write.

    >>> p = wb.placement("cpu", ranks=[0, 1])
    >>> x, w = wb.ones(4, 6, placement=p, sbp="S(0)"), wb.ones(6, 2, placement=p, sbp="B")
    >>> with wb.explicit_boxing():
    ...     y = x @ w                   # S(0) with B needs nothing
    >>> y.sbp
    (S(0),)
    """
    world = current()
    before, world.implicit_boxing_allowed = world.implicit_boxing_allowed, False
    try:
        yield
    finally:
        world.implicit_boxing_allowed = before


def check_explicit(function: str, needs: Sequence[Need]) -> None:
    """Raise ``ExplicitBoxingError`` if any of the boxings communicates; all of them are named at once."""
    texts = [text for need in needs if (text := _describe(need))]
    if texts:
        raise ExplicitBoxingError(
            f"{function}: needs a boxing {'; and '.join(texts)}. Under wb.explicit_boxing() only what moves nothing "
            "happens by itself."
        )


def _describe(need: Need) -> str | None:
    source = need.tensor._spec
    with local_torch():
        itemsize = need.tensor.element_size()
    plan = plan_boxing(source.layout, need.layout, source.shape, itemsize)
    if plan.is_local:
        return None
    return (
        f"{describe_sbp_change(source.layout, need.layout)} of {need.argument}, {tuple(source.shape)} on "
        f"{source.layout.placement}, that the code does not write ({plan.kind}, {format_bytes(plan.wire_bytes)}): "
        f"write {to_global_line(need.tensor, need.layout)}"
    )


def to_global_line(tensor: GlobalTensor, layout: Layout) -> str:
    """The call that boxes ``tensor`` to ``layout``, with the name the user's code has for it."""
    name = name_in_user_code(tensor, "x")
    placement = "" if tensor._spec.layout.placement == layout.placement else f"placement=wb.{layout.placement!r}, "
    return f'{name}.to_global({placement}sbp="{", ".join(map(repr, layout.sbp))}")'
