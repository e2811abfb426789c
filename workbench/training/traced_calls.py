"""The layers of a model in the order in which a batch goes through them, before anything is parallelized."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from workbench.core.rows import Layer
from workbench.tensors import default_generator
from workbench.tensors.fake_mode import FakeTensorConverter, fake_mode, fake_state, without_log
from workbench.tensors.program_state import ProgramState, tables_of
from workbench.training.batches import Batch, arguments, call
from workbench.training.strategies.call_order import Calls, recorded_calls
from workbench.training.strategies.state import describe


def describe_with_calls(model: nn.Module, batch: Batch) -> list[Layer]:
    """The layers of a plain model, with the positions of their calls in a forward of the batch.

    The forward runs on fake tensors; one that reads values runs on one sample. Attributes and buffers are then as they
    were. If it fails, too, the layers have no positions: training will say why.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> [layer.calls for layer in describe_with_calls(model, Batch(torch.ones(4, 2)))]
    [(1, 1), (2, 2)]
    """
    for run, writes in ((_on_fake_tensors, False), (_on_one_sample, True)):
        before = ProgramState([model, *tables_of(model)], torch.device("cpu"), copies_tensors=writes)
        try:
            return describe(model, run(model, batch))
        except Exception:  # noqa: BLE001 - whatever the model's own code raises
            continue
        finally:
            before.put_back_objects()
    return describe(model)


def _on_fake_tensors(model: nn.Module, batch: Batch) -> Calls:
    mode = fake_mode(allow_non_fake_inputs=True)
    state = fake_state(model, mode, None)
    args, kwargs = arguments(FakeTensorConverter(mode, None)(batch.inputs))
    with without_log(), mode, recorded_calls(model) as calls:
        functional_call(model, state, args, kwargs)
    return calls


def _on_one_sample(model: nn.Module, batch: Batch) -> Calls:
    (first, *_) = batch.cut(batch.num_samples)
    with default_generator.restored(), recorded_calls(model) as calls:
        call(model, first.inputs)
    return calls
