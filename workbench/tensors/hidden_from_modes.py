"""Hides exchanges between ranks, and functions that run on metadata, from users' dispatch modes.

A mode may return the result of an earlier call, as selective checkpointing does: it finds the call by its operator and
by the number of calls before. Only the calls of the program itself are the same in each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_num_modes = torch._C._len_torch_dispatch_stack
_nothing = nullcontext()


def hidden_from_modes(ours: bool = False) -> AbstractContextManager[None]:
    """A context in which only the modes of this package and torch's own (fake tensors, tracing) see operators; with
    ``ours``, only torch's own.
    """
    return _without_modes(ours) if _num_modes() else _nothing


@contextmanager
def _without_modes(ours: bool) -> Iterator[None]:
    modes = _get_current_dispatch_mode_stack()
    kept = [mode for mode in modes if not _is_hidden(mode, ours)]
    if len(kept) == len(modes):
        yield
        return
    _replace(len(modes), kept)
    try:
        yield
    finally:
        _replace(len(kept), modes)


def _replace(num_modes: int, others: list[Any]) -> None:
    for _ in range(num_modes):
        _pop_mode()
    for mode in others:
        _push_mode(mode)


def _is_hidden(mode: Any, ours: bool) -> bool:
    return getattr(mode, "_mode_key", None) is None and (ours or not type(mode).__module__.startswith("workbench."))
