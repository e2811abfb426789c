"""What a notebook's kernel says arrives, however late the page's server reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from tests.timeouts import WAIT_TIMEOUT_S

pytestmark = pytest.mark.procs
NUM_MESSAGES = 4000
BURST = f"""
from IPython.display import display
for number in range({NUM_MESSAGES}):
    display({{"text/plain": str(number), "padding": "." * 4000}}, raw=True)
"""
"""16 MB: more than sockets hold. Beyond that zmq drops what comes after 1000 messages."""
SHOWN = """
from ipywidgets import HTML
from workbench.ui.controls import display_widget
display_widget(HTML())
"""


@pytest.fixture
def client() -> Iterator[Any]:
    manager, client = start_new_kernel(kernel_name="python3")
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.context.destroy(linger=0)


@pytest.mark.parametrize("first", ["%load_ext workbench", SHOWN])
def test_a_burst_of_messages_arrives_whole(client: Any, first: str) -> None:
    client.execute_interactive(first, timeout=WAIT_TIMEOUT_S)
    request = client.execute(BURST)
    client.get_shell_msg(timeout=WAIT_TIMEOUT_S)  # all was said, and nobody has read any of it
    shown = []
    while True:
        message = client.get_iopub_msg(timeout=WAIT_TIMEOUT_S)
        if message["parent_header"].get("msg_id") == request and message["msg_type"] == "display_data":
            shown.append(int(message["content"]["data"]["text/plain"]))
        if message["content"].get("execution_state") == "idle" and message["parent_header"].get("msg_id") == request:
            break
    assert shown == list(range(NUM_MESSAGES))
