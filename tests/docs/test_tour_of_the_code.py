"""The walks of docs/tour-of-the-code.md enter the files that the page lists, in its order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import workbench as wb
from workbench.tensors.dispatch.dispatcher import forget_function
from workbench.testing import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tour-of-the-code.md").read_text("utf-8")


def listed(heading: str, steps: str) -> list[str]:
    """The files of a walk whose steps match a pattern; simulated ranks use no shared memory, so that is left out."""
    walk = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(rf"^\| {steps} \| `([\w./]+)` \|", walk, re.MULTILINE)
    return [name for name in found if not name.startswith("workbench/transport/")]


def entered(call: Callable[[], object]) -> list[str]:
    """The files of the package that a call enters, in order of first entry."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/workbench/"):
            found[Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def in_order(files: list[str], entered_files: list[str]) -> bool:
    """Whether all of the first stand in the second, in the same order."""
    return [name for name in entered_files if name in files] == files


def walks(rank: int) -> dict[str, list[str]]:
    ranks = wb.placement("cpu", ranks=[0, 1])
    # A shape that no other test boxes: boxing paths are remembered by shape.
    x, w = (wb.ones(23, 23, placement=ranks, sbp=sbp) for sbp in ("S(0)", "B"))
    product, boxing = (lambda: x @ w), (lambda: x.to_global(sbp="B"))
    if rank > 0:  # handlers are shared by all threads of the process: this rank must not find them first
        boxing(), boxing()
        return {}
    forget_function("matmul", {})
    return {
        "first product": entered(product),
        "product": entered(product),
        "first boxing": entered(boxing),
        "boxing": entered(boxing),
    }


@pytest.fixture(scope="module")
def walked() -> dict[str, list[str]]:
    return run_ranks(walks, 2)[0]


def test_a_product(walked: dict[str, list[str]]) -> None:
    assert in_order(listed("A matrix product", r"\d"), walked["first product"])
    assert walked["product"] == listed("A matrix product", "[12]")


def test_a_boxing(walked: dict[str, list[str]]) -> None:
    assert len(listed("A boxing", r"\d")) == 3
    assert in_order(listed("A boxing", r"\d"), walked["boxing"])
    assert set(listed("A boxing", "[a-d]")) <= {*walked["first product"], *walked["first boxing"]}


def test_another_order_is_found() -> None:
    assert in_order(["a", "b"], ["a", "x", "b"])
    assert not in_order(["b", "a"], ["a", "b"])
    assert not in_order(["a", "b"], ["a"])
