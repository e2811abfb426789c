"""Cloudpickle that keeps file names and sends a tensor's own elements.

Tracebacks of a function that was sent show the lines of its file: from 3.1.3 on, cloudpickle writes ``<dynamic-code>``
in the place of the file of every function that travels by value. And torch pickles the whole storage of a tensor, also
for a view of its first row; views of one storage share no memory after that either way.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import IO, Any

import cloudpickle

from workbench.errors import SessionError

_TABLE = cloudpickle.CloudPickler.dispatch_table
_reduce_plainly: Callable[[CodeType], tuple[Any, ...]] = _TABLE[CodeType]


def _reduce(code: CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce_plainly(code)
    return _make_in_file, (code.co_filename, make, arguments)


def _make_in_file(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _without_rest(tensor: Any) -> Any:
    """A tensor of the same elements without the rest of its storage; the tensor itself if its storage holds no more.

    An expanded dim stays expanded: it costs one element.
    """
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return tensor
    held = tensor.detach()[tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())]
    if held.numel() * held.element_size() >= tensor.untyped_storage().nbytes():
        return tensor
    copy = held.clone().expand(tensor.shape).requires_grad_(tensor.requires_grad)
    vars(copy).update(vars(tensor))
    return copy


class Pickler(cloudpickle.CloudPickler):
    """``cloudpickle.CloudPickler``, but code keeps the name of its file, and tensors are without unused storage."""

    dispatch_table = _TABLE.new_child({CodeType: _reduce})

    def reducer_override(self, obj: Any) -> Any:
        """The reduction of an object that is not pickled as usual."""
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor:
            return _without_rest(obj).__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)
        return super().reducer_override(obj)


def dump(value: object, file: IO[bytes]) -> None:
    """Write the pickle of a value to a file or buffer."""
    Pickler(file).dump(value)


@contextmanager
def naming(variables: Mapping[str, object], what: str) -> Iterator[None]:
    """Let an error of pickling these variables say which of them it is about.

    Raises:
        SessionError: one cannot be pickled.
    """
    try:
        yield
    except Exception as error:
        for name, value in variables.items():
            try:
                dump(value, io.BytesIO())
            except Exception as own:  # noqa: BLE001 - pickling runs anybody's code
                raise SessionError(
                    f"{what} {name}: the variable {name!r}, a {type(value).__name__}, cannot be pickled ({own}). Only "
                    f"what can be pickled goes from process to process. Make it in a %%global cell, or send what it is "
                    f"made of, e.g. list({name}) of a generator."
                ) from error
        raise
