"""Checks a cell before it is sent, so that a syntax error is shown once and nothing runs anywhere."""

from __future__ import annotations

import ast

from IPython.core.inputtransformer2 import TransformerManager

from workbench.session.output.tracebacks import syntax_error


def check_syntax(code: str) -> None:
    """Raise `CellError` with the marked line if engines could not run the code.

    IPython's own syntax (``%magic``, ``!command``) and top-level ``await`` are fine.
    """
    try:
        plain = TransformerManager().transform_cell(code)
        compile(plain, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise syntax_error(error) from None
    except ValueError as error:  # null characters
        raise syntax_error(SyntaxError(str(error), ("<cell>", 1, 1, ""))) from None
