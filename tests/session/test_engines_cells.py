"""How cells end on two real engines, and what is shown of them."""

import pytest

from workbench.errors import CellError

pytestmark = pytest.mark.engines

GROUP = """import asyncio
async def fails():
    raise KeyError('inner')
async def both():
    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
"""


def raise_group():
    raise ExceptionGroup("of a call", [ValueError("inner")])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{GROUP}await both()", r"ExceptionGroup on ranks 0-1: (?s:.*)KeyError: 'inner' \(at cell line 3\)"),
        ("try:\n    raise ExceptionGroup('x', [OSError(3)])\nfinally:\n    1 / 0", r"ZeroDivisionError on ranks 0-1"),
        ("%nosuchmagic 3", r"UsageError on ranks 0-1: Line magic function `%nosuchmagic` not found"),
        ("if True: exit()\nran = 1", "SystemExit on ranks 0-1"),
        ("quit", "SystemExit on ranks 0-1"),
    ],
)
def test_whatever_ends_a_cell_is_its_error(session, code, words):
    """IPython shows some errors as plain output, and leaves by exit() only after the cell."""
    with pytest.raises(CellError, match=words) as caught:
        session.run(code)
    assert "cell line" in str(caught.value) or "magic" in code
    assert session.run("'ran' in globals()").values == [False, False]


def test_a_call_that_raises_a_group_fails(session):
    with pytest.raises(CellError, match="ValueError: inner"):
        session.submit(raise_group).result()


def test_what_subprocesses_print_is_shown_with_their_cell(session):
    session.run("import os")
    for _ in range(10):
        shown = session.run("os.system('echo out; echo err >&2');").text
        assert sorted(shown.splitlines()) == ["[all] err", "[all] out"]  # ipykernel sends each stream in its own time


MODEL = """import torch
class Net(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Net(depth - 1) if depth else torch.nn.Linear(3, 3)
    def forward(self, x):
        return self.inner(x)
"""


def test_an_error_shows_the_users_own_lines_of_all_files(session, tmp_path):
    """Between two of them are two frames of torch."""
    (tmp_path / "model_with_a_mistake.py").write_text(MODEL)
    session.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport model_with_a_mistake as mine")
    with pytest.raises(CellError) as caught:
        session.run("sys.path.pop(0)\nmine.Net(11)(torch.ones(2, 4))")
    place = f"  {tmp_path}/model_with_a_mistake.py:7, in Net.forward\n  \u25b6    7          return self.inner(x)\n"
    assert str(caught.value).count(place) == 12
    assert "_call_impl" not in str(caught.value) and "linear.py" in str(caught.value)


def test_pull_names_the_variable_that_cannot_be_pickled(session):
    session.run("data = (x for x in 'ab')")
    with pytest.raises(CellError, match="pull data: the variable 'data', a generator, cannot be pickled"):
        session.pull("data")


def test_engines_read_no_magics_of_the_notebook(session):
    session.run("%load_ext workbench\nimport workbench as wb")
    assert session.run("# %%global --label two\nwb.rank()").values == [0, 1]
