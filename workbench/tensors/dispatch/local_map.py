"""``wb.local_map``: a function on shards, with the layouts of its operands and results declared by its author."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from workbench.core.layout import Layout, Shape
from workbench.core.placement import Placement
from workbench.core.sbp import Partial, Sbp, SbpLike
from workbench.errors import LayoutError, SbpError
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.checks import plain_operand_text, refuse_two_placements
from workbench.tensors.dispatch.gradient_layout import box_gradient_of
from workbench.tensors.dispatch.placeholder_calls import TENSOR, autocast_state, infer_outputs, placeholder_outputs
from workbench.tensors.dispatch.planning import key_of
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, new_placeholder, spec_of, wrap

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def local_map(
    function: Callable[_Arguments, _Result],
    in_sbp: str | Sbp | Sequence[SbpLike | None],
    out_sbp: SbpLike | Sequence[SbpLike],
    *,
    in_grad_sbp: str | Sbp | Sequence[SbpLike | None] | None = None,
    out_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
    meta: Callable[..., Any] | None = None,
) -> Callable[_Arguments, _Result]:
    """``function`` on shards: operands are boxed to ``in_sbp``, and each rank's result is its shard of layout
    ``out_sbp``.

    Use it for a custom ``autograd.Function`` or your own kernel. The function gets this rank's shards as plain tensors.
    It does not run on ranks outside the placement. Without a global tensor among the arguments, it is simply called.

    Args:
        function: any function of tensors, such as the ``apply`` of a custom ``autograd.Function``.
        in_sbp: one entry per positional argument, each as in ``to_global(sbp=)``; None for an argument that is not a
            tensor. Of a function of one argument, the entry alone. One entry serves all tensors of a list. Plain
            tensors count as B.
        out_sbp: the layout of the result; for several tensors, a list with one per result.
        in_grad_sbp: the layouts of the gradients that the function's backward returns, where they are not the dual of
            ``in_sbp`` (S to S, B to P, P to B). Example: B for an operand B whose backward returns the whole gradient
            on every rank. None keeps the dual.
        out_shape: logical shape of the result, or a list of them, where it cannot be inferred. The results have the
            dtype of the first floating-point operand.
        meta: computes shapes and dtypes on tensors without data; default: ``function`` itself.

    Returns:
        A function of global tensors. Each rank computes the results' logical shapes from the shards' shapes on all
        ranks, without communication.

    Raises:
        SbpError: another number of entries than arguments, results or axes; a split dim out of range.
        LayoutError: results that are not tensors, or whose shapes on the ranks do not fit the declared layout.

    >>> p = wb.placement(ranks=[0, 1])
    >>> halves = wb.local_map(lambda x, k: (x * k, x.sum(0)), in_sbp=["S(0)", None], out_sbp=["S(0)", "P"])
    >>> y, total = halves(wb.ones(5, 3, placement=p, sbp="S(0)"), 2.0)
    >>> y.shape, total.shape, total.sbp
    (torch.Size([5, 3]), torch.Size([3]), (P,))
    """
    mapping = _Mapping(function, in_sbp, out_sbp, in_grad_sbp, out_shape, meta or function)

    @functools.wraps(function, updated=())
    def mapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Any:
        return mapping(args, kwargs)

    return mapped


def _by_argument(sbp: Any) -> list[Any]:
    """The entries of all arguments; an entry alone is that of the only one."""
    return [sbp] if isinstance(sbp, (str, Sbp)) else list(sbp)


class _Mapping:
    """One declared function; ``name`` is what errors and traces call it."""

    def __init__(self, function: Any, in_sbp: Any, out_sbp: Any, in_grad_sbp: Any, out_shape: Any, meta: Any) -> None:
        self.function, self.in_sbp, self.out_sbp, self.meta = function, _by_argument(in_sbp), out_sbp, meta
        owner = getattr(function, "__self__", None)
        short = getattr(function, "__name__", type(function).__name__)
        self.name = f"local_map({f'{owner.__name__}.apply' if isinstance(owner, type) else short})"
        self.in_grad_sbp = [None] * len(self.in_sbp) if in_grad_sbp is None else _by_argument(in_grad_sbp)
        if len(self.in_grad_sbp) != len(self.in_sbp):
            raise SbpError(
                f"{self.name}: in_grad_sbp has {len(self.in_grad_sbp)} entries, in_sbp {len(self.in_sbp)}. Both have "
                "one per argument: give None where the gradient lies as the dual of the operand."
            )
        self.out_shape = out_shape
        try:
            self.parameters = tuple(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            self.parameters = ()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor)]
        if not known:
            return self.function(*args, **kwargs)
        args, kwargs = self._bind(args, kwargs)
        if len({tensor._spec.layout.placement for tensor in known}) > 1:
            refuse_two_placements(self.function, args, kwargs, known)
        spec = known[0]._spec
        boxed = tuple(self._prepare(i, arg, args, spec) for i, arg in enumerate(args))
        operands = [leaf for leaf in tree_leaves(boxed) if isinstance(leaf, GlobalTensor)]
        structure, results = self._known_results(boxed, kwargs, operands, spec)
        return self._run(boxed, kwargs, operands, structure, results)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keyword arguments that ``in_sbp`` has an entry for, moved to their positions."""
        bound, rest = list(args), dict(kwargs)
        for parameter in self.parameters[len(args) : len(self.in_sbp)]:
            if parameter not in rest:
                break
            bound.append(rest.pop(parameter))
        if len(bound) != len(self.in_sbp):
            raise SbpError(
                f"{self.name}: called with {len(bound)} arguments, but in_sbp has {len(self.in_sbp)} entries. Give one "
                "per argument, and None for an argument that is no tensor, e.g. in_sbp=['S(0)', 'B', None]."
            )
        for name, value in rest.items():
            if any(isinstance(leaf, GlobalTensor) for leaf in tree_leaves(value)):
                raise SbpError(
                    f"{self.name}: the keyword argument {name!r} is a global tensor, and in_sbp's {len(self.in_sbp)} "
                    "entries are for positional arguments. Pass it by position and give it an entry."
                )
        return tuple(bound), rest

    def _prepare(self, position: int, arg: Any, args: tuple[Any, ...], known: Spec) -> Any:
        """One argument with its tensors global and in the declared layout."""
        entry, gradient = self.in_sbp[position], self.in_grad_sbp[position]
        where = f"{self.name}: argument {position + 1}"
        if position < len(self.parameters):
            where += f" ({self.parameters[position]})"

        def prepare(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if entry is None:
                if isinstance(leaf, GlobalTensor):
                    raise SbpError(
                        f"{where} is a global tensor, {leaf._spec.layout}, but in_sbp has None there, which is for "
                        f'what is no tensor. Give its layout, e.g. "{", ".join(map(repr, leaf._spec.layout.sbp))}".'
                    )
                return leaf
            layout = _layout(known.layout.placement, entry, tuple(leaf.shape), f"{where}, in_sbp")
            if not isinstance(leaf, GlobalTensor):
                origin = functools.partial(plain_operand_text, self.function, args, {}, leaf)
                leaf = from_local(leaf, known.world, known.layout, origin)
            leaf = box_implicitly(leaf, layout, self.name)
            return leaf if gradient is None else _with_gradient(leaf, gradient, where)

        if entry is not None and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(arg)):
            raise SbpError(
                f"{where} is a {type(arg).__name__}, but in_sbp has {entry!r} there. Only tensors have layouts: give "
                "None."
            )
        return tree_map(prepare, arg)

    def _known_results(self, args: Any, kwargs: Any, operands: list[GlobalTensor], known: Spec) -> Any:
        """``_results``, worked out once for what they depend on, and forgotten with the function."""
        flags = tuple((t.dtype, t.requires_grad) for t in operands)
        modes = torch.is_grad_enabled(), torch.get_default_dtype(), autocast_state()
        key = (key_of(args), key_of(kwargs), flags, modes)
        leaves = tree_leaves((args, kwargs))
        has_plain = any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, GlobalTensor) for leaf in leaves)
        by_mapping = known.plans.setdefault("local_map", WeakKeyDictionary())
        results: dict[Any, Any] = {} if has_plain else by_mapping.setdefault(self, {})
        try:
            found = results.get(key)
        except TypeError:  # an argument that cannot be hashed
            return self._results(args, kwargs, operands, known)
        if found is None:
            found = results[key] = self._results(args, kwargs, operands, known)
        return found

    def _results(
        self, args: Any, kwargs: Any, operands: list[GlobalTensor], known: Spec
    ) -> tuple[Any, list[tuple[Spec, torch.dtype, Any]]]:
        """Structure of what the function returns, and spec, dtype and links of each result, the same on all ranks."""
        placement = known.layout.placement
        inferred = {} if self.out_shape is not None else {r: self._infer_on(r, args, kwargs) for r in placement}
        infos, structure, leaves = inferred[placement.grid[0]] if inferred else self._given(operands)
        for leaf in leaves:
            if leaf is not TENSOR:
                raise LayoutError(
                    f"{self.name}: returns a {type(leaf).__name__} ({leaf!r}) among {len(leaves)} results. A result is "
                    "a tensor, which has a layout: return torch.tensor(value), or leave it out."
                )
        entries = self._out_entries(structure, len(infos))
        results = []
        for number, (entry, (shape, dtype, links)) in enumerate(zip(entries, infos, strict=True)):
            where = f"{self.name}: result {number}, out_sbp" if len(infos) > 1 else f"{self.name}: out_sbp"
            layout = _layout(placement, entry, shape, where)
            _check_differentiable(layout, links, where)
            if inferred:
                shape = _whole_shape({rank: found[0][number][0] for rank, found in inferred.items()}, layout, where)
            results.append((spec_of(known.world, layout, shape), dtype, links))
        return structure, results

    def _infer_on(self, rank: int, args: Any, kwargs: Any) -> Any:
        """What the function returns on ``rank``, from tensors without data that have that rank's sizes."""

        def to_meta(leaf: Any) -> Any:
            if not isinstance(leaf, GlobalTensor):
                return leaf
            spec = leaf._spec
            shape = spec.layout.local_shape(spec.shape, rank)
            with local_torch():
                local = new_placeholder(shape, leaf.dtype, spec.world.device).requires_grad_(leaf.requires_grad)
                return wrap(local, spec_of(spec.world, spec.layout.broadcast(), shape))

        try:
            metas, meta_kwargs = tree_map(to_meta, (args, kwargs))
            return infer_outputs(self.meta, metas, meta_kwargs, with_grad=True)
        except Exception as raised:
            error = raised.__cause__ or raised
            raise LayoutError(
                f"{self.name}: cannot tell its results' shapes, because it raises {type(error).__name__} on tensors "
                f"without data ({error}). Give meta=, a function of the same arguments that returns empty tensors, or "
                "out_shape=, the logical shapes."
            ) from raised

    def _given(self, operands: list[GlobalTensor]) -> Any:
        """What ``infer_outputs`` would give, by ``out_shape``, for whole results."""
        is_single = all(isinstance(size, int) for size in self.out_shape)
        shapes = [tuple(self.out_shape)] if is_single else [tuple(shape) for shape in self.out_shape]
        leaves, structure = tree_flatten(TENSOR if is_single else (TENSOR,) * len(shapes))
        dtype = next((t.dtype for t in operands if t.is_floating_point()), operands[0].dtype)
        links = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
        return [(shape, dtype, links) for shape in shapes], structure, leaves

    def _out_entries(self, structure: Any, num_results: int) -> list[Any]:
        if structure.is_leaf():
            return [self.out_sbp]
        entries = self.out_sbp if isinstance(self.out_sbp, (list, tuple)) else [self.out_sbp]
        if len(entries) != num_results:
            example = ", ".join(["'S(0)'", *["'B'"] * (num_results - 1)])
            raise SbpError(
                f"{self.name}: returns {num_results} results, but out_sbp has {len(entries)} "
                f"entr{'y' if len(entries) == 1 else 'ies'}. Give a list with one per result, e.g. "
                f"out_sbp=[{example}]."
            )
        return list(entries)

    def _run(self, args: Any, kwargs: Any, operands: list[GlobalTensor], structure: Any, results: Any) -> Any:
        specs = [spec for spec, _, _ in results]
        world = specs[0].world
        if specs[0].is_placeholder:
            infos = [(spec.shape, dtype, links) for spec, dtype, links in results]
            locals_ = placeholder_outputs(infos, operands, world.device)
        else:
            locals_ = tree_leaves(aliases(self.function(*tree_map(plain_alias, args), **kwargs)))
            self._check_shards(locals_, specs)
        return tree_unflatten([wrap(t, spec) for t, spec in zip(locals_, specs, strict=True)], structure)

    def _check_shards(self, locals_: list[Any], specs: list[Spec]) -> None:
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__ for value in locals_]
        expected = [tuple(spec.local_shape) for spec in specs]
        if shapes != expected:
            declared = "out_shape" if self.out_shape is not None else "meta"
            raise LayoutError(
                f"{self.name}: rank {specs[0].world.rank} returns {shapes}, but {declared} says {expected} for "
                f"{[str(spec.layout) for spec in specs]}. Every rank returns its balanced part (torch.tensor_split): "
                "mend the function or what was declared."
            )


def plain_alias(leaf: Any) -> Any:
    """This rank's shard as a plain tensor with its history."""
    if not isinstance(leaf, GlobalTensor):
        return leaf
    with local_torch():
        return leaf.as_subclass(torch.Tensor)


def aliases(results: Any) -> Any:
    """What a user's function returns, as tensors that it does not hold: those that it keeps, as for its backward, must
    not become global.
    """

    def alias(leaf: Any) -> Any:
        return leaf[...] if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided else leaf

    with local_torch():
        return tree_map(alias, results)


def _layout(placement: Placement, entry: Any, shape: Shape, where: str) -> Layout:
    try:
        return Layout.of(placement, entry).normalized(shape)
    except SbpError as error:
        raise SbpError(f"{where}: {error}") from None


def _check_differentiable(layout: Layout, links: Any, where: str) -> None:
    for entry in layout.sbp:
        if links and isinstance(entry, Partial) and entry.reduction != "sum":
            raise LayoutError(
                f"{where}: {entry} for a result that requires a gradient. Only sums are linear in their terms: call it "
                "under torch.no_grad(), or return B or S."
            )


def _whole_shape(shapes: dict[int, Shape], layout: Layout, where: str) -> Shape:
    """The logical shape whose balanced parts are the shards' shapes; an error where there is none."""
    placement = layout.placement
    whole = list(shapes[placement.grid[0]])
    for dim in range(len(whole)):
        whole[dim] = sum(shapes[rank][dim] for rank in layout.ranks_along(dim, placement.grid[0]))
    for rank in placement:
        expected = layout.local_shape(tuple(whole), rank)
        if shapes[rank] != expected:
            raise LayoutError(
                f"{where}: {layout} does not fit what the ranks return: rank {rank} returns shape {shapes[rank]}, but "
                f"its part of the whole {tuple(whole)} is {expected}. Split dims are cut in balanced parts "
                "(torch.tensor_split), all other dims are equal on all ranks: declare another layout, or return such "
                "parts."
            )
    return tuple(whole)


def _with_gradient(tensor: GlobalTensor, declared: Any, where: str) -> GlobalTensor:
    spec = tensor._spec
    layout = _layout(spec.layout.placement, declared, spec.shape, f"{where}, in_grad_sbp")
    for rank in layout.placement:
        mine, theirs = (one.local_shape(spec.shape, rank) for one in (spec.layout, layout))
        if mine != theirs:
            raise SbpError(
                f"{where}: in_sbp gives rank {rank} a shard of shape {mine}, in_grad_sbp {layout} a gradient of shape "
                f"{theirs}. A gradient has the shape of its operand: use the same splits, and B or P elsewhere."
            )
    return box_gradient_of(tensor, layout, spec.layout.dual(), "in_grad_sbp")
