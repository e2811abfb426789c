"""A notebook's kernel with a session: what people see, interrupt, and the kernel's sudden death."""

import queue
import time

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]


class Notebook:
    """Runs cells in a kernel and keeps the messages they cause."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code, interrupt_after_s=None):
        """(stdout pieces with their times, MIME types displayed, error name or None, seconds)."""
        message_id, started = self.client.execute(code), time.monotonic()
        pieces, shown, error = [], [], None
        while True:
            elapsed = time.monotonic() - started
            assert elapsed < 60, "the cell does not end"
            if interrupt_after_s is not None and elapsed > interrupt_after_s:
                interrupt_after_s = None
                self.manager.interrupt_kernel()
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            content, kind = message["content"], message["header"]["msg_type"]
            if message["parent_header"].get("msg_id") != message_id:
                continue
            if kind == "stream":
                pieces.append((elapsed, content["text"]))
            elif kind in ("display_data", "execute_result"):
                shown.append(set(content["data"]))
            elif kind == "error":
                error = (content["ename"], "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return pieces, shown, error, elapsed


@pytest.fixture
def notebook():
    notebook = Notebook()
    yield notebook
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel(now=True)
    notebook.manager.context.destroy(linger=0)


def test_a_notebook_from_start_to_sudden_death(notebook):
    assert notebook.run("%load_ext workbench.session.magic")[2] is None
    pieces, _, error, _ = notebook.run("%workbench start --engines 2 --device cpu")
    assert error is None
    assert "2 engines ready on cpu" in pieces[-1][1]

    pieces, _, error, elapsed = notebook.run("%%global\nimport time\nprint('first')\ntime.sleep(1.5)\nprint('second')")
    assert "".join(text for _, text in pieces) == "[all] first\n[all] second\n"
    assert pieces[0][0] < 1.0 < elapsed  # shown while the cell ran, and not sent again with the rest

    _, shown, _, _ = notebook.run("%%global\nimport pandas\npandas.DataFrame({'a': [1]})")
    assert shown == [{"text/plain", "text/html"}]

    _, _, error, elapsed = notebook.run("%%global\ntime.sleep(30)", interrupt_after_s=0.5)
    assert error[0] == "Interrupted"
    assert elapsed < 2.5
    assert notebook.run("%%global\n1 / 0")[2][0] == "CellError"

    kernel = psutil.Process(notebook.manager.provisioner.pid)
    family = kernel.children(recursive=True)
    assert len(family) >= 5  # controller, two engines and their nannies
    kernel.kill()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
