"""Types of the arguments and results of job functions: ``tp.Numpy.Placeholder((100, 1, 28, 28), dtype=flow.float)``.

``Numpy`` is one logical array (consistent view). ``ListNumpy`` is a list with one array per device (mirrored view).
Both can also annotate results, alone or inside ``Tuple``, ``List`` and ``Dict``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

_NUMPY_DTYPES = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.int64: "int64",
    torch.int32: "int32", torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Placeholder:
    """The type of an argument of a job function.

    Attributes:
        shape: of the logical array, or of each device's array where ``is_list``.
        dtype: a torch dtype; None for the job's default data type.
        is_list: a list with one array per device, as in the mirrored view.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    is_list: bool = False

    def with_default(self, dtype: torch.dtype) -> Placeholder:
        """This placeholder, with ``dtype`` if it has none."""
        if self.dtype is not None:
            return self
        return _placeholder(self.shape, dtype, self.is_list)

    def check(self, value: Any, where: str) -> Any:
        """``value`` as an array, or as a list of arrays.

        Raises:
            TypeError: the value is an array instead of a list, a list instead of an array, or has another dtype.
            ValueError: the value has another shape.
        """
        if self.is_list:
            if not isinstance(value, (list, tuple)):
                raise TypeError(
                    f"{where} is {_describe(value)}, not a list. A ListNumpy argument (mirrored view) takes a list "
                    "with one array per device: cut the batch, e.g. [x[:50], x[50:]], or type it tp.Numpy.Placeholder."
                )
            return [self._array(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, (list, tuple)):
            raise TypeError(
                f"{where} is a {type(value).__name__} of {len(value)}, not an array. A Numpy argument (consistent "
                "view) takes one logical array: join it, np.concatenate(x), or type it tp.ListNumpy.Placeholder."
            )
        return self._array(value, where)

    def _array(self, value: Any, where: str) -> np.ndarray:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        if not isinstance(value, np.ndarray):
            raise TypeError(
                f"{where} is {_describe(value)}, but its placeholder takes an array of shape {self.shape}. Pass "
                "np.asarray(x)."
            )
        if value.shape != self.shape:
            raise ValueError(
                f"{where} has shape {value.shape}, but its placeholder has {self.shape}. The two are the same in every "
                "call: cut or pad the array, or change the placeholder."
            )
        wanted = np.dtype(_NUMPY_DTYPES[self.dtype or torch.float32])
        if value.dtype != wanted:
            raise TypeError(
                f"{where} has dtype {value.dtype}, but its placeholder has {wanted}. A job casts no argument: pass "
                f"x.astype(np.{wanted}), or change the placeholder."
            )
        return value


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return f"a {type(value).__name__}"


def _placeholder(shape: Sequence[int], dtype: torch.dtype | None, is_list: bool) -> Placeholder:
    where = f"{'ListNumpy' if is_list else 'Numpy'}.Placeholder({shape!r})"
    if isinstance(shape, int) or not all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape):
        raise TypeError(f"{where}: a shape is a tuple of whole numbers, e.g. (100, 1, 28, 28), or (100,).")
    if dtype is not None and dtype not in _NUMPY_DTYPES:
        known = ", ".join(str(known).replace("torch", "flow") for known in _NUMPY_DTYPES)
        raise TypeError(f"{where}: dtype={dtype!r} is none that numpy has. Known are {known}.")
    return Placeholder(tuple(int(size) for size in shape), dtype, is_list)


class Numpy:
    """One logical array: an argument or a result in the consistent view."""

    is_list: ClassVar[bool] = False

    @classmethod
    def Placeholder(  # noqa: N802 - as programs write it
        cls, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Any:
        """An argument of this shape and dtype (default: the job's ``default_data_type``).

        >>> Numpy.Placeholder((100,), dtype=torch.int32).shape
        (100,)
        """
        return _placeholder(shape, dtype, cls.is_list)


class ListNumpy(Numpy):
    """One array per device: an argument (its shape is that of one device's array) or a result in the mirrored view."""

    is_list: ClassVar[bool] = True


class Callback:
    """``-> tp.Callback[tp.Numpy]``: the job returns a function, which calls its argument with the job's result.

    ``train_job(images, labels)(lambda loss: print(loss.mean()))``
    """

    result: Any = None

    def __class_getitem__(cls, result: Any) -> type[Callback]:
        return type("Callback", (Callback,), {"result": result})
