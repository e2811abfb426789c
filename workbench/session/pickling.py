"""Cloudpickle that keeps file names: tracebacks of a function that was sent show the lines of its file.

From 3.1.3 on, cloudpickle writes ``<dynamic-code>`` in the place of the file of every function that travels by value.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import IO, Any

import cloudpickle

_TABLE = cloudpickle.CloudPickler.dispatch_table
_reduce_plainly: Callable[[CodeType], tuple[Any, ...]] = _TABLE[CodeType]


def _reduce(code: CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce_plainly(code)
    return _make_in_file, (code.co_filename, make, arguments)


def _make_in_file(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class Pickler(cloudpickle.CloudPickler):
    """``cloudpickle.CloudPickler``, but code keeps the name of its file."""

    dispatch_table = _TABLE.new_child({CodeType: _reduce})


def dump(value: object, file: IO[bytes]) -> None:
    """Write the pickle of a value to a file or buffer."""
    Pickler(file).dump(value)
