"""The style sheets and scripts of ``static``, and HTML elements with escaped text."""

from __future__ import annotations

from html import escape
from pathlib import Path

STATIC = Path(__file__).parent / "static"


def asset(name: str) -> str:
    """Text of a file in ``static``."""
    return (STATIC / name).read_text(encoding="utf-8")


def element(tag: str, *children: str, text: str | None = None, css: str = "", **attributes: str) -> str:
    """One HTML element. ``text`` is escaped, ``children`` are HTML already; ``css`` is the class.

    >>> element("td", text="a < b", css="name", title="x")
    '<td class="name" title="x">a &lt; b</td>'
    """
    named = ({"class": css} if css else {}) | {key.replace("_", "-"): value for key, value in attributes.items()}
    written = "".join(f' {key}="{escape(value, quote=True)}"' for key, value in named.items())
    inner = (escape(text, quote=False) if text is not None else "") + "".join(children)
    return f"<{tag}{written}>{inner}</{tag}>"
