"""Recomputation per block: ``recompute`` of a strategy. A block saves its input, and runs its forward again in
backward. It may also keep results that take long to compute (torch's selective checkpointing), or only some blocks run
again.

Blocks are the repeated parts of a model: the members of its outermost ``nn.ModuleList``, ``nn.ModuleDict`` or
``nn.Sequential`` objects that have submodules, else its modules of one class. A model without blocks (a chain of
layers) is recomputed layer by layer. (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.)
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from workbench.core.recompute_kinds import chosen_blocks
from workbench.errors import StrategyError
from workbench.pipeline.check import check_table
from workbench.pipeline.schedules import make_table
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.reached_objects import PLAIN_VALUES
from workbench.tensors.tensor_state import version_of
from workbench.training.kept_results import KEPT, count_kept, keeping_contexts
from workbench.training.strategies.blocks import repeated_blocks
from workbench.training.strategies.state import ParallelState, layers_of


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Make every block of ``module`` recompute, if the strategy says so."""
    blocks = _chosen_blocks(module, state)
    around = {part: path.rpartition(".")[0] for path, part in module.named_modules()} if blocks else {}
    return [Recomputed(block, state.strategy.options.recompute, around[block]) for block in blocks]


def _chosen_blocks(module: nn.Module, state: ParallelState) -> list[nn.Module]:
    """The blocks that the strategy runs again."""
    how = state.strategy.options.recompute
    blocks = blocks_of(module) if how else []
    chosen = chosen_blocks(len(blocks), how)
    return [block for number, block in enumerate(blocks) if number in chosen]


def check(module: nn.Module, state: ParallelState) -> None:
    """Refuse blocks over several stages if these would wait for each other when they run again.

    Raises:
        StrategyError: names a block, its stages, and the ranks that would wait.
    """
    resolved, stage_of = state.resolved, dict[nn.Module, int]()
    for choice, (_, layer) in zip(resolved.layers, layers_of(module), strict=True):
        stage_of[layer] = choice.stage
    blocks = _chosen_blocks(module, state)
    stages = {block: {stage_of[part] for part in block.modules() if part in stage_of} for block in blocks}
    over_several = {block: (min(on), max(on)) for block, on in stages.items() if len(on) > 1}
    if not over_several:
        return
    m, again = resolved.num_micro_batches, sorted(set(over_several.values()))
    table = make_table(resolved.schedule, resolved.num_stages, m, resolved.degrees[0])
    if not (problems := check_table(table, resolved.num_stages, m, run_again=again)):
        return
    name = next(name for name, part in module.named_modules() if part in over_several)
    first, last = over_several[module.get_submodule(name)]
    raise StrategyError(
        f"strategy {str(state.strategy)!r}: recompute runs {name} again, which lies on stages {first} to {last}. Under "
        f"{resolved.schedule} with {m} micro-batches these would wait for each other ({problems[0]}). Put all layers "
        "of a block on one stage, use 1f1b with one stage on each rank, or leave recompute out."
    )


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks that are recomputed.

    >>> blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    blocks = list(repeated_blocks(module))
    return blocks or [layer for _, layer in layers_of(module) if layer is not module]


_KEPT_PASS_HOOKS_BY: dict[str, Any] = {
    name: False for name in ("respect_saved_tensors_hooks",) if name in inspect.signature(checkpoint).parameters
}
"""What blocks keep passes by hooks of saved tensors. torch 2.14 asks for it, those before do not know the word."""


def _held(block: nn.Module, kind: str) -> list[tuple[dict[str, Any], str, Any]]:
    """The ``_parameters`` or ``_buffers`` of a block and its parts, each with the dict that holds it and its name."""
    holders = [vars(part)[kind] for part in block.modules()]
    return [(held, name, tensor) for held in holders for name, tensor in held.items()]


class Recomputed:
    """Runs the calls of a block with its hooks, which gather or load parameters and must do so in both runs.

    It takes the place of a compiled call of ``nn.Module.compile``, which torch leaves out of copies of a module: a copy
    of this object, in the copied state of the model, puts itself there. ``how`` is the option of a strategy, ``around``
    the path of what the block is a member of.
    """

    def __init__(self, block: nn.Module, how: str = "full", around: str = "") -> None:
        self.block, self.how, self.around, self.kept = block, how, around, KEPT.get(how)
        block._compiled_call_impl = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Recomputed:
        return Recomputed(copy.deepcopy(self.block, memo), self.how, self.around)

    def remove(self) -> None:
        """Make the block save its activations again."""
        if self.block._compiled_call_impl is self:
            self.block._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.block._call_impl(*args, **kwargs)
        args, kwargs = self._without_caches(args, kwargs)
        state, has_run = _StateBefore(self.block), False
        given = [(t, _version(t)) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            if has_run:
                with state.put_back(), _explaining_errors(self.block):
                    return self.block._call_impl(*args, **kwargs)
            has_run = True
            result = self.block._call_impl(*args, **kwargs)
            state.forget_unchanged()
            if any(_version(t) != version and t.requires_grad for t, version in given):
                raise StrategyError(
                    f"recompute: {type(self.block).__name__} has written in place to 1 tensor that it was given "
                    "(x += y), where its second run would find other values. Compute a new tensor (x = x + y), or "
                    "leave recompute out."
                )
            given.clear()
            return result

        if self.kept is None:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        kwargs |= _KEPT_PASS_HOOKS_BY
        contexts = keeping_contexts(self.kept)
        result = checkpoint(run, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)
        count_kept(contexts[0])
        return result

    def _without_caches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without an empty cache of ``transformers``, which drops it too when it recomputes.

        A block fills its cache. A second run would find the entries of the first and attend to every word twice. The
        cache would also keep the graph of every step alive, because the function that runs again holds it.
        """
        values = [*args, *kwargs.values()]
        of_transformers = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
        empty = [v for v in values if isinstance(v, of_transformers) and v.get_seq_length() == 0]
        for value in values:
            if _is_cache(value, of_transformers) and value not in empty:
                raise StrategyError(
                    f"recompute: {type(self.block).__name__} was given 1 cache of keys and values "
                    f"({type(value).__name__}) that it cannot leave out. The first run of a block fills it, and the "
                    "second one, in backward, finds other words there. Call the model with use_cache=False."
                )
        if not empty:
            return args, kwargs
        for cache in empty:
            filled_by = _left_out.setdefault(cache, self.around)
            if filled_by != self.around:
                raise StrategyError(
                    f"recompute: the blocks of {self.around} read 1 cache of keys and values "
                    f"({type(cache).__name__}) that the blocks of {filled_by} have filled. Blocks run again without "
                    "caches, whose entries would be those of the first run. Leave recompute out, or use offload=, "
                    "zero= or more ranks, if memory is short."
                )
        named = {name: None if isinstance(value, of_transformers) else value for name, value in kwargs.items()}
        if "use_cache" in named:
            named["use_cache"] = False
        return tuple(None if isinstance(value, of_transformers) else value for value in args), named


@contextmanager
def _explaining_errors(block: nn.Module) -> Iterator[None]:
    """Context that explains torch's errors of a second run: the block has written to a kept result, or runs again for
    another backward of the same graph.
    """
    try:
        yield
    except RuntimeError as error:
        name, text = type(block).__name__, str(error)
        if "has been mutated" in text:
            raise StrategyError(
                f"recompute: {name} has written in place to a result that is kept for its second run "
                "(x += y, ReLU(inplace=True)), which would find other values there. Use recompute, which keeps 0 "
                "results, or compute a new tensor."
            ) from error
        if "backward an extra time" in text:
            raise StrategyError(
                f"recompute: {name} runs again for the 2nd backward of one graph (retain_graph=True), and the 1st has "
                "used the results that recompute=cheap and attention keep. Use recompute, which keeps 0 results and "
                "runs again for each backward, or add the losses and call backward once."
            ) from error
        raise


_left_out: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""By cache, the path of the blocks that were called without it."""


def _is_cache(value: Any, of_transformers: Any) -> bool:
    return isinstance(value, of_transformers) or isinstance(getattr(value, "is_updated", None), dict)


_Attribute = tuple[dict[str, Any], str, Any]
_ABSENT, _AS_IT_IS = object(), object()


class _StateBefore:
    """A block before its first forward: copies of the buffers that this forward changes, the numbers, texts and tensors
    without history that it changes among attributes, modes, and the parameters: ``torch.func.functional_call`` may have
    put these into their places for its call.

    The second forward starts from these values. Otherwise a spectral norm, for example, would iterate once more and
    give other weights. The second forward writes to copies, and so the block keeps what the first has made of it.
    Values of parameters are not copied: a forward that writes to one must write the same again.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        with torch.no_grad():
            held = _held(block, "_buffers")
            self.before = [(*found, None if found[2] is None else found[2].clone()) for found in held]
        self.versions = [_version(buffer) for *_, buffer, _ in self.before]
        self.parts = [(vars(part), dict(vars(part))) for part in block.modules()]
        self.attributes = _held(block, "_parameters")
        self.parameters = [(held, _version(held)) for *_, held in self.attributes if held is not None]
        self.written: list[Any] = []

    def forget_unchanged(self) -> None:
        """After the first forward: drop what did not change. Modes may change before the second."""
        self.before = [
            (held, name, buffer, buffer if held.get(name) is buffer and _version(buffer) == version else copy)
            for (held, name, buffer, copy), version in zip(self.before, self.versions, strict=True)
        ]
        self.attributes += [
            (held, name, _kept(values.get(name, _ABSENT)))
            for held, values in self.parts
            for name in ("training", *_changed(values, held))
        ]
        self.parts.clear()
        changed = [parameter for parameter, version in self.parameters if _version(parameter) != version]
        self.written = [p for p in changed if isinstance(p, GlobalTensor) and not p._spec.is_placeholder]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Context in which the block is as it was before the first forward; its buffers are copies.

        Raises:
            StrategyError: what the block writes to its parameters differs from what its first forward wrote.
        """
        now = _held(self.block, "_buffers")
        attributes = [(held, name, held.get(name, _ABSENT)) for held, name, _ in self.attributes]
        before = {(id(held), name): copy for held, name, _, copy in self.before}
        with torch.no_grad(), hidden_from_modes():
            with local_torch():
                values = [parameter.detach().clone() for parameter in self.written]
            for held, name, buffer in now:
                found = before.get((id(held), name), buffer)
                held[name] = found if found is None or found.requires_grad else found.clone()
        _set(self.attributes)
        try:
            yield
        finally:
            _set(attributes)
            for held, name, buffer in now:
                held[name] = buffer
        with torch.no_grad(), hidden_from_modes(), local_torch():
            if not all(torch.allclose(p, value, equal_nan=True) for p, value in zip(self.written, values, strict=True)):
                raise StrategyError(
                    f"recompute: the forward of {type(self.block).__name__} has written to {len(values)} of "
                    f"{len(self.parameters)} parameters, and has written other values when it ran again in backward. "
                    "Both runs start from the same buffers, but from the parameters as they are. Register what it "
                    "writes to with register_buffer, or write outside of the block's forward."
                )


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The names of what is another object."""
    if len(before) == len(now) and all(map(is_, before.values(), now.values())):  # the common case
        return []
    return [n for n in dict.fromkeys((*before, *now)) if before.get(n, _ABSENT) is not now.get(n, _ABSENT)]


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with local_torch():
            return value if value.grad_fn is None else _AS_IT_IS  # the graph of an earlier step would stay
    return value if value is _ABSENT or type(value) in PLAIN_VALUES else _AS_IT_IS


def _set(attributes: list[_Attribute]) -> None:
    for held, name, value in attributes:
        if value is _ABSENT:
            held.pop(name, None)
        elif value is not _AS_IT_IS:
            held[name] = value


def _version(buffer: torch.Tensor | None) -> int:
    with local_torch():
        return 0 if buffer is None else version_of(buffer)
