"""Grouping of failures, with outcomes made by hand."""

import dataclasses
import linecache
import pickle
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from workbench.errors import CellError, CollectiveAborted
from workbench.session.on_engine.failures import failure_of
from workbench.session.outcome import Outcome
from workbench.session.output.tracebacks import Interrupted, cell_error, check_cell, consequences, group
from workbench.session.protocol import Failure, Frame


def failure(kind="ValueError", message="bad", line=3, time_s=1.0, was_stopped=False):
    source = tuple((number, f"text {number}") for number in range(line - 1, line + 2))
    return Failure(kind, message, (Frame("cell", line, "<module>", True, source),), time_s, was_stopped)


def outcome(failures, **others):
    return Outcome(ranks=tuple(range(4)), failures=failures, **others)


def test_equal_failures_are_told_once():
    text = str(cell_error(outcome({rank: failure() for rank in range(4)})))
    assert text.count("ValueError") == 1
    assert "ValueError on ranks 0-3: bad" in text
    assert "▶    3  text 3" in text


def test_a_model_of_the_notebook_is_shown_with_its_line(monkeypatch):
    """Its class is defined in a cell of the notebook, whose file exists nowhere."""
    file = "/tmp/ipykernel_1/2491301530.py"
    lines = ["class Model:\n", "    def forward(self, x):\n", "        return x + self.bias\n"]
    monkeypatch.setitem(linecache.cache, file, (60, None, lines, file))
    frames = (
        Frame("training_on_engine.py", 72, "keep_job", False),
        Frame(file, 3, "Model.forward", False, is_users=True),
    )
    text = str(cell_error(outcome({0: Failure("RuntimeError", "sizes differ", (*frames, frames[0]), 1.0)})))
    assert f"{file}:3, in Model.forward\n  ▶    3          return x + self.bias" in text


def test_the_first_cause_comes_first():
    text = str(cell_error(outcome({0: failure("KeyError", time_s=2.0), 3: failure("OSError", time_s=1.0)})))
    assert text.index("OSError on rank 3") < text.index("KeyError on rank 0")


def test_the_reason_in_one_line_is_the_first_cause():
    stopped = failure("KeyboardInterrupt", "", time_s=0.5, was_stopped=True)
    later = {0: failure("KeyError", time_s=2.0), 1: stopped, 3: failure("OSError", time_s=1.0)}
    assert outcome(later).reason == "rank 3: OSError: bad"
    assert outcome({1: stopped}, dead={2: "killed"}).reason == "rank 2: killed"
    assert outcome({1: stopped}, stop_reason="timeout").reason == "timeout"
    assert outcome({}).reason == ""


def test_different_lines_or_messages_are_different_failures():
    failures = {0: failure(line=3), 1: failure(line=4), 2: failure(message="worse"), 3: failure(line=3)}
    assert [ranks for ranks, _ in group(outcome(failures))] == [[0, 3], [1], [2]]


def test_ranks_that_were_stopped_are_a_consequence():
    what = outcome(
        {1: failure(), 0: failure("KeyboardInterrupt", "", time_s=1.3, was_stopped=True)},
        stopped=(0,),
        stop_reason="failure",
        places={0: "at cell line 6, in barrier (world.py:9)"},
    )
    text = str(cell_error(what))
    assert "KeyboardInterrupt" not in text
    assert "rank 0 was running at cell line 6, in barrier (world.py:9) and stopped because of it" in text
    assert text.index("ValueError on rank 1") < text.index("rank 0 was running")


def test_a_rank_that_ended_before_it_could_say_where_it_is_was_where_its_error_says():
    """On a busy machine the answer comes when the rank has been stopped, or never."""
    inner = Frame("/site-packages/torch/distributed/c10d_logger.py", 80, "wrapper", False)
    called = Frame("/site-packages/torch/distributed/distributed_c10d.py", 12, "all_reduce", False)
    stopped = failure("KeyboardInterrupt", "", line=6, was_stopped=True)
    for frames, place in (
        ((*stopped.frames, inner, called), "at cell line 6, in all_reduce (distributed_c10d.py:12)"),
        (stopped.frames, "at cell line 6"),
        ((called,), "in all_reduce (distributed_c10d.py:12)"),
    ):
        text = str(cell_error(outcome({1: failure(), 0: dataclasses.replace(stopped, frames=frames)}, stopped=(0,))))
        assert f"rank 0 was running {place} and stopped because of it" in text


def test_a_rank_that_failed_by_itself_while_being_stopped_is_a_cause():
    what = outcome({1: failure(), 0: failure("OSError", time_s=1.1)}, stopped=(0,), stop_reason="failure")
    assert [ranks for ranks, _ in group(what)] == [[1], [0]]
    assert consequences(what) == []


def test_killed_ranks_are_told_to_the_user():
    what = outcome({1: failure()}, stopped=(0,), killed=(0,), dead={0: "killed by SIGKILL"}, stop_reason="failure")
    text = str(cell_error(what))
    assert "had to be killed" in text
    assert "variables are lost" in text
    assert "%workbench recover" in text
    assert "died while running" not in text


def test_a_rank_that_died_by_itself():
    text = str(cell_error(outcome({}, dead={2: "killed by SIGKILL"})))
    assert "rank 2 died while running this cell (killed by SIGKILL)" in text


def test_ranks_of_one_cancelled_job_are_told_together():
    first, second = "Slurm job 7 is CANCELLED", "Slurm job 8 is TIMEOUT"
    lines = str(cell_error(outcome({}, dead={0: first, 1: first, 2: second}))).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        f"ranks 0-1 died while running this cell ({first})",
        f"rank 2 died while running this cell ({second})",
    ]


def test_who_gave_up_waiting_for_a_rank_that_died_is_a_consequence():
    """The wait may end by itself before the session ends it."""
    waited = failure("CollectiveAborted", "rank 2 has ended", line=7, was_stopped=True)
    text = str(cell_error(outcome({0: waited, 1: waited}, dead={2: "killed by SIGKILL"})))
    assert text.startswith("rank 2 died while running this cell")
    assert "CollectiveAborted" not in text
    assert "ranks 0-1 were running at cell line 7 and stopped because of it; their variables are kept." in text


def test_where_all_gave_up_waiting_that_is_the_cause():
    diverged = failure("CollectiveAborted", "ranks diverged", was_stopped=True)
    assert "CollectiveAborted on ranks 0-1: ranks diverged" in str(cell_error(outcome({0: diverged, 1: diverged})))


def test_a_group_of_ended_waits_is_an_ended_wait():
    waits = ExceptionGroup("tasks", [CollectiveAborted("rank 1 has ended"), ExceptionGroup("", [CollectiveAborted()])])
    assert failure_of(waits).was_stopped
    assert not failure_of(ExceptionGroup("tasks", [CollectiveAborted(), ValueError("own")])).was_stopped


def test_divergence_names_the_exchanges_that_ranks_wait_for():
    call = "rank 3 in reduction of 2 gradients, 60 bytes, float32 at 7.py:6"
    what = outcome(
        {rank: failure("KeyboardInterrupt", "", was_stopped=True) for rank in (0, 1, 2)},
        replies={3: None},
        stopped=(0, 1, 2),
        stop_reason="divergence",
        calls={0: call, 1: call, 2: "rank 0 in barrier()"},
    )
    lines = str(cell_error(what)).splitlines()
    assert "ranks 0-2 wait for other ranks, but rank 3 has finished it" in lines[0]
    assert lines[1:3] == [f"ranks 0-1 wait for {call}", "rank 2 waits for rank 0 in barrier()"]
    many = dataclasses.replace(what, calls={rank: f"rank 3 in {rank}" for rank in range(20)})
    assert len(str(cell_error(many)).splitlines()) < 10


def test_timeout_names_ranks_and_places():
    what = outcome(
        {rank: failure("KeyboardInterrupt", "", was_stopped=True) for rank in (0, 1)},
        stopped=(0, 1),
        stop_reason="timeout",
        places={0: "at cell line 2", 1: "at cell line 2"},
    )
    text = str(cell_error(what, timeout_s=1.5))
    assert "Timeout: the cell may take 1.50 s, but ranks 0-1 of 0-3 still ran" in text
    assert "ranks 0-1 were running at cell line 2" in text


def test_at_most_four_tracebacks_then_one_line_each():
    text = str(cell_error(outcome({rank: failure(line=10 * rank + 2) for rank in range(6)})))
    assert text.count("▶") == 4
    assert "ValueError on rank 5" in text


def test_the_error_can_be_pickled_and_is_coloured_in_notebooks():
    error = cell_error(outcome({0: failure()}))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.failures) == (str(error), error.failures)
    assert "\x1b[31m" in copy._render_traceback_()[0]
    assert "\x1b" not in str(error)


@pytest.mark.parametrize("mode", ["Context", "Verbose", "Plain", "Minimal"])
def test_a_mistake_in_a_cell_of_the_notebook_is_shown_without_our_lines(mode):
    shell = InteractiveShell.instance()
    shell.run_cell(f"%xmode {mode}", silent=True)
    with capture_output() as shown:
        shell.run_cell("import workbench as wb\nwb.sbp.split('rows')")
    InteractiveShell.clear_instance()
    assert "dim is a str, not an int" in shown.stdout
    assert ("sbp.py" in shown.stdout) is (mode == "Verbose")
    assert ("wb.sbp.split('rows')" in re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)) is (mode != "Minimal")


def test_an_interrupt_says_where_the_ranks_were():
    what = outcome(
        {0: failure("KeyboardInterrupt", "", was_stopped=True)},
        stopped=(0,),
        stop_reason="interrupt",
        places={0: "at cell line 2"},
    )
    assert "rank 0 was running at cell line 2 and stopped; its variables are kept." in str(Interrupted.during(what))


def test_a_rank_that_is_killed_says_what_it_did_not_end():
    what = outcome(
        {}, stopped=(0, 1, 2), stop_reason="interrupt", killed=(0, 1, 2), unended={0: "an import", 2: "this"}
    )
    said = str(Interrupted.during(what))
    assert "rank 0 did not end an import after an interrupt and had to be killed" in said
    assert "rank 1 did not react to an interrupt and" in said and "rank 2 did not end this after an interrupt" in said


def test_an_interrupt_does_not_hide_that_a_save_failed_for_which_it_was_caught():
    save = dataclasses.replace(failure("OSError", "no space left"), in_handler=True)
    failures = {0: failure("KeyboardInterrupt", "", was_stopped=True), 1: save}
    said = str(Interrupted.during(outcome(failures, stopped=(0, 1), stop_reason="interrupt"))).splitlines()
    assert said[-1] == "OSError on rank 1: no space left (in an except or finally clause that handled the interrupt)"


def test_an_interrupt_does_not_hide_that_a_rank_had_failed_before_it():
    failures = {0: failure("KeyboardInterrupt", "", was_stopped=True), 1: failure("OSError", "no space left")}
    said = str(Interrupted.during(outcome(failures, stopped=(0, 1), stop_reason="interrupt"))).splitlines()
    assert said[-1] == "OSError on rank 1: no space left"


def test_a_wait_inside_a_transport_is_called_an_exchange():
    """A run has no cell whose call could be named."""
    frame = Frame("/lib/workbench/transport/messaging/message_transport.py", 34, "closes_on_error.<locals>.run", False)
    waited = dataclasses.replace(failure("CollectiveAborted", was_stopped=True), frames=(frame,))
    what = outcome({0: waited}, dead={1: "killed by SIGKILL"})
    assert "rank 0 was running in an exchange with other ranks and stopped because of it" in str(cell_error(what))


def test_a_run_that_a_restart_ended_says_so():
    what = outcome(
        {rank: failure("KeyboardInterrupt", "", was_stopped=True) for rank in (0, 1)},
        stopped=(0, 1),
        stop_reason="restart",
        replaced=(1,),
        places=dict.fromkeys((0, 1), "in train_strategy"),
    )
    said = "was running in train_strategy and stopped, because engines were restarted"
    assert str(cell_error(what)) == f"rank 1 {said}.\nrank 0 {said}; its variables are kept."


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = (1,\ny = 3 3", "never closed"),
        ("def f(:\n  pass", "invalid syntax"),
        ("a\n  b", "indent"),
        ("a = 1\0", "null bytes"),
    ],
)
def test_syntax_errors_are_marked(code, words):
    with pytest.raises(CellError, match=words) as caught:
        check_cell(code)
    text = str(caught.value)
    assert "Nothing ran on any rank" in text
    assert "▶" in text
    assert "^" in text


def test_the_caret_stands_under_the_mistake():
    with pytest.raises(CellError) as caught:
        check_cell("if True:\n    y = 3 +* 4")
    _, line, caret = str(caught.value).splitlines()
    assert line.index("*") == caret.index("^")


def test_a_mistake_that_python_finds_after_parsing_is_shown_with_its_line():
    with pytest.raises(CellError) as caught:
        check_cell("# %%global\nx = 1\nreturn 5")
    assert str(caught.value).splitlines()[1:] == ["  ▶    3  return 5", "          ^^^^^^^^"]


@pytest.mark.parametrize("code", ["%time 1", "!ls", "await f()", "x?", "", "\n\n", "%%time\n1", "# only a comment"])
def test_ipython_syntax_is_fine(code):
    assert check_cell(code) is None  # it raises CellError on a mistake
