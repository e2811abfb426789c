"""A session of another process, as a second notebook or a terminal finds it."""

import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from workbench.session import cluster
from workbench.session.processes import folder


def first_notebook(tmp_path, program, engines=1, keep=True):
    """Runs a program with a `session` of its own, in another process."""
    script = tmp_path / "first.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, sys, time
        from workbench.session import Session
        session = Session(engines={engines}, device="cpu", keep={keep})
        """)
        + textwrap.dedent(program)
        + textwrap.dedent("""
        print(json.dumps({"pid": session.status()[0].pid, "folder": str(session._folder.path)}), flush=True)
        time.sleep(600)
        """)
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return SimpleNamespace(**json.loads(process.stdout.readline()), process=process)


def kill(notebook):
    notebook.process.kill()
    notebook.process.wait(10)
    notebook.process.stdout.close()


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Sessions of these tests are not seen by others, and the other way round."""
    monkeypatch.setenv(folder.BASE_VARIABLE, str(tmp_path / "sessions"))
    monkeypatch.setattr(cluster, "_open", [])
    yield
    for each in folder.all_folders():
        each.reap()
