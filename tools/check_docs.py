"""Build the documentation's site and look at every page: no link leads nowhere, nothing is fetched from elsewhere, and
quoted numbers are the newest.

    python -m tools.check_docs

mkdocs itself refuses links of Markdown that lead nowhere; this looks at what was made of them, the reference's too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.quote_numbers import outdated

ROOT = Path(__file__).parents[1]
EXTERNAL = {"ipyparallel.readthedocs.io", "keepachangelog.com", "pytorch.org", "semver.org", "ui.perfetto.dev"}
"""Hosts that pages link to. Nobody visits them but a reader who clicks."""
_LOADING = re.compile(
    r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="((?:https?:)?//[^"]+)"|url\([\'"]?(https?:[^)]*)|(@import[^;]*)'
)


def build(folder: Path) -> bool:
    """Make the site in a folder; whether mkdocs had nothing to complain of."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    # The variable keeps a notice about another product out of the output.
    return (
        subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False).returncode == 0
    )


def dead_links(pages: Mapping[Path, str]) -> list[str]:
    """Links of pages to places that are not there."""
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    dead = []
    for page, text in pages.items():
        if page.name == "404.html":  # its links start at the root of a server
            continue
        for target in re.findall(r'(?:href|src)="(?!\w+:)([^"]+)"', text):
            path, _, anchor = target.partition("#")
            found = (page.parent / path.partition("?")[0]).resolve() if path else page
            found = found / "index.html" if found.is_dir() else found
            in_page = anchor and found in anchors and not anchor.startswith("__")  # the theme's own switches begin so
            if not found.exists() or (in_page and anchor not in anchors[found]):
                dead.append(f"{page.name}: {target}")
    return dead


def fetched(texts: Iterable[str]) -> list[str]:
    """What a page or a style sheet would load from elsewhere, without a click."""
    return ["".join(found) for text in texts for found in _LOADING.findall(text)]


def strangers(texts: Iterable[str]) -> list[str]:
    """Hosts that pages link to and that are not among those that are known."""
    return sorted({host for text in texts for host in re.findall(r'href="https?://([^/"]+)', text)} - EXTERNAL)


def main() -> int:
    """Build, look, and say what is wrong; the exit code is 0 if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        if not build(Path(folder)):
            return 1
        pages = {page: page.read_text("utf-8") for page in Path(folder).resolve().rglob("*.html")}
        sheets = [path.read_text("utf-8") for path in Path(folder).rglob("*.css")]
        wrong = [
            *(f"leads nowhere: {link}" for link in dead_links(pages)),
            *(f"fetched from elsewhere: {address}" for address in fetched([*pages.values(), *sheets])),
            *(f"not a known host: {host}" for host in strangers(pages.values())),
            *(f"not the newest numbers, see tools.quote_numbers: {path.name}" for path in outdated()),
        ]
    print("\n".join([*wrong, f"documentation: {len(pages)} pages, {'see above' if wrong else 'clean'}"]))
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
