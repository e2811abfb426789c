"""How a run follows the messages of its ranks, without engines."""

from threading import Timer
from typing import Any

from workbench.session.adapter import Request
from workbench.session.protocol import Failure
from workbench.session.run import NullListener, Run


def test_an_error_that_comes_late_on_a_busy_machine_is_not_lost():
    """Replies and output come on different sockets."""
    request, nobody = Request([0]), Any
    failure = Failure("ValueError", "planned", (), 0.0)
    request.put("reply", 0, ValueError("planned"))
    timers = [Timer(1.3, request.put, event) for event in (("data", 0, failure), ("idle", 0, None))]
    for timer in timers:
        timer.start()
    outcome = Run(nobody, request, NullListener(), nobody).wait()
    assert outcome.failures == {0: failure}
    assert outcome.elapsed_s < 5, "the end of the output ends the run"
