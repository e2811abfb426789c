"""Names, rules and calls: what a file of rules needs to add a function.

A rule is looked up by a function's folded name (``torch.add``, ``Tensor.__iadd__`` and ``Tensor.add_`` are all "add").
It is one of

* an equation, ``equations("linear", "...k, nk, +n -> ...n")``, or a function ``Call -> Resolution`` that makes one;
* a composite, ``@composite("batch_norm")``: written with other functions on global tensors;
* a handler, ``@handler("get:dtype")``: for functions that are no tensor arithmetic (metadata, reads, backward).

Functions without a rule: Python functions of torch are decomposed, builtins fall back to broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from workbench.core.layout import Shape
from workbench.core.rules import Signature
from workbench.core.sbp import NdSbp
from workbench.tensors.global_tensor import GlobalTensor, Spec

LocalFunction = Callable[..., Any]


@dataclass
class Call:
    """One call of a torch function, with its keyword arguments moved to their positions (``arguments.in_order``).

    ``operands`` are the tensors among the arguments, in order; ``outputs`` are (shape, dtype) of the results for the
    logical shapes, as torch itself infers them.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[GlobalTensor]
    outputs: list[tuple[Shape, torch.dtype]] = field(default_factory=list)

    @property
    def shapes(self) -> list[Shape]:
        """Logical shapes of the operands."""
        return [operand._spec.shape for operand in self.operands]

    @property
    def has_fractions(self) -> bool:
        """Whether the first operand's dtype has fractions. Integers are rounded: a mean of sums is no sum of means."""
        return self.operands[0].is_floating_point() or self.operands[0].is_complex()

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """A static argument, by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


@dataclass
class Resolution:
    """The result of a rule for one call.

    Attributes:
        signatures: the one-axis signatures, or an equation that gives them.
        localize: makes the local function from the chosen layouts (inputs, outputs, letters), where it is not the
            function itself: sizes to rewrite, a sum over logical sizes.
        filled: letters of dims of which every rank must have a row, because the local function fails on empty shards.
        accepts: whether layouts (of the inputs, of the outputs) fit, where axes cannot be judged one by one.
        goes_by_dtype: whether shapes of the results depend on the operands' dtypes. Plans that are kept serve all of
            them, so this one serves one call.
    """

    signatures: str | Sequence[Signature]
    localize: Localize | None = None
    filled: str = ""
    accepts: Callable[[tuple[NdSbp, ...], tuple[NdSbp, ...]], bool] | None = None
    goes_by_dtype: bool = False


Localize = Callable[[Call, list[Spec], list[Spec], tuple[str, ...]], LocalFunction | None]
RuleFunction = Callable[[Call], Resolution | None]
Registered = TypeVar("Registered", bound=Callable[..., Any])
RULES: dict[str, RuleFunction] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}
EXACT: dict[Any, Callable[..., Any]] = {}
"""Composites for one function object, where its name means something else too: ``nn.init.uniform_``. An operator of
aten stands for its overloads.
"""
HANDLERS: dict[str, Callable[..., Any]] = {}
FILLERS: dict[str, Callable[..., GlobalTensor]] = {}
"""For ``out=`` of functions that take no tensor, by torch's name: what makes the result in the layout of ``out``."""
USER_FUNCTION_NAMES: dict[Any, str] = {}
"""Names of users' Python functions; torch may have another function of the same name."""
VALUE_INDEPENDENT: set[str] = {"add", "sub", "rsub", "mul", "div", "lerp"}
"""Functions whose rule depends on a float only by whether it is zero or infinite; all equations are among them."""
INDICES: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(("where", F.embedding), (0,)),
    **dict.fromkeys(("getitem", "take", "put", "index_put", "embedding"), (1,)),
    **dict.fromkeys(("masked_fill", "masked_scatter", "masked_select"), (1,)),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), (2,)),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), (2,)),
    F.embedding_bag: (0, 2),
}
"""By folded name, or by function where another one has the name too: the positions of indices and masks. They say which
of the data a call reads or writes, and go where the data lie."""


def _registers(table: dict[str, Registered]) -> Callable[..., Callable[[Registered], Registered]]:
    """A decorator that takes names, and registers a function under them.

    Raises:
        ValueError: a name is registered already.
    """

    def under(*names: str) -> Callable[[Registered], Registered]:
        def register(function: Registered) -> Registered:
            if again := table.keys() & set(names):
                raise ValueError(f"{sorted(again)} are registered twice, and one of the two is dead: remove it.")
            table.update(dict.fromkeys(names, function))
            return function

        return register

    return under


rule = _registers(RULES)
"""Registers a function ``Call -> Resolution`` under folded names; None means: this call has no rule, fall back."""
composite = _registers(COMPOSITES)
"""Registers a function written with other functions on global tensors; same signature as torch's."""
handler = _registers(HANDLERS)
"""Registers a function ``(func, args, kwargs) -> result`` that takes over the whole call."""
filler = _registers(FILLERS)
"""Registers a function ``(args, options, out) -> result`` for ``torch.NAME(..., out=global)`` without operands."""


def equations(names: str, equation: str) -> None:
    """Register one equation under several folded names."""
    resolution = Resolution(equation)
    VALUE_INDEPENDENT.update(names.split())
    rule(*names.split())(lambda call: resolution)


_DUNDERS = {
    "truediv": "div", "div": "div", "floordiv": "floor_divide", "mod": "remainder", "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "invert": "bitwise_not", "pos": "positive",
}  # fmt: skip
_IN_PLACE = {f"i{operator}" for operator in (*_DUNDERS, "add", "sub", "mul", "pow")}
_REFLECTED = {"radd": "add", "rmul": "mul", "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor"}
_ALIASES = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "negative": "neg", "absolute": "abs",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "concat": "cat",
    "concatenate": "cat", "clip": "clamp", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "arccos": "acos", "arcsin": "asin", "arctan": "atan", "fix": "trunc", "conv_transpose": "conv_transpose1d",
    "expit": "sigmoid", "psi": "digamma", "gammaln": "lgamma", "gammainc": "igamma", "gammaincc": "igammac",
    "multigammaln": "mvlgamma", "type_as": "to", "arccosh": "acosh", "arcsinh": "asinh", "arctanh": "atanh",
}  # fmt: skip
_KEEP_UNDERSCORE = {"requires_grad_", "retain_grad", "share_memory_", "set_", "resize_", "resize_as_", "as_strided_"}


@dataclass(frozen=True)
class Name:
    """A function's folded name, and whether this form of it writes into its first argument."""

    folded: str
    in_place: bool = False


def fold_name(func: Any) -> Name:
    """The folded name of a torch function: ``Tensor.__iadd__`` -> add, in place; ``Tensor.dtype.__get__``
    -> get:dtype.
    """
    if func in USER_FUNCTION_NAMES:
        return Name(USER_FUNCTION_NAMES[func])
    if isinstance(func, torch.jit.ScriptFunction):
        return Name(func.qualified_name)
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        qualified = func._schema.name if isinstance(func, torch._ops.OpOverload) else func._qualified_op_name
        if not qualified.startswith(("aten::", "prim")):  # a user's "mylib::add" is not torch's function
            return Name(qualified.removesuffix("_"), in_place=qualified.endswith("_"))
    name = getattr(func, "__name__", str(func)).partition(".")[0].removeprefix("special_")  # overloads: "slice.Tensor"
    if name in ("__get__", "__set__", "__delete__"):
        return Name(f"{name.strip('_')}:{func.__self__.__name__}")
    if name.startswith("__") and name.endswith("__"):
        inner = name.strip("_")
        if inner in _REFLECTED:
            return Name(_REFLECTED[inner])
        if inner in _IN_PLACE:
            return Name(_DUNDERS.get(inner[1:], inner[1:]), in_place=True)
        return Name(_DUNDERS.get(inner, inner), in_place=inner == "setitem")
    if name.endswith("_") and not name.startswith("_") and name not in _KEEP_UNDERSCORE:
        return Name(_ALIASES.get(name[:-1], name[:-1]), in_place=True)
    return Name(_ALIASES.get(name, name))


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def normalize_dims(dims: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Dims counted from the front; None and an empty list mean all. Torch's error for a dim that there is not."""
    if dims is None:
        return list(range(ndim))
    listed, count = list(dims) if isinstance(dims, Sequence) else [dims], max(1, ndim)
    for dim in listed:
        if not -count <= dim < count:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], but got {dim})"
            )
    return [dim % count for dim in listed] or list(range(ndim))


def term(ndim: int, whole: Collection[int] = (), ones: Collection[int] = (), dropped: Collection[int] = ()) -> str:
    """``term(3, whole=[1])`` is ``"aBc"``; ``ones`` become dims of size one, ``dropped`` ones are left out."""
    names = []
    for dim in range(ndim):
        if dim in dropped:
            continue
        letter = _LETTERS[dim]
        names.append("1" if dim in ones else letter.upper() if dim in whole else letter)
    return "".join(names)


def elementwise_except(ndim: int, whole: Collection[int], addend: bool = False) -> str:
    """An equation for a function that keeps the shape and works along ``whole`` dims, like softmax or cumsum."""
    return f"{'+' * addend}{term(ndim, whole)} -> {term(ndim, whole)}"


def reduction(ndim: int, dims: Collection[int], keepdim: bool, whole: bool, addend: bool = False) -> str:
    """An equation that removes ``dims``: summed over (``whole=False``), or reduced by a function that
    needs all of them.
    """
    left = term(ndim, dims if whole else ())
    right = term(ndim, ones=dims) if keepdim else term(ndim, dropped=dims)
    return f"{'+' * addend}{left} -> {right}"


def along(ndim: int, dim: int, letter: str) -> str:
    """A term for broadcasting operands with one named dim: ``along(3, 1, "X")`` is ``"...Xa"``."""
    return f"...{letter}{_LETTERS[: ndim - 1 - dim % max(1, ndim)]}"
