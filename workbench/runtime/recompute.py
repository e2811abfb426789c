"""Recomputation per block: ``recompute`` of a strategy. A block saves its input and runs forward again for backward.

Blocks are the repeated parts of a model: the members of its outermost ``nn.ModuleList`` or ``nn.Sequential`` objects
that have parts themselves. A model without any (a chain of layers) is recomputed layer by layer. (Chen et al., Training
Deep Nets with Sublinear Memory Cost, 2016.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from workbench.errors import StrategyError
from workbench.runtime.strategies.state import ParallelState, layers_of
from workbench.runtime.tensor import GlobalTensor, Spec, label


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Let every block of ``module`` be recomputed, where the strategy says so."""
    if not state.strategy.options.recompute:
        return []
    return [Recomputed(block) for block in blocks_of(module)]


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks that are recomputed.

    >>> blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    [Linear(in_features=2, out_features=2, bias=True)]
    """
    blocks = list(repeated_blocks(module))
    return blocks or [layer for _, layer in layers_of(module) if layer is not module]


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists and sequences of modules that have parts themselves."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        blocks = [child for child in module if any(True for _ in child.children()) and _has_parameters(child)]
        if blocks:
            yield from blocks
            return
    for child in module.children():
        yield from repeated_blocks(child)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


class Recomputed:
    """Runs the calls of a block, with its hooks: they gather or bring parameters, and must do so again.

    It stands where ``nn.Module.compile`` puts a compiled call; copies of the module leave it behind.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        block._compiled_call_impl = self

    def remove(self) -> None:
        """The block saves its activations again."""
        if self.block._compiled_call_impl is self:
            self.block._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.block._call_impl(*args, **kwargs)
        self._refuse_caches([*args, *kwargs.values()])
        specs = [leaf._spec if isinstance(leaf, GlobalTensor) else None for leaf in tree_leaves((args, kwargs))]
        has_run: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not has_run:
                has_run.append(True)
                return self.block._call_impl(*args, **kwargs)
            args, kwargs = _labelled((args, kwargs), specs)
            with _CopiedBuffers(self.block):
                return self.block._call_impl(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def _refuse_caches(self, values: Sequence[Any]) -> None:
        """A cache that remembers that it was filled makes the second run another one than the first."""
        cache = next((value for value in values if isinstance(getattr(value, "is_updated", None), dict)), None)
        if cache is not None:
            raise StrategyError(
                f"recompute: {type(self.block).__name__} was given 1 cache of keys and values "
                f"({type(cache).__name__}). Its first run fills it, and the second one, in backward, finds it full and "
                "computes less. Training needs no cache: call the model with use_cache=False."
            )


def _labelled(values: Any, specs: Sequence[Spec | None]) -> Any:
    """Arguments as they were: where hooks look at what autograd saves, torch gives plain aliases of them back."""
    leaves, structure = tree_flatten(values)
    pairs = zip(leaves, specs, strict=True)
    return tree_unflatten(
        [label(leaf, spec) if spec is not None and type(leaf) is torch.Tensor else leaf for leaf, spec in pairs],
        structure,
    )


class _CopiedBuffers:
    """Context in which a block writes to copies of its buffers: statistics are of the first forward, not of both."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __enter__(self) -> None:
        self.kept = [
            (part, name, buffer) for part in self.block.modules() for name, buffer in part.named_buffers(recurse=False)
        ]
        with torch.no_grad():
            for part, name, buffer in self.kept:
                part._buffers[name] = buffer.clone()

    def __exit__(self, *exc: object) -> None:
        for part, name, buffer in self.kept:
            part._buffers[name] = buffer
