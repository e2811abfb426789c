"""A Python that has loaded torch before it starts: programs of tests begin in a tenth of a second, not in five seconds.

`executable` is a command as ``python`` is. It asks a server, the same for all workers of a run, to fork a process that
runs the program with the command's arguments, variables, folder and open files. The command passes signals on, and ends
as the program ends. Where a test is about the start of a program, or about the parents and children of processes,
``sys.executable`` starts it.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from tests.warm.client import read_at_load

_NAME = "WORKBENCH_TEST_PYTHON"


def executable() -> str:
    """The path of the command. The first program starts the server, which ends with the process that asked first."""
    if _NAME not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="workbench-warm-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / "variables").write_text(json.dumps(read_at_load()), encoding="utf-8")
        client = Path(__file__).with_name("client.py")
        words = [sys.executable, "-IS", str(client), str(folder), str(os.getpid())]
        command = folder / "python"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        command.chmod(0o700)
        os.environ[_NAME] = str(command)
    return os.environ[_NAME]
