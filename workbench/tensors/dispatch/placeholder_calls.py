"""A function call on a rank outside the placement: no data, but the same links in the autograd graph.

Every rank runs the whole program, so that boxings are reached in the same order everywhere, forward and backward. A
placeholder's gradient is None from end to end: autograd still visits every node, and nothing is allocated. Only where
the graph of the gradients is wanted (``create_graph=True``) are they tensors, linked as the owner's: each function is
run again on meta tensors and differentiated there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from workbench.core.layout import Shape
from workbench.tensors.dispatch.registry import USER_FUNCTION_NAMES
from workbench.tensors.fake_mode import fake_mode
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, new_placeholder, wrap
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.leaf_gradients import mark_placeholder_leaves
from workbench.tensors.tensor_state import applying, count_write

TENSOR = object()
"""Marks a tensor among the leaves of a result."""
OutputInfo = tuple[Shape, torch.dtype, bool | tuple[int, ...]]
"""Logical shape and dtype of one result; the operands it is linked to by number, True for all, False for none."""
Recipe = Callable[[dict[int, torch.Tensor]], Sequence[torch.Tensor]]
"""Computes a function's results on meta tensors, given those that stand for its operands, by id."""


class NeedsDataError(Exception):
    """A function cannot run on tensors without data: it reads values, or nobody has written it for metadata.

    Its cause is the error that the function raises.
    """


def infer_outputs(
    func: Callable[..., Any], args: Any, kwargs: Any, with_grad: bool = False
) -> tuple[list[OutputInfo], Any, list[Any]]:
    """Run ``func`` on meta tensors of the logical shapes.

    Returns:
        info of every tensor in the result, the result's structure, and its leaves with ``TENSOR`` for tensors.

    Raises:
        NeedsDataError: the function cannot run on meta tensors. Mistakes in its arguments are its own errors.
    """
    memo: dict[int, torch.Tensor] = {}
    with _inferring(with_grad):
        result = _run_without_data(func, args, kwargs, memo, with_grad)
        operands = [memo[id(leaf)] for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, GlobalTensor)]
        return outputs_info(result, operands)


def infer_dtypes(func: Callable[..., Any], args: Any, kwargs: Any, shapes: Sequence[Shape]) -> list[torch.dtype]:
    """Dtypes of the results for shards, by a run of ``func`` on tensors without data of the logical ``shapes``."""
    with _inferring():
        shards = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        memo = {
            id(shard): torch.empty(shape, dtype=shard.dtype, device=_device_without_data(shard.device))
            for shard, shape in zip(shards, shapes, strict=True)
        }
        result = _run_without_data(func, args, kwargs, memo, with_grad=False)
        return [leaf.dtype for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]


@contextmanager
def _inferring(with_grad: bool = False) -> Iterator[None]:
    """Context in which functions run on tensors without data."""
    grad_mode = torch.set_grad_enabled(with_grad and torch.is_grad_enabled())
    with grad_mode, hidden_from_modes(), _without_data(), saving_as_ever():
        yield


def outputs_info(result: Any, operands: list[torch.Tensor]) -> tuple[list[OutputInfo], Any, list[Any]]:
    """Info of every tensor in a function's result; ``operands`` stand for the global ones that it was computed of."""
    out_leaves, out_structure = tree_flatten(result)
    infos: list[OutputInfo] = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad and (_links(leaf, operands) or True))
        for leaf in out_leaves
        if isinstance(leaf, torch.Tensor)
    ]
    return infos, out_structure, [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in out_leaves]


def autocast_state() -> tuple[Any, ...]:
    """What autocast does now; the dtypes of results depend on it."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple([torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)])


def _without_data() -> Any:
    """Where tensors without data live: meta, or, for autocast (which goes by the device), fake ones of this device.

    Constants that the function makes lie there too: on meta they could not meet others.
    """
    if not autocast_state():
        return torch.device("meta")
    return fake_mode()


def saving_as_ever() -> Any:
    """No saved-tensor hooks: a checkpoint counts what is saved, and this happens the first time only."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _run_without_data(func: Any, args: Any, kwargs: Any, memo: dict[int, torch.Tensor], with_grad: bool) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    meta_args, meta_kwargs = tree_unflatten([_as_meta(leaf, memo, with_grad) for leaf in leaves], structure)
    if meta_kwargs.get("device") is not None:
        meta_kwargs = {**meta_kwargs, "device": _device_without_data(meta_kwargs["device"])}
    with local_torch():
        try:
            return func(*meta_args, **meta_kwargs)
        except Exception as error:
            if func in USER_FUNCTION_NAMES or _lacks_data(error):
                raise NeedsDataError(f"{type(error).__name__}: {error}") from error
            raise


def _lacks_data(error: Exception) -> bool:
    """Whether torch raises this because a tensor has no data: fake tensors have own errors, others name meta."""
    is_of_fake_tensors = type(error).__module__ == FakeTensor.__module__
    words = str(error)
    return isinstance(error, NotImplementedError) or is_of_fake_tensors or "meta" in words or "not allocated" in words


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has numbers; those in which ``infer_outputs`` runs functions have none."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _device_without_data(device: Any) -> Any:
    """Under autocast this device; metadata has none of its own, a dry run's is the CPU's (``World.autocast_type``)."""
    if not autocast_state():
        return "meta"
    return "cpu" if torch.device(device).type == "meta" else device


def _as_meta(leaf: Any, memo: dict[int, torch.Tensor], with_grad: bool) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device(_device_without_data(leaf))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if id(leaf) not in memo:
        with local_torch():
            shape = leaf._spec.shape if isinstance(leaf, GlobalTensor) else leaf.shape
            meta = torch.empty(shape, dtype=leaf.dtype, device=_device_without_data(leaf.device))
            if with_grad and leaf.requires_grad:
                meta = meta.requires_grad_()
                meta = meta if leaf.is_leaf else meta.clone()  # torch refuses in-place functions on leaves
            memo[id(leaf)] = meta
    return memo[id(leaf)]


def _links(result: torch.Tensor, operands: list[torch.Tensor]) -> tuple[int, ...]:
    """Numbers of the operands that the history of ``result`` reaches."""
    found, seen, waiting = {id(result)}, set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        waiting += [edge for edge, _ in node.next_functions]
    return tuple(i for i, t in enumerate(operands) if id(t) in found or (t.grad_fn is not None and t.grad_fn in seen))


def recipe_of(func: Callable[..., Any], args: Any, kwargs: Any, in_place: bool = False) -> Recipe:
    """How to compute the results of ``func(*args, **kwargs)`` on meta tensors; of an in-place function, its target."""

    def run(metas: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        memo = dict(metas)
        if in_place:
            memo[id(args[0])] = target = _as_meta(args[0], memo, False).clone()
        result = _run_without_data(func, args, kwargs, memo, with_grad=False)
        return [target] if in_place else [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]

    return run


_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def _gradients(ctx: Any, grads: Any) -> Sequence[Any]:
    """The gradients of a node's inputs. Where autograd frees the graph, the node drops the inputs: the history of one
    that was written since (``x += f(x)``) leads back to the node, and Python collects no such cycle.
    """
    if torch.is_grad_enabled() and ctx.second_order is None:
        raise RuntimeError("create_graph=True through a graph that is freed: give its first backward retain_graph=True")
    found: Sequence[Any] = ctx.second_order(grads) if torch.is_grad_enabled() else (None,) * ctx.num_inputs
    if not _keeps_graph():
        ctx.second_order = None
    return found


class _Placeholder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, infos: list[OutputInfo], device: torch.device, second_order: Any, *inputs: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.num_inputs, ctx.second_order = len(inputs), second_order
        ctx.leaves = [tensor for tensor in inputs if tensor.is_leaf and isinstance(tensor, GlobalTensor)]
        return tuple([new_placeholder(shape, dtype, device) for shape, dtype, _ in infos])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if any(leaf._gradient.placeholder is False for leaf in ctx.leaves):  # few steps need the walk over all inputs
            mark_placeholder_leaves(ctx)
        return None, None, None, *_gradients(ctx, grads)


_apply_placeholder = applying(_Placeholder)


class _PlaceholderWrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, second_order: Any, target: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.num_inputs, ctx.second_order = 1 + len(inputs), second_order
        ctx.mark_dirty(target)
        return target

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mark_placeholder_leaves(ctx)
        return None, *_gradients(ctx, grads)


class _ToMeta(torch.autograd.Function):
    """A placeholder as a meta tensor, so that torch's own functions can be differentiated for their links."""

    @staticmethod
    def forward(ctx: Any, placeholder: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.device = placeholder.device
        return torch.empty(placeholder.shape, dtype=placeholder.dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mark_placeholder_leaves(ctx)
        linked = torch.is_grad_enabled() and grads[0] is not None
        return _FromMeta.apply(grads[0], ctx.device) if linked else None


class _FromMeta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return new_placeholder(tuple(meta.shape), meta.dtype, device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None if grads[0] is None else _ToMeta.apply(grads[0])), None


def _second_order(inputs: Sequence[torch.Tensor], keys: Sequence[int], recipe: Recipe | None, device: Any) -> Any:
    """The differentiable gradient of a function on placeholders: ``grads -> grads of inputs``, linked as owners do."""

    def gradient(grads: Sequence[Any]) -> Sequence[Any]:
        with local_torch():
            if recipe is None:
                sources = [grad for grad in grads if grad is not None] + list(inputs)
                infos: list[OutputInfo] = [(tuple(t.shape), t.dtype, True) for t in inputs]
                again = _second_order(sources, [id(t) for t in sources], None, device)
                return _Placeholder.apply(infos, device, again, *sources)
            metas = {key: _ToMeta.apply(t) for key, t in zip(keys, inputs, strict=True)}
            results = recipe(metas)
            pairs = [
                (result, _ToMeta.apply(grad))
                for result, grad in zip(results, grads, strict=False)
                if grad is not None and result.requires_grad
            ]
            if not pairs:
                return (None,) * len(inputs)
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                list(metas.values()),
                [grad for _, grad in pairs],
                create_graph=True,
                allow_unused=True,
            )
            by_key = dict(zip(metas, found, strict=True))
            of_each = [by_key.pop(key, None) for key in keys]  # of w * w all is the first one's
            return [None if grad is None else _FromMeta.apply(grad, device) for grad in of_each]

    return gradient


def placeholder_outputs(
    infos: list[OutputInfo],
    operands: list[GlobalTensor],
    device: torch.device,
    recipe: Recipe | None = None,
) -> Sequence[torch.Tensor]:
    """Plain placeholder tensors for the results, each linked to the operands that its owner's result is linked to.

    Without a ``recipe`` the gradient of the gradient is linked to everything.
    """
    with local_torch():
        if len(infos) == 1:
            return _alike(infos, operands, device, recipe)
        results: dict[int, torch.Tensor] = {}
        for links in dict.fromkeys([info[2] for info in infos]):
            same = [i for i, info in enumerate(infos) if info[2] == links]
            some: Callable[..., Any] | None = recipe and (lambda m, same=same: [*map(recipe(m).__getitem__, same)])
            made = _alike([infos[i] for i in same], operands, device, some)
            results.update(zip(same, made, strict=True))
        return [results[i] for i in range(len(infos))]


def wrapped_placeholders(found: Any, operands: list[GlobalTensor], specs: list[Spec], recipe: Recipe | None) -> Any:
    """The result that ``infer_outputs`` has found, with placeholders in these layouts as its tensors."""
    infos, structure, leaves = found
    made = placeholder_outputs(infos, operands, operands[0]._spec.world.device, recipe)
    results = [wrap(result, spec) for result, spec in zip(made, specs, strict=True)]
    if structure.is_leaf() and results:
        return results[0]
    remaining = iter(results)
    return tree_unflatten([next(remaining) if leaf is TENSOR else leaf for leaf in leaves], structure)


def _alike(
    infos: list[OutputInfo],
    operands: list[GlobalTensor],
    device: torch.device,
    recipe: Recipe | None,
) -> Sequence[torch.Tensor]:
    """Results that are all linked to the same operands, by one node."""
    links = infos[0][2]
    if links is True:
        linked = [operand for operand in operands if operand.requires_grad]
    else:
        linked = [operands[i] for i in links if operands[i].requires_grad] if links else []
    if not linked or not torch.is_grad_enabled():  # without gradients, views alone still require one
        return [new_placeholder(shape, dtype, device).requires_grad_(bool(linked)) for shape, dtype, _ in infos]
    again = _second_order(linked, [id(t) for t in linked], recipe, device)
    made: Sequence[torch.Tensor] = _apply_placeholder(infos, device, again, *linked)
    return made


def write_placeholder(
    target: GlobalTensor,
    operands: list[GlobalTensor],
    func: Callable[..., Any] | None = None,
    args: Any = (),
    kwargs: Any = None,
) -> GlobalTensor:
    """Mirror an in-place operation on a placeholder: no data, but the target's history continues from here.

    ``func(*args, **kwargs)`` is the operation, for the gradient of the gradient.
    """
    with local_torch():
        others = [operand for operand in operands if operand is not target and operand.requires_grad]
        differentiable = target.is_floating_point() or target.is_complex()
        if torch.is_grad_enabled() and (others or target.requires_grad) and differentiable:
            second_order = _second_order_in_place(target, others, func, args, kwargs or {})
            _PlaceholderWrite.apply(second_order, target, *others)
            if target._history_views is not None:
                _rebase([view for view in target._history_views.values() if view._history_base is target], target)
        count_write(target)  # all ranks cache boxings by version
    if target._history_base is not None:
        write_placeholder(target._history_base, [target._history_base, target])
    return target


def _rebase(views: Sequence[GlobalTensor], base: GlobalTensor) -> None:
    """Link views to the history that their base has now, as torch does where there is data. It refuses those that were
    made without gradients when they are used.
    """
    key = id(base)
    for view in (view for view in views if not (view.is_leaf and view.requires_grad)):
        shape, is_alike = tuple(view.shape), view.dtype == base.dtype
        recipe: Any = (lambda metas, shape=shape: [metas[key].sum().expand(shape)]) if is_alike else None
        of_base = _second_order([base], [key], recipe, view.device)
        _PlaceholderWrite.apply(lambda grads, of_base=of_base: (None, *of_base(grads)), view, base)


def _second_order_in_place(target: GlobalTensor, others: list[Any], func: Any, args: Any, kwargs: Any) -> Any:
    # The node must not hold its own result, so the recipe gets a stub in place of the target.
    stub = torch.empty(target._spec.shape, dtype=target.dtype, device="meta")
    recipe = None
    if func is not None:
        args, kwargs = tree_map(lambda leaf: stub if leaf is target else leaf, (args, kwargs))
        recipe = recipe_of(func, args, kwargs, in_place=True)
    device, inputs, keys = target.device, list(others), [id(t) for t in others]
    if not target.requires_grad:
        of_others = _second_order(inputs, keys, recipe, device)
        return lambda grads: (None, *of_others(grads))
    info: OutputInfo = (tuple(target.shape), target.dtype, True)
    before = _Placeholder.apply([info], device, lambda grads: grads, target)[0]  # the target's history up to now
    return _second_order([before, *inputs], [id(stub), *keys], recipe, device)
