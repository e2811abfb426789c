"""The layer grid without controls and without a script: a table, for saved, printed and mailed notebooks."""

from __future__ import annotations

from typing import Any

from workbench.ui.assets import element

_HEAD = ("layer", "weight", "params", "choice", "sbp", "stage", "activation", "boxing before it")


def static_grid_html(view: dict[str, Any]) -> str:
    """The rows of ``grid_view`` as a plain table; mistakes follow their rows."""
    head = element("tr", *(element("th", text=title) for title in _HEAD))
    body = "".join(_row(row) for row in view["rows"])
    total, parts = view["total"]
    foot = element("p", text=f"boxed per step {total} = {parts}")
    return element("table", element("thead", head), element("tbody", body)) + foot


def _row(row: dict[str, Any]) -> str:
    boxing = row["flow"]["boxing"]
    texts = (
        "\u2003" * row["depth"] + row["label"],
        row["weight"],
        row["params"],
        row["choice_text"],
        row["sbp"],
        row["stages_text"],
        row["flow"]["layout"],
        " ".join(filter(None, (boxing["change"], boxing["kind"], boxing["bytes"]))) if boxing else "",
    )
    cells = element("tr", *(element("td", text=text) for text in texts))
    mistakes = "".join(
        element("tr", element("td", text=mistake["message"], colspan=str(len(texts)))) for mistake in row["mistakes"]
    )
    return cells + mistakes
