"""Which ranks a stop kills, with messages that come in any order: a played clock, played engines."""

import pytest

from tests.session.played_engines import PlayedEngines
from workbench.session import stopping
from workbench.session.outcome import Outcome
from workbench.session.protocol import RankStatus
from workbench.session.stop_escalation import STEPS
from workbench.session.stopping import SILENCE_LIMIT_S, Stop

RUN = 7
RUNS = RankStatus(0, True, doing="at cell line 3", run=RUN, is_handling=True)
IMPORTS = RankStatus(0, True, run=RUN, is_handling=True, importing="slow")
HANDLES = RankStatus(0, True, run=RUN, is_handling=True, handles="interrupt")
HANDLES_ERROR = RankStatus(0, True, run=RUN, is_handling=True, handles="error")
IS_AHEAD = RankStatus(0, True, run=RUN - 1)
"""It has yet to get the request."""
HAS_REPLIED = RankStatus(0, True, run=RUN)
STEPS_S = sum(after_s for after_s, _ in STEPS)


class NoCoreWaits:
    """On a machine that is not busy."""

    def __init__(self, pids):
        self.waited_s = 0.0

    def longest_s(self):
        return self.waited_s


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch):
    monkeypatch.setattr(stopping, "CoreWaits", NoCoreWaits)


class Played:
    """A stop of two ranks, followed by a clock that ticks every 10 ms."""

    def __init__(self, statuses, nannies=(), reason="interrupt"):
        self.engines, self.said = PlayedEngines(statuses, nannies), []
        self.outcome = Outcome((0, 1), stop_reason=reason)
        self.pending, self.now = [0, 1], 100.0
        self.stop = Stop(self.engines, self.engines, RUN, self.pending, self.outcome, self.now, self.said.append)

    def run(self, for_s):
        """The ranks that have been killed after so many seconds more."""
        for _ in range(round(for_s / 0.01)):
            self.stop.step(self.now, self.pending)
            self.now += 0.01
        return sorted(set(self.engines.killed))

    def sent(self, operation):
        return [ranks for kind, ranks in self.engines.sent if kind == operation]


def test_ranks_that_run_on_are_killed_after_all_steps():
    played = Played({0: RUNS, 1: RUNS}, nannies={0, 1})
    assert played.run(STEPS_S - 0.1) == []
    assert played.run(0.3) == [0, 1]
    assert played.sent("interrupt") == [(0, 1)] * 3 and played.sent("SIGINT") == []
    assert played.outcome.places == dict.fromkeys((0, 1), "at cell line 3")


@pytest.mark.parametrize("on_way", [IS_AHEAD, HAS_REPLIED])
def test_a_rank_with_a_message_on_its_way_is_not_killed_and_one_that_is_stuck_is(on_way):
    played = Played({0: on_way, 1: RUNS}, nannies={0, 1})
    assert played.run(5.0) == [1]
    assert played.said == [
        "workbench: the message to or from rank 0 is on its way (at most 10 s). Another interrupt kills it now."
    ]
    played.pending = [0]
    assert played.run(SILENCE_LIMIT_S) == [0, 1]


def test_a_rank_that_is_ahead_may_be_slow_to_answer():
    """Its answers wait for a core where the machine is busy, while its nanny's come at once."""
    played = Played({0: IS_AHEAD, 1: RUNS}, nannies={0, 1})
    assert played.run(STEPS_S - 0.3) == []
    played.engines.statuses = {1: RUNS}
    assert played.run(5.0) == [1]
    played.pending = [0]
    assert played.run(SILENCE_LIMIT_S) == [0, 1]


def test_a_message_that_takes_seconds_to_the_hosts_costs_the_ranks_none_of_their_time():
    played = Played({})
    assert played.run(8.0) == [] and played.sent("interrupt") == [(0, 1)]
    played.engines.statuses = {0: RUNS, 1: RUNS}
    assert played.run(STEPS_S - 0.2) == []
    assert played.run(0.5) == [0, 1]


def test_one_host_that_is_not_heard_holds_up_the_steps():
    played = Played({0: RUNS, 1: RUNS})
    played.run(0.3)
    played.engines.statuses = {0: RUNS}
    played.run(0.4)
    assert played.run(5.0) == []


def test_c_code_that_holds_the_interpreter_gets_a_signal_of_its_nanny_and_is_killed_in_time():
    played = Played({0: RUNS}, nannies={0, 1})
    assert played.run(STEPS_S + 0.2) == [0, 1]
    assert played.sent("SIGINT") == [(1,), (1,)]
    assert played.sent("interrupt") == [(0, 1), (0,), (0,)], "questions do not pile up"


def test_where_nobody_answers_the_ranks_are_killed_at_last():
    played = Played({})
    assert played.run(SILENCE_LIMIT_S) == []
    assert played.run(STEPS_S + 0.5) == [0, 1]


def test_time_in_which_ranks_wait_for_a_core_does_not_count_and_no_time_counts_twice():
    played = Played({0: RUNS, 1: RUNS}, nannies={0, 1})
    for _ in range(300):
        played.stop._core_waits.waited_s += 0.02  # more than has passed: several threads take turns
        assert played.run(0.01) == []
    assert played.run(STEPS_S + 0.2) == [0, 1]


def test_another_interrupt_takes_the_time_of_a_rank_that_is_known_to_be_waited_for():
    played = Played({0: IMPORTS, 1: RUNS}, nannies={0, 1})
    played.stop.hurry(played.now)  # nobody has been told yet
    assert played.run(STEPS_S + 0.2) == [1] and "rank 0 must end an import first" in played.said[0]
    played.pending = [0]
    played.stop.hurry(played.now)
    assert played.run(STEPS_S + 0.2) == [0, 1]
    assert played.outcome.unended == {0: "an import"}


def test_a_rank_that_handles_its_interrupt_has_time_and_another_interrupt_reaches_its_handler():
    played = Played({0: HANDLES, 1: RUNS}, nannies={0, 1})
    assert played.run(STEPS_S + 5.0) == [1]
    assert played.said == [
        "workbench: rank 0 must end an except or finally clause first (at most 60 s). Another interrupt ends it now."
    ]
    played.pending = [0]
    assert [told["spared"] for told in played.engines.arguments("interrupt")][-1] == ["interrupt"]
    played.stop.hurry(played.now)
    assert played.run(STEPS_S - 0.1) == [1] and played.engines.arguments("interrupt")[-1]["spared"] == []
    assert played.run(0.3) == [0, 1] and played.outcome.unended == {0: "an except or finally clause"}


def test_a_handler_without_end_is_interrupted_again_before_it_is_killed(monkeypatch):
    monkeypatch.setattr(stopping, "FINISH_LIMIT_S", 4.0)
    played = Played({0: HANDLES, 1: HANDLES}, nannies={0, 1})
    assert played.run(4.0 + STEPS_S) == [] and played.engines.arguments("interrupt")[-1]["spared"] == []
    assert played.run(2 * STEPS_S) == [0, 1]


def test_a_notebook_that_comes_late_interrupts_a_handler_before_it_kills():
    """It was suspended: the time of handlers is over at the first step that could kill."""
    played = Played({0: HANDLES, 1: HANDLES}, nannies={0, 1})
    played.run(1.0)
    played.now += 70.0
    assert played.run(STEPS_S) == [] and played.engines.arguments("interrupt")[-1]["spared"] == []
    assert played.run(2 * STEPS_S) == [0, 1]


def test_handlers_may_exchange_while_all_ranks_are_there():
    played = Played({0: HANDLES, 1: HANDLES}, nannies={0, 1})
    played.run(2.0)
    assert [told["all_are_there"] for told in played.engines.arguments("abort")] == [True, True]
    played.pending = [0]
    played.run(2.0)
    assert not played.engines.arguments("abort")[-1]["all_are_there"]


@pytest.mark.parametrize(("reason", "killed"), [("failure", [1]), ("timeout", [0, 1])])
def test_a_rank_that_handles_an_error_has_time_when_another_one_fails(reason, killed):
    played = Played({0: HANDLES_ERROR, 1: RUNS}, nannies={0, 1}, reason=reason)
    assert played.run(STEPS_S + 5.0) == killed
    for operation in ("interrupt", "abort"):
        assert ("error" in played.engines.arguments(operation)[-1]["spared"]) == (reason == "failure")


def test_a_reply_that_comes_before_the_answer_loses_no_place():
    played = Played({}, nannies={0, 1})
    played.run(0.02)
    played.engines.statuses = {0: RUNS, 1: RUNS}
    played.stop.finish()
    assert played.outcome.places == dict.fromkeys((0, 1), "at cell line 3")


def test_a_run_ends_when_its_signals_have_been_sent():
    played, waited = Played({0: RUNS}, nannies={0, 1}), []
    played.run(STEPS_S)
    for _, call in played.stop._signals:
        call.has_arrived = waited.append
    played.outcome.dead[0] = "killed"
    played.stop.finish()
    assert len(waited) == len(played.sent("SIGINT")) == 2 and all(0 < limit_s <= SILENCE_LIMIT_S for limit_s in waited)
