"""The report in a real browser: all pictures are drawn, in both themes, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import new_page
from tests.ui.conftest import make_record
from workbench.core.verdict import Verdict
from workbench.session.comparison.compare import CompareResult
from workbench.ui.runs.report import report_html

pytestmark = pytest.mark.browser
NUM_PICTURES = 5


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_report_draws_everything_by_itself(browser: Any, tmp_path: Path, theme: str) -> None:
    verdict = Verdict(True, differences=(0.0, 7e-7, 1e-7))
    runs = [make_record("data"), make_record("model", peak_memory_bytes=(4_000_000,) * 2, verdict=verdict)]
    result = CompareResult(make_record("one device", num_ranks=1), runs)
    path = tmp_path / "report.html"
    path.write_text(report_html(result), encoding="utf-8")
    problems: list[str] = []
    page = new_page(browser, viewport={"width": 1240, "height": 900}, color_scheme=theme)
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    page.goto(path.as_uri())
    pictures = page.locator("svg[role=img]:visible").count()
    overflow = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
    background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.close()
    assert problems == [] and pictures == NUM_PICTURES
    assert overflow <= 0, "nothing is cut off at the right"
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(33, 33, 33)"}[theme]
