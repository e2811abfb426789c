"""A function that runs on the engines while the notebook goes on."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.errors import CellError
from workbench.session import protocol
from workbench.session.outcome import Outcome
from workbench.session.output.listeners import OutputListener
from workbench.session.output.tracebacks import cell_error
from workbench.session.run import Run


class RemoteCall:
    """The call that `Session.submit` returns: its progress and, in the end, its results.

    When one rank fails, the others are stopped, also if no code waits for the result.
    """

    def __init__(
        self,
        name: str,
        listener: OutputListener,
        perform: Callable[[RemoteCall], Outcome],
        control: Callable[..., object],
    ) -> None:
        self.name = name
        self._listener, self._perform, self._control = listener, perform, control
        self._run: Run | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._finished = threading.Event()
        follow = contextvars.copy_context().run  # what it shows belongs to the cell that made the call
        threading.Thread(target=follow, args=(self._follow,), name=f"workbench-call-{name}", daemon=True).start()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self.exception() else "finished"
        return f"<RemoteCall {self.name}: {state}>"

    def done(self) -> bool:
        """Whether every rank has returned, failed or been stopped."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> list[Any]:
        """The function's results by rank, waiting for them at most ``timeout`` seconds.

        Raises:
            CellError: the function failed on one or more ranks, or was cancelled.
            TimeoutError: it still runs; the call goes on.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(
                f"RemoteCall({self.name}).result: still running after {timeout} s. Wait again, or call request_stop()."
            )
        error = self.exception()
        if error is not None:
            raise error
        assert self._outcome is not None
        return [protocol.load(self._outcome.replies[rank]) for rank in self._outcome.ranks]

    def exception(self) -> BaseException | None:
        """The exception that `result` raises; None before the call is done, and if it succeeded."""
        if self._error is not None:
            return self._error
        if self._outcome is None or self._outcome.ok:
            return None
        return cell_error(self._outcome, what="call")

    def messages(self) -> list[tuple[int, Any]]:
        """(rank, object) published by the ranks since the last call, in order of arrival."""
        return self._listener.take_published()

    @property
    def text(self) -> str:
        """The output of the ranks so far. A line that several ranks printed appears once."""
        return self._listener.text

    def request_stop(self) -> None:
        """Ask the function to end early: `workbench.session.engine.stop_requested` becomes true on its ranks."""
        self.send_command("stop")

    def send_command(self, kind: str, text: str = "") -> None:
        """Send a command that a training run executes between two steps on all ranks: ``"stop"``, ``"pause"``,
        ``"resume"``, or ``"strategy"`` with the new one's text.
        """
        self._control("command", kind=kind, text=text)

    def describe(self, what: str) -> None:
        """Set the text that a waiting cell shows for this call."""
        if self._run is not None:
            self._run.label = what

    def check_wanted(self) -> None:
        """Raise ``CellError`` if the call was cancelled. The session asks while the call waits for its turn."""
        if self._cancelled:
            raise CellError(f"{self.name} was cancelled while it waited for its turn. No rank has run it.")

    def cancel(self) -> None:
        """Interrupt the ranks, and escalate for ranks that do not react. A call that waits for its turn gives it up."""
        with self._lock:
            self._cancelled = True
            if self._run is not None:
                self._run.stop()

    def end(self) -> None:
        """`cancel`, and wait until every rank has ended. A further interrupt of the caller hurries it."""
        while not self.done():
            try:
                self.cancel()
                self._finished.wait()
            except KeyboardInterrupt:  # the next cancel hurries
                continue

    def follow(self, run: Run) -> Outcome:
        """Follow the sent request to its end. The session calls this."""
        with self._lock:
            self._run = run
            if self._cancelled:
                run.stop()
        return run.wait()

    def _follow(self) -> None:
        try:
            self._outcome = self._perform(self)
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error
        finally:
            self._listener.finish()
            self._finished.set()


@contextmanager
def ended_on_interrupt(call: RemoteCall) -> Iterator[None]:
    """A context that waits for a call: an interrupt of the notebook ends the call before it passes."""
    try:
        yield
    except KeyboardInterrupt:
        call.end()
        raise


def finished(call: RemoteCall) -> list[Any]:
    """The results of a call that nothing but the caller waits for: an interrupt of the caller ends it."""
    with ended_on_interrupt(call):
        return call.result()
