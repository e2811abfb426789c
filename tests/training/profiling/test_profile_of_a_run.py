"""A run that is asked for a profile on the way: the parts of all ranks, and what it leaves behind."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from tests.training.runs.test_live_run import STEPS, assert_like_one_device, events_of, make_job, train
from workbench.core.profile import RankPart
from workbench.core.run_commands import RunCommand
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.profiling.recording import Recording
from workbench.training.runs.train import run_strategy

MIB = 2**20


def parts_of(messages) -> dict[int, RankPart]:
    return {message.profile.rank: message for message in messages if isinstance(message, RankPart)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: data", "0: data; 2: data@1; 4: data@1 | 2x1x1 mb=2 1f1b"])
def test_three_steps_of_every_rank_come_while_the_run_goes_on(strategy: str):
    """The run is stopped when they have come, long before its end."""

    def commands(said: list[object]) -> list[RunCommand]:
        return [RunCommand("profile"), *([RunCommand("stop")] if set(parts_of(said)) == {0, 1} else [])]

    results, messages = train(strategy, commands, num_steps=2000)
    num_steps = len(results[0].losses)
    assert num_steps < 2000
    assert all(part.profile.num_steps == 3 and part.events for part in parts_of(messages).values())
    assert events_of(messages)[0].kind == "profiling"
    assert_like_one_device(results[0], num_steps)


def test_a_run_that_is_too_short_says_so_and_the_next_one_is_not_profiled():
    def program() -> list[object]:
        said: list[object] = []
        job = make_job(4)
        run_strategy(job, "*: data", listen=said.append, commands=lambda: [RunCommand("profile")])
        run_strategy(replace(job, num_steps=STEPS), "*: data", listen=said.append)
        assert current().context.profiler is None
        return said

    said = run_ranks(program, 2)
    assert not any(parts_of(messages) for messages in said)
    texts = [event.text for event in events_of(said[0]) if event.kind == "unprofiled"]
    assert len(texts) == 1 and "steps ended, the first 4 are for warming up" in texts[0]


def test_a_run_that_fails_leaves_no_profile_behind():
    def broken_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 8:
            raise ValueError("broken")
        return torch.nn.functional.cross_entropy(output, target)

    calls, said = list[int](), list[object]()

    def program() -> bool:
        with pytest.raises(Exception, match="broken"):
            run_strategy(
                replace(make_job(60), loss_fn=broken_loss),
                "*: data",
                listen=said.append,
                commands=lambda: [RunCommand("profile")],
            )
        return current().context.profiler is None

    assert run_ranks(program, 1) == [True]


def test_a_second_profile_waits_for_the_first():
    _, messages = train("*: data", lambda said: [RunCommand("profile")] * 2, num_steps=40)
    assert [(event.kind, event.text) for event in events_of(messages)] == [
        ("profiling", ""), ("unprofiled", "another profile counts the steps"),
    ]  # fmt: skip
    assert len(parts_of(messages)) == 2


def test_a_change_of_strategy_ends_the_profile():
    """Its rows would be of no strategy."""
    commands = [RunCommand("profile"), RunCommand("strategy", "*: model")]
    _, messages = train("*: data", lambda said: commands)
    assert [event.kind for event in events_of(messages)] == ["profiling", "unprofiled", "strategy"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the resident size is known")
def test_what_the_profile_holds_is_not_in_the_run_s_peak(monkeypatch: pytest.MonkeyPatch):
    """As much as the runs hold, and more, while it records and while its part is made."""

    def start(recording: Recording) -> None:
        held.append(torch.ones(50 * MIB, dtype=torch.uint8))

    def read(recording: Recording) -> tuple[str, ...]:
        torch.ones(100 * MIB, dtype=torch.uint8)
        return ()

    held = list[torch.Tensor]()
    monkeypatch.setattr(Recording, "start", start)
    monkeypatch.setattr(Recording, "notes", property(read))
    (result,), messages = train("*: data", lambda said: [RunCommand("profile")], num_ranks=1, num_steps=40)
    assert len(held) == len(parts_of(messages)) == 1
    assert result.memory_bytes["peak"] < 30 * MIB
