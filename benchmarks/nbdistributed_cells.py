"""The round trip of an empty cell in nbdistributed, started by `benchmarks.session` in namespaces of its own.

It ends processes of other programs by name when it shuts down, and listens on all interfaces with nothing but pickle
in front of it. So it gets a process namespace and a network of its own, which end with it:

    unshare --pid --net --fork --mount-proc --kill-child \\
        sh -c "ip link set lo up; python -m benchmarks.nbdistributed_cells 2 20"
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from statistics import median

NAMESPACES = ["unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"]
TIMEOUT_S = 300


def why_not() -> str:
    """Why it cannot be measured here; empty if it can."""
    if importlib.util.find_spec("nbdistributed") is None:
        return "it is not installed (pip install nbdistributed)"
    if not all(shutil.which(program) for program in ("unshare", "ip")):
        return "its namespaces need the programs unshare and ip"
    allowed = subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
    return "" if allowed else "this user may make no process namespace, and it ends processes of others by name"


def measure(num_workers: int, num_cells: int) -> float:
    """Median seconds of an empty cell, measured in namespaces of its own.

    Raises:
        subprocess.SubprocessError: it failed, or took too long.
    """
    module = "benchmarks.nbdistributed_cells"
    inner = shlex.join([sys.executable, "-m", module, str(num_workers), str(num_cells)])
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # its workers run `python`
    done = subprocess.run(
        [*NAMESPACES, "sh", "-c", f"ip link set lo up; {inner}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PATH": path},
        check=True,
    )
    return float(done.stdout.split()[-1])


def main(arguments: list[str]) -> int:
    """Measure here: only where nobody else's processes can be seen."""
    if os.getpid() > 20:
        sys.stderr.write("nbdistributed ends other programs' processes: run this in its own PID namespace\n")
        return 1
    from IPython.core.interactiveshell import InteractiveShell

    num_workers, num_cells = map(int, arguments)
    shell = InteractiveShell.instance()
    times = []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        shell.run_line_magic("load_ext", "nbdistributed")
        shell.run_line_magic("dist_init", f"-n {num_workers}")
        shell.run_cell_magic("distributed", "", "pass")
        for _ in range(num_cells):
            started = time.perf_counter()
            shell.run_cell_magic("distributed", "", "pass")
            times.append(time.perf_counter() - started)
    sys.stdout.write(f"{median(times)}\n")
    sys.stdout.flush()
    os._exit(0)  # the namespace takes its workers along; its own way out ends processes by name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
