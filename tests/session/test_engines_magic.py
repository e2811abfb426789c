"""The magics in a real IPython shell, on the shared engines."""

import json
import re
import socket
import time

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import workbench as wb
from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from workbench.errors import CellError, NotStartedError
from workbench.session import cluster, completion, magic

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell.instance()
    magic.load_ipython_extension(shell)
    yield shell
    shell.input_transformers_cleanup.remove(magic.read_comment_spelling)
    InteractiveShell.clear_instance()


@pytest.fixture
def run(shell, session):
    """Runs a notebook cell; what it printed, and the exception it ended with."""

    def run(cell):
        with capture_output() as captured:
            result = shell.run_cell(cell)
        return captured, result.error_in_exec or result.error_before_exec

    return run


def test_a_cell_runs_everywhere_and_shows_its_value(run):
    captured, error = run("%%global\nprint('hello')\nwb.rank()")
    assert error is None
    assert captured.stdout.splitlines() == ["[all] hello", "[0] 0", "[1] 1"]


def test_a_warning_about_a_line_of_the_cell_is_told_once(run):
    captured, error = run("%%global\nimport warnings\nwarnings.warn('old', DeprecationWarning)")
    assert error is None
    assert captured.stderr.splitlines() == [
        "[all] cell line 3: DeprecationWarning: old",
        "[all]   warnings.warn('old', DeprecationWarning)",
    ]


def test_the_comment_spelling(run):
    captured, error = run("# %%global --ranks 1\nwb.rank()")
    assert error is None
    assert captured.stdout == "[1] 1\n"


def test_an_ordinary_comment_stays(run, shell):
    _, error = run("# a %%global that is only talked about\nlocal_only = 1")
    assert error is None
    assert shell.user_ns["local_only"] == 1


def test_a_set_up_cell_that_runs_without_its_option_is_no_longer_one(run, shell, monkeypatch):
    monkeypatch.setattr(shell, "get_parent", lambda: {"metadata": {"cellId": "a"}}, raising=False)
    assert not run("%%global --setup\nmade = 1")[0].stderr
    assert "no longer marked as set-up" in run("%%global\nmade = 2")[0].stderr
    assert not run("%%global\nmade = 3")[0].stderr


def test_line_magic_expands_nothing(run):
    captured, error = run("zz = 5\n%global x = '{zz}'; print(x)")
    assert error is None
    assert captured.stdout == "[all] {zz}\n"


def test_the_global_statement_still_works(run, shell):
    _, error = run("def f():\n    global made_here\n    made_here = 1\nf()")
    assert error is None
    assert shell.user_ns["made_here"] == 1


def test_line_numbers_are_those_of_the_notebook_cell(run):
    captured, error = run("%%global --label demo\nx = 1\nraise ValueError('bad')")
    assert isinstance(error, CellError)
    assert "▶    3  raise ValueError('bad')" in str(error)
    assert "ValueError on ranks 0-1: bad" in captured.stdout
    assert "ipyparallel" not in captured.stdout
    assert "cluster.py" not in captured.stdout


def test_a_failed_cell_fails_the_notebook_cell(run):
    assert isinstance(run("%%global\nif wb.rank() == 0: 1/0")[1], CellError)


def test_syntax_error_is_shown_once(run):
    captured, error = run("%%global\nx = (1,\n")
    assert isinstance(error, CellError)
    assert captured.stdout.count("was never closed") == 1
    assert "cell line 2" in captured.stdout


def test_quiet_and_no_stream(run):
    assert run("%%global --quiet\nprint(1)\n2")[0].stdout == ""
    assert run("%%global --no-stream\nprint(1)\n2")[0].stdout == "[all] 1\n[all] 2\n"


def test_stderr_goes_to_stderr(run):
    captured, _ = run("%%global\nimport sys\nprint('careful', file=sys.stderr)")
    assert captured.stdout == ""
    assert captured.stderr == "[all] careful\n"


def test_widgets_of_an_engine_are_shown_as_text(run):
    captured, error = run(
        "%%global\nimport workbench as wb\nfrom tqdm.auto import trange\n"
        "for i in trange(2, desc=f'bar of {wb.rank()}'): pass"  # else two alike are one
    )
    assert error is None and captured.outputs == []
    assert all(f"bar of {rank}: 100%" in captured.stderr for rank in range(2))
    captured, _ = run("%%global\nimport ipywidgets\nipywidgets.IntSlider(3)")
    assert captured.outputs == []
    assert sorted(captured.stdout.splitlines()) == ["[0] IntSlider(value=3)", "[1] IntSlider(value=3)"]


def test_group_by_engine(run):
    captured, _ = run("%%global -e\nprint('a')\nprint('b')")
    assert captured.stdout.splitlines() == ["[0] a", "[0] b", "[1] a", "[1] b"]


def test_out_stores_the_result(run, shell):
    run("%%global -o result\nwb.rank() + 1")
    assert shell.user_ns["result"].values == [1, 2]


def test_html_is_displayed_once_for_all(run):
    captured, error = run("%%global\nfrom IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))")
    assert error is None
    assert [output.data["text/html"] for output in captured.outputs] == ["<b>x</b>"]
    assert captured.stdout == "[all]\n"


def test_html_that_differs_is_displayed_per_rank(run):
    captured, _ = run("%%global\nfrom IPython.display import HTML\nHTML(f'<b>{wb.rank()}</b>')")
    assert [output.data["text/html"] for output in captured.outputs] == ["<b>0</b>", "<b>1</b>"]
    assert captured.stdout == "[0]\n[1]\n"


def test_another_cell_magic_inside(run):
    _, error = run("%%global --quiet\n%%capture grabbed\nprint('inside')")
    assert error is None
    assert "inside" in run("%%global\nprint(grabbed.stdout)")[0].stdout


def test_push_and_pull(run, shell):
    assert run("y = 41\n%push y")[1] is None
    run("%%global\nz = y + wb.rank()")
    run("%pull z")
    assert shell.user_ns["z"] == [41, 42]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%push no_such_thing", "no variable 'no_such_thing'"),
        ("%push", "no variable is named"),
        ("%pull a-b", "'a-b' is not a name"),
        ("%workbench dance", "%workbench dance: argument action: invalid choice"),
        ("%workbench dance", "%workbench? explains every option"),
        ("%workbench start --engines 3", "2 engines on cpu is running"),
        ("%global", "needs a line"),
        ("%%global --ranks\n1", "expected one argument"),
        ("%%global --ranks\n1", "%%global [-o SAVE_NAME]"),
        ("%%global --label 'open\n1", "quot"),
    ],
)
def test_usage_errors_say_what_to_do(run, line, words):
    captured, error = run(line)
    assert isinstance(error, UsageError)
    assert words in captured.stdout + captured.stderr


@pytest.mark.parametrize("line", ["%workbench", "%workbench help", "%workbench --help"])
def test_help_is_asked_for_in_every_usual_way(run, line):
    captured, error = run(line)
    assert error is None
    assert captured.stdout.startswith("%workbench [--engines N]")
    assert "``%workbench start --engines 2``" in captured.stdout
    assert "--lines N" in captured.stdout


@pytest.mark.parametrize(("magics", "name"), [("line_workbench", "%workbench"), ("cell_global", "%%global")])
def test_shift_tab_shows_a_magic_by_its_name(magics, name):
    assert getattr(magic.SessionMagics, magics).__doc__.splitlines()[2].startswith(f"  {name} [")


def test_a_rank_that_does_not_exist(run):
    captured, error = run("%%global --ranks 0,7\n1")
    assert "rank 7 does not exist" in str(error)
    assert "Traceback" not in captured.stdout


def test_timeout_option(run):
    _, error = run("%%global --timeout 0.3\nimport time\ntime.sleep(30)")
    assert isinstance(error, CellError)
    assert "Timeout" in str(error)


def test_status(run):
    captured, _ = run("%workbench status")
    first, second, transport = captured.stdout.splitlines()
    assert first.startswith("rank 0  pid ") and second.startswith("rank 1  pid ")
    assert first.endswith("idle")
    assert transport.startswith("ranks [0, 1]: shared (one host, ")


def test_the_current_session_is_the_one_that_was_opened_last(session):
    assert wb.Session.current() is session


def test_before_start_the_error_says_how_to_start(run, monkeypatch):
    monkeypatch.setattr(cluster, "_open", [])
    captured, error = run("%%global\n1")
    assert isinstance(error, NotStartedError)
    assert "%workbench start --engines 2" in captured.stdout
    assert len(captured.stdout.splitlines()) == 1
    with pytest.raises(NotStartedError, match=r"No engines are running.*wb\.Session\(engines=2\)"):
        wb.Session.current()


class TestGlobalTensors:
    def test_are_shown_once_with_who_holds_what(self, run):
        captured, error = run(
            "%%global\nwb.ones(4, 2, placement=wb.placement('cpu', ranks=[0, 1]), sbp=wb.sbp.split(0))"
        )
        assert error is None
        assert len(captured.outputs) == 1
        data = captured.outputs[0].data
        assert "rows 2-3" in data["text/html"]
        assert "float32[4, 2]  S(0)  on" in data["text/plain"]

    def test_on_some_ranks_nothing_is_collected(self, run):
        run("%%global --quiet\nx = wb.ones(4, 2, placement=wb.placement('cpu', ranks=[0, 1]), sbp=wb.sbp.split(0))")
        captured, error = run("%%global --ranks 1\nx")
        assert error is None
        assert "numbers" not in captured.outputs[0].data["text/html"].split("</style>")[1]


class TestNamesOfTheEngines:
    """What the kernel asks the shell for on Tab and Shift-Tab."""

    @pytest.fixture(autouse=True)
    def _longer_timeout(self, monkeypatch):
        monkeypatch.setattr(completion, "ANSWER_TIMEOUT_S", 20.0)  # a busy machine is not what is tested here

    def complete(self, shell, text):
        from IPython.core.completer import provisionalcompleter

        with provisionalcompleter():
            return {item.text for item in shell.Completer.completions(text, len(text))}

    def test_are_completed_in_a_global_cell(self, run, shell):
        run("%%global --quiet\nengine_only_name = 1")
        assert "engine_only_name" in self.complete(shell, "%%global\nengine_on")
        assert "engine_only_name" in self.complete(shell, "# %%global --ranks 1\nx = 1\ny = engine_on")
        assert "engine_only_name" not in self.complete(shell, "engine_on")

    def test_attributes_and_options(self, run, shell):
        assert self.complete(shell, "%%global\nwb.to_glo") == {"to_global"}
        assert "--ranks" in self.complete(shell, "%%global --ra")

    def test_while_a_cell_runs(self, run, shell, session):
        run("%%global --quiet\nengine_only_name = 1")
        call = session.submit(time.sleep, 5.0)  # not a function of this file: a cancelled import would stay half done
        try:
            assert "engine_only_name" in self.complete(shell, "%%global\nengine_on")
        finally:
            call.cancel()
            with pytest.raises(CellError):
                call.result()

    def test_help_in_a_cell_and_on_shift_tab(self, run, shell):
        run("%%global --quiet\ndef engine_function(x):\n    'Says what it does.'")
        captured, error = run("%%global\nengine_function?")
        assert error is None
        assert "Says what it does." in "".join(str(output.data) for output in captured.outputs) + captured.stdout
        assert "Says what it does." in shell.object_inspect_mime("engine_function")["text/plain"]
        with pytest.raises(KeyError):
            shell.object_inspect_mime("nobody_has_this")


def test_changed_modules_are_loaded_again(run, tmp_path):
    module = tmp_path / "edited_module.py"
    module.write_text("def answer():\n    return 1\n")
    run(f"%%global --quiet\nimport sys; sys.path.insert(0, {str(tmp_path)!r})\n%load_ext autoreload\n%autoreload 2")
    assert run("%%global\nimport edited_module\nedited_module.answer()")[0].stdout == "[all] 1\n"
    module.write_text("def answer():\n    return 1 + 1  # longer\n")
    assert run("%%global\nedited_module.answer()")[0].stdout == "[all] 2\n"
    run("%%global --quiet\n%autoreload 0")


def test_time_names_the_slowest_rank(run):
    captured, error = run("%%global --time\nimport time\nif wb.rank() == 1: time.sleep(3)")
    assert error is None
    assert "rank 1 was slowest, rank 0 was done after" in captured.stdout


def test_the_log_has_what_a_fold_leaves_out(run):
    shown = run("%%global\nfor i in range(3000): print(wb.rank(), i)")[0].stdout
    assert "lines folded" in shown
    assert "%workbench log has them" in shown
    listed = run("%workbench log --ranks 1 --lines 2")[0].stdout
    assert "3.00 k lines, all of them in " in listed
    assert listed.endswith("  1 2998\n  1 2999\n")
    path = listed.splitlines()[0].rpartition(" in ")[2]
    with open(path) as log:
        assert [line.split()[1] for line in log] == [str(i) for i in range(3000)]


def test_dump_shows_where_each_rank_is(run, session):
    def sleep(seconds):
        time.sleep(seconds)

    call = session.submit(sleep, 120.0)
    try:
        wait_until(lambda: "time.sleep(seconds)" in run("%workbench dump --ranks 0")[0].stdout, "a sleep in the dump")
    finally:
        call.cancel()
        with pytest.raises(CellError):
            call.result()


def test_a_breakpoint_without_a_debugger_says_so(run):
    captured, error = run("%%global\nbreakpoint()\n'after'")
    assert error is None and captured.stdout == "[all] 'after'\n"
    assert "no debugger listens" in captured.stderr and "%workbench debug" in captured.stderr


def test_a_debugger_listens_on_loopback(run):
    """It speaks the debug adapter protocol: an editor's first request is answered."""
    captured, error = run("%workbench debug --ranks 1")
    assert error is None
    port = int(re.search(r"rank 1  debugger listens on 127\.0\.0\.1:(\d+)", captured.stdout).group(1))
    request = json.dumps({"seq": 1, "type": "request", "command": "initialize", "arguments": {"adapterID": "test"}})
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_TIMEOUT_S) as connection:
        connection.sendall(f"Content-Length: {len(request)}\r\n\r\n{request}".encode())
        answer = b""
        while b"supportsConditionalBreakpoints" not in answer:
            part = connection.recv(65536)
            assert part, answer
            answer += part
    assert run("%%global --quiet\nx = 1")[1] is None


def test_a_debugger_is_asked_for_by_rank(run):
    assert "name the ranks" in str(run("%workbench debug")[1])
