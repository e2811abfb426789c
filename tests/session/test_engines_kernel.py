"""A notebook's kernel with a session: what people see, interrupt, and the kernel's sudden death."""

import queue
import time

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from tests.session.traces import Traces
from tests.timeouts import PROMPT_S, WAIT_TIMEOUT_S, wait_until

pytestmark = pytest.mark.engines


START_ONE = "%load_ext workbench\n%workbench start --engines 1 --device cpu"


class Notebook:
    """Runs cells in a kernel and keeps the messages they cause."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def run(self, code, interrupt_after_s=None, on_piece=lambda: None):
        """(text printed, MIME types displayed, error name or None)."""
        message_id, started = self.client.execute(code), time.monotonic()
        printed, shown, error = "", [], None
        while True:
            elapsed = time.monotonic() - started
            assert elapsed < WAIT_TIMEOUT_S, "the cell does not end"
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
                printed += content["text"]  # a line may come in two pieces
                on_piece()
            elif kind in ("display_data", "execute_result", "update_display_data"):
                shown.append(set(content["data"]))
            elif kind == "error":
                error = (content["ename"], "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, shown, error


@pytest.fixture
def notebook():
    notebook = Notebook()
    yield notebook
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel(now=True)
    notebook.manager.context.destroy(linger=0)


def test_an_interrupt_while_engines_start_leaves_no_half_of_torch(notebook, tmp_path):
    """The notebook imports it in the meantime."""
    (tmp_path / "slow_numbers.py").write_text("import time\ntime.sleep(1)\nis_whole = True")
    slow = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    slow += "from workbench.session import notebook_imports\nnotebook_imports.load_in_notebook('slow_numbers')"
    assert notebook.run(slow, interrupt_after_s=0.5)[2][0] == "KeyboardInterrupt"
    assert notebook.run("assert sys.modules['slow_numbers'].is_whole")[2] is None


def test_a_notebook_from_start_over_a_restart_to_sudden_death(notebook, tmp_path):
    assert notebook.run("%load_ext workbench.session.magic")[2] is None
    printed, _, error = notebook.run("%workbench start --engines 2 --device cpu")
    assert error is None
    assert "2 engines ready on cpu" in printed
    assert notebook.run("import sys\nassert 'workbench.api' in sys.modules and 'torch' in sys.modules")[2] is None

    seen = tmp_path / "seen"
    waits = f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    cell = f"%%global\nimport os, time\nprint('first')\n{waits}\nprint('second')"
    printed, _, error = notebook.run(cell, on_piece=seen.touch)  # shown while the cell runs
    assert printed == "[all] first\n[all] second\n"  # and not again with the rest

    _, shown, _ = notebook.run("%%global\nimport pandas\npandas.DataFrame({'a': [1]})")
    assert shown == [{"text/plain", "text/html"}]

    bar = (
        "import workbench as wb\nfrom tqdm.auto import tqdm\n"
        "for i in tqdm(range(12), f'bar of {wb.rank()}'): time.sleep(0.1)"  # else two alike are one
    )
    printed, shown, _ = notebook.run(f"%%global\n{bar}")
    assert len(shown) >= 4  # it moves while the cell runs
    assert printed == ""  # no line above or below it

    drawn = "from IPython.display import clear_output, display\nh = display('0 %', display_id=True)\nh.update('50 %')"
    printed, shown, _ = notebook.run(f"%%global --ranks 0\n{drawn}\nclear_output(wait=True)\nprint('end')")
    assert printed == "[0] end\n" and shown == [{"text/plain"}] * 2

    module, where = tmp_path / "edited_model.py", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})"
    text = "import torch\n@torch.no_grad()\ndef width(): return 8"
    module.write_text(text)
    assert notebook.run(f"%%global\n{where}")[2] is None
    load = f"{where}\n%load_ext autoreload\n%autoreload 2\nimport workbench as wb\nfrom edited_model import width"
    assert notebook.run(load)[2] is None
    trains = "print(wb.Session.current().submit(width).result())"
    assert notebook.run(trains)[0] == "[8, 8]\n"
    module.write_text(text.replace("8", "4096"))
    assert notebook.run(trains)[0] == "[4096, 4096]\n"
    module.write_text(text.replace("8", "4096  # a comment"))
    assert notebook.run(trains)[0] == "[4096, 4096]\n"

    _, _, error = notebook.run("%%global\ntime.sleep(1000)", interrupt_after_s=0.5)
    assert error[0] == "Interrupted"
    assert notebook.run("%%global\n1 / 0")[2][0] == "CellError"

    traces = Traces.of(notebook.pid)
    assert len(traces.processes) >= 5 and len(traces.ports) > 10 and traces.folders
    notebook.manager.restart_kernel(now=False)
    notebook.client.wait_for_ready(timeout=WAIT_TIMEOUT_S)
    traces.assert_gone()

    assert notebook.run(START_ONE)[2] is None  # at once
    assert notebook.run("%%global\nwb.world_size()")[0] == "[all] 1\n"
    in_c = tmp_path / "in_c"
    stuck = f"import hashlib\nopen({str(in_c)!r}, 'w').close()\nhashlib.pbkdf2_hmac('sha256', b'x', b'y', 200_000_000)"
    notebook.client.execute(f"%%global\n{stuck}")
    wait_until(in_c.exists, "the cell")
    traces = Traces.of(notebook.pid)
    psutil.Process(notebook.pid).kill()
    traces.assert_gone()


@pytest.mark.slow
def test_a_notebook_is_closed(notebook):
    assert notebook.run(START_ONE)[2] is None
    traces = Traces.of(notebook.pid)
    assert len(traces.processes) >= 3 and traces.ports and traces.folders
    began = time.monotonic()
    notebook.manager.shutdown_kernel(now=False)
    assert time.monotonic() - began < PROMPT_S
    traces.assert_gone()
