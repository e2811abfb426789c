"""Running the blocks of a page: on processes, alone, or as cells of a notebook."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

from tests.docs.pages import Block

_CHECKER = doctest.OutputChecker()
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^Out\[\d+\]: ", re.MULTILINE)
"""What terminals add: colours, and numbers of cells."""


def run_program(page: str, blocks: Sequence[Block], folder: str = "") -> list[str]:
    """Run blocks as one program; what each of them prints. The value of a last expression is shown, as in a notebook.

    ``folder`` is where the program's temporary files go.
    """
    from workbench.tensors.dispatch.dispatcher import FallbackWarning

    warnings.simplefilter("ignore", FallbackWarning)
    tempfile.tempdir = folder or None
    names: dict[str, Any] = {"__name__": "__page__"}
    return [_run(page, block, names) for block in blocks]


def _run(page: str, block: Block, names: dict[str, Any]) -> str:
    tree = ast.parse("\n" * (block.line - 1) + block.code, page)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, page, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), page, "eval"), names)
            if value is not None:
                printed.write(f"{value!r}\n")
    return printed.getvalue()


def run_cells(shell: Any, page: str, blocks: Sequence[Block]) -> list[str]:
    """Run blocks as cells of a notebook; what each of them shows."""
    from IPython.utils.capture import capture_output

    shown = []
    for block in blocks:
        with capture_output() as captured:
            result = shell.run_cell(block.code)
        error = result.error_in_exec or result.error_before_exec
        if error is not None:
            raise AssertionError(f"{page}, line {block.line}: {error}") from error
        texts = [str(output.data.get("text/plain", "")) for output in captured.outputs]
        shown.append(_DECORATION.sub("", "\n".join([captured.stdout, *texts])))
    return shown


def assert_printed(page: str, blocks: Sequence[Block], printed: Sequence[str]) -> None:
    """Every block that says what it prints has printed that."""
    for block, got in zip(blocks, printed, strict=True):
        if block.prints is not None and not _CHECKER.check_output(block.prints, got, _LIKE):
            raise AssertionError(f"{page}, line {block.line}, should print\n{block.prints}but prints\n{got}")


def together(by_rank: Sequence[Sequence[str]]) -> list[str]:
    """What the ranks have printed, block by block: once where they agree, else one after the other."""
    return [block[0] if len(set(block)) == 1 else "".join(block) for block in zip(*by_rank, strict=True)]
