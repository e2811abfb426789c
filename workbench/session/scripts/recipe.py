"""What a script is made of, whatever library it trains with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedStrategy, Strategy
from workbench.session.scripts.sources import WIDTH, Source

if TYPE_CHECKING:
    from torch import nn

    from workbench.training.batches import Batch


@dataclass(frozen=True)
class Recipe:
    """A strategy, the user's functions, and the numbers of a training.

    Attributes:
        sources: by role; those that are not given are missing, or have a place to fill in.
        model: the model, maybe without data, for its layers; None if it is not known.
        layers, resolved: those of the model; None without it.
    """

    strategy: Strategy
    num_ranks: int
    sources: dict[str, Source]
    batch_size: int
    num_steps: int
    seed: int
    model: nn.Module | None = None
    layers: Sequence[Layer] | None = None
    resolved: ResolvedStrategy | None = None

    @cached_property
    def model_with_data(self) -> nn.Module:
        """The model with its first weights, on the CPU, in evaluation: nothing is dropped."""
        from workbench.tensors.program_state import all_seeded, undrawn

        with undrawn(), all_seeded(self.seed):
            model: nn.Module = self.sources["model_fn"].value()
        return model.eval()

    @cached_property
    def samples(self) -> Any:
        """The data set; None if it is not known."""
        if self.sources["dataset"].value is None:
            return None
        from workbench.tensors.program_state import undrawn

        with undrawn():
            return self.sources["dataset"].samples

    @cached_property
    def first_samples(self) -> Any:
        """A batch of two samples as the loaders give it; None if the data set is not known."""
        if self.samples is None:
            return None
        import torch

        from workbench.tensors.program_state import undrawn
        from workbench.training.batches import as_tensors
        from workbench.training.datasets import take

        collate = self.sources.get("collate_fn")
        with undrawn():
            return as_tensors(take(self.samples, torch.arange(2), None if collate is None else collate.value))

    @cached_property
    def first_batch(self) -> Batch:
        """These samples as inputs and targets."""
        from workbench.training.batches import Batch

        loss_fn = self.sources.get("loss_fn")
        return Batch.of(self.first_samples, None if loss_fn is None else loss_fn.value)

    @property
    def is_dict(self) -> bool:
        """Whether a batch is a dict. Where the data set is not known, that of a model with its own loss is."""
        return isinstance(self.first_samples, dict) or (self.first_samples is None and "loss_fn" not in self.sources)

    @property
    def num_entries(self) -> int:
        """Of a batch that is a tuple, how many entries it has; 2 if the data set is not known."""
        if self.first_samples is None:
            return 2
        return len(self.first_samples) if isinstance(self.first_samples, (tuple, list)) else 1

    @property
    def dataset_text(self) -> str:
        """The data set in the script."""
        return "dataset()" if self.sources["dataset"].is_called else "dataset"

    @property
    def collate_text(self) -> str:
        """The argument of a loader, if there is one."""
        return "collate_fn=collate_fn" if "collate_fn" in self.sources else ""

    def head(self, title: str, more: str = "") -> str:
        """The docstring of the script."""
        command = f"torchrun --standalone --nproc-per-node {self.num_ranks} script.py"
        given = [source for source in self.sources.values() if source.module is not None]
        own = sorted({f"{source.module}" for source in given if not source.is_of_library})
        found = f"It imports {', '.join(own)}, found in the script's folder or on PYTHONPATH."
        notes = [f"Its strategy: {self.strategy}", *([found] if own else [])]
        text = "\n\n".join("\n".join(wrap(note, WIDTH)) for note in notes)
        return f'"""{title}\n\n    {command}\n\n{text}{more}\n"""'

    @property
    def places(self) -> list[str]:
        """The functions that are to be filled in, as blocks of the script."""
        missing = [source for source in self.sources.values() if source.module is None]
        return [f"\n{source.fill_in}".rstrip() for source in missing]

    @property
    def numbers(self) -> str:
        """The constants that both scripts have."""
        return (
            f"BATCH_SIZE = {self.batch_size}  # samples per step, all ranks together\n"
            f"STEPS = {self.num_steps}\n"
            f"SEED = {self.seed}  # of the weights, and of the order of the samples"
        )

    @property
    def optimizer(self) -> str:
        """The optimizer over a model's parameters, as an expression."""
        if "optimizer_fn" in self.sources:
            return "optimizer_fn(model.parameters())"
        return "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
