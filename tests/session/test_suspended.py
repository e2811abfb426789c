"""A machine that goes to sleep and wakes up: nobody is declared dead, and what ran goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.timeouts import WAIT_TIMEOUT_S

pytestmark = pytest.mark.engines

BOXINGS = """
import time
p = wb.placement.all("cpu")
x = wb.ones(4, 3, placement=p, sbp=wb.sbp.split(0))
until, num_boxings, is_over = time.time() + 1.5, 0, 0.0
while not is_over:  # decided together, since a rank that stops alone leaves the other waiting
    num_boxings += 1
    x.to_global(sbp=wb.sbp.broadcast)
    is_over = wb.to_global(
        torch.tensor([float(time.time() > until)]), placement=p, sbp=wb.sbp.partial_sum
    ).full_tensor().item()
num_boxings
"""
NOTEBOOK = f"""
import json
from workbench.session import Session

with Session(engines=2, device="cpu") as session:
    session.run("kept = 17")
    before = [status.pid for status in session.status()]
    print("ready", flush=True)
    facts = {{
        "boxings": session.run({BOXINGS!r}).values,
        "kept": session.run("wb.barrier(); kept").values,
        "before": before,
        "after": [status.pid for status in session.status()],
    }}
    print(json.dumps(facts), flush=True)
"""


def suspend(pids, for_s):
    """Stop processes, then wake them in the other order."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(for_s)
    for pid in pids[::-1]:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_sleep_longer_than_ten_heartbeats(tmp_path):
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    process = subprocess.Popen([sys.executable, str(tmp_path / "notebook.py")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # the cell runs
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        assert len(family) >= 6
        suspend(family, 30.0)
        facts = json.loads(process.stdout.readline())
        assert facts["boxings"][0] == facts["boxings"][1] > 0
        assert facts["kept"] == [17, 17]
        assert facts["after"] == facts["before"]
        assert process.wait(WAIT_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_short_sleep_of_all_but_the_notebook(session):
    session.run("kept = 17")
    before = [status.pid for status in session.status()]
    family = [process.pid for process in session._folder.processes() if process.find()]
    assert len(family) >= 5
    sleep = threading.Timer(0.3, suspend, (family, 1.0))
    sleep.start()
    ended = session.run(BOXINGS).values
    sleep.join()
    assert ended[0] == ended[1] > 0
    assert session.run("wb.barrier(); kept").values == [17, 17]
    assert [status.pid for status in session.status()] == before
