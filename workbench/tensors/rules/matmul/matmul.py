"""Products: linear layers, the matmul family, einsum, distances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from string import ascii_lowercase
from typing import Any

import torch

from workbench.core import gradient_accumulation
from workbench.core.rules import Signature
from workbench.core.sbp import Split, broadcast
from workbench.tensors.autocast import cast_for_product
from workbench.tensors.dispatch import gradient_accumulation_fusion as fusion
from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.placeholder_calls import has_data
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, composite, equations, rule, term
from workbench.tensors.global_tensor import GlobalTensor, Spec
from workbench.tensors.rules.reduction.empty_shards import as_if_filled, filled
from workbench.tensors.rules.reduction.two_stage import own_rows

equations("mm", "mk, kn -> mn")
equations("bmm", "bmk, bkn -> bmn")
equations("mv", "mk, k -> m")
equations("dot vdot", "k, k ->")
equations("outer ger", "m, n -> mn")


@rule("linear")
def _linear(call: Call) -> Resolution:
    if len(call.shapes[1]) == 1:
        return Resolution("...k, k, + -> ...")
    bias = "+" if len(call.shapes) == 3 and not call.shapes[2] else "+n"
    return Resolution(f"...k, nk, {bias} -> ...n", _with_large_weight)


def _with_large_weight(
    call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]
) -> LocalFunction | None:
    return fusion.linear if math.prod(inputs[1].local_shape) >= gradient_accumulation.SMALLEST_NUMEL else None


_SUMMED = {
    "addmm": ("mn", "mk, kn"),
    "addbmm": ("mn", "bmk, bkn"),
    "baddbmm": ("bmn", "bmk, bkn"),
    "addmv": ("m", "mk, k"),
    "addr": ("mn", "m, n"),
}


@rule(*_SUMMED)
def _added_product(call: Call) -> Resolution:
    """``beta * input + alpha * product``. The input broadcasts to the result and is an addend of its sum."""
    result, factors = _SUMMED[call.name]
    addend = result[len(result) - len(call.shapes[0]) :]
    return Resolution(f"+{addend}, {factors} -> {result}")


@rule("matmul", "rmatmul", "linalg_matmul")
def _matmul(call: Call) -> Resolution:
    """The cases of torch.matmul by number of dims; ``...`` are the batch dims, which broadcast."""
    left, right = (len(shape) for shape in call.shapes)
    if call.name == "rmatmul":
        left, right = right, left
    if left == 1 and right == 1:
        text = "k, k ->"
    elif left == 1:
        text = "k, ...kn -> ...n"
    elif right == 1:
        text = "...mk, k -> ...m"
    else:
        text = "...mk, ...kn -> ...mn"
    if call.name == "rmatmul":
        inputs, _, output = text.partition("->")
        first, second = inputs.split(",")
        text = f"{second}, {first} -> {output}"
    return Resolution(text)


@rule("linalg_vecdot")
def _vecdot(call: Call) -> Resolution:
    """A sum over one dim of a broadcast product."""
    ndim = max(map(len, call.shapes))
    factors = [term(ndim)[ndim - len(shape) :] for shape in call.shapes]
    return Resolution(f"{', '.join(factors)} -> {term(ndim, dropped=[call.kwargs.get('dim', -1) % ndim])}")


@rule("kron")
def _kron(call: Call) -> Resolution:
    """A block of rows of the left factor gives a block of rows of the result. Slices must have equal sizes."""
    left, right = call.shapes
    ndim, num_ranks = max(len(left), len(right)), call.operands[0]._spec.layout.placement.num_ranks
    found = [
        Signature((Split(dim), broadcast), (Split(ndim - len(left) + dim),), "r")
        for dim, size in enumerate(left)
        if size % num_ranks == 0
    ]
    return Resolution([*found, Signature((broadcast, broadcast), (broadcast,))])


@rule("inner")
def _inner(call: Call) -> Resolution:
    left, right = (len(shape) for shape in call.shapes)
    if not left or not right:
        return Resolution("..., ... -> ...")
    first, second = term(left - 1), term(left + right - 2)[left - 1 :]
    return Resolution(f"{first}z, {second}z -> {first}{second}")


@rule("bilinear")
def _bilinear(call: Call) -> Resolution:
    return Resolution("...i, ...j, oij, +o -> ...o", as_if_filled)


@rule("tensordot")
def _tensordot(call: Call) -> Resolution | None:
    dims: Any = call.arg(2, "dims", 2)
    if (of_second := call.arg(3, "dims_other")) is not None:  # aten has a list for each operand
        dims = dims, of_second
    if isinstance(dims, torch.Tensor):
        return None
    left, right = (len(shape) for shape in call.shapes)
    if isinstance(dims, int):
        pairs = [(left - dims + i, i) for i in range(dims)]
    else:
        first, second = ([dim] if isinstance(dim, int) else list(dim) for dim in dims)
        pairs = [(a % left, b % right) for a, b in zip(first, second, strict=True)]
    of_left, of_right = term(left), list(term(left + right)[left:])
    for a, b in pairs:
        of_right[b] = of_left[a]
    kept = [letter for letter in (*of_left, *of_right) if letter not in of_left or letter not in of_right]
    return Resolution(f"{of_left}, {''.join(of_right)} -> {''.join(kept)}")


@rule("einsum")
def _einsum(call: Call) -> Resolution | None:
    """The equation of the einsum. A repeated letter inside an operand takes the diagonal, so its dims stay whole."""
    left, arrow, right = call.args[0].replace(" ", "").partition("->")
    terms = left.split(",")
    names = [_einsum_names(text, len(shape)) for text, shape in zip(terms, call.shapes, strict=True)]
    if arrow:
        num_free = max(sum(isinstance(name, int) for name in operand) for operand in names)
        result = _einsum_names(right, len(right.replace("...", "")) + num_free * ("..." in right))
    else:
        letters = left.replace(".", "").replace(",", "")
        free = sorted({name for operand in names for name in operand if isinstance(name, int)})
        result = [*free, *sorted(letter for letter in set(letters) if letters.count(letter) == 1)]
    whole = {name for operand in names for name in operand if operand.count(name) > 1}
    different = dict.fromkeys(itertools.chain(*names))
    if len(different) > len(ascii_lowercase):
        return None
    renamed = {
        name: letter.upper() if name in whole else letter
        for name, letter in zip(different, ascii_lowercase, strict=False)
    }
    *factors, product = ["".join(renamed[name] for name in operand) for operand in (*names, result)]
    linear = "+" * (len(factors) == 1)
    return Resolution(f"{linear}{', '.join(factors)} -> {product}", lambda *_: _einsum_of_shards)


def _einsum_of_shards(equation: str, *operands: Any) -> torch.Tensor:
    """torch.einsum after autocast's cast. torch multiplies if the contracted dim has size one, which autocast does not
    cast; the shards of all ranks must have one dtype.
    """
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    kind = "cpu" if tensors[0].is_meta else tensors[0].device.type  # dry runs use the autocast of CPUs
    return torch.einsum(equation, *cast_for_product(tensors, kind))


def _einsum_names(text: str, ndim: int) -> list[Hashable]:
    """The letters of a term; dims of its ellipsis are negative numbers, counted from the right."""
    before, dots, after = text.partition("...")
    num_free = ndim - len(before) - len(after) if dots else 0
    return [*before, *range(-num_free, 0), *after]


@composite("chain_matmul")
def chain_matmul(*matrices: Any, out: Any = None) -> Any:
    """``torch.chain_matmul``, the older name of ``multi_dot``."""
    return NotImplemented if out is not None else torch.linalg.multi_dot(list(matrices))


@composite("linalg_multi_dot")
def multi_dot(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """A chain of products, in the order with the fewest multiplications for the logical sizes."""
    if out is not None or len(tensors) < 2:
        return NotImplemented
    first, last = tensors[0], tensors[-1]
    chain = [
        first.unsqueeze(0) if first.dim() == 1 else first,
        *tensors[1:-1],
        last.unsqueeze(1) if last.dim() == 1 else last,
    ]
    sizes = [chain[0].shape[0], *(matrix.shape[1] for matrix in chain)]
    result = _multiply(chain, _cheapest_cuts(sizes), 0, len(chain) - 1)
    if last.dim() == 1:
        result = result.squeeze(1)
    return result.squeeze(0) if first.dim() == 1 else result


def _cheapest_cuts(sizes: Sequence[int]) -> dict[tuple[int, int], int]:
    """Where to cut the products of matrices ``i`` to ``j`` of these sizes (Cormen et al., matrix-chain order)."""
    count = len(sizes) - 1
    cost = {(i, i): 0 for i in range(count)}
    cuts = {}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            options = [cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1] for k in range(i, j)]
            cost[i, j] = min(options)
            cuts[i, j] = i + options.index(cost[i, j])
    return cuts


def _multiply(chain: Sequence[Any], cuts: dict[tuple[int, int], int], i: int, j: int) -> Any:
    if i == j:
        return chain[i]
    cut = cuts[i, j]
    return torch.mm(_multiply(chain, cuts, i, cut), _multiply(chain, cuts, cut + 1, j))


@composite("matrix_power", "linalg_matrix_power")
def matrix_power(input: Any, n: int, *, out: Any = None) -> Any:
    """Powers by repeated squaring. The zeroth and negative powers fall back."""
    if out is not None or n < 1:
        return NotImplemented
    result: Any = None
    square = input
    while n:
        if n & 1:
            result = square if result is None else result @ square
        n >>= 1
        square = square @ square if n else square
    return input.clone() if result is input else result


_CDIST_MODES = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")
"""In the order of the numbers that aten has for them."""


@rule("cdist")
def _cdist(call: Call) -> Resolution:
    """Distances between rows. The logical number of rows selects one of two algorithms."""
    rows = max(call.shapes[0][-2], call.shapes[1][-2])
    mode = call.arg(3, "compute_mode")
    mode = mode if isinstance(mode, str) else _CDIST_MODES[mode or 0]
    if mode == _CDIST_MODES[0]:
        mode = f"{'' if rows > 25 else 'donot_'}use_mm_for_euclid_dist"

    def distances(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: Any = None) -> torch.Tensor:
        return torch.cdist(x1, x2, p, mode)

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
        # Of an empty shard, torch's product has no gradient
        return filled(distances, inputs, outputs) or distances

    return Resolution("...pK, ...rK -> ...pr", localize)


@rule("pdist")
def _pdist(call: Call) -> Resolution:
    return Resolution("NK -> M")


@composite("_grouped_mm", "grouped_mm")
def grouped_mm(input: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows sorted by expert, times one matrix per expert. Other forms have no rule."""
    if offs is None or bias is not None or out_dtype is not None:
        return NotImplemented
    if (input.dim(), mat2.dim()) != (2, 3) or not isinstance(mat2, GlobalTensor):
        return NotImplemented
    return call_by_plan(product_by_expert, (input, mat2, offs))


def product_by_expert(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, first: int = 0) -> torch.Tensor:
    """``torch._grouped_mm`` for any sizes: its kernel needs strides of 16 bytes, which slices do not have.

    Args:
        rows: (rows, inputs), sorted by expert.
        weights: (experts here, inputs, outputs).
        offsets: for each of all experts, the row after its last one.
        first: number of the first expert here. Rows of other experts give zeros.
    """
    if not has_data(rows):  # metadata has no offsets to read
        return rows[:, :1] * weights[0, :1]
    ends = [0, *offsets.tolist()]
    result = rows.new_zeros(len(rows), weights.shape[-1])
    with torch.autocast(rows.device.type, enabled=False):  # torch's kernel does not cast
        if not len(weights):  # a rank without experts takes part in backward, too
            result[:0] = rows[:0] @ weights.sum(0)
        for expert, matrix in enumerate(weights, start=first):
            start, stop = ends[expert : expert + 2]
            result[start:stop] = rows[start:stop] @ matrix
    return result


@rule("product_by_expert")
def _product_by_expert(call: Call) -> Resolution:
    """Features and experts may be split. Rows stay whole, because the rows of an expert may be anywhere."""
    return Resolution("Tk, ekn, Z -> Tn", _from_first)


def _from_first(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
    if not any(letters) or inputs[1].is_placeholder:
        return lambda rows, weights, offsets: torch._grouped_mm(rows, weights, offs=offsets)
    first, _ = own_rows(inputs[1], 0)
    return lambda rows, weights, offsets: product_by_expert(rows, weights, offsets, first)
