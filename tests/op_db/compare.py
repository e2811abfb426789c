"""One sample on one random layout against one device: values, shapes, dtypes, gradients.

Random functions are compared between two layouts instead, since their numbers are not those of plain torch.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import workbench as wb
from tests.op_db.samples import SHAPES_ONLY, Entry
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Partial, Split
from workbench.tensors.dispatch import dispatcher
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.tensors.global_tensor import GlobalTensor, new_placeholder, spec_of, wrap
from workbench.tensors.world import current
from workbench.testing import run_ranks

PLACEMENTS = ((2, [0, 1]), (3, [0, 1, 2]), (4, [[0, 1], [2, 3]]), (4, [[3, 0], [1, 2]]), (3, [2, 0]))
"""(number of ranks, ranks of the placement); the last leaves a rank outside."""
LARGE = 1e30
MAX_DRAWS = 8  # of layouts, until one is no broadcast; a scalar that is no float has no other
RTOL, RTOL_DOUBLE, RTOL_LOW = 1e-4, 1e-9, 1e-2
DOUBLES = {torch.float32: torch.float64, torch.complex64: torch.complex128}
LOW_PRECISION = (torch.bfloat16, torch.float16, torch.complex32)
SUMMABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Wrong(AssertionError):
    """A number, a shape or a dtype differs from one device."""


@dataclass
class Outcome:
    """What became of one sample.

    ``state`` is "ok", "wrong" or "raises"; ``fallbacks`` names the functions that gathered split or partial operands.
    """

    state: str
    message: str = ""
    where: str = ""
    is_sharded: bool = False
    fallbacks: set[str] = field(default_factory=set)


@dataclass
class _Truth:
    """What plain torch gives: result, gradients of the differentiable leaves, and whether numbers are random."""

    result: Any
    grads: list[torch.Tensor | None]
    is_random: bool


def run_sample(entry: Entry, sample: Any, seed: int) -> Outcome:
    """Run the sample as plain torch and on simulated ranks, and compare.

    A sample that differs in single precision has to agree in double precision, to nine digits: rounding shrinks with
    the precision, mistakes do not.
    """
    outcome = _run_sample(entry, sample, seed, RTOL)
    wide = DOUBLES.get(entry.dtype)
    if outcome.state == "wrong" and wide in entry.op.dtypes:
        doubled = sample.transform(lambda leaf: _in_double(leaf, entry.dtype, wide))
        again = _run_sample(entry, doubled, seed, RTOL_DOUBLE)
        if again.state == "ok":
            return again
    return outcome


def _in_double(leaf: Any, narrow: torch.dtype, wide: torch.dtype) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to(wide).requires_grad_(leaf.requires_grad) if leaf.dtype == narrow else leaf
    return wide if leaf == narrow else leaf


def _run_sample(entry: Entry, sample: Any, seed: int, rtol: float) -> Outcome:
    generator = random.Random(f"{entry.name} {seed}")
    num_ranks, ranks = generator.choices(PLACEMENTS, weights=(4, 3, 2, 1, 1))[0]
    placement = Placement.of("cpu", ranks)
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    originals = {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    for _ in range(MAX_DRAWS):
        layouts = {key: _random_layout(tensor, placement, generator) for key, tensor in originals.items()}
        if any(not layout.is_broadcast for layout in layouts.values()):
            break
    where = f"{placement}: {', '.join(f'{tuple(originals[k].shape)} {v.sbp}' for k, v in layouts.items())}"
    process = sample.output_process_fn_grad or (lambda result: result)
    flags = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]

    def arguments(make: Callable[[torch.Tensor, Layout], torch.Tensor]) -> tuple[list[Any], list[Any]]:
        made = {}
        for leaf, flag in zip(leaves, flags, strict=True):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
                made[id(leaf)] = make(originals[id(leaf)], layouts[id(leaf)]).requires_grad_(flag)
        found = [made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tree_unflatten(found, structure), list(made.values())

    outcome = Outcome("ok", "", where, any(not layout.is_broadcast for layout in layouts.values()))
    if not originals:
        return outcome
    try:
        truth = _truth(entry, arguments, process)
    except Exception as error:  # noqa: BLE001 - whatever plain torch raises, global tensors may raise too
        truth = error

    def program(rank: int) -> Any:
        def attempt(spread_as: Callable[..., torch.Tensor]) -> Any:
            wb.manual_seed(seed)
            (first, args, kwargs), tensors = arguments(spread_as)
            result = entry.call(first, *args, **kwargs)
            kept = tree_map(lambda leaf: _full(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)
            differentiates = isinstance(truth, _Truth) and truth.grads
            grads = _gradients(process(result), tensors) if differentiates else []
            return kept, [None if grad is None else _full(grad) for grad in grads]

        result, grads = attempt(lambda full, layout: _spread(full, layout, rank))
        if isinstance(truth, _Truth) and truth.is_random:
            return result, grads, attempt(lambda full, layout: _spread(full, layout.broadcast(), rank))
        return result, grads, (None, None)

    try:
        with _recorded_fallbacks(outcome.fallbacks), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("ignore", FallbackWarning)
            found = run_ranks(program, num_ranks)
        if isinstance(truth, Exception):
            raise Wrong(f"plain torch raises {type(truth).__name__}: {truth}")
        for rank in placement:
            _compare_rank(entry, truth, *found[rank], rtol)
    except Wrong as error:
        outcome.state, outcome.message = "wrong", str(error)
    except Exception as error:  # noqa: BLE001 - every failure is a finding of the sweep
        if not isinstance(truth, Exception):
            outcome.state, outcome.message = "raises", f"{type(error).__name__}: {error}"
            outcome.message += _place_of(error)
    return outcome


def _place_of(error: BaseException) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/workbench/" in file:
            place = f" [{file.rsplit('/workbench/', 1)[1]}:{trace.tb_lineno}]"
        trace = trace.tb_next
    return place


def _truth(entry: Entry, arguments: Any, process: Any) -> _Truth:
    (first, args, kwargs), tensors = arguments(lambda full, _: full.clone())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = entry.call(first, *args, **kwargs)
        is_random = not torch.equal(before, torch.get_rng_state())
        kept = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, result)
        try:
            grads = _gradients(process(result), tensors)
        except (RuntimeError, NotImplementedError):  # not differentiable for this input
            grads = []
    return _Truth(kept, grads, is_random)


def _full(tensor: torch.Tensor) -> torch.Tensor | None:
    """The logical value on the ranks of the placement."""
    if not isinstance(tensor, GlobalTensor):
        return tensor.detach()
    whole = tensor.detach().to_global(sbp=["B"] * tensor.placement.num_axes)
    return None if whole.is_placeholder else whole.to_local().clone()


def _gradients(result: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of a weighted sum of everything differentiable in the result; none where nothing is."""
    outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outputs or not any(tensor.requires_grad for tensor in tensors):
        return []
    total = 0
    for output in outputs:
        weight = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64).reshape(output.shape)
        part = (output * weight.to(output.dtype)).sum()
        total = total + (torch.real(part) if part.is_complex() else part)
    total.backward()
    return [tensor.grad for tensor in tensors if tensor.requires_grad]


def _random_layout(tensor: torch.Tensor, placement: Placement, generator: random.Random) -> Layout:
    choices = [f"S({dim})" for dim in range(tensor.dim())] + ["B"]
    if tensor.dtype in SUMMABLE:
        choices.append("P")
    return Layout.of(placement, [generator.choice(choices) for _ in range(placement.num_axes)])


def _spread(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """This rank's part of a plain tensor. Terms of partial sums add up to it without rounding."""
    spec = spec_of(current(), layout, tuple(full.shape))
    if rank not in layout.placement:
        return wrap(new_placeholder(tuple(full.shape), full.dtype, torch.device("cpu")), spec)
    part, coefficients = full, itertools.chain([(2, -1)], itertools.repeat((1, 0)))
    for entry, size, place in zip(layout.sbp, layout.placement.shape, layout.placement.coordinates(rank), strict=True):
        if isinstance(entry, Split):
            part = torch.tensor_split(part, size, dim=entry.dim)[place]
        elif isinstance(entry, Partial):
            factor = [*next(coefficients), *[0] * size][place]
            ordinary = part.isfinite() & (part.abs() < LARGE)
            part = torch.where(ordinary, part * factor, part if place == 0 else torch.zeros_like(part))
    return wrap(part.clone(), spec)


@contextmanager
def _recorded_fallbacks(names: set[str]) -> Iterator[None]:
    """Collect the names of functions that fall back with operands that are not broadcast."""
    original = dispatcher.run_fallback

    def recording(plan: Any, func: Any, args: Any, kwargs: Any) -> Any:
        operands = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, GlobalTensor)]
        if any(not operand._spec.layout.is_broadcast for operand in operands):
            names.add(plan.name.folded)
        return original(plan, func, args, kwargs)

    dispatcher.run_fallback = recording
    try:
        yield
    finally:
        dispatcher.run_fallback = original


def _compare_rank(entry: Entry, truth: _Truth, result: Any, grads: Any, on_broadcast: Any, rtol: float) -> None:
    expected, expected_grads = on_broadcast if truth.is_random else (truth.result, truth.grads)
    if truth.is_random:
        assert_close(entry.name, result, truth.result, rtol, values=False)
    compares_values = entry.name not in SHAPES_ONLY
    assert_close(entry.name, result, expected, rtol, values=compares_values)
    leaves = tree_flatten(expected)[0]
    rounded = any(isinstance(leaf, torch.Tensor) and leaf.dtype in LOW_PRECISION for leaf in leaves)
    if len(grads) != len(expected_grads):
        raise Wrong(f"{len(grads)} gradients, one device has {len(expected_grads)}")
    for position, (grad, wanted) in enumerate(zip(grads, expected_grads, strict=True)):
        if (grad is None) != (wanted is None):
            other = wanted if grad is None else grad
            if bool(other.any()) and compares_values:
                raise Wrong(f"gradient {position}: {'missing' if grad is None else 'there, but not on one device'}")
        elif grad is not None:
            assert_close(f"gradient {position}", grad, wanted, RTOL_LOW if rounded else rtol, compares_values)


def assert_close(what: str, actual: Any, expected: Any, rtol: float = RTOL, values: bool = True) -> None:
    """Compare two results leaf by leaf."""
    found, structure = tree_flatten(actual)
    wanted, wanted_structure = tree_flatten(expected)
    if structure != wanted_structure:
        raise Wrong(f"{what}: structure {structure} instead of {wanted_structure}")
    for leaf, other in zip(found, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            _assert_tensor(what, leaf, other, rtol, values)
        elif isinstance(other, float) and values:
            _assert_tensor(what, torch.tensor(leaf), torch.tensor(other), rtol, values)
        elif values and leaf != other:
            raise Wrong(f"{what}: {leaf!r} instead of {other!r}")


def _assert_tensor(what: str, actual: Any, expected: torch.Tensor, rtol: float, values: bool) -> None:
    if not isinstance(actual, torch.Tensor):
        raise Wrong(f"{what}: {actual!r} instead of a tensor of shape {tuple(expected.shape)}")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise Wrong(f"{what}: {tuple(actual.shape)} {actual.dtype} instead of {tuple(expected.shape)} {expected.dtype}")
    if not values or expected.numel() == 0:
        return
    actual, expected = actual.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg()
    if expected.dtype.itemsize == 1 and expected.is_floating_point():
        actual, expected = actual.float(), expected.float()
    finite = expected[expected.isfinite()]
    scale = (
        float(finite.to(torch.complex128 if finite.is_complex() else torch.float64).abs().max())
        if finite.numel()
        else 1.0
    )
    rtol = max(rtol, RTOL_LOW) if expected.dtype in LOW_PRECISION else rtol
    try:
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=0.1 * rtol * max(1.0, scale), equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        raise Wrong(f"{what}: " + " ".join(str(error).split())[:300]) from None
