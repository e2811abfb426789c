"""Shows a cell's last expression, a global tensor with its logical value, and sends it if the notebook wants it."""

from __future__ import annotations

import math
import sys
from typing import Any

from workbench.session import protocol
from workbench.session.on_engine.shell import current_tag, send
from workbench.units import format_bytes


def install(shell: Any) -> None:
    """Make the shell's display hook show logical values and send values that the notebook wants."""
    hook = shell.displayhook
    plain_format = hook.compute_format_data

    def compute_format_data(result: object) -> tuple[dict[str, Any], dict[str, Any]]:
        tag = current_tag()
        if tag is None:
            return plain_format(result)
        value = portable(result, collective=tag.all_ranks)
        if tag.wants_values:
            send(protocol.Value(protocol.dump_or_omit(value)))
        if is_global(result):
            return picture(result, value), {}
        return plain_format(result)

    hook.compute_format_data = compute_format_data
    # Out[n] and the text of old output cannot be reached from the notebook, and would only fill memory.
    hook.update_user_ns = lambda result: shell.user_ns.update(_=result)
    hook.log_output = lambda format_dict: None
    shell.events.register("post_run_cell", lambda result: shell.history_manager.outputs.clear())


def is_global(value: object) -> bool:
    """Whether this is a global tensor. Loads no module for the test."""
    module = sys.modules.get("workbench.tensors.global_tensor")
    return module is not None and isinstance(value, module.GlobalTensor)


def portable(value: Any, collective: bool, made: dict[int, Any] | None = None) -> Any:
    """A value in the form that the notebook gets: global tensors as logical ones, on the CPU, without gradients.

    Args:
        collective: all ranks run this. Otherwise a global tensor becomes its description, and no data moves.
        made: by id, the lists and dicts that exist in this form, or begin to: they may contain themselves.
    """
    made = {} if made is None else made
    if id(value) in made:
        return made[id(value)]
    torch = sys.modules.get("torch")
    if is_global(value):
        return _logical(value) if collective else protocol.OmittedValue(repr(value))
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) is tuple:
        return tuple(portable(item, collective, made) for item in value)
    if type(value) is list:
        items = made[id(value)] = list[Any]()
        items.extend(portable(item, collective, made) for item in value)
        return items
    if type(value) is dict:
        entries = made[id(value)] = dict[Any, Any]()
        entries.update((key, portable(item, collective, made)) for key, item in value.items())
        return entries
    return value


def _logical(tensor: Any) -> Any:
    """The logical tensor, collected from all ranks. All ranks decide the same way whether it is too large."""
    size_bytes = math.prod(tensor.shape) * tensor.element_size()
    if size_bytes > protocol.MAX_VALUE_BYTES:
        return protocol.OmittedValue(
            f"{layout_line(tensor)}: {format_bytes(size_bytes)}, more than the "
            f"{format_bytes(protocol.MAX_VALUE_BYTES)} that is collected for display; index it, or use .full_tensor()"
        )
    full = tensor.full_tensor()
    return full.detach().cpu() if hasattr(full, "detach") else full


def picture(tensor: Any, value: Any) -> dict[str, str]:
    """A global tensor as a cell shows it: text, and HTML with each rank's shard. ``value``: see `portable`."""
    from workbench.core.layout import Layout
    from workbench.session.on_engine.tensor_html import tensor_html

    absent = value.text if isinstance(value, protocol.OmittedValue) else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = Layout.of(tensor.placement, tensor.sbp)
    html = tensor_html(dtype, tensor.element_size(), tuple(tensor.shape), layout, None if absent else value, absent)
    return {"text/plain": f"{layout_line(tensor)}\n{value!r}", "text/html": html}


def layout_line(tensor: Any) -> str:
    """``float32[8, 16]  S(0), B  on  cpu [[0, 1], [2, 3]]``. Moves no data."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    sbp = tensor.sbp if isinstance(tensor.sbp, (tuple, list)) else (tensor.sbp,)
    return f"{dtype}{list(tensor.shape)}  {', '.join(map(str, sbp))}  on  {tensor.placement}"
