"""``wb.compare(seeds=...)``: a run per strategy and seed, each compared with one device of its seed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.session.simulated_session import Finished, SimulatedSession
from workbench.core.seeds import over_seeds
from workbench.errors import EngineStartError, SessionError
from workbench.session.comparison import training_on_engine
from workbench.session.comparison.compare import CompareResult
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.session.comparison.subject import Subject
from workbench.session.on_engine import shell


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "publish", lambda message: None)
    monkeypatch.setattr(shell, "commands", list)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, 6, generator=generator), torch.randint(0, 3, (20,), generator=generator)


def losses_of(seed: int, steps: int) -> list[float]:
    """In plain torch."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found, order = [], torch.Generator().manual_seed(seed)
    while len(found) < steps:
        for rows in torch.randperm(20, generator=order).split(8):
            inputs, targets = (each[rows] for each in data())
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found[:steps]


def test_every_strategy_is_trained_with_every_seed_and_compared_with_its_own_one_device(tmp_path, capsys):
    session, saved = SimulatedSession(), SavedRuns(tmp_path)
    result = wb.compare(
        make_model, data(), F.cross_entropy, ["data", "*: model"], batch_size=8, steps=4, seeds=[3, 7], keep=saved,
        session=session,  # type: ignore[arg-type]
    )  # fmt: skip
    assert [run.name for run in result.runs] == ["data", "*: model", "data, seed 7", "*: model, seed 7"]
    assert [run.name for run in result.baselines] == ["one device", "one device, seed 7"]
    for run in [*result.runs, *result.baselines]:
        torch.testing.assert_close(list(run.losses), losses_of(run.settings["seed"], 4), rtol=1e-5, atol=0)
    assert result.all_equal and all(run.speedup for run in result.runs)
    assert "[4/4] *: model, seed 7" in capsys.readouterr().err

    table = result.table.set_index("strategy")
    assert list(table.index) == ["data", "*: model", "one device"]
    finals = [losses_of(seed, 4)[-1] for seed in (3, 7)]
    assert abs(table.loc["data", "final_loss"] - sum(finals) / 2) < 1e-5
    assert abs(table.loc["data", "final_loss_std"] - torch.tensor(finals).std().item()) < 1e-5
    assert table.loc["one device", "samples_per_s_std"] >= 0 and table.loc["data", "rank_seconds"] > 0
    assert "\u00b1" in result._repr_html_() and "2 strategies" in repr(result)

    assert CompareResult.from_json(result.to_json()).table.equals(result.table)
    old = CompareResult.from_json('{"baseline": null, "runs": []}')
    assert old.baseline is None and old.baselines == []
    assert sorted(run.name for run in over_seeds(saved)) == ["*: model", "data", "one device"]


class FailsWithSeed7(SimulatedSession):
    """One device fails with this seed."""

    def submit(self, fn: Any, *args: Any, **options: Any) -> Finished:
        if fn is training_on_engine.train_one_device and args[1].seed == 7:
            return Finished(lambda: [1 // 0])
        return super().submit(fn, *args, **options)


def test_one_device_that_fails_with_a_later_seed_keeps_the_runs_of_all_others():
    options: dict[str, Any] = {"batch_size": 8, "steps": 2, "keep": False, "session": FailsWithSeed7()}
    result = wb.compare(make_model, data(), F.cross_entropy, ["data"], seeds=[3, 7, 9], **options)
    assert [run.name for run in result.runs] == ["data", "data, seed 7", "data, seed 9"]
    assert [run.equal for run in result.runs] == [True, None, True] and not result.all_equal
    assert result.runs[1].error == "one device failed with seed 7: integer division or modulo by zero"
    assert [run.name for run in result.baselines] == ["one device", "one device, seed 9"]
    assert list(result.table["strategy"]) == ["data", "data, seed 7", "one device"]
    with pytest.raises(SessionError, match="by zero"):  # there is nothing to keep
        wb.compare(make_model, data(), F.cross_entropy, ["data"], seeds=[7, 9], **options)


def test_a_comparison_that_has_to_wait_says_so():
    session: Any = SimulatedSession()
    session.is_busy, session.report_wait = True, Mock()
    wb.compare(make_model, data(), F.cross_entropy, ["data"], batch_size=8, steps=2, keep=False, session=session)
    session.report_wait.assert_called_once_with()


def test_one_seed_gives_the_table_of_before():
    result = wb.compare(
        make_model, data(), F.cross_entropy, ["data"], batch_size=8, steps=2, keep=False, progress=False,
        session=SimulatedSession(),  # type: ignore[arg-type]
    )  # fmt: skip
    assert not [name for name in result.table.columns if name.endswith("_std")]
    assert [run.name for run in result.runs] == ["data"] and "\u00b1" not in result._repr_html_()


def test_the_weights_of_another_seed_are_freed_and_its_runs_are_not_compared_with_this_one():
    subject = Subject.of(make_model, data(), F.cross_entropy, batch_size=8, steps=3)
    with Comparison(SimulatedSession(), subject) as comparison:  # type: ignore[arg-type]
        first = comparison.start("*: data")
        held = [which.seed for key, which in training_on_engine._histories if key == comparison.key]
        comparison.use_seed(1)
        assert held == [0] and not [key for key, _ in training_on_engine._histories if key == comparison.key]
        assert comparison.start("*: data").result().equal
        assert first.result().equal is None, "its one-device run is gone; that of seed 1 would say unequal"
        comparison.use_seed(0)
        again = comparison.start("*: data").result()
        assert again.equal and again.settings["seed"] == 0 and comparison.baseline().settings["seed"] == 0
    assert not [key for key, _ in training_on_engine._histories if key == comparison.key]


def test_engines_keep_the_jobs_of_the_last_comparisons():
    """Each run of a panel's cell left the data of the panel before on all engines."""
    session: Any = SimulatedSession()
    subject = Subject.of(make_model, data(), F.cross_entropy, batch_size=8, steps=2)
    first, *others = (Comparison(session, subject) for _ in range(5))
    assert [other.key in training_on_engine._jobs for other in (first, *others)] == [False] + [True] * 4
    assert first.start("*: data").result().equal and session.submitted.count("keep_job") == 6
    assert others[0].key not in training_on_engine._jobs
    for other in (first, *others):
        other.close()


class LostAtTheEnd(SimulatedSession):
    """Its engines are gone when the last run has ended, and cannot be started again."""

    def submit(self, fn: Any, *args: Any, **options: Any) -> Finished:
        if fn is training_on_engine.forget_job:
            raise EngineStartError("no host answers")
        return super().submit(fn, *args, **options)


def test_results_are_there_although_the_engines_are_gone_in_the_end():
    """The error of what frees the engines' memory took their place."""
    options: dict[str, Any] = {"batch_size": 8, "steps": 2, "keep": False, "session": LostAtTheEnd()}
    assert wb.compare(make_model, data(), F.cross_entropy, ["data"], **options).all_equal
