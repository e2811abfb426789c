"""``wb.compare`` on real engines: figures, truth, failures."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import StrategyError
from workbench.session.compare import CompareResult, Comparison

pytestmark = pytest.mark.engines


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 8, generator=generator), torch.randint(0, 4, (50,), generator=generator)


@pytest.fixture(scope="module")
def result(shared_session):
    strategies = {"data": "data", "split": "*: model", "stages": "pipeline", "mixed": "0: data; 2: model; 4: model"}
    return wb.compare(make_model, data(), F.cross_entropy, strategies, batch_size=16, steps=12, session=shared_session)


def test_every_strategy_gives_the_numbers_of_one_device(result):
    assert [run.name for run in result.runs] == ["data", "split", "stages", "mixed"]
    assert result.all_equal, result
    for run in result.runs:
        assert run.error is None and run.loss_difference <= 1e-5 and run.weight_difference <= 1e-5
        assert len(run.losses) == 12 and run.samples_per_s > 0 and run.boxed_bytes_per_step > 0


def test_the_table_and_its_units(result):
    table = result.table.set_index("strategy")
    assert list(table.index) == ["data", "split", "stages", "mixed", "one device"]
    assert table.loc["one device", "speedup"] == 1.0
    size = sum(p.numel() for p in make_model().parameters()) * 4
    assert table.loc["data", "parameter_bytes"] == size > table.loc["split", "parameter_bytes"]
    assert table.loc["data", "boxed_bytes_per_step"] == 2 * size
    assert (table["peak_memory_bytes"] >= 0).all() and table["equal"].all()


def test_json_round_trip(result):
    again = CompareResult.from_json(result.to_json())
    assert again.table.equals(result.table) and json.loads(result.to_json())["settings"]["batch_size"] == 16


def test_a_wrong_number_is_noticed(result):
    from dataclasses import replace

    broken = CompareResult(result.baseline, [replace(result.runs[0], equal=False)])
    assert not broken.all_equal


def test_a_strategy_that_does_not_fit_runs_nothing(session):
    with pytest.raises(StrategyError, match="no layer matches"):
        wb.compare(make_model, data(), F.cross_entropy, ["data", "nope: model"], batch_size=16, session=session)
    with pytest.raises(ValueError, match="data set has 50 samples"):
        wb.compare(make_model, data(), F.cross_entropy, ["data"], batch_size=64, session=session)


def test_a_strategy_that_fails_keeps_the_others(session):
    def picky_loss(output, target):
        if isinstance(output, wb.GlobalTensor) and wb.rank() == 1 and "S(1)" in repr(output):
            raise ValueError("split classes are not for me")
        return F.cross_entropy(output, target)

    found = wb.compare(make_model, data(), picky_loss, ["*: data", "*: model"], batch_size=16, steps=3, session=session)
    by_name = {run.name: run for run in found.runs}
    assert by_name["*: data"].equal
    assert "split classes are not for me" in by_name["*: model"].error and not found.all_equal


def test_a_run_is_followed_and_stopped_while_the_notebook_goes_on(session):
    arguments = {"batch_size": 16, "steps": 100_000}
    with Comparison(session, make_model, data(), F.cross_entropy, **{**arguments, "steps": 300}) as comparison:
        run = comparison.start("data")
        seen = []
        while not run.done():
            seen += run.poll()
        seen += run.poll()
        assert {record.rank for record in seen} == {0, 1} and max(record.step for record in seen) == 299
        assert run.result().equal
        assert all(record.loss is not None and record.boxed_bytes > 0 for record in seen)
