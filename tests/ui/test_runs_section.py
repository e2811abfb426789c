"""The part of the panel that runs: steer a run, keep the finished ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from tests.ui.conftest import make_record
from tests.ui.reports import FakeTrainer, block
from workbench.core.metrics import RunEvent
from workbench.core.profile import Profile, RankProfile
from workbench.core.strategy import Strategy
from workbench.errors import RunError, SessionError, StrategyError
from workbench.session.comparison.checker import RunStopped
from workbench.ui.panel import Panel
from workbench.ui.runs.runs_section import PanelCallbacks, RunsSection, predictions


class FakeEditor:
    """A strategy editor that counts calls."""

    def __init__(self) -> None:
        self.strategy, self.label, self.error = Strategy("*: data"), "data", None
        self.changes = 0

    def wanted(self):
        if self.error is not None:
            raise self.error
        return self.strategy, self.label

    def changed(self) -> None:
        self.changes += 1


@pytest.fixture
def editor() -> FakeEditor:
    return FakeEditor()


@pytest.fixture
def part(trainer: FakeTrainer, editor: FakeEditor) -> RunsSection:
    return RunsSection(trainer, 3, PanelCallbacks(editor.wanted, changed=editor.changed))


def finish(part: RunsSection, trainer: FakeTrainer, error: Exception | None = None) -> None:
    trainer.runs[-1].error = error
    trainer.runs[-1].ended.set()
    assert part.wait(WAIT_TIMEOUT_S)


def test_a_run_is_followed_to_its_end(part: RunsSection, trainer: FakeTrainer, editor: FakeEditor):
    assert part.stop_button.disabled and not part.busy
    part.run()
    assert part.busy and not part.stop_button.disabled and editor.changes == 1
    finish(part, trainer)
    assert [run.name for run in part.runs] == ["data"] and part.baseline.name == "one device"
    assert part.stop_button.disabled and editor.changes == 2
    assert ">data<" in part.table.page.page and part.table.selected == "data"


def test_two_runs_at_once_are_refused(part: RunsSection, trainer: FakeTrainer):
    part.run()
    with pytest.raises(RuntimeError, match="a run holds the engines"):
        part.run()
    finish(part, trainer)


def test_equal_names_are_numbered(part: RunsSection, trainer: FakeTrainer):
    for _ in range(2):
        part.run()
        finish(part, trainer)
    assert [run.name for run in part.runs] == ["data", "data (2)"]


def test_pause_and_resume(part: RunsSection, trainer: FakeTrainer):
    part.run()
    part.pause_button.click()
    assert trainer.runs[0].commands == ["pause"] and part.pause_button.description == "Go on"
    wait_until(lambda: "paused" in part.live.status.state.value)
    part.pause()
    part.pause_button.click()
    assert trainer.runs[0].commands == ["pause", "resume"] and part.pause_button.description == "Pause"
    wait_until(lambda: "running" in part.live.status.state.value)
    finish(part, trainer)


def test_another_strategy_and_on_with_the_same_weights(part: RunsSection, trainer: FakeTrainer, editor: FakeEditor):
    part.run()
    part.change_button.click()
    assert part.is_changing and part.apply_button.layout.display == "" and part.change_button.layout.display == "none"
    editor.strategy, editor.label = Strategy("*: model"), "model"
    part.apply_button.click()
    assert trainer.runs[0].commands == ["pause", "strategy *: model", "resume"]
    assert not part.is_changing and part.apply_button.layout.display == "none"
    wait_until(lambda: sum(shape.name == "change" for shape in part.live.shown.figure.layout.shapes) == 2)
    (change,) = part.live.history.changes
    assert (change.before, change.after) == ("data", "model")
    assert trainer.runs[0].later == ("model", {}), "the name of its part of the run, and what is predicted"
    finish(part, trainer)


def test_a_strategy_with_mistakes_leaves_the_run_waiting(part: RunsSection, trainer: FakeTrainer, editor: FakeEditor):
    part.run()
    part.change()
    editor.error = StrategyError("stages cannot go back")
    with pytest.raises(StrategyError, match="stages cannot go back"):
        part.apply()
    assert part.is_changing and trainer.runs[0].commands == ["pause"]
    part.keep_button.click()
    assert trainer.runs[0].commands == ["pause", "resume"] and not part.is_changing
    finish(part, trainer)


def test_after_a_refused_change_the_old_strategy_is_the_one_that_is_kept(
    trainer: FakeTrainer, editor: FakeEditor, monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    part = RunsSection(trainer, 3, PanelCallbacks(editor.wanted, opened=opened.append))
    part.run()
    run, places = trainer.runs[0], part.live._places
    monkeypatch.setattr(run, "change", lambda *_: run.waiting.append(RunEvent("refused", 1, "too few heads")))
    part.change()
    editor.strategy, editor.label = Strategy("fc1: data; fc2: data@1"), "pipeline"
    part.apply()
    wait_until(lambda: any("too few heads" in line.text for line in part.live.log.lines))
    part.change()
    part.keep()
    assert opened == ["*: data"] and part.live._places == places
    monkeypatch.undo()
    part.apply()
    wait_until(lambda: part.live.history.changes)
    part.change()
    part.keep()
    assert opened[1:] == ["fc1: data; fc2: data@1"] and part.live._places != places
    finish(part, trainer)


def test_a_strategy_that_is_applied_and_not_reported_yet_is_the_one_that_is_kept(
    trainer: FakeTrainer, editor: FakeEditor, monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    part = RunsSection(trainer, 3, PanelCallbacks(editor.wanted, opened=opened.append))
    part.run()
    run = trainer.runs[0]
    monkeypatch.setattr(run, "change", lambda *_: None)
    part.change()
    editor.strategy, editor.label = Strategy("*: model"), "model"
    part.apply()
    part.change()
    part.keep()
    assert opened == ["*: model"], "the run goes on under it"
    run.waiting.append(RunEvent("refused", 1, "too few heads"))
    wait_until(lambda: any("too few heads" in line.text for line in part.live.log.lines))
    part.change()
    part.keep()
    assert opened[1:] == ["*: data"]
    finish(part, trainer)


def test_without_a_run_there_is_nothing_to_change(part: RunsSection):
    part.pause()
    part.change()
    part.stop()
    with pytest.raises(RuntimeError, match="no run is going on"):
        part.apply()


def test_a_failed_run_says_why(part: RunsSection, trainer: FakeTrainer):
    part.run()
    finish(part, trainer, RuntimeError("rank 1 died"))
    assert "rank 1 died" in part.live.failure.value and part.runs == []
    part.run()
    assert part.live.failure.value == "" and not part.stop_button.disabled
    finish(part, trainer)
    assert len(part.runs) == 1


def test_a_run_that_was_stopped_before_its_first_step_is_no_failure(part: RunsSection, trainer: FakeTrainer):
    part.run()
    finish(part, trainer, RunStopped("stopped while one device trained, after its step 7"))
    assert "stopped" in part.live.status.state.value and "before the first step" in part.live.status.state.value
    assert part.live.failure.value == "" and "after its step 7" in part.live.log_section.lines.value
    assert part.runs == [] and part.stop_button.disabled


def test_recorded_steps_can_be_saved_for_trace_viewers(part: RunsSection, trainer: FakeTrainer):
    part.run()
    finish(part, trainer)
    sent: list[tuple[str, str, str]] = []
    part.live.link.download = lambda *file: sent.append(file)
    part.trace_button.click()
    ((name, content, kind),) = sent
    assert name == "data-trace.json" and '"B0"' in content and kind == "application/json"


@pytest.mark.parametrize("steps", ["data", 0, 2.5])
def test_what_is_no_number_of_steps_begins_nothing(part: RunsSection, steps: object):
    with pytest.raises(RunError, match=r"panel\.run\(steps=.*at least 1"):
        part.run(steps)
    assert not part.busy and part.live.history is None


def test_what_was_predicted_goes_with_the_run(trainer: FakeTrainer, editor: FakeEditor):
    estimate = SimpleNamespace(
        step_s=0.5,
        samples_per_s=200.0,
        memory=({"parameters": 3e6}, {"parameters": 1e6}),
        peak_bytes=3e6,
        boxed_bytes=1e6,
        bubble_s=0.1,
        timeline=None,
    )
    editor.strategy = Strategy("fc1: data; fc2: data@1 | 2x1x1")
    part = RunsSection(
        trainer, 3, PanelCallbacks(editor.wanted, estimate=lambda: estimate, limit=lambda: (4e6, "h200"))
    )
    part.run()
    assert trainer.predicted[0]["step_s"] == 0.5 and trainer.predicted[0]["bubble"] == pytest.approx(0.2)
    finish(part, trainer)
    drawn = {trace.name: trace for trace in part.live.shown.figure.data}
    assert list(drawn["predicted"].y) == [200, 200] and list(drawn["predicted peak"].x) == [3000, 1000]  # in kB
    assert predictions(None) == {}


def test_the_check_against_one_device_is_a_switch(part: RunsSection, trainer: FakeTrainer, editor: FakeEditor):
    assert part.check.value and part.check.description == "check against one device"
    part.check.value = False
    assert (trainer.check_steps, editor.changes) == (0, 1)
    part.run()
    assert part.check.disabled, "a run keeps what it has begun with"
    finish(part, trainer)
    part.check.value = True
    assert trainer.check_steps == 20


def test_compiling_is_a_switch_and_is_shown(part: RunsSection, trainer: FakeTrainer):
    part.compile.value = True
    assert trainer.compiles
    part.run()
    assert part.compile.disabled and trainer.runs[-1].name.endswith(", compiled")
    compiling = [RunEvent("compiling", 2, f"{number} of 3") for number in (1, 2)]
    trainer.runs[-1].waiting.extend([*compiling, RunEvent("uncompiled", 2, "there is no compiler")])
    wait_until(lambda: any("there is no compiler" in line.text for line in part.live.log.lines))
    wait_until(lambda: "compiling part 2 of 3 <b>step" in part.live.status.state.value)
    assert sum("compiling its operators" in line.text for line in part.live.log.lines) == 1
    finish(part, trainer)


def test_steps_that_arrive_after_a_stop_do_not_hide_it(part: RunsSection, trainer: FakeTrainer, monkeypatch):
    part.run()
    run = trainer.runs[-1]
    monkeypatch.setattr(run, "stop", lambda: run.waiting.append(block(2, (1.0,), num_steps=3)))
    part.stop()
    wait_until(lambda: part.live.history.last_step == 3, "the run reports its last step")
    part.live.draw(everything=True)
    assert "stopping <b>after this step</b>" in part.live.status.state.value
    finish(part, trainer)
    assert "stopping" not in part.live.status.state.value


def test_the_comparison_with_one_device_is_no_training_time(part: RunsSection, trainer: FakeTrainer, monkeypatch):
    part.run()
    run, is_stopped = trainer.runs[-1], list[bool]()
    result = run.result
    monkeypatch.setattr(run, "result", lambda: (is_stopped.append(part.live.stopwatch.is_stopped), result())[1])
    finish(part, trainer)
    assert is_stopped == [True]


def test_another_seed_repeats_a_run_like_the_selected_ones(trainer: FakeTrainer, editor: FakeEditor):
    opened: list[str] = []
    part = RunsSection(trainer, 3, PanelCallbacks(editor.wanted, changed=editor.changed, opened=opened.append))
    part.run(steps=7)
    settings = {"seed": 0, "steps": 7}
    trainer.runs[-1].settings = settings
    finish(part, trainer)
    part.compile.value = True
    for seed in (1, 2):
        part.table.seed_button.click()
        assert trainer.seeds[-1] == seed and trainer.runs[-1].name == f"data, seed {seed}" and not trainer.compiles
        assert part.live.history.num_steps == 7
        trainer.runs[-1].settings = settings | {"seed": seed}
        part.table.seed_button.click()
        assert "a run holds the engines" in part.table.answer.value and len(trainer.runs) == seed + 1
        finish(part, trainer)
        assert ">3 seeds<" in part.table.page.page or seed == 1
    assert opened == ["*: data"] * 2


@pytest.mark.parametrize("means", [True, False])
def test_another_seed_is_none_that_is_there(part: RunsSection, trainer: FakeTrainer, means: bool):
    """Also where its run is another row: of another name, without means, or beside a second run of a seed."""
    seeds = {"data": 0, "data, seed 1": 1, "data (2)": 0, "mine": 2}
    records = {name: make_record(name, strategy="*: data", settings={"seed": seed}) for name, seed in seeds.items()}
    part.table.add([*records.values(), make_record("model", settings={"seed": 8})])
    part.table.means.value = means
    part.table.select("data (2)")
    part.table.seed_button.click()
    assert trainer.seeds == [3] and trainer.runs[-1].name == "data (2), seed 3"
    finish(part, trainer)


def test_run_again_has_the_steps_the_seed_and_the_compiling_of_the_run(trainer: FakeTrainer, editor: FakeEditor):
    opened: list[str] = []
    part = RunsSection(trainer, 3, PanelCallbacks(editor.wanted, opened=opened.append))
    settings = {"seed": 4, "steps": 9, "compiled": True}
    part.table.add([make_record("earlier", strategy="*: data", settings=settings)])
    part.table.select("earlier")
    part.table.again_button.click()
    assert opened == ["*: data"] and trainer.seeds == [4] and trainer.compiles and part.live.history.num_steps == 9
    assert trainer.runs[-1].name == "data, compiled, seed 4"
    part.table.again_button.click()
    assert "a run holds the engines" in part.table.answer.value and len(opened) == 1
    finish(part, trainer)


def test_a_run_can_have_a_seed_of_its_own(part: RunsSection, trainer: FakeTrainer):
    part.run(seed=5)
    assert trainer.seeds == [5] and trainer.runs[-1].name == "data, seed 5"
    finish(part, trainer)
    with pytest.raises(RunError, match="seed='x': a whole number"):
        part.run(seed="x")
    assert not part.busy


def test_profile_asks_the_run_or_starts_one(part: RunsSection, trainer: FakeTrainer):
    section = part.profile_section
    assert section.box.layout.display == "none" and "train with this strategy" in section.button.tooltip
    section.button.click()
    assert trainer.runs[0].commands == ["profile"] and part.busy and "train with" not in section.button.tooltip
    trainer.runs[0].waiting += [RunEvent("profiling", 2), Profile((RankProfile(0, 3, 1.0, 0.5, 0.5, 0.2, 0.2),))]
    wait_until(lambda: section.box.layout.display == "", "the profile is shown while the run goes on")
    (shown,) = section._output.outputs
    assert "<table>" in shown["data"]["text/html"] and "3 steps on 1 rank" in shown["data"]["text/plain"]
    assert "Profile of data" in section._title.value
    lines = [line.text for line in part.live.log.lines]
    assert any("profiles 3 steps after 4 others" in line for line in lines) and "profiled: the table is below" in lines
    trainer.runs[0].waiting.append(RunEvent("unprofiled", 9, "another profile counts the steps"))
    wait_until(lambda: any(line.warns and "no profile: another" in line.text for line in part.live.log.lines))
    finish(part, trainer)


def test_a_profile_has_the_name_of_its_strategy(part: RunsSection, trainer: FakeTrainer, editor: FakeEditor):
    """Not after the run's first one, nor after one that came before the parts of all ranks."""
    part.run()
    profile = Profile((RankProfile(0, 3, 1.0, 0.5, 0.5, 0.2, 0.2),))
    for label in ("model", "model:row"):
        editor.strategy, editor.label = Strategy(f"*: {label}"), label
        part.apply()
    begun, changed = RunEvent("profiling", 3), RunEvent("strategy", 9, "*: model:row")
    trainer.runs[0].waiting += [RunEvent("strategy", 2, "*: model"), begun, changed, profile]
    wait_until(lambda: "Profile of model<" in part.profile_section._title.value, "the profile is shown")
    trainer.runs[0].waiting += [begun, profile]
    wait_until(lambda: "Profile of model<" not in part.profile_section._title.value, "the next one is shown")
    assert "Profile of model:row<" in part.profile_section._title.value
    finish(part, trainer)


def test_the_answer_where_a_run_parts_begins_with_its_name_in_the_table(trainer: FakeTrainer, editor: FakeEditor):
    trainer.first_difference = lambda text, seed: f"{text} parts in a, seed {seed}"  # type: ignore[attr-defined]
    part = RunsSection(trainer, 3, PanelCallbacks(editor.wanted, changed=editor.changed))
    part.table.add([make_record("data", equal=False, settings={"seed": 1})])
    part.table.rename("data", "mine")
    part.table.select("data")
    part.table.part_button.click()
    wait_until(lambda: "parts in" in part.table.answer.value, "the answer comes")
    assert "mine: *: data parts in a, seed 1" in part.table.answer.value
    part.table.add([make_record("compiled", equal=False, settings={"seed": 1, "compiled": True})])
    part.table.select("compiled")
    part.table.part_button.click()
    wait_until(lambda: "parts in" in part.table.answer.value, "the answer comes")
    assert "compiled: without compiling, *: compiled parts in a" in part.table.answer.value


def test_a_panel_of_other_engines_starts_a_run_by_no_button(panel: Panel, trainer: FakeTrainer):
    """Run again and Profile did, on a number of ranks that the panel cannot show."""
    part = panel._runs_section
    panel.run()
    finish(part, trainer)
    panel._on_message(-1, RunEvent("resized", 0))
    for start in (panel.run, panel.profile):
        with pytest.raises(SessionError, match="another number of engines now: run the cell that makes the panel"):
            start()
    for each in (part.table.again_button, part.table.seed_button, part.profile_section.button):
        panel._failures.clear()
        each.click()
        assert "another number of engines now" in str(panel._failures.error)
    assert len(trainer.runs) == 1
