"""A run is compared with the one device that trained the same model, batches and seed, and with no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord
from workbench.ui.runs.render_table import comparison_table_text
from workbench.ui.runs.table_rows import run_rows
from workbench.ui.runs.table_widget import RunTable

SETTINGS = {"model": "mlp", "num_parameters": 100, "optimizer": "SGD(lr=0.1)", "seed": 0}


DATA = ("sample_shape", "num_samples", "first_samples", "shuffle", "drop_last", "count")
OPTIONS = ("model_checksum", "optimizer_options")


@pytest.mark.parametrize("other", [*SETTINGS, "loss", *DATA, *OPTIONS, "machine", "device", "threads"])
def test_a_run_that_one_device_has_not_trained_keeps_its_own_speed_up(baseline: RunRecord, other: str):
    truth = replace(baseline, settings=SETTINGS, samples_per_s=1e5)
    run = make_record("data", settings=SETTINGS | {other: "other"}, speedup=1.9)
    assert run_rows([run, truth], truths=["1 device"])[0].values["speedup"] == 1.9
    assert " 1.90x" in comparison_table_text([run], truth)
    means = replace(truth, settings=SETTINGS | {"seeds": [0, "other"]})
    assert run_rows([run, means], truths=["1 device"])[0].values["speedup"] == (0.05 if other == "seed" else 1.9)


def test_the_table_keeps_one_device_of_each_model(baseline: RunRecord):
    table = RunTable()
    for model in ("mlp", "cnn"):
        settings = SETTINGS | {"model": model}
        table.add(
            [make_record(model, settings=settings)], [replace(baseline, name=f"1 device, {model}", settings=settings)]
        )
    assert [row.name for row in table.rows if row.is_truth] == ["1 device, mlp", "1 device, cnn"]
