"""``%workbench profile`` on real engines: one file and one table of what the next cell trains."""

import gzip
import json
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import workbench as wb
from tests.timeouts import wait_until
from tests.training.profiling.trace_files import assert_is_valid, named
from workbench.core.profile import Profile
from workbench.errors import CellError
from workbench.session import cluster, magic, profiles
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject

pytestmark = pytest.mark.engines

SETUP = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
model = wb.parallelize(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8)), "0: data; 1: data@1 | 2x1x1 mb=2 1f1b")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.ones(32, 64), torch.ones(32, 8)
def step():
    optimizer.zero_grad()
    loss = wb.forward_backward(model, F.mse_loss, x, y)
    optimizer.step()
    return loss.detach()
"""
LOOP = "%%global\nfor _ in range({}): loss = step()"


@pytest.fixture
def run(session, tmp_path, monkeypatch):
    """Runs a notebook's cell in an empty folder: what it shows, its value, and its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "_open", [session])
    shell = InteractiveShell.instance()
    magic.load_ipython_extension(shell)
    session.run(SETUP)

    def run(cell):
        with capture_output() as captured:
            result = shell.run_cell(cell)
        return captured, result.result, result.error_in_exec

    yield run
    shell.input_transformers_cleanup.remove(magic.read_comment_spelling)
    InteractiveShell.clear_instance()


def test_three_steps_of_the_next_cell(run, tmp_path):
    captured, _, error = run("%workbench profile --steps 3")
    assert error is None and "the next 3 steps after 4 others are profiled" in captured.stdout
    captured, _, error = run(LOOP.format(8))
    assert error is None
    [shown] = captured.outputs
    assert "<table>" in shown.data["text/html"] and "3 steps on 2 ranks" in shown.data["text/plain"]
    [file] = tmp_path.glob("profile-*.json.gz")
    assert f'href="{file.name}"' in shown.data["text/html"]
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert_is_valid(events)
    assert_all_of_it(events)
    _, profile, _ = run("%workbench profile")
    assert profile.num_steps == 3 and profile.ranks[1].compute_s > 0
    for row in profile.ranks:
        assert 0 < row.step_s < 60 and row.exchange_s > 0
        assert row.compute_s + row.exchange_s - row.overlapped_s + row.idle_s == pytest.approx(row.step_s)
    captured, _, _ = run(LOOP.format(1))
    assert not captured.outputs, "one cell was profiled"


def assert_all_of_it(events):
    """Steps, actions, exchanges and torch's operators of both ranks, at the same time on one clock."""
    for rank in (0, 1):
        steps = named(events, "step", rank)
        assert len(steps) == 3 and all(0 < step["dur"] < 60e6 for step in steps)
        first, last = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
        actions = [
            event["name"] for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, 2)
        ]
        assert sorted(set(actions)) == ["B0", "B1", "F0", "F1", "optimizer"] and len(actions) == 15
        exchanges = named(events, "exchange", rank)
        assert exchanges and all(first <= event["ts"] < last for event in exchanges)
        assert any(re.search(r"@?cpu:\[0\]", event["args"].get("from", "")) for event in exchanges)
        operators = named(events, "cpu_op", rank)
        assert any(event["name"] == "aten::addmm" for event in operators)
        assert all(first <= event["ts"] < last for event in operators)
    for one, other in zip(named(events, "step", 0), named(events, "step", 1), strict=True):
        assert one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]
    # What rank 0 sends between the stages arrives on rank 1 after it was sent: one clock.
    sent = [e["ts"] for e in named(events, "exchange", 0) if e["args"]["sent_bytes"] == 16 * 256 * 4 and e["tid"] == 3]
    forwards = [
        e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 2 and e["name"] == "F0"
    ]
    assert min(sent) < min(forwards)


def test_a_cell_with_too_few_steps(run):
    run("%workbench profile --steps 2 --to found.json")
    captured, _, _ = run(LOOP.format(2))
    assert "nothing is profiled yet. 2 steps ended, and the first 4 are for warming up" in captured.stdout
    captured, _, _ = run(LOOP.format(5))
    [shown] = captured.outputs
    assert "1 step on 2 ranks" in shown.data["text/plain"], "the cell had one more than its warm-up"
    assert "found.json" in shown.data["text/plain"]


@pytest.mark.parametrize("how", ["fails", "is interrupted", "loses a rank"])
def test_a_cell_that_breaks_off_is_profiled_when_it_runs_again(run, session, how):
    """The profile was lost in silence, and every later cell said that too few steps had ended."""
    run("%workbench profile --steps 2 --to found.json")
    break_off = {
        "fails": "assert not wb.rank()",
        "is interrupted": "import time\nwhile True: time.sleep(0.01)",
        "loses a rank": "import os, signal\nif wb.rank(): os.kill(os.getpid(), signal.SIGKILL)",
    }[how]
    if how == "is interrupted":
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    _, _, error = run(f"{LOOP.format(5)}\n{break_off}\nstep()")
    assert isinstance(error, KeyboardInterrupt if how == "is interrupted" else CellError)
    session.run(SETUP)
    captured, _, _ = run(LOOP.format(4))
    assert "nothing is profiled yet. 4 steps ended, and the first 4 are" in captured.stdout, "of this cell alone"
    captured, _, _ = run(LOOP.format(6))
    [shown] = captured.outputs
    assert "2 steps on 2 ranks" in shown.data["text/plain"]
    captured, _, _ = run("%%global\nprint(1)")
    assert captured.stdout == "[all] 1\n"


def test_captured_steps(run, tmp_path):
    run("%workbench profile --steps 2 --to found.json")
    _, _, error = run(
        "%%global\ncaptured = wb.capture(step)\nfor _ in range(7): captured()\nassert captured.num_replays == 4"
    )
    assert error is None
    events = json.loads((tmp_path / "found.json").read_text())["traceEvents"]
    assert_is_valid(events)
    assert len(named(events, "step", 1)) == 2 and named(events, "exchange", 1) and named(events, "cpu_op", 1)
    assert not [e for e in events if e["ph"] == "X" and e["tid"] == 2], "replays have no actions"


@pytest.mark.slow
def test_a_run_of_a_comparison(run, session):
    """One device trains on rank 0 alone, and its steps are none of all ranks."""
    run("%workbench profile --steps 2 --to found.json")
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :2])
    wb.compare(
        lambda: torch.nn.Linear(4, 2), data, F.mse_loss, ["*: data"], batch_size=8, steps=8, session=session, keep=False
    )
    captured, _, _ = run("%%global\nprint(1)")
    assert "2 steps on 2 ranks" in captured.outputs[-1].data["text/plain"], "a later cell shows it, and drops nothing"
    _, profile, _ = run("%workbench profile")
    assert profile.num_steps == 2 and [row.num_exchanges > 0 for row in profile.ranks] == [True, True]


def test_a_run_is_profiled_on_the_way(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = (inputs, inputs[:, :2])
    subject = Subject.of(lambda: torch.nn.Linear(4, 2), data, F.mse_loss, batch_size=8, steps=100_000)
    found = []
    with Comparison(session, subject) as comparison:
        training = comparison.start("*: data")
        training.profile()
        wait_until(lambda: found.extend(m for m in training.poll() if isinstance(m, Profile)) or found, "the profile")
        assert not training.done(), "it comes while the run goes on"
        training.stop()
        assert training.result().equal
    (profile,) = found
    assert profile.num_steps == 3 and [row.num_exchanges > 0 for row in profile.ranks] == [True, True]
    assert_is_valid(json.loads(gzip.decompress((tmp_path / profile.path).read_bytes()))["traceEvents"])
    assert profiles.last(session) is profile


def test_it_begins_before_a_run_and_not_in_it(run, session):
    call = session.submit(time.sleep, 1.0, label="a nap")
    wait_until(lambda: session.is_busy, "the call runs")
    _, _, error = run("%workbench profile --steps 3")
    assert isinstance(error, UsageError) and "a profile begins before" in str(error)
    call.result()


def test_bad_numbers(run):
    _, _, error = run("%workbench profile --steps 0")
    assert isinstance(error, UsageError) and "at least 1 step" in str(error)


def test_many_steps_are_cut_with_a_word_about_their_size(run):
    run("%workbench profile --steps 5000 --to found.json")
    captured, _, _ = run(LOOP.format(30))
    text = captured.outputs[0].data["text/plain"]
    assert "20 steps on 2 ranks" in text
    assert re.search(r"5000 steps would be [\d.]+ [MG]B, [\d.]+ [kM]B per step: only the first 20", text)
    assert "%workbench profile --any-size" in text
