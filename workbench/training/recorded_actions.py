"""Actions of a rank as they are recorded while they run, and read later, when the device has done them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.metrics import ActionSpan
from workbench.pipeline.schedules import Action
from workbench.transport.traffic import Moment, Traffic


class RecordedAction(NamedTuple):
    """An action between two moments of its rank."""

    action: Action
    start: Moment
    stop: Moment


def read_actions(traffic: Traffic, actions: Sequence[RecordedAction], clock_offset_s: float) -> tuple[ActionSpan, ...]:
    """The actions as they are reported; waits for the device.

    Args:
        traffic: of the rank.
        clock_offset_s: the time on its clock at a moment that is the same on all ranks.
    """
    found = []
    for action, start, stop in actions:
        between = traffic.between(start, stop)
        span = ActionSpan(
            action.kind,
            action.stage,
            action.micro_batch,
            between.start_s - clock_offset_s,
            between.stop_s - clock_offset_s,
            between.exchange_s,
            between.num_exchanges,
            between.sent_bytes,
        )
        found.append(span)
    return tuple(found)
