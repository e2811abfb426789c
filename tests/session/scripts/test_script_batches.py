"""How exported scripts take batches from a data set, and apart: as a comparison does."""

from __future__ import annotations

import inspect
import re
from collections import UserDict
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.data import TensorDataset, default_collate

import workbench as wb
from tests.session.scripts.jobs import BATCH_SIZE, NUM_STEPS, mlp
from workbench.testing import run_ranks
from workbench.training.batches import Batch, arguments, own_loss
from workbench.training.runs.job import Job

PAIR, LABELS = [torch.ones(2), torch.ones(2)], torch.tensor(1)


@pytest.mark.parametrize(
    ("sample", "lines"),
    [
        ((PAIR[0], LABELS), ["*inputs, targets = batch", "output = model(*inputs)"]),
        ((*PAIR, LABELS), ["*inputs, targets = batch", "output = model(*inputs)"]),
        (({"x": PAIR[0]}, LABELS), ["inputs, targets = batch", "output = model(**inputs)"]),
        ((tuple(PAIR), {"class": LABELS}), ["inputs, targets = batch", "output = model(*inputs)"]),
        ({"x": {"deep": PAIR[0]}, "labels": LABELS}, ['targets = batch.pop("labels")', "output = model(**batch)"]),
        (
            {"x": PAIR[0], "label": LABELS, "target": LABELS},
            ['targets = {name: batch.pop(name) for name in ("label", "target")}', "output = model(**batch)"],
        ),
        (PAIR[0], ["targets = None", "output = model(batch)"]),
    ],
)
def test_the_torch_script_takes_batches_apart_as_a_comparison_does(sample: Any, lines: list[str]) -> None:
    text = wb.planner.script("*: data", 2, mlp, [sample] * 8, F.cross_entropy, batch_size=8, library="torch")
    found = [line.strip() for line in text.partition("batch = on_device(batch, device)\n")[2].splitlines()]
    assert found[:3] == [*lines, "loss = loss_fn(output, targets)"]
    names: dict[str, Any] = {"batch": default_collate([sample] * 2), "model": lambda *args, **options: (args, options)}
    exec("\n".join(lines), names)
    right = Batch.of(default_collate([sample] * 2), F.cross_entropy)
    assert str((*names["output"], names["targets"])) == str((*arguments(right.inputs), right.targets))


class Sample(NamedTuple):
    x: torch.Tensor
    label: torch.Tensor


SHARED, ROWS = torch.arange(4.0)[None], torch.arange(96.0).view(24, 4)
TABLE = pd.DataFrame(ROWS.numpy(), index=range(5, 29))
DATASETS: dict[str, tuple[Any, Any]] = {
    "one array": ((ROWS,), F.mse_loss),
    "a data set of one array": (TensorDataset(ROWS), F.mse_loss),
    "a list of single tensors": ([*ROWS], F.mse_loss),
    "pairs": ((ROWS, ROWS.numpy()), F.mse_loss),
    "a shared row": ((ROWS, SHARED, ROWS), F.mse_loss),
    "a dict with what is shared": ({"x": ROWS, "w": SHARED, "scale": 0.5, "labels": [0, 1] * 12}, F.mse_loss),
    "positions": ({"ids": ROWS, "positions": torch.arange(4), "labels": ROWS}, F.mse_loss),
    "tables": ((TABLE, TABLE[0]), F.mse_loss),
    "a dict of columns": ({"x": TABLE[[0, 2]], "labels": TABLE[1]}, F.mse_loss),
    "an encoding": (UserDict(x=ROWS, labels=ROWS), None),
    "encodings": ([UserDict(x=row, labels=row) for row in ROWS], None),
    "samples with lists of numbers": ([{"ids": [1, 2, 3], "mask": [[1], [0]], "label": i} for i in range(24)], None),
    "tuples with lists of numbers": ([([1, 2, 3], i) for i in range(24)], F.mse_loss),
    "named tuples": ([Sample(row, row) for row in ROWS], F.mse_loss),
}


def script_of(library: Any, data: Any, loss_fn: Any) -> str:
    given: dict[str, Any] = {"batch_size": BATCH_SIZE, "steps": NUM_STEPS, "library": library}
    return wb.planner.script("*: data", 2, mlp, data, loss_fn, **given)


def right_batches(data: Any, loss_fn: Any) -> list[str]:
    """What the model is called with in a comparison, and the targets."""
    job = Job(mlp, data, loss_fn, None, BATCH_SIZE, NUM_STEPS)
    return [str((*arguments(batch.inputs), batch.targets)) for batch in job.batches()]


@pytest.mark.parametrize("name", DATASETS)
def test_batches_of_torch(name: str) -> None:
    data, loss_fn = DATASETS[name]
    text = script_of("torch", data, loss_fn)
    names: dict[str, Any] = {"model": lambda *args, **options: (args, options), "targets": None}
    exec(text, names)
    names["dataset"] = lambda: data
    samples = eval(re.findall(r"    samples = (.*)", text)[-1], names)
    split = text.partition("batch = on_device(batch, device)\n")[2].partition("        loss = ")[0]
    found = []
    for batch in islice(names["batches"](samples, 0, 1), NUM_STEPS):
        names["batch"] = names["on_device"](batch, torch.device("cpu"))
        exec(inspect.cleandoc(split), names)
        found.append(str((*names["output"], names["targets"])))
    assert found == right_batches(data, loss_fn)


@pytest.mark.parametrize("name", DATASETS)
def test_batches_of_the_workbench(name: str) -> None:
    data, loss_fn = DATASETS[name]
    text = script_of("workbench", data, loss_fn)
    variables, given = (
        re.findall(pattern, text)[0] for pattern in (r"for (.*) in loader", r"wb.forward_backward\((.*)\)")
    )

    def given_to(model: Any, loss_fn: Any = None, inputs: Any = None, targets: Any = None) -> str:
        batch = Batch.of_arguments(inputs, targets, loss_fn)
        parts = tree_map_only(wb.GlobalTensor, lambda part: part.full_tensor(), (batch.inputs, batch.targets))
        return str((*arguments(parts[0]), parts[1]))

    def program() -> list[str]:
        loader = wb.GlobalDataLoader(data, BATCH_SIZE, shuffle=True, seed=0)
        names = {"model": None, "loss_fn": loss_fn, "take": given_to, "found": [], "loader": loader}
        exec(f"for _ in range(2):\n for {variables} in loader:\n  found.append(take({given}))", names)
        return names["found"]

    assert run_ranks(program, 1)[0] == right_batches(data, loss_fn)


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(1.5),
        {"loss": torch.tensor(1.5), "number": 3},
        UserDict(loss=torch.tensor(1.5)),
        (torch.tensor(1.5), torch.ones(4)),
        (torch.tensor(1.5), torch.tensor(2.5)),
        [torch.ones(4), 3, torch.tensor(1.5)],
        NamedTuple("Output", [("logits", Any), ("loss", Any)])(torch.tensor(0.5), torch.tensor(1.5)),
        SimpleNamespace(loss=torch.tensor(1.5)),
    ],
)
def test_a_models_own_loss_is_found_as_in_a_comparison(output: Any) -> None:
    names: dict[str, Any] = {}
    exec(script_of("torch", (ROWS,), None), names)
    assert names["loss_of"](output) == own_loss(output) == 1.5


def test_a_script_draws_none_of_the_programs_random_numbers() -> None:
    def dataset() -> Any:
        return torch.rand(8, 4), torch.rand(8, 2)

    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    text = wb.planner.script("*: data", 2, dataset=dataset, loss_fn=F.mse_loss, batch_size=4)
    assert "for inputs, targets in loader" in text
    assert torch.rand(()) == expected
