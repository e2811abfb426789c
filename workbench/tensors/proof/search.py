"""Tries layouts of the operands of a call on one axis, and compares with one device."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, Partial, Sbp, Split, broadcast, dual, partial_sum
from workbench.tensors.dispatch.placeholder_calls import NeedsDataError, infer_outputs
from workbench.tensors.dispatch.planning import Plan, candidates_of, make_plan
from workbench.tensors.dispatch.registry import COMPOSITES, EXACT, RULES, Call
from workbench.tensors.global_tensor import local_torch, spec_of, wrap
from workbench.tensors.proof.cut import cut, mismatch
from workbench.tensors.proof.examples import Example, collect
from workbench.tensors.proof.ranks import redrawn, run_each
from workbench.tensors.proof.report import Finding, Proof
from workbench.tensors.world import World
from workbench.transport.threads import ThreadHub, ThreadTransport

Entries = tuple[Sbp, ...]
MAX_COMBINATIONS = 256


def prove(
    function: Callable[..., Any],
    *operands: Any,
    num_ranks: Sequence[int] = (2, 3),
    max_combinations: int = MAX_COMBINATIONS,
    finds_missing: bool = True,
) -> Proof:
    """Check the rules of the torch functions that ``function(*operands)`` calls, by brute force on one axis.

    Each call runs under every layout of its operands (S of each dim, B, P; at most ``max_combinations``, chosen by a
    fixed seed), on shards of uneven sizes and on terms of 0.6 and 0.4. Where the rule declares a layout, results and
    gradients must equal those of one device. Where it does not, and the function on the shards would have been right
    without a boxing, the signature is missing.

    Args:
        function: a function of tensors; also one that you passed to ``wb.register_rule``.
        operands: plain tensors, the logical values. Other arguments are passed on.
        num_ranks: sizes of the axis.
        max_combinations: the most undeclared layouts to try per call.
        finds_missing: whether to try undeclared layouts.

    Returns:
        A ``Proof``: ``print`` it; ``proof.wrong`` and ``proof.missing`` hold the findings.

    >>> proof = wb.debug.prove(torch.add, torch.randn(5, 4), torch.randn(5, 4))
    >>> proof.wrong, proof.missing
    ([], [])
    """
    return prove_examples(collect(function, operands), num_ranks, max_combinations if finds_missing else 0)


def prove_examples(
    examples: Iterable[Example], num_ranks: Sequence[int] = (2, 3), max_combinations: int = MAX_COMBINATIONS
) -> Proof:
    """``prove`` for calls that are known; undeclared layouts are tried on the first size only."""
    proof = Proof()
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        for example in examples:
            reason = _why_infeasible(example)
            if reason:
                proof.skipped.append(f"{example}: {reason}")
                continue
            proof.num_calls += 1
            for position, size in enumerate(num_ranks):
                proof += _Search(example, size).run(max_combinations, finds_missing=position == 0)
    return proof


def _why_infeasible(example: Example) -> str | None:
    operands = example.operands
    try:
        infer_outputs(example.func, example.args, example.kwargs)
    except NeedsDataError:
        return "the shape of its result depends on data"
    first, second = (example.run([operand.clone() for operand in operands]) for _ in range(2))
    if not first:
        return "returns no tensor"
    if any(mismatch([b], broadcast, a) for a, b in zip(first, second, strict=True)):
        return "gives other numbers each time"
    return None


class _Search:
    """One call on an axis of ``num_ranks``."""

    def __init__(self, example: Example, num_ranks: int) -> None:
        self.example, self.num_ranks = example, num_ranks
        self.placement = Placement.of("cpu", list(range(num_ranks)))
        hub = ThreadHub(num_ranks)
        self.worlds = [World(r, num_ranks, torch.device("cpu"), ThreadTransport(hub, r)) for r in range(num_ranks)]
        self.generator = torch.Generator().manual_seed(num_ranks)
        self.operands = example.operands
        self.shapes = [tuple(operand.shape) for operand in self.operands]
        self.differentiates = True
        self.inferred = infer_outputs(example.func, example.args, example.kwargs)
        self.expected = self._expected()

    def run(self, max_combinations: int, finds_missing: bool) -> Proof:
        proof = Proof()
        declared = self._declared()
        for inputs in declared:
            self._check_if_run(inputs, proof)
        # A composite takes split operands before its rule; the functions that it calls have proofs of their own.
        is_composite = self.example.name.folded in COMPOSITES or self.example.func in EXACT
        if finds_missing and self.expected.has_distinct_values and not is_composite:
            tried = [inputs for inputs in self._combinations(max_combinations) if inputs not in declared]
            right = [(inputs, outputs) for inputs in tried if (outputs := self._right_outputs_of(inputs))]
            missing = [
                (inputs, outputs)
                for inputs, outputs in right
                if not self._check_if_run(inputs, proof)
                and self._saves(inputs, outputs)
                and self._holds_again(inputs, outputs)
            ]
            proof.missing = [self._finding(*found) for found in self._undominated(missing)]
        return proof

    def _declared(self) -> list[Entries]:
        """Layouts of the operands that the rule's signatures name, whatever they cost."""
        name = self.example.name.folded
        if name not in RULES:
            return []
        whole = (broadcast,) * len(self.operands)
        tensors = self._wrapped(0, whole, [[operand.clone()] for operand in self.operands])
        args, kwargs = self.example.with_operands(tensors)
        call = Call(name, self.example.func, args, kwargs, tensors, [info[:2] for info in self.inferred[0]])
        resolution = RULES[name](call)
        found = candidates_of(call, resolution, self.placement) if resolution is not None else []
        return list(dict.fromkeys(signature.inputs for signature in found))

    def _check_if_run(self, inputs: Entries, proof: Proof) -> bool:
        """Check these layouts if dispatch runs the call without boxing anything; whether it does."""
        shards = self._cut(self.operands, inputs)
        plan, _ = self._plan(0, inputs, shards)
        as_they_lie = all(target.sbp == (e,) for target, e in zip(plan.targets, inputs, strict=True))
        if plan.outputs is None or not as_they_lie:
            return False
        proof.num_checked += 1
        outputs = _outputs_of(plan)
        problem = self._check(inputs, outputs, self._seeds(inputs, outputs), shards)
        if problem:
            proof.wrong.append(self._finding(inputs, outputs, problem))
        return True

    def _finding(self, inputs: Entries, outputs: Entries, problem: str = "") -> Finding:
        return Finding(str(self.example), self.example.name.folded, inputs, outputs, self.num_ranks, problem)

    def _combinations(self, limit: int) -> list[Entries]:
        found = list(itertools.product(*map(_entries_for, self.operands)))
        random.Random(0).shuffle(found)
        return found[:limit]

    def _cut(self, operands: Sequence[torch.Tensor], inputs: Entries, one_holder: bool = False) -> list[Any]:
        """Shards by operand, then by rank."""
        return [
            cut(operand, entry, self.num_ranks, self.generator, one_holder)
            for operand, entry in zip(operands, inputs, strict=True)
        ]

    def _layout(self, entry: Sbp) -> Layout:
        return Layout(self.placement, (entry,))

    def _wrapped(self, rank: int, inputs: Entries, shards: list[Any]) -> list[Any]:
        """Global tensors over the shards of one rank."""
        return [
            wrap(of_ranks[rank], spec_of(self.worlds[rank], self._layout(entry), shape))
            for of_ranks, entry, shape in zip(shards, inputs, self.shapes, strict=True)
        ]

    def _plan(self, rank: int, inputs: Entries, shards: list[Any]) -> tuple[Plan, Any]:
        """What dispatch would do on ``rank`` for these layouts, and the arguments with the leaves behind them."""
        leaves = [self._as_leaf(of_ranks[rank].clone()) for of_ranks in shards]
        with local_torch():
            copies = [{rank: leaf.clone()} for leaf in leaves]  # an in-place function may not write into a leaf
        args, kwargs = self.example.with_operands(self._wrapped(rank, inputs, copies))
        return make_plan(self.example.func, args, kwargs, self.inferred), (args, kwargs, leaves)

    def _expected(self) -> _OneDeviceResults:
        leaves = [self._as_leaf(operand.clone()) for operand in self.operands]
        try:
            return _OneDeviceResults(leaves, self.example.run([leaf.clone() for leaf in leaves]))
        except RuntimeError:
            if not self.differentiates:
                raise
        self.differentiates = False  # no derivative on one device (running means, weights): none here
        return self._expected()

    def _as_leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        is_smooth = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_() if is_smooth and self.differentiates else tensor

    def _seeds(self, inputs: Entries, outputs: Entries) -> list[Any]:
        """For every result, the gradients to start from on the ranks; None where there is nothing to differentiate."""
        kinds = {entry.reduction for entry in (*inputs, *outputs) if isinstance(entry, Partial)}
        if not self.expected.gradients or not kinds <= {"sum"}:
            return [None] * len(outputs)
        return [
            None if weight is None else cut(weight, dual(entry), self.num_ranks, self.generator)
            for weight, entry in zip(self.expected.weights, outputs, strict=True)
        ]

    def _check(self, inputs: Entries, outputs: Entries, seeds: list[Any], shards: list[Any]) -> str | None:
        """Why the ranks' results or gradients are not one device's."""

        def run(rank: int) -> OneRank:
            plan, (args, kwargs, leaves) = self._plan(rank, inputs, shards)
            with local_torch():
                result = plan.local(*args, **kwargs)
            return _differentiate(self.example.results(result, args), leaves, seeds, rank)

        try:
            found = run_each(run, self.worlds)
        except Exception as error:  # noqa: BLE001 - any error of the local function is the finding
            return f"the local function raises {type(error).__name__}: {error}"
        return self._compare(found, inputs, outputs, seeds)

    def _compare(self, found: list[OneRank], inputs: Entries, outputs: Entries, seeds: list[Any]) -> str | None:
        for number, (entry, value) in enumerate(zip(outputs, self.expected.values, strict=True)):
            problem = mismatch([results[number] for results, _ in found], entry, value.detach(), self.operands)
            if problem:
                return f"result {number}: {problem}" if len(outputs) > 1 else problem
        for number, gradient in self.expected.gradients.items() if any(s is not None for s in seeds) else ():
            of_ranks = [gradients[number] for _, gradients in found]
            problem = mismatch(of_ranks, dual(inputs[number]), gradient, self.operands)
            if problem:
                return f"gradient of operand {number}: {problem}"
        return None

    def _right_outputs_of(self, inputs: Entries) -> Entries | None:
        """Layouts of the results under which the function itself is right on shards, gradients included."""
        if any(
            shape[e.dim] < self.num_ranks for e, shape in zip(inputs, self.shapes, strict=True) if isinstance(e, Split)
        ):
            return None  # some builtins crash the process on an empty shard
        shards = self._cut(self.operands, inputs)
        outputs = self._right_outputs(shards, [value.detach() for value in self.expected.values])
        if outputs is None:
            return None
        seeds = self._seeds(inputs, outputs)
        found = []
        for rank in range(self.num_ranks):
            leaves = [self._as_leaf(of_ranks[rank].clone()) for of_ranks in shards]
            values = self.example.run([leaf.clone() for leaf in leaves])
            try:
                found.append(_differentiate(values, leaves, seeds, rank))
            except RuntimeError:  # the backward does not fit the shards
                return None
        return None if self._compare(found, inputs, outputs, seeds) else outputs

    def _right_outputs(self, shards: list[Any], values: list[torch.Tensor]) -> Entries | None:
        """Layouts as which the function itself, on these shards, gives ``values``; the most useful ones first."""
        results = []
        for rank in range(self.num_ranks):
            try:
                results.append([value.detach() for value in self.example.run([o[rank].clone() for o in shards])])
            except Exception:  # noqa: BLE001 - a function that raises on a shard has no such signature
                return None
        if any(len(result) != len(values) for result in results):
            return None
        found = []
        for number, value in enumerate(values):
            parts = [result[number] for result in results]
            entry = next((e for e in _possible_outputs(value) if mismatch(parts, e, value) is None), None)
            if entry is None:
                return None
            found.append(entry)
        return tuple(found)

    def _saves(self, inputs: Entries, outputs: Entries) -> bool:
        """Whether what dispatch would do moves bytes that this signature would not."""
        plan, _ = self._plan(0, inputs, self._cut(self.operands, inputs))
        planned = _outputs_of(plan) or (broadcast,) * len(outputs)
        moved = sum(
            plan_boxing(self._layout(entry), target, shape, 4).wire_bytes
            for entry, target, shape in zip(inputs, plan.targets, self.shapes, strict=True)
        )
        return moved + self._cost(planned, outputs, self.expected.shapes) > 0

    def _cost(self, sources: Entries, targets: Entries, shapes: Sequence[tuple[int, ...]]) -> int:
        return sum(
            plan_boxing(self._layout(a), self._layout(b), shape, 4).wire_bytes
            for a, b, shape in zip(sources, targets, shapes, strict=True)
        )

    def _holds_again(self, inputs: Entries, outputs: Entries) -> bool:
        """Whether it holds for other values too: fresh ones, and infinities where zero terms meet them."""
        for value in (None, *[torch.inf, 0.0, torch.nan] * 2):
            operands = [redrawn(operand, value, self.generator) for operand in self.operands]
            try:
                values = [value.detach() for value in self.example.run([operand.clone() for operand in operands])]
            except Exception:  # noqa: BLE001 - the function accepts only the first values
                return False
            shards = self._cut(operands, inputs, one_holder=value is not None)
            found = self._right_outputs(shards, values)
            if found is None or any(
                a != b and not isinstance(a, Broadcast) for a, b in zip(found, outputs, strict=True)
            ):
                return False
        return True

    def _undominated(self, found: list[tuple[Entries, Entries]]) -> list[tuple[Entries, Entries]]:
        """Without those that another missing one gives for free."""
        values = self.expected.shapes
        kept: list[tuple[Entries, Entries]] = []
        for inputs, outputs in found:
            others = [other for other in found if other != (inputs, outputs)]
            better = [
                o for o in others
                if self._cost(inputs, o[0], self.shapes) == 0 and self._cost(o[1], outputs, values) == 0
                and (o in kept or self._cost(o[0], inputs, self.shapes) or self._cost(outputs, o[1], values))
            ]  # fmt: skip
            if not better:
                kept.append((inputs, outputs))
        return kept


class _OneDeviceResults:
    """Results of one device, random weights for them, and the gradients of the weighted sum by operand number."""

    def __init__(self, leaves: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self.values, self.shapes = values, [tuple(value.shape) for value in values]
        generator = torch.Generator().manual_seed(1)
        self.weights = [
            torch.randn(value.shape, generator=generator).to(value.dtype) if value.requires_grad else None
            for value in values
        ]
        pairs = [(v, w) for v, w in zip(values, self.weights, strict=True) if w is not None]
        if pairs:
            torch.autograd.backward([v for v, _ in pairs], [w for _, w in pairs])
        self.gradients = {i: _gradient_of(leaf) for i, leaf in enumerate(leaves) if leaf.requires_grad and pairs}
        self.has_distinct_values = all(
            value.numel() > 0 and bool((value != value.reshape(-1)[0]).any() or value.numel() == 1)
            for value in (v.detach() for v in values)
        )


def _entries_for(operand: torch.Tensor) -> list[Sbp]:
    entries: list[Sbp] = [Split(dim) for dim in range(operand.dim())]
    return [*entries, broadcast] if operand.dtype == torch.bool else [*entries, broadcast, partial_sum]


def _possible_outputs(value: torch.Tensor) -> list[Sbp]:
    splits: list[Sbp] = [Split(dim) for dim in range(value.dim()) if value.shape[dim] > 1]
    return [broadcast, *splits] if value.dtype == torch.bool else [broadcast, *splits, partial_sum]


def _outputs_of(plan: Plan) -> Entries:
    return tuple(spec.layout.sbp[0] for spec in plan.outputs or [])


def _gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf).detach() if leaf.grad is None else leaf.grad


OneRank = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Results and gradients of the operands on one rank."""


def _differentiate(values: list[torch.Tensor], leaves: list[torch.Tensor], seeds: list[Any], rank: int) -> OneRank:
    pairs = [(v, s[rank]) for v, s in zip(values, seeds, strict=True) if s is not None and v.requires_grad]
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [s for _, s in pairs])
    return [value.detach() for value in values], [_gradient_of(leaf) for leaf in leaves]
