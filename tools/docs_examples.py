"""Examples in docstrings as blocks of code on the documentation's site; a griffe extension (mkdocs.yml).

In Markdown, ``>>>`` would be a quotation in a quotation in a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!$|>>>).*\n?)*)+", re.MULTILINE)


def fence_examples(text: str) -> str:
    """Every example with what it prints, up to the next empty line, between fences.

    >>> fence_examples("Twice one.\\n\\n>>> 1 + 1\\n2\\n\\nThat is all.").splitlines()
    ['Twice one.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'That is all.']
    """
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


class Examples(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that has been read from the sources."""
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
