"""The command ``FOLDER/python``: has the server fork a process for a program, and ends as the program ends.

It runs with nothing but the standard library: ``python -IS client.py FOLDER OWNER arguments...``. Where a fork would
not do what a new interpreter does, it becomes that interpreter.
"""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

READ_AT_LOAD = ("PYTHON", "LD_", "MKL_", "MALLOC_", "TRITON_", "TORCHINDUCTOR_", "TORCH_LOGS")
"""Variables with these beginnings are read while an interpreter or a library loads. Of ``OMP_``, the number of
threads matters, which the server sets."""
READ_AT_USE = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONPATH")
"""But the first two are read when a program compiles; and a process that has compiled has them, whoever started it.
The server puts the third into ``sys.path``."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def read_at_load() -> dict:
    """Those of this process, by name."""
    names = [name for name in os.environ if name.startswith(READ_AT_LOAD) and name not in READ_AT_USE]
    return {name: os.environ[name] for name in names}


def connect(folder: Path, owner: str) -> socket.socket:
    """A connection to the server, which the first of all commands starts, with the variables of the folder's owner."""
    connection = socket.socket(socket.AF_UNIX)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            others = {name: value for name, value in os.environ.items() if name not in read_at_load()}
            with (folder / "log").open("w") as log:
                server = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("server.py")), str(folder), owner],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                    env=others | json.loads((folder / "variables").read_text()),
                )  # fmt: skip
            server.stdout.readline()
    connection.connect(str(folder / "socket"))
    return connection


def main() -> None:
    """Run the program."""
    folder, owner, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    program = arguments[1:] if arguments[:1] == ["-u"] else arguments
    can_be_forked = bool(program) and (program[0] in ("-c", "-m") or not program[0].startswith("-"))
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if _is_inherited(file)]
    connection = connect(folder, owner) if can_be_forked else None
    if connection is None or json.loads((folder / "variables").read_text()) != read_at_load():
        os.execv(sys.executable, [sys.executable, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    request = {
        "arguments": program, "buffers": program == arguments, "environment": dict(os.environ),
        "folder": os.getcwd(), "files": files,
        "ignores_interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "umask": os.umask(0o77),
        "cores": sorted(os.sched_getaffinity(0)),
    }  # fmt: skip
    text = json.dumps(request).encode()
    socket.send_fds(connection, [b"%12d" % len(text)], files)
    connection.sendall(text)
    for file in files:
        os.close(file)  # else nobody sees that the program has closed them
    answers = connection.makefile()
    pid = int(answers.readline())
    wakes, is_woken = os.pipe()
    os.set_blocking(is_woken, False)
    signal.set_wakeup_fd(is_woken)  # a signal just before a read does not end it
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    while connection not in select.select([connection, wakes], [], [])[0]:
        os.read(wakes, 1000)
    code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_inherited(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:  # the listing's own, closed by now
        return False


if __name__ == "__main__":
    main()
