"""Rules of operations as equations, and the choice of a signature.

An equation names the dims of the operands and of the result, as in ``"...k, nk, +n -> ...n"`` (a linear layer). For one
axis of a placement every letter gives a signature: operands that have the letter are split at it, the others are
broadcast; a letter that the result lacks was summed over, so the result is a partial sum. Signatures for several
axes are the product of those for one.

    a-z    a dim that can be split          A-Z   a dim that must stay whole (softmax over it, a kernel slides over it)
    ...    all leading dims, aligned to the right like broadcasting
    1      a dim of size one                +     an addend: where the result is a partial sum, so is it

An equation all of whose operands are addends is linear and also takes partial sums to a partial sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from workbench.core.boxing import LinkCost
from workbench.core.boxing_path import find_boxing_path
from workbench.core.layout import Layout, Shape
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, NdSbp, Partial, Sbp, Split, broadcast, partial_sum
from workbench.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Term:
    """One operand or result of an equation: the names of its dims, and whether it is an addend."""

    dims: tuple[str, ...]
    is_addend: bool = False


@dataclass(frozen=True, slots=True)
class Equation:
    """A parsed equation; ``Equation.parse("ab, b -> a")``."""

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> Equation:
        """Parse ``"inputs -> outputs"``; raises ``LayoutError`` where the text is no equation."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise LayoutError(f'equation {text!r} has no "->". Write inputs -> outputs, e.g. "ab, bc -> ac".')
        inputs, outputs = (tuple(_parse_term(part, text) for part in side.split(",")) for side in (left, right))
        return Equation(inputs, outputs)


def _parse_term(part: str, text: str) -> Term:
    body = part.strip()
    is_addend, body = body.startswith("+"), body.removeprefix("+")
    dims: list[str] = []
    for chunk in body.replace("...", " . ").replace(" ", ""):
        if not (chunk.isalpha() or chunk in ".1"):
            raise LayoutError(f"equation {text!r}: {chunk!r} is no dim. Dims are letters, 1 and '...'.")
        dims.append(chunk)
    return Term(tuple(dims), is_addend)


@dataclass(frozen=True, slots=True)
class Signature:
    """One legal combination on one axis: the sbp of the operands, and that of the results of the local function.

    ``letter`` is the dim that is split, or "" for all-broadcast and all-partial.

    A local function may exchange parts of its operands itself, as a ring does. It then costs ``part`` of a boxing of
    the operands from ``inputs`` to ``exchanged``.
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    letter: str = ""
    exchanged: tuple[Sbp, ...] = ()
    part: float = 1.0


def signatures(equation: str, shapes: Sequence[Shape], output_ndims: Sequence[int]) -> tuple[Signature, ...]:
    """The one-axis signatures of an equation for operands of these shapes; splits first, all-broadcast last."""
    return _signatures(equation, tuple(tuple(shape) for shape in shapes), tuple(output_ndims))


@lru_cache(maxsize=8192)
def _signatures(text: str, shapes: tuple[Shape, ...], output_ndims: tuple[int, ...]) -> tuple[Signature, ...]:
    equation = Equation.parse(text)
    if len(equation.inputs) < len(shapes):
        raise LayoutError(
            f"equation {text!r} has {len(equation.inputs)} inputs, but the call has {len(shapes)} tensors."
        )
    terms = equation.inputs[: len(shapes)]
    inputs = [_expand(term, len(shape), text) for term, shape in zip(terms, shapes, strict=True)]
    outputs = [_expand(term, ndim, text) for term, ndim in zip(equation.outputs, output_ndims, strict=False)]
    sizes: dict[str, int] = {}
    for dims, shape in zip(inputs, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            sizes[dim] = max(size, sizes.get(dim, 0))
    result = []
    for letter in sorted(sizes):
        if letter == "1" or (letter.isalpha() and letter.isupper()):
            continue
        result.append(_signature_of_letter(letter, terms, inputs, shapes, sizes, outputs))
    everywhere = Signature((broadcast,) * len(shapes), (broadcast,) * len(outputs))
    if terms and all(term.is_addend for term in terms):
        result.append(Signature((partial_sum,) * len(shapes), (partial_sum,) * len(outputs)))
    return (*result, everywhere)


def _expand(term: Term, ndim: int, text: str) -> tuple[str, ...]:
    """Names for all ``ndim`` dims: the dots become numbers counted from the right, so that shapes align."""
    if "." not in term.dims:
        if len(term.dims) != ndim:
            raise LayoutError(f"equation {text!r}: a term with {len(term.dims)} dims for a tensor with {ndim} dims.")
        return term.dims
    at = term.dims.index(".")
    num_free = ndim - len(term.dims) + 1
    return (*term.dims[:at], *(f"#{num_free - i}" for i in range(num_free)), *term.dims[at + 1 :])


def _signature_of_letter(
    letter: str,
    terms: Sequence[Term],
    inputs: Sequence[tuple[str, ...]],
    shapes: Sequence[Shape],
    sizes: dict[str, int],
    outputs: Sequence[tuple[str, ...]],
) -> Signature:
    is_summed = all(letter not in dims for dims in outputs)
    entries: list[Sbp] = []
    for term, dims, shape in zip(terms, inputs, shapes, strict=True):
        if letter in dims and shape[dims.index(letter)] == sizes[letter]:
            entries.append(Split(dims.index(letter)))
        elif term.is_addend and is_summed:
            entries.append(partial_sum)
        else:
            entries.append(broadcast)
    results = tuple(
        Split(dims.index(letter)) if letter in dims else partial_sum if is_summed else broadcast for dims in outputs
    )
    return Signature(tuple(entries), results, letter)


@dataclass(frozen=True, slots=True)
class Operand:
    """The facts about one tensor argument that the choice needs."""

    layout: Layout
    shape: Shape
    itemsize: int
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen nd-signature: a layout per operand and per result, and the letter split on each axis."""

    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]
    letters: tuple[str, ...]


def choose(
    candidates: Sequence[Signature],
    operands: Sequence[Operand],
    placement: Placement,
    cost: LinkCost,
    accepts: Callable[[tuple[NdSbp, ...], tuple[NdSbp, ...]], bool] | None = None,
) -> Choice | None:
    """The nd-signature whose boxings are cheapest; ties go to the first. None if no candidate is legal.

    The decision needs no communication: it depends on layouts and shapes, which all ranks know, and on constants.
    ``accepts(inputs, outputs)`` rules out combinations of axes that are right one by one but not together.
    """
    per_axis = [_legal_on_axis(candidates, operands, axis) for axis in range(placement.num_axes)]
    best, best_cost = None, (math.inf, 0)
    for combination in itertools.product(*per_axis):
        inputs = tuple(tuple(s.inputs[i] for s in combination) for i in range(len(operands)))
        costs = [_boxing_cost(op, placement, sbp, cost) for op, sbp in zip(operands, inputs, strict=True)]
        # A boxing can be free and still be one: of equally cheap signatures, the one that changes fewest operands.
        changes = sum(op.layout.sbp != sbp for op, sbp in zip(operands, inputs, strict=True))
        total = (sum(costs) + _exchange_cost(combination, operands, placement, cost), changes)
        if total < best_cost:
            outputs = tuple(tuple(s.outputs[i] for s in combination) for i in range(len(combination[0].outputs)))
            if accepts is not None and not accepts(inputs, outputs):
                continue
            best, best_cost = Choice(inputs, outputs, tuple(s.letter for s in combination)), total
    return best


def _exchange_cost(
    combination: Sequence[Signature], operands: Sequence[Operand], placement: Placement, cost: LinkCost
) -> float:
    """Seconds of the exchanges that the local function makes itself."""
    found = 0.0
    for axis in (axis for axis, signature in enumerate(combination) if signature.exchanged):
        for i, operand in enumerate(operands):
            inputs = tuple(s.inputs[i] for s in combination)
            exchanged = (*inputs[:axis], combination[axis].exchanged[i], *inputs[axis + 1 :])
            here = replace(operand, layout=Layout(placement, inputs))
            found += combination[axis].part * _boxing_cost(here, placement, exchanged, cost)
    return found


def _legal_on_axis(candidates: Sequence[Signature], operands: Sequence[Operand], axis: int) -> list[Signature]:
    current = [operand.layout.sbp[axis] for operand in operands]
    legal = [s for s in candidates if all(map(_is_allowed, operands, current, s.inputs))]
    if not legal:  # terms that are written in place stay terms: slices grow to terms
        legal = [s for s in candidates if all(map(_may_grow, operands, current, s.inputs))]
    if all(isinstance(entry, Broadcast) for entry in current):
        # Copies stay copies: slicing them would be free now and cost a gather later.
        legal = [s for s in legal if all(isinstance(entry, Broadcast) for entry in s.inputs)] or legal
    has_partial = any(isinstance(entry, Partial) for entry in current)
    return [s for s in legal if has_partial or s.letter or not any(isinstance(e, Partial) for e in s.inputs)]


def _is_allowed(operand: Operand, current: Sbp, wanted: Sbp) -> bool:
    """Whether an operation may ask for this implicit boxing, at any cost."""
    if current == wanted:
        return True
    if operand.is_parameter:  # operations follow weights: a weight may be sliced, never gathered or moved
        return isinstance(current, Broadcast)
    if isinstance(wanted, Partial):  # only a whole addend becomes a term; slices would grow
        return isinstance(current, Broadcast)
    return True


def _may_grow(operand: Operand, current: Sbp, wanted: Sbp) -> bool:
    return _is_allowed(operand, current, wanted) or (wanted == partial_sum and isinstance(current, Split))


@lru_cache(maxsize=4096)
def _boxing_cost(operand: Operand, placement: Placement, sbp: NdSbp, cost: LinkCost) -> float:
    source, target = operand.layout, Layout(placement, sbp)
    if target == source:
        return 0.0
    if source.placement == placement:  # which ranks these are changes nothing: alike stages are priced once
        ranks = Placement(placement.device_type, tuple(range(placement.num_ranks)), placement.shape)
        source, target = Layout(ranks, source.sbp), Layout(ranks, sbp)
    return find_boxing_path(source, target, operand.shape, operand.itemsize, cost).time_s(cost)
