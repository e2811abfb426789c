"""The button below a profile's table hands the file to a page of Perfetto."""

from pathlib import Path
from typing import Any

import pytest

from workbench.core.profile import Profile, RankProfile

pytestmark = pytest.mark.browser

PERFETTO = """<script>
addEventListener('message', event => {
  if (event.data === 'PING') event.source.postMessage('PONG', event.origin);
  else window.received = event.data.perfetto;
});
</script>"""
"""What Perfetto's page does: it answers when it is there, and takes the file."""


def test_the_file_comes_to_perfetto(browser: Any) -> None:
    row = RankProfile(0, 3, 1.0, 0.5, 0.5, 0.25, 0.25)
    table = Profile((row,), Path("folder/p.json.gz"), 4)._repr_html_()
    context = browser.new_context()
    try:
        context.route(
            "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
        )
        context.route("http://notebook.test/lab", lambda route: route.fulfill(body=table, content_type="text/html"))
        context.route("http://notebook.test/folder/p.json.gz", lambda route: route.fulfill(body=b"\x1f\x8bab"))
        page = context.new_page()
        page.goto("http://notebook.test/lab")
        with context.expect_page() as opened:
            page.get_by_role("button", name="open in Perfetto").click()
        perfetto = opened.value
        perfetto.wait_for_function("window.received !== undefined")
        assert perfetto.evaluate("received.title") == "folder/p.json.gz"
        assert perfetto.evaluate("Array.from(new Uint8Array(received.buffer))") == [0x1F, 0x8B, 0x61, 0x62]
    finally:
        context.close()
