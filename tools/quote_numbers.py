"""Put measured numbers into the README, between the comments that mark their places.

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


def quoted(text: str, name: str) -> str:
    """What stands in the place ``name`` of a text."""
    (found,) = _between(name).findall(text)
    return str(found)


def quote(text: str, name: str, part: str) -> str:
    """The text with ``part`` in the place ``name``."""
    return _between(name).sub(lambda _: part, text)


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", flags=re.DOTALL)


def benchmarks_part() -> str:
    """The newest table of all in short: its score, how we stand beside other software, every target that is missed."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(RESULTS.glob("*.md"))}
    path, text = [(path, text) for path, text in texts.items() if text.startswith(f"# {one_table.TITLE}\n")][-1]
    rows = summary.read_rows(text)
    return f"""{text.splitlines()[2]} [All rows]({path.relative_to(ROOT)}).

Of each comparison with other software, the row in which we come off worst, and the best one. 2× is twice as fast as
theirs; below 1× we are slower:

{summary.beside_software(rows)}

Every target that is missed:

{summary.misses(rows)}
"""


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
    """What the README quotes of the demo's output."""
    tables = list(_TABLE.finditer(printed))
    parts = []
    for table in tables:
        parts += [table["title"], "", *(f"    {row}" for row in table["rows"].splitlines()), ""]
    legend = (
        f"{tables[0]['threads']}.\n*peak* is the process's memory above the warm engine, *boxed* what all ranks send "
        "in a step, *equal* the largest\ndifference of a loss to one device."
    )
    return "\n".join([*parts, measured, legend, ""])


def main() -> int:
    """Rewrite the README's parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="run the demo, too")
    args = parser.parse_args()
    text = quote(README.read_text(encoding="utf-8"), "benchmarks", benchmarks_part())
    if args.demo:
        text = quote(text, "demo table", demo_part())
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
