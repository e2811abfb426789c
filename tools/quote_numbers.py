"""Put measured numbers into the README and pages of docs, between the comments that mark their places.

    python -m tools.quote_numbers            the benchmarks' newest table (benchmarks/results)
    python -m tools.quote_numbers --demo     that, and the demo's table

The second one runs the demo, on a machine that should do nothing else.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from benchmarks import one_table, summary
from benchmarks.reporting import RESULTS, machine, today

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
GUIDE = ROOT / "docs" / "guides" / "which-strategy.md"
GUIDES_RESULTS = ("choose-parallelism", "experts-2", "offload")
"""Results of which the guide shows the first table."""


def quoted(text: str, name: str) -> str:
    """What stands in the place ``name`` of a text."""
    (found,) = _between(name).findall(text)
    return str(found)


def quote(text: str, name: str, part: str) -> str:
    """The text with ``part`` in the place ``name``."""
    return _between(name).sub(lambda _: part, text)


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", flags=re.DOTALL)


def _newest() -> tuple[Path, str]:
    """The newest table of all comparisons, and its text."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(RESULTS.glob("*.md"))}
    return [(path, text) for path, text in texts.items() if text.startswith(f"# {one_table.TITLE}\n")][-1]


def short_part() -> str:
    """For the README: a few lines of comparisons with other software, how many targets were met, when and on what."""
    path, text = _newest()
    rows = summary.read_rows(text)
    return f"""{summary.in_short(rows)}

{summary.alone(rows)} Together:
{text.splitlines()[2]} [All rows]({path.relative_to(ROOT)}).
"""


def benchmarks_part() -> str:
    """For the page of benchmarks: the rows behind that, and every target that is missed."""
    path, text = _newest()
    rows = summary.read_rows(text)
    return f"""{text.splitlines()[2]} [All rows](../{path.relative_to(ROOT)}).

Of each comparison, the slowest row and the fastest one. 2× is twice as fast as theirs, below 1× the
workbench is slower.

{summary.beside_software(rows)}

Every target that is missed:

{summary.misses(rows)}
"""


def guides_part(name: str) -> str:
    """For the guide to strategies: the first table of the newest result of a name, when and on what it was measured."""
    path = max(RESULTS.glob(f"????-??-??-{name}.md"))
    title, measured, *parts = path.read_text(encoding="utf-8").split("\n\n")
    table = next(part for part in parts if part.startswith("|"))
    return f"{table.rstrip()}\n\n{measured}. [{title.removeprefix('# ')}](../../{path.relative_to(ROOT)})\n"


_TABLE = re.compile(
    r"^(?P<title>[^\n]+:)\n(?P<rows>strategy .*?)\npeak: .*?\n(?P<threads>\d+ engines? with [^\n]*)$",
    re.DOTALL | re.MULTILINE,
)
"""One network's part of what the demo prints."""


def demo_part() -> str:
    """The tables that the demo prints, in code blocks, with the threads of its processes, date and machine."""
    command = [sys.executable, "-m", "workbench", "demo"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return quoted_demo(printed, f"Measured on {today()}: {machine()}.")


def quoted_demo(printed: str, measured: str) -> str:
    """The part of the demo's output that the page quotes."""
    tables = list(_TABLE.finditer(printed))
    parts = []
    for table in tables:
        parts += [table["title"], "", *(f"    {row}" for row in table["rows"].splitlines()), ""]
    legend = (
        f"{tables[0]['threads']}.\n*peak* is the process's memory above the warm engine, *boxed* what all ranks send "
        "in a step, *equal* the largest\ndifference of a loss to one device."
    )
    return "\n".join([*parts, measured, legend, ""])


def as_measured() -> dict[Path, str]:
    """Each file that quotes results, as it reads with the newest ones."""
    guide = GUIDE.read_text(encoding="utf-8")
    for name in GUIDES_RESULTS:
        guide = quote(guide, name, guides_part(name))
    return {
        README: quote(README.read_text(encoding="utf-8"), "benchmarks", short_part()),
        PAGE: quote(PAGE.read_text(encoding="utf-8"), "benchmarks", benchmarks_part()),
        GUIDE: guide,
    }


def outdated() -> list[Path]:
    """Files that quote other results than the newest."""
    return [path for path, text in as_measured().items() if path.read_text(encoding="utf-8") != text]


def main() -> int:
    """Rewrite the marked parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="run the demo, too")
    args = parser.parse_args()
    for path, text in as_measured().items():
        path.write_text(text, encoding="utf-8")
    if args.demo:
        PAGE.write_text(quote(PAGE.read_text(encoding="utf-8"), "demo table", demo_part()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
