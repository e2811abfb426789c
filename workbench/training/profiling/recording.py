"""Some steps of one rank as they are recorded: torch's events, exchanges, actions, and where steps end."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack

from workbench.core.intervals import Interval, united
from workbench.core.profile import RankProfile, rank_profile
from workbench.core.trace_events import Event, action_event, lanes, rank_name, span, track_name
from workbench.tensors.world import World
from workbench.training.profiling.exchanges import ExchangeRecorder, RecordedExchange
from workbench.training.profiling.torch_events import TorchRecording, computes, nccl_kernels, on_tracks
from workbench.training.recorded_actions import ActionTimer, RecordedAction, read_actions
from workbench.transport.traffic import Moment, seconds

_STEPS, _ACTIONS, _CALLS, _IN_PROGRESS = 1, 2, 3, 4
_BOXING = re.compile(r"boxing (?P<source>.*?) -> (?P<target>.*) of (?P<shape>\(.*?\))")


class Recording:
    """The steps of one rank from ``begin_steps`` to ``stop``; each ends with a call of ``step_ends``.

    Args:
        world: of the rank.
        sees_torch: whether torch's profiler runs too. It sees a process, not one of several simulated ranks.
    """

    def __init__(self, world: World, sees_torch: bool) -> None:
        self.world = world
        self._torch = TorchRecording(world.device) if sees_torch else None
        self._exchanges = ExchangeRecorder(world)
        self._actions: dict[int, RecordedAction] = {}
        self._moments: list[Moment] = []
        self._host_times_s: list[float] = []
        self._around = ExitStack()
        self._events: list[Event] | None = None

    @property
    def num_steps(self) -> int:
        """The number of steps that have ended."""
        return max(0, len(self._moments) - 1)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know."""
        if self._torch is None:
            problem = "simulated ranks share a process, where torch's profiler does not tell them apart"
        else:
            problem = self._torch.problem
        return (f"{problem}: all time outside of exchanges is compute",) if problem else ()

    def start(self) -> None:
        """Start what records. That takes time, so that the step in which it happens is better not one of the steps."""
        if self._torch is not None:
            self._torch.start()
        self._around.enter_context(self._exchanges.recording())

    def begin_steps(self) -> None:
        """The first of the steps begins here."""
        self._take_moment()

    def step_ends(self) -> None:
        """A step ends here."""
        self._take_moment()
        timer: ActionTimer | None = self.world.context.action_timer
        if timer is not None:
            self._actions |= {id(action.start): action for action in timer.actions}

    def stop(self) -> None:
        """End the recording. What follows the last step is not part of it."""
        self._around.close()
        if self._torch is not None:
            self._torch.stop()

    def profile(self) -> RankProfile:
        """The table's row of this rank; waits for the device."""
        steps = self._steps()
        torch_events, exchanges = self._torch_events(), self._exchanges_within(steps)
        work = computes(torch_events) if torch_events else united(steps)
        sent = [exchange.sent_bytes for exchange in exchanges]
        calls = [interval for exchange in exchanges for interval in _calls(exchange)]
        in_progress = nccl_kernels(torch_events) or list(map(_whole, exchanges))
        return rank_profile(self.world.rank, steps, work, calls, in_progress, sent)

    def events(self, clock_offset_s: float = 0.0, host: str = "") -> Iterator[Event]:
        """The steps in the trace event format.

        Args:
            clock_offset_s: what this rank's clock shows at a moment that is the same on all ranks.
            host: of the rank, for its name.
        """
        rank, steps = self.world.rank, self._steps()
        yield from rank_name(rank, host)
        yield from track_name(rank, _STEPS, "steps")
        for number, (start, stop) in enumerate(steps):
            yield span(f"step {number}", "step", rank, _STEPS, start - clock_offset_s, stop - clock_offset_s)
        yield from self._action_events(steps, clock_offset_s)
        yield from self._exchange_events(steps, clock_offset_s)
        shift = clock_offset_s * 1e6
        for event in on_tracks(self._torch_events(), rank):
            yield event if event["ph"] == "M" else {**event, "ts": event["ts"] - shift}

    def _take_moment(self) -> None:
        self._moments.append(self.world.traffic.moment())
        self._host_times_s.append(time.perf_counter())

    def _steps(self) -> list[Interval]:
        times = [seconds(moment.time) for moment in self._moments]
        return list(itertools.pairwise(times))

    def _torch_events(self) -> list[Event]:
        if self._events is None:
            found = self._torch.events() if self._torch is not None else []
            steps = self._steps()  # of a GPU; the host works ahead
            first = 1e6 * min(steps[0][0], self._host_times_s[0])
            last = 1e6 * max(steps[-1][1], self._host_times_s[-1])
            self._events = [e for e in found if e["ph"] == "M" or first <= e["ts"] < last]
        return self._events

    def _exchanges_within(self, steps: list[Interval]) -> list[RecordedExchange]:
        return [each for each in self._exchanges.exchanges if steps[0][0] <= seconds(each.started) < steps[-1][1]]

    def _action_events(self, steps: list[Interval], clock_offset_s: float) -> Iterator[Event]:
        found = read_actions(self.world.traffic, list(self._actions.values()), 0.0)
        within = [action for action in found if steps[0][0] <= action.start_s < steps[-1][1]]
        if within:
            yield from track_name(self.world.rank, _ACTIONS, "forward, backward, optimizer")
        for action in within:
            step = next(number for number, (_, stop) in enumerate(steps) if action.start_s < stop)
            yield action_event(action, step, self.world.rank, _ACTIONS, clock_offset_s)

    def _exchange_events(self, steps: list[Interval], clock_offset_s: float) -> Iterator[Event]:
        rank, exchanges = self.world.rank, self._exchanges_within(steps)
        if not exchanges:
            return
        yield from track_name(rank, _CALLS, "exchanges: calls")
        for exchange in exchanges:
            for start, stop in _calls(exchange):
                yield _exchange_event(exchange, rank, _CALLS, start - clock_offset_s, stop - clock_offset_s)
        waited = [exchange for exchange in exchanges if exchange.ended is not None]
        intervals = list(map(_whole, waited))
        for exchange, (start, stop), lane in zip(waited, intervals, lanes(intervals), strict=True):
            yield from track_name(rank, _IN_PROGRESS + lane, "exchanges: in progress")
            yield _exchange_event(exchange, rank, _IN_PROGRESS + lane, start - clock_offset_s, stop - clock_offset_s)


def _calls(exchange: RecordedExchange) -> Iterator[Interval]:
    """When the rank is in a call of the transport."""
    yield seconds(exchange.started), seconds(exchange.stopped)
    if exchange.finishing is not None and exchange.ended is not None:
        yield seconds(exchange.finishing), seconds(exchange.ended)


def _whole(exchange: RecordedExchange) -> Interval:
    """When the exchange is in progress."""
    return seconds(exchange.started), seconds(exchange.stopped if exchange.ended is None else exchange.ended)


def _exchange_event(exchange: RecordedExchange, rank: int, track: int, start_s: float, stop_s: float) -> Event:
    boxing = _BOXING.match(exchange.call)
    name = f"{boxing['source']} -> {boxing['target']}" if boxing else exchange.call.partition(",")[0]
    layouts = {"from": boxing["source"], "to": boxing["target"], "shape": boxing["shape"]} if boxing else {}
    values = {"call": exchange.call, "kind": exchange.kind, "sent_bytes": exchange.sent_bytes, **layouts}
    return {**span(name, "exchange", rank, track, start_s, stop_s), "args": values}
