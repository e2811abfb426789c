"""A notebook's kernel keeps what it says until its pages have it.

zmq drops what a publisher sends while 1000 messages wait. A panel has some 500 widgets, and a cell that runs again
closes as many as it makes: where the server was busy for a moment, the end was lost, and with it the panel, or that
the cell has ended.
"""

from __future__ import annotations

from workbench.session.output.start_progress import ipython_shell


def keep_messages() -> None:
    """Let any number of messages wait. Outside of a kernel this does nothing.

    ZeroMQ's manual, ``zmq_setsockopt``: the limit may change while a socket is in use.
    """
    channel = getattr(getattr(ipython_shell(), "kernel", None), "iopub_thread", None)
    if channel is not None and hasattr(channel.socket, "set_hwm"):
        channel.schedule(lambda: channel.socket.set_hwm(0))
