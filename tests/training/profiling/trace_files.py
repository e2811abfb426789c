"""What must hold of every file for Perfetto."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def assert_is_valid(events: list[Event]) -> None:
    """What Perfetto and Chrome need of every event, in a file of two ranks."""
    assert {event["pid"] for event in events} == {0, 1}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys()
        assert event["ph"] in "XMsf" and (event["ph"] != "X" or event["dur"] >= 0)
    names = {event["args"]["name"].partition(" on ")[0] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    for rank in (0, 1):
        for track in {event["tid"] for event in events}:
            assert_nested([e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, track)])


def assert_nested(events: list[Event]) -> None:
    """Spans of one track lie beside or inside one another; a nanosecond may be lost in rounding."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, stop = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + 2e-3:
            open_until.pop()
        assert not open_until or stop <= open_until[-1] + 2e-3, event
        open_until.append(stop)


def named(events: list[Event], category: str, rank: int = 0) -> list[Event]:
    """The events of one category and rank."""
    return [event for event in events if event.get("cat") == category and event["pid"] == rank]
