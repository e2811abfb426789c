"""Simulated ranks take turns with the state of torch's default generator."""

import subprocess

import pytest

from tests.timeouts import PROGRAM_TIMEOUT_S
from tests.warm import executable

PROGRAM = """
import faulthandler, gc, sys, time, torch, weakref
from workbench.testing import run_ranks

class Circle:
    pass

def program():
    seen, end_s = [], time.monotonic() + 1.0
    while time.monotonic() < end_s:
        circle = Circle()
        circle.itself = circle
        seen = [*seen[-50:], weakref.ref(circle, lambda _: time.sleep(0))]
        torch.set_rng_state(torch.get_rng_state())

faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-6)
gc.set_threshold(1)
run_ranks(program, 2)
print("done")
"""


@pytest.mark.procs
def test_a_collection_of_garbage_while_a_rank_reads_the_state_holds_up_nobody():
    """torch locks the generator and may then wait for the interpreter, which another rank held and waited for it."""
    done = subprocess.run(
        [executable(), "-c", PROGRAM], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
    )
    assert done.stdout == "done\n", done.stderr[-2000:]
