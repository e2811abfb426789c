"""``wb.compare`` on real engines: figures, reference, failures."""

import importlib
import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.timeouts import PROMPT_S, WAIT_TIMEOUT_S, wait_until
from workbench.core.metrics import RunEvent, RunRecord, StepBlock, StepSpans
from workbench.core.segments import by_strategy
from workbench.core.strategy import Strategy
from workbench.core.verdict import CHECKED_STEPS, TOLERANCES
from workbench.errors import CellError, RunError, StrategyError
from workbench.session.comparison.checker import RunObserver, RunStopped
from workbench.session.comparison.compare import CompareResult, Comparison
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.session.comparison.subject import Subject
from workbench.ui.runs.trainer import SessionTrainer

pytestmark = pytest.mark.engines


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 8, generator=generator), torch.randint(0, 4, (50,), generator=generator)


def large_loss(output, target):
    return 1000 * F.cross_entropy(output, target)


def subject(steps, loss_fn=F.cross_entropy):
    return Subject.of(make_model, data(), loss_fn, batch_size=16, steps=steps)


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "metrics.jsonl"


@pytest.fixture(scope="module")
def result(shared_session, log_path):
    log = f"jsonl:{log_path}"
    strategies = {
        "data": "data",
        "split": "*: model | overlap=2",
        "stages": "pipeline",
        "mixed": "0: data; 2: model; 4: model",
    }
    job = make_model, data(), F.cross_entropy, strategies
    return wb.compare(*job, batch_size=16, steps=12, session=shared_session, log=log)


def test_an_interrupt_is_one_line(shared_session, monkeypatch):
    """Not the lines of the workbench and of Python that were running."""

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "baseline", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"compare was interrupted.*keep=True") as raised:
        wb.compare(make_model, data(), F.cross_entropy, "data", batch_size=16, session=shared_session, keep=False)
    assert len(raised.value._render_traceback_()) == 1


def slow_loss(output, target):
    time.sleep(0.1)
    return F.cross_entropy(output, target)


@pytest.mark.parametrize("during", ["training run", "train_one_device"])
def test_an_interrupt_ends_the_training(session, during):
    """It went on to its last step, and the interrupted call waited for that."""
    interrupted_s = []

    def interrupt():
        wait_until(lambda: any(during in run.label for run in list(session._pool.active)))
        time.sleep(0.5)
        interrupted_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    job = make_model, data(), slow_loss, ["data"]
    check_steps = 1000 if during == "train_one_device" else 1
    with pytest.raises(KeyboardInterrupt, match=r"compare was interrupted"):
        wb.compare(*job, batch_size=16, steps=1000, check_steps=check_steps, session=session, keep=False)
    assert time.monotonic() < interrupted_s[0] + PROMPT_S and not session.is_busy
    thread.join()
    assert session.run("1 + 1").values == [2, 2]


class GrowingLoss:
    """Its weight grows with its calls; and it draws, as augmentation does."""

    def __init__(self):
        self.calls, self.generator = 0, np.random.default_rng(0)

    def __call__(self, output, target):
        self.calls += 1
        return F.cross_entropy(output, target) * (self.calls + self.generator.random())


def test_a_loss_that_keeps_a_state_begins_each_run_alike(session):
    """It went on where the run before had ended, on rank 0 further than on rank 1: no strategy was equal."""
    job = make_model, data(), GrowingLoss(), ["*: data", "*: model"]
    found = wb.compare(*job, batch_size=16, steps=5, session=session, keep=False)
    assert found.all_equal, found
    assert found.runs[0].losses == pytest.approx(found.runs[1].losses, rel=1e-5)


class Scattered(nn.Linear):
    """Its weights are drawn by numpy."""

    def __init__(self):
        super().__init__(8, 4)
        self.weight.data = torch.from_numpy(np.random.rand(4, 8)).float()  # noqa: NPY002


def turned(samples):
    """Augmentation by Python's random numbers."""
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs) * random.random(), torch.stack(targets)


def test_what_numpy_and_python_draw_is_alike_in_all_runs(session):
    job = Scattered, torch.utils.data.TensorDataset(*data()), F.cross_entropy, ["*: data", "*: model"]
    found = wb.compare(*job, batch_size=16, steps=5, collate_fn=turned, session=session, keep=False)
    assert found.all_equal, found


def test_every_strategy_gives_the_numbers_of_one_device(result):
    assert [run.name for run in result.runs] == ["data", "split", "stages", "mixed"]
    assert result.all_equal, result
    for run in result.runs:
        assert run.error is None and run.loss_difference <= 1e-5 and run.weight_difference <= 1e-5
        assert len(run.losses) == 12 and run.samples_per_s > 0 and run.boxed_bytes_per_step > 0


def test_learning_rate_and_gradient_norm_come_without_being_asked_and_are_logged(result, log_path):
    rows = [json.loads(line) for line in log_path.read_text().splitlines()]
    assert {row["run"] for row in rows} == {"one device", *(run.name for run in result.runs)}
    ranks = {row["run"]: row["settings"]["ranks"] for row in rows if "settings" in row}
    assert ranks == {"one device": 1, **{run.name: run.num_ranks for run in result.runs}}
    norms = {}
    for run in result.runs:
        assert run.values["learning_rate"] == tuple((step, 0.1) for step in range(12))
        norms[run.name] = [norm for _, norm in run.values["gradient_norm"]]
        logged = [row for row in rows if row["run"] == run.name and "loss" in row]
        assert [row["loss"] for row in logged] == list(run.losses)
        assert [row["gradient_norm"] for row in logged if "gradient_norm" in row] == norms[run.name]
    first = make_norm()
    assert all(found[0] == pytest.approx(first, rel=1e-5) for found in norms.values()), norms
    assert json.loads(result.to_json())["runs"][0]["values"].keys() == result.runs[0].values.keys()


def make_norm() -> float:
    """Of the first step's gradients, in plain torch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_model()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:16]
    inputs, targets = (each[order] for each in data())
    F.cross_entropy(model(inputs), targets).backward()
    return float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))


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


@pytest.mark.slow
def test_large_losses_are_equal_though_they_round(session):
    large = {"loss_fn": large_loss, "optimizer_fn": lambda parameters: torch.optim.SGD(parameters, lr=1e-4)}
    result = wb.compare(make_model, data(), strategies=["data", "model"], batch_size=16, session=session, **large)
    pairs = [(a, b) for run in result.runs for a, b in zip(run.losses, result.baseline.losses, strict=True)]
    assert max(abs(a - b) for a, b in pairs) > TOLERANCES["fp32"].loss, "else this test says nothing"
    assert result.all_equal


def test_a_strategy_that_does_not_fit_runs_nothing(session):
    with pytest.raises(StrategyError, match="no layer matches"):
        wb.compare(make_model, data(), F.cross_entropy, ["data", "nope: model"], batch_size=16, session=session)


@pytest.mark.parametrize(
    ("mistake", "error", "words"),
    [
        ({"batch_size": 64}, RunError, "batch_size=64, but the data set has 50 samples.*batch_size=50"),
        ({"steps": 0}, RunError, "steps=0: a whole number of at least 1"),
        ({"dataset": iter([1, 2])}, RunError, "has no positions"),
        ({"optimizer_fn": lambda p: []}, RunError, "returned a list of 0"),
        ({"model_fn": make_model()}, RunError, "model_fn is a Sequential.*without calling it"),
        ({"strategies": ["data", "nope: model"]}, StrategyError, "no layer matches 'nope'"),
        ({"strategies": "*: data | 1x3x1", "engines": 2}, StrategyError, "there are 2 ranks"),
        ({"strategies": ["*: nope", "data", "x: data"]}, StrategyError, "(?s)2 of 3 strategies .*nope.*matches 'x'"),
        ({"strategies": {"a": "data", 1: "data"}}, StrategyError, "1: 'data'.*the name 1 is of type int.*'1'"),
    ],
)
def test_mistakes_are_told_before_any_engine_is_started(monkeypatch, mistake, error, words):
    compare = importlib.import_module("workbench.session.comparison.compare")
    monkeypatch.setattr(compare, "find_current", lambda: None)
    monkeypatch.setattr(compare, "Session", lambda *_: pytest.fail("engines were started"))
    asked = {"model_fn": make_model, "dataset": data(), "strategies": ["data"], "batch_size": 16} | mistake
    with pytest.raises(error, match=words):
        wb.compare(loss_fn=F.cross_entropy, **asked)


def padded(samples):
    words, classes = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(words, batch_first=True), torch.stack(classes)


def unlike_sentences():
    return [(torch.arange(2 + index % 5) % 7, torch.tensor(index % 3)) for index in range(20)]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 8), nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1))


def test_a_collate_fn_travels_to_the_engines(session):
    words = {"dataset": unlike_sentences(), "loss_fn": F.cross_entropy, "collate_fn": padded, "shuffle": False}
    result = wb.compare(Words, strategies=["data", "pipeline"], batch_size=6, steps=3, session=session, **words)
    assert result.all_equal, result


def test_a_sum_runs_without_micro_batches_only(session):
    def total(output, target):
        return F.cross_entropy(output, target, reduction="sum") / 100

    strategies = {"data": "data", "stages": "pipeline"}
    found = wb.compare(make_model, data(), total, strategies, batch_size=16, steps=3, session=session, keep=False)
    assert found.runs[0].equal and found.runs[1].equal is None
    assert "no mean over the samples" in found.runs[1].error and "this one has 4" in found.runs[1].error


def test_what_a_loss_was_called_with_is_told_beside_its_own_error(session):
    class Pairs(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(CellError, match=r"must be Tensor, not tuple(?s:.*)output is a tuple of \(float32 \(2, 4\)"):
        wb.compare(lambda: Pairs(8, 4), data(), F.cross_entropy, ["data"], batch_size=16, session=session)


def test_a_strategy_that_fails_keeps_the_others(session):
    def picky_loss(output, target):
        if isinstance(output, wb.GlobalTensor) and wb.rank() == 1 and "S(1)" in repr(output):
            raise ValueError("split classes are not for me")
        return F.cross_entropy(output, target)

    found = wb.compare(make_model, data(), picky_loss, ["*: data", "*: model"], batch_size=16, steps=3, session=session)
    by_name = {run.name: run for run in found.runs}
    assert by_name["*: data"].equal
    assert "split classes are not for me" in by_name["*: model"].error and not found.all_equal


class Followed:
    """A run and everything that it has reported so far."""

    def __init__(self, run) -> None:
        self.run, self.seen = run, []

    def until(self, condition) -> None:
        def holds() -> bool:
            if condition():
                return True
            assert not self.run.done() or condition == self.run.done, self.run.call.exception()
            self.seen += self.run.poll()
            return False

        wait_until(holds, lambda: f"what is waited for, in {len(self.seen)} messages,")

    @property
    def steps(self) -> int:
        return max((message.stop_step for message in self.seen if isinstance(message, StepBlock)), default=0)

    def happened(self, kind: str) -> bool:
        return any(isinstance(message, RunEvent) and message.kind == kind for message in self.seen)


def test_a_run_is_followed_to_its_end_and_kept_on_disk(session, tmp_path):
    saved = SavedRuns(tmp_path)
    with Comparison(session, subject(60), saved) as comparison:
        followed = Followed(comparison.start("data", predicted={"step_s": 0.5}))
        followed.until(followed.run.done)
        record = followed.run.result()
        baseline = comparison.baseline()
    assert record.equal and record.bubble == 0.0 and record.predicted == {"step_s": 0.5}
    assert [run for run in saved if run.run_id == record.run_id] == [record]
    assert {run.name for run in saved} == {"data", baseline.name}
    assert record.settings["threads"] >= 1
    assert record.settings["seed"] == 0 and record.settings["torch"] == torch.__version__ and record.settings["machine"]
    blocks = [message for message in saved.messages(record.run_id) if isinstance(message, StepBlock)]
    assert [loss for block in blocks for loss in block.losses] == list(record.losses)
    ranks = {message.rank for message in saved.messages(record.run_id) if isinstance(message, StepSpans)}
    assert ranks == {0, 1}


def test_pause_change_the_strategy_resume_and_stop(session):
    with Comparison(session, subject(3000)) as comparison:
        run = comparison.start("data")
        followed = Followed(run)
        followed.until(lambda: followed.steps >= 5)
        run.pause()
        followed.until(lambda: followed.happened("paused"))
        held = followed.steps
        with pytest.raises(StrategyError):
            run.change("nope: model")
        run.change("0: data; 2: data@1; 4: data@1 | 2x1x1 mb=2", "stages", {"step_s": 0.5})
        followed.until(lambda: followed.happened("strategy"))
        assert followed.steps == held, "it waits while it is changed"
        run.resume()
        followed.until(lambda: followed.steps > held + 5)
        run.stop()
        record = run.result(WAIT_TIMEOUT_S)
    ((step, text),) = record.changes
    assert step == held and text.startswith("0: data; 2: data@1") and len(record.losses) < 3000
    assert record.equal, "losses as on one device, before and after"
    data, stages = by_strategy([RunRecord.from_dict(json.loads(json.dumps(record.to_dict())))])
    assert (data.name, data.strategy) == (f"data, steps 1-{held}", "*: data")
    assert (stages.name, stages.strategy) == (f"data \u2192 stages, steps {held + 1}-{len(record.losses)}", text)
    assert data.boxed_bytes_per_step > stages.boxed_bytes_per_step > 0 and stages.predicted == {"step_s": 0.5}
    assert data.bubble == 0 < stages.bubble < 1 and len(stages.losses) + held == len(record.losses)
    assert data.memory_by_kind[0]["parameters"] > stages.memory_by_kind[0]["parameters"]


def test_a_stop_reaches_the_one_device_run_that_comes_first(session):
    steps: list[int] = []
    with Comparison(session, subject(100, slow_loss)) as comparison:
        observer = RunObserver(lambda block: steps.append(block.stop_step), lambda: bool(steps))
        with pytest.raises(RunStopped, match="one device trained, after its step"):
            comparison.reference(None, observer)
        assert 0 < steps[-1] < CHECKED_STEPS, "it ends soon after its first report, not with its last step"
        complete = comparison.reference(None, RunObserver(lambda block: None, lambda: False))
    assert len(complete.losses) == CHECKED_STEPS, (
        "an incomplete reference is not kept, and only compared steps are trained"
    )


@pytest.mark.slow
def test_the_panels_runs_may_differ_in_length(session):
    trainer = SessionTrainer(session, make_model, data(), F.cross_entropy, batch_size=16, steps=3)
    for steps in (3, 5):
        run = trainer.start(Strategy("*: data"), "data", steps)
        Followed(run).until(run.done)
        record = run.result()
        assert len(record.losses) == len(trainer.baseline.losses) == steps and record.equal


def test_a_cell_that_has_to_wait_says_for_what(session, capsys):
    with Comparison(session, subject(600)) as comparison:
        run = comparison.start("data", "hybrid, edited")
        followed = Followed(run)
        followed.until(lambda: followed.steps >= 1)
        threading.Timer(0.5, run.stop).start()
        session.run("pass")
        told = capsys.readouterr().err
        assert "training run 'hybrid, edited', step " in told and "of 600; this waits its turn" in told
        run.result(WAIT_TIMEOUT_S)
