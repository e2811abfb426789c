"""Profiles of simulated ranks: what is recorded, what a rank's table says, and one file of all ranks."""

from __future__ import annotations

import copy
import gzip
import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import workbench as wb
from tests.training.profiling.trace_files import assert_is_valid, assert_nested, named
from workbench.core.profile import MEMORY_KINDS, MOST_STEPS
from workbench.core.trace_events import lanes
from workbench.errors import RunError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.transport.threads import ThreadTransport
from workbench.units import format_bytes

PLAIN = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
PIPELINE = "0: data; 2: data@1 | 2x1x1 mb=2 1f1b"
X, Y = torch.ones(8, 4), torch.ones(8, 2)


def make_step(strategy: str, captured: bool = False):
    model = wb.parallelize(copy.deepcopy(PLAIN), strategy)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = wb.forward_backward(model, F.mse_loss, x, y)
        optimizer.step()
        return loss.detach()

    return wb.capture(step) if captured else step


def profiled(tmp_path, strategy: str, captured: bool = False, num_calls: int = 8, name: str = "p.json", **options):
    """The profiles of two ranks, and the events of the file."""

    def program():
        step = make_step(strategy, captured)
        with wb.debug.profile(tmp_path / name, **options) as profile:
            for _ in range(num_calls):
                step(X, Y)
        return profile

    profiles = run_ranks(program, 2)
    return profiles, json.loads((tmp_path / name).read_text())["traceEvents"]


def test_spans_that_cross_are_found():
    assert_nested([{"ts": 0, "dur": 4}, {"ts": 1, "dur": 2}, {"ts": 4, "dur": 1}])
    with pytest.raises(AssertionError):
        assert_nested([{"ts": 0, "dur": 4}, {"ts": 1, "dur": 5}])


def test_two_ranks_come_in_one_file(tmp_path):
    profiles, events = profiled(tmp_path, "0: data; 2: model", steps=3)
    assert_is_valid(events)
    for rank, profile in enumerate(profiles):
        assert profile.num_steps == 3 and [row.rank for row in profile.ranks] == [0, 1]
        assert profile.size_bytes == (tmp_path / "p.json").stat().st_size
        steps = named(events, "step", rank)
        assert [step["name"] for step in steps] == ["step 0", "step 1", "step 2"]
        assert sum(step["dur"] for step in steps) / 3e6 == pytest.approx(profile.ranks[rank].step_s)
    for one, other in zip(named(events, "step", 0), named(events, "step", 1), strict=True):
        assert one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"], "they step together"


def test_exchanges_have_layouts_and_bytes(tmp_path):
    _, events = profiled(tmp_path, "0: data; 2: model", steps=2)
    exchanges = named(events, "exchange")
    boxings = [event["args"] for event in exchanges if "from" in event["args"]]
    assert {"S(0) on cpu:[0, 1]", "B on cpu:[0, 1]"} <= {end for each in boxings for end in (each["from"], each["to"])}
    whole = next(each for each in boxings if each["from"].startswith("S(0)") and each["to"].startswith("B"))
    assert whole["sent_bytes"] == 4 * 8 * 4, "4 of 8 rows of the hidden layer, for one other rank"
    assert any(event["name"].startswith("reduction of") for event in exchanges)
    start, stop = named(events, "step")[0]["ts"], named(events, "step")[-1]["ts"] + named(events, "step")[-1]["dur"]
    assert all(start <= event["ts"] < stop for event in exchanges)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "strategy",
    ["*: data", "*: model", "*: data | zero=3", "0: data; 2: model@1 | 1x2+1x2 mb=2",
     "0: data; 2: data@1 | 2x2x1 mb=2 interleaved", "*: data | context=2"],
)  # fmt: skip
def test_bytes_are_those_that_a_step_counts(strategy, captured):
    def program():
        step, traffic = make_step(strategy, captured), current().traffic
        with wb.debug.profile(steps=2) as profile:
            for _ in range(6):
                step(X, Y)
        before = traffic.sent_bytes
        step(X, Y)
        return profile.ranks[current().rank].sent_bytes, traffic.sent_bytes - before

    for found, counted in run_ranks(program, 4):
        assert found == counted > 0


def test_actions_of_micro_batches_have_a_track(tmp_path):
    _, events = profiled(tmp_path, PIPELINE, steps=2)
    for rank in (0, 1):
        actions = [e for e in events if e["pid"] == rank and e["ph"] == "X" and e["tid"] == 2]
        for step in (0, 1):
            found = [event["name"] for event in actions if event["args"]["step"] == step]
            assert sorted(found) == ["B0", "B1", "F0", "F1", "optimizer"]


def test_a_loop_that_logs_shows_its_actions_too(tmp_path):
    def program():
        step = make_step(PIPELINE)
        with wb.debug.profile(tmp_path / "p.json", steps=2):
            for _ in range(6):
                wb.log(loss=step(X, Y), to=f"jsonl:{tmp_path}/{current().rank}.jsonl")

    run_ranks(program, 2)
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    names = [e["name"] for e in events if e["pid"] == 1 and e["ph"] == "X" and e["tid"] == 2 and e["args"]["step"] == 1]
    assert sorted(names) == ["B0", "B1", "F0", "F1", "optimizer"]


def test_replays_of_a_captured_step_are_profiled(tmp_path):
    profiles, events = profiled(tmp_path, "0: data; 2: model", captured=True, steps=3)
    assert_is_valid(events)
    assert profiles[0].num_steps == 3
    exchanges = [e["args"] for e in named(events, "exchange") if e["tid"] == 3]
    assert any("from" in each for each in exchanges)
    assert not [e for e in events if e["ph"] == "X" and e["tid"] == 2], "a replay has no forward and backward"


def test_shares_add_up(tmp_path):
    profiles, _ = profiled(tmp_path, "*: data", steps=3)
    for row in profiles[0].ranks:
        assert row.compute_s + row.exchange_s - row.overlapped_s + row.idle_s == pytest.approx(row.step_s)
        assert 0 <= row.overlapped_s <= min(row.compute_s, row.exchange_s)
        assert row.num_exchanges >= 1 and row.sent_bytes > 0
    text = str(profiles[1])
    assert "2 ranks" in text and "overlapped" in text and "ui.perfetto.dev" in text and "on the CPU" in text
    assert "<table>" in profiles[0]._repr_html_()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("captured", [False, True])
def test_memory_over_one_step(tmp_path, captured):
    profiles, _ = profiled(tmp_path, PIPELINE, captured=captured)
    first, second = profiles[0].memory
    assert (first.rank, second.rank) == (0, 1) and set(first.size_bytes) == {*MEMORY_KINDS[:4]}
    sizes = first.size_bytes
    assert set(sizes["parameters"]) == {(4 * 8 + 8) * 4} and set(second.size_bytes["parameters"]) == {(8 * 2 + 2) * 4}
    assert max(sizes["gradients"]) == (4 * 8 + 8) * 4 and set(sizes["optimizer"]) == {0}
    assert sizes["activations"][0] == sizes["activations"][-1] == 0 < max(sizes["activations"])
    assert list(first.time_s) == sorted(first.time_s) and first.time_s[0] == 0 and len(first.time_s) > 4
    assert first.peak_bytes == max(map(sum, zip(*sizes.values(), strict=True)))


def test_memory_needs_a_step_of_its_own(tmp_path):
    profiles, _ = profiled(tmp_path, "*: data", warmup=2)
    assert profiles[0].memory == ()


def test_a_name_with_gz_is_compressed(tmp_path):
    def program():
        step = make_step("*: data")
        with wb.debug.profile(tmp_path / "p.json.gz") as profile:
            for _ in range(7):
                step(X, Y)
        return profile

    profile = run_ranks(program, 2)[0]
    assert_is_valid(json.loads(gzip.decompress(profile.path.read_bytes()))["traceEvents"])


def test_what_follows_the_last_step_runs_as_ever(tmp_path):
    """No hook, no timer and no replaced method is left behind, and none is there without a profile."""

    def program():
        step, world = make_step("*: data"), current()
        with wb.debug.profile(steps=2):
            for _ in range(6):
                step(X, Y)
            during = [world.context.profiler, world.context.action_timer, *(set(vars(world.transport)) & methods)]
            for _ in range(3):
                step(X, Y)
        return during, [world.context.profiler, world.context.action_timer, *(set(vars(world.transport)) & methods)]

    methods = {name for name in vars(ThreadTransport) if not name.startswith("_")}
    for found in run_ranks(program, 2):
        assert found == ([None, None], [None, None])


def test_a_second_optimizer_ends_no_step(tmp_path):
    def program():
        step = make_step("*: data")
        other = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        with wb.debug.profile(steps=2) as profile:
            for _ in range(7):
                step(X, Y)
                other.step()
        return profile.num_steps

    assert run_ranks(program, 2) == [2, 2]


def test_another_optimizer_ends_steps_where_the_first_one_is_gone():
    def program():
        make_step("*: data")(X, Y)
        with wb.debug.profile(steps=2) as profile:
            make_step("*: data")(X, Y)
            step = make_step("*: data")
            for _ in range(8):
                step(X, Y)
        return profile.num_steps

    assert run_ranks(program, 2) == [2, 2]


def test_a_file_that_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / "file").write_text("no folder")

    def program():
        step = make_step("*: data")
        with wb.debug.profile(tmp_path / "file" / "p.json") as profile:
            for _ in range(7):
                step(X, Y)
        return profile

    for profile in run_ranks(program, 2):
        assert profile.path is None and profile.num_steps == 3
        assert "p.json was not written" in str(profile)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_path_of_rank_0_decides(tmp_path, rank):
    """`"p.json" if wb.rank() == 0 else None`: rank 0 waited for events that the others did not send."""

    def program():
        step = make_step("*: data")
        with wb.debug.profile(tmp_path / "p.json" if wb.rank() == rank else None) as profile:
            for _ in range(7):
                step(X, Y)
        return profile.path

    assert run_ranks(program, 2) == [tmp_path / "p.json" if rank == 0 else None] * 2
    assert (tmp_path / "p.json").exists() == (rank == 0)


def test_without_an_optimizer_the_context_is_one_step(tmp_path):
    def program():
        model = wb.parallelize(copy.deepcopy(PLAIN), "0: data; 2: model")
        with wb.debug.profile(tmp_path / "p.json", warmup=0) as profile:
            model(X)
        return profile

    profile = run_ranks(program, 2)[0]
    assert profile.num_steps == 1 and profile.ranks[0].num_exchanges >= 1


def test_a_profile_of_too_many_steps_says_its_size_first(tmp_path):
    profiles, _ = profiled(tmp_path, "*: data", num_calls=30, steps=1000)
    assert profiles[0].num_steps == MOST_STEPS
    note, size = profiles[1].notes[0], (tmp_path / "p.json").stat().st_size
    whole = format_bytes(size * 1000 / MOST_STEPS)
    assert f"1000 steps would be {whole[:2]}" in note and "any_size=True" in note
    assert note in str(profiles[0])


def test_more_steps_than_that_are_profiled_if_their_size_does_not_matter(tmp_path):
    profiles, _ = profiled(tmp_path, "*: data", num_calls=30, steps=22, any_size=True)
    assert profiles[0].num_steps == 22 and "would be" not in str(profiles[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps is 0"), ({"steps": 2.5}, "steps is 2.5"), ({"warmup": -1}, "warmup is -1"),
     ({"warmup": 9}, "6 steps ended here")],
)  # fmt: skip
def test_bad_numbers(options, message):
    def program():
        step = make_step("*: data")
        with wb.debug.profile(**options):
            for _ in range(6):
                step(X, Y)

    with pytest.raises(RunError, match=message):
        run_ranks(program, 2)


def test_one_profile_at_a_time():
    def program():
        with wb.debug.profile(), pytest.raises(RunError, match="another profile"), wb.debug.profile():
            pass

    with pytest.raises(RunError, match="nothing was profiled"):
        run_ranks(program, 1)


def test_an_error_in_the_loop_is_the_users():
    def program():
        with wb.debug.profile(warmup=0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_ranks(program, 1)


def test_lanes_do_not_overlap():
    intervals = sorted((start, start + length) for start, length in [(0, 5), (1, 1), (2, 6), (2.5, 1), (9, 1), (4, 4)])
    found = lanes(intervals)
    for lane in set(found):
        own = [interval for interval, number in zip(intervals, found, strict=True) if number == lane]
        assert all(one[1] <= other[0] for one, other in pairwise(own))
    assert len(set(found)) == 3


def test_names_of_files_that_an_address_does_not_take_and_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def program():
        step = make_step("*: data | 1x2x1")
        with wb.debug.profile("~/my #1 run.json") as profile:
            for _ in range(8):
                step(X, Y)
        return profile

    [profile, _] = run_ranks(program, 2)
    assert profile.path == tmp_path / "my #1 run.json" and profile.path.is_file()
    assert "/my%20%231%20run.json" in profile._repr_html_() and ">" + str(profile.path) in profile._repr_html_()
    assert "all time outside of exchanges is compute" in str(profile)
