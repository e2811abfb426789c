"""An interrupt that comes during an import is raised when the import has ended, and what was imported is whole."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.timeouts import PROGRAM_TIMEOUT_S, WAIT_TIMEOUT_S, wait_until
from workbench.errors import CellError
from workbench.session import protocol, stopping
from workbench.session.on_engine import current_request, deferred_interrupts

PACKAGE = {
    "__init__.py": "import time\nfrom slow.core import number\ntime.sleep(1)\nfrom slow.parts import more\nvalue = 41",
    "core.py": "number = 41",
    "parts/__init__.py": "",
    "parts/more.py": "from slow.core import number\nhalf = number / 2",
}
"""Once `core` is there an import that breaks off leaves `slow` without it for ever, as sympy's does."""
BODIES = {
    "statement": "import slow",
    "function": "importlib.import_module('slow.parts.more')",
    "inner": "exec('from slow.parts import more')",
    "reload": "importlib.reload(slow)",
}
ALONE = """
import importlib, os, signal, sys, threading, time
from types import SimpleNamespace
from workbench.session.on_engine import deferred_interrupts

if {holds}:
    deferred_interrupts._count_imports()
    signal.signal(signal.SIGINT, deferred_interrupts.interrupt)
if {body!r}.startswith("importlib.reload"):
    import slow
for after_s in (0.3, 0.5)[: 1 + {holds}]:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    {body}
    time.sleep(600)
except KeyboardInterrupt as error:
    took = time.monotonic() - began
else:
    raise SystemExit("nobody interrupted")
time.sleep(0.3)  # nothing comes after it
print(f"{{0.9 < took < 300}} {{deferred_interrupts.importing()!r}}")
import slow
print(slow.core.number, slow.value, importlib.import_module("slow.parts.more").half)
try:
    import nobody_has_this
except ImportError as error:
    print(error.__traceback__.tb_next)
"""


@pytest.fixture
def package(tmp_path):
    for name, text in PACKAGE.items():
        path = tmp_path / "slow" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run_alone(package, body, holds=True):
    script = package / "script.py"
    script.write_text(ALONE.format(body=body, holds=holds))
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
    )


@pytest.mark.procs
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", BODIES)
def test_the_interrupt_comes_after_the_whole_import(package, kind):
    ended = run_alone(package, BODIES[kind])
    assert ended.stdout.splitlines() == ["True ''", "41 41 20.5", "None"], ended.stderr


@pytest.mark.procs
def test_python_alone_leaves_the_package_broken(package):
    """The oracle: without the deferral this very program fails as users have seen it."""
    ended = run_alone(package, BODIES["statement"], holds=False)
    assert "has no attribute 'core'" in ended.stderr


def test_a_clause_that_was_under_way_is_spared_with_the_errors_in_it_and_later_ones_are_not(monkeypatch):
    monkeypatch.setattr(current_request, "_spared", [protocol.ERROR])
    monkeypatch.setattr(deferred_interrupts, "_handled_first", [])

    def interrupt():
        deferred_interrupts.interrupt(signal.SIGINT, None)

    try:
        raise ValueError
    except ValueError:
        interrupt()
        try:
            raise KeyError from None
        except KeyError:
            interrupt()
        interrupt()
    try:
        raise ValueError
    except ValueError:
        with pytest.raises(KeyboardInterrupt):
            interrupt()


@pytest.mark.engines
class TestEngines:
    @pytest.fixture(autouse=True)
    def _path(self, session, package):
        session.run(f"import sys, importlib\nsys.path.insert(0, {str(package)!r})\nimportlib.invalidate_caches()")
        yield
        session.run(
            "sys.path.pop(0)\nfor name in [n for n in sys.modules if n.split('.')[0] == 'slow']:\n"
            "    del sys.modules[name]"
        )

    def test_a_rank_that_fails_stops_another_after_its_import(self, session, package):
        begun = package / "begun"
        core = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(2)\nnumber = 41"
        (package / "slow" / "core.py").write_text(core)
        program = (
            "import pathlib, time\n"
            f"while wb.rank() == 1 and not pathlib.Path({str(begun)!r}).exists(): time.sleep(0.01)\n"
            "if wb.rank() == 1: raise ValueError('mine')\nimport slow\nwhile True: pass"
        )
        with pytest.raises(CellError, match=r"(?s)ValueError on rank 1: mine.*rank 0 was .*importing slow.* are kept"):
            session.run(program)
        assert session.run("import slow\nslow.core.number, slow.value").values == [(41, 41)] * 2

    @pytest.mark.slow
    def test_an_import_that_takes_longer_than_all_steps_to_stop_is_waited_for(self, session, package):
        (package / "slow" / "core.py").write_text("import time\ntime.sleep(3)\nnumber = 41")
        session.run("kept = 7")
        began = time.monotonic()
        with pytest.raises(CellError, match=r"Timeout(?s:.*)importing slow"):
            session.run("import slow\nwhile True: pass", timeout=0.5)
        assert time.monotonic() - began > 3.5
        assert session.run("import slow\nslow.value, kept").values == [(41, 7)] * 2

    def test_while_it_imports_status_says_what(self, session):
        call = session.submit(_import_slow)
        wait_until(lambda: "slow" in {each.importing for each in session.status()}, "an import that is said")
        call.result(WAIT_TIMEOUT_S)
        assert [each.importing for each in session.status()] == ["", ""]

    @pytest.mark.slow  # test_stopping has the same in a played session
    def test_another_interrupt_ends_an_import_that_hangs_with_its_engine(self, session, hanging, capsys):
        for after_s in (0.5, 4.0):
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt, match=hanging):
            session.run("if wb.rank() == 0: import slow")
        assert (
            "rank 0 must end an import first (at most 60 s). Another interrupt kills it now." in capsys.readouterr().err
        )
        assert session.run("globals().get('kept')").values == [None, 7]

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("slow", ["_publish_execute_input", "finish_metadata", "init_metadata"])
    def test_an_interrupt_around_the_code_of_a_cell_costs_no_engine(self, session, slow):
        """The kernel reads the request, or writes the reply: an interrupt there left it without one."""
        kernel = "get_ipython().kernel"
        session.run(
            f"import time\nkept, plain = 7, {kernel}.{slow}\ndef slowly(*args):\n    time.sleep(0.5)\n"
            f"    return plain(*args)\n{kernel}.{slow} = slowly"
        )
        threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt, match=r"(?s)^(?!.*killed)"):
            session.run("ran = 1\nif wb.rank() >= 0 and plain.__name__ != 'finish_metadata':\n    while True: pass")
        session.run(f"del {kernel}.{slow}")
        assert session.run("kept").values == [7, 7]

    @pytest.mark.sampled(2, 1)
    @pytest.mark.parametrize("slow", ["kernel.do_apply", "showtraceback"])
    def test_an_interrupt_around_a_call_costs_no_engine(self, session, slow):
        """The second comes while the kernel handles the first: nothing replied then."""
        session.run(
            f"import time\nkept, plain = 7, get_ipython().{slow}\ndef slowly(*args, **kwargs):\n    time.sleep(0.8)\n"
            f"    return plain(*args, **kwargs)\nget_ipython().{slow} = slowly"
        )
        call = session.submit(_run_on)
        wait_until(lambda: all(each.is_handling for each in session.status()), "a call that has begun")
        call.cancel()
        with pytest.raises(CellError, match=r"(?s)^(?!.*killed)"):
            call.result(WAIT_TIMEOUT_S)
        session.run(f"get_ipython().{slow} = plain")
        assert session.run("kept").values == [7, 7]

    @pytest.mark.slow
    def test_an_import_that_hangs_ends_with_its_engine_after_a_while(self, session, hanging, monkeypatch):
        monkeypatch.setattr(stopping, "FINISH_LIMIT_S", 2.0)
        with pytest.raises(CellError, match=hanging):
            session.run("if wb.rank() == 0: import slow", timeout=0.5)
        assert session.run("globals().get('kept')").values == [None, 7]

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("clause", ["except KeyboardInterrupt", "finally"])
    def test_code_that_handles_an_interrupt_ends_in_its_time(self, session, tmp_path, clause):
        """It was interrupted again 0.6 s later, and killed if it computed in C."""
        code = f"""
            import ctypes, pathlib, time
            begun, ended = pathlib.Path({str(tmp_path)!r}, f"begun{{wb.rank()}}"), 0
            try:
                begun.touch()
                time.sleep(100)
            {clause}:
                try: {{}}["an error of its own"]
                except KeyError: time.sleep(0.8)
                ctypes.PyDLL(None).usleep(800_000)  # holds the interpreter
                wb.barrier()
                ended = 7"""

        def interrupt():
            wait_until(lambda: len(list(tmp_path.glob("begun*"))) == 2, "a cell")
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt, match=r"(?s)^(?!.*killed)"):
            session.run(textwrap.dedent(code))
        assert session.run("ended").values == [7, 7]

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("others", ["raise ValueError('yours')", "torch.distributed.barrier()"])
    def test_a_clause_for_an_error_ends_in_its_time_though_another_rank_has_failed(self, session, others):
        program = (
            f"import time\nsaved = False\ntry:\n    if wb.rank() == 0: raise ValueError('mine')\n    {others}\n"
            "finally:\n    time.sleep(wb.rank())\n    saved = True"
        )
        what = "ValueError on rank 1: yours" if "yours" in others else "rank 1 was .* and stopped because of it"
        with pytest.raises(CellError, match=f"(?s)^ValueError on rank 0: mine.*{what}"):
            session.run(program)
        assert session.run("saved").values == [True, True]

    @pytest.fixture
    def hanging(self, session, package):
        (package / "slow" / "core.py").write_text("import time\ntime.sleep(100)")
        session.run("kept = 7")
        yield re.escape("rank 0 did not end an import after an interrupt (it was at cell line 1, importing slow)")
        session.run("import sys\nsys.path.insert(0, '')", ranks=[0])  # what `_path` takes away again

    def test_an_idle_engine_loads_what_the_first_product_needs(self, session):
        def both_have_it():
            time.sleep(2 * deferred_interrupts.IDLE_S)  # an engine that is asked is not idle
            return session.run("import sys\n'sympy.plotting' in sys.modules").values == [True, True]

        wait_until(both_have_it, "an import by idle engines")
        program = "before = set(sys.modules)\nx = wb.ones(4, 4, placement=wb.placement.all('cpu'), sbp='S(0)')\nx @ x"
        session.run(program)
        loaded = session.run("[name for name in set(sys.modules) - before if name.startswith('sympy')]").values
        assert loaded == [[], []]


def _run_on():
    while True:
        time.sleep(0.01)


def _import_slow():
    import slow  # noqa: F401
