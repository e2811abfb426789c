"""The check of the documentation's site finds what is wrong with a page; `make check` runs it on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_docs

PAGE = '<p id="here"><a href="#here"><a href="#there"><a href="other.html"><a href="https://semver.org"><a href="http://a.b">'


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGE)
    assert check_docs.dead_links({page: PAGE}) == ["page.html: #there", "page.html: other.html"]
    assert check_docs.strangers([PAGE]) == ["a.b"]


def test_what_is_fetched_is_found() -> None:
    texts = ['<script src="https://a.b/c.js">', "@import x;", '<a href="https://a.b">']
    assert check_docs.fetched(texts) == ["https://a.b/c.js", "@import x"]


@pytest.mark.parametrize(("page", "code"), [("<p>", 0), ('<p><a href="gone.html">', 1), (None, 1)])
def test_a_wrong_page_is_a_failure(
    page: str | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(folder: Path) -> bool:
        if page is not None:
            (folder / "index.html").write_text(page)
        return page is not None

    monkeypatch.setattr(check_docs, "build", build)
    assert check_docs.main() == code
    assert ("leads nowhere: index.html: gone.html" in capsys.readouterr().out) == (page is not None and code == 1)
