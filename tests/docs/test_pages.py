"""Every block of Python in the documentation runs unchanged, and prints what the page says."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, Block, blocks, how, name_of
from tests.docs.running import assert_printed, run_cells, run_program, together
from tests.processes import run_processes

ELSEWHERE = {
    "README.md": "test_readme.py runs its script under torchrun",
    "docs/guides/restarts.md": "tests/training/saving/test_restarts.py kills a rank of its script",
    "docs/training.md": "test_training_page.py also looks at its losses",
}
"""Pages whose blocks other tests run."""

SELDOM = {
    "docs/concepts/sessions.md": "tests/session/test_engines.py",
    "docs/guides/experts.md": "tests/training/strategies/test_experts.py",
    "docs/guides/long-sequences.md": "tests/models/test_context.py",
    "docs/guides/own-loop.md": "the notebook of this name in the gallery",
    "docs/guides/plan-published-models.md": "docs/guides/plan-3072.md and tests/models/test_published_plans.py",
    "docs/guides/transformers.md": "tests/models/test_transformers.py",
}
"""Slow pages, and where the quick tests see what they show."""

TEXTS = {name_of(page): page.read_text(encoding="utf-8") for page in PAGES}
HOW = {name: how(text) for name, text in TEXTS.items() if any(block.runs for block in blocks(text))}


def pages_that_run(kind: str) -> list[str]:
    return [name for name, said in HOW.items() if name not in ELSEWHERE and said is not None and kind in said]


def cases_of(kind: str) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SELDOM)) for name in pages_that_run(kind)]


def blocks_of(name: str) -> list[Block]:
    return [block for block in blocks(TEXTS[name]) if block.runs]


def test_every_page_with_python_says_how_it_runs() -> None:
    unsaid = [name for name, said in HOW.items() if said is None and name not in ELSEWHERE]
    assert not unsaid, "write e.g. <!-- run: alone --> into the page; see tests/docs/pages.py"
    known = {*pages_that_run(" ranks"), *pages_that_run("alone"), *pages_that_run("notebook"), *ELSEWHERE}
    assert set(HOW) == known & set(HOW)


@pytest.mark.procs
@pytest.mark.parametrize("name", cases_of(" ranks"))
def test_page_on_ranks(name: str, tmp_path: Path) -> None:
    num_ranks = int(str(HOW[name]).split()[0])
    by_rank = run_processes(run_program, num_ranks, name, blocks_of(name), str(tmp_path))
    assert_printed(name, blocks_of(name), together(by_rank))


@pytest.mark.parametrize("name", cases_of("alone"))
def test_page_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert_printed(name, blocks_of(name), run_program(name, blocks_of(name), str(tmp_path)))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_session: None) -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    from workbench.session import magic
    from workbench.session.output import merging

    # Pages show what ranks print together; on a busy machine one may be later than a reader would wait for it.
    monkeypatch.setattr(merging, "MERGE_WAIT_S", 10.0)
    monkeypatch.setattr(merging, "SAME_TIME_S", 10.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shell = InteractiveShell.instance()
    yield shell
    if magic.read_comment_spelling in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(magic.read_comment_spelling)
    InteractiveShell.clear_instance()


@pytest.mark.engines
@pytest.mark.parametrize("name", cases_of("notebook"))
def test_page_in_a_notebook(name: str, shell: Any) -> None:
    assert_printed(name, blocks_of(name), run_cells(shell, name, blocks_of(name)))


# What the tests above would not notice.

PAGE = """
<!-- run: alone -->

```python
x = 1 + 1
x
```

```text
2
```

*Not run by the tests: it needs a GPU.*

```python
x.cuda()
```
"""


def test_blocks_outputs_and_reasons_are_found() -> None:
    first, second = blocks(PAGE)
    assert (first.line, first.prints, first.runs, second.runs) == (5, "2\n", True, False)
    assert how(PAGE) == "alone" and how("*The code runs on 4 ranks: [how to follow it](x.md).*") == "4 ranks"


def test_a_page_that_is_wrong_fails() -> None:
    (block,) = (block for block in blocks(PAGE.replace("1 + 1", "1 + 2")) if block.runs)
    with pytest.raises(AssertionError, match="should print\n2\nbut prints\n3"):
        assert_printed("a.md", [block], run_program("a.md", [block]))


def test_what_ranks_print_differently_is_kept_apart() -> None:
    assert together([["a\n", "b\n"], ["a\n", "c\n"]]) == ["a\n", "b\nc\n"]
