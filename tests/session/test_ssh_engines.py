"""The launcher of engines over SSH, with a program in place of ssh; `tests/session/test_hosts.py` has real hosts."""

import asyncio
import signal
import sys

import psutil
import pytest

from tests.timeouts import wait_until
from workbench.session.processes.ssh_engines import SshEngineSet

SSH = """#!/bin/sh
printf '%s ' "$@" >>{folder}/calls
echo >>{folder}/calls
for word; do command="$word"; done
case "$*" in *silent*) echo "ssh: connect to host silent: refused" >&2; exit 255 ;; esac
exec sh -c "$command"
"""
KEY = 'it\'s $HOME "key"'


@pytest.fixture
def launch(tmp_path):
    """Starts two engines that run a program of Python on a host; returns their set."""
    (tmp_path / "ssh").write_text(SSH.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    sets = []

    def launch(program, host="me@good:2222"):
        launcher = SshEngineSet(
            engines={host: 2}, ssh_cmd=[str(tmp_path / "ssh")], environment={"KEY": KEY}, delay=0.0,
            engine_cmd=[sys.executable, "-S", "-c", program], remote_profile_dir=str(tmp_path / "profile of mine"),
            profile_dir=str(tmp_path),
        )  # fmt: skip
        sets.append(launcher)
        launcher.start(2)
        return launcher

    yield launch
    for each in sets:
        asyncio.run(each.stop())


def test_an_engine_has_its_environment_and_interrupts_and_brings_its_last_lines(launch, tmp_path):
    engines = launch("import os, signal\nprint('was', os.environ['KEY'], signal.getsignal(2).__name__)\nexit(3)")
    wait_until(lambda: engines.poll() or engines.state == "after", "the end")
    asyncio.run(engines.stop())
    assert engines.get_output().count(f"  was {KEY} default_int_handler\n") == 2
    assert not list((tmp_path / "profile of mine" / "log").iterdir())
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2 and all("-p 2222 " in call and "me@good sh -s" in call for call in calls)
    assert not any("key" in call for call in calls)


def test_engines_that_run_are_ended(launch):
    engines = launch("import time\nprint('runs', flush=True)\ntime.sleep(600)")
    pids = [int(each._read().strip("_\n").removeprefix("pid=")) for each in engines.launchers.values()]
    engines.poll()
    assert engines.state == "running" and all(map(psutil.pid_exists, pids))
    asyncio.run(engines.stop())
    assert not any(map(psutil.pid_exists, pids)) and engines.get_output().count("runs") == 2
    engines.signal(signal.SIGKILL)  # nothing runs any more


def test_what_ssh_says_is_the_error(launch):
    with pytest.raises(RuntimeError, match="connect to host silent: refused"):
        launch("", host="silent")
