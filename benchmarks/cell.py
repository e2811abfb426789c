"""The round trip of a ``%%global`` cell that does nothing, against ipyparallel's ``view.execute`` on the same engines.

python -m benchmarks.cell
"""

from __future__ import annotations

import argparse
import sys

from IPython.core.interactiveshell import InteractiveShell

import workbench as wb
from benchmarks.harness import Target, interleave, medians, publish, table

NUM_ENGINES = 2
CELL = "pass"
TARGET = Target(1.5)


def make_shell() -> InteractiveShell:
    """A shell with the workbench's magics, as a notebook has them."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "workbench")
    return shell


def measure(rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of a round trip for both ways, on the engines of one session."""
    shell = make_shell()
    with wb.Session(engines=NUM_ENGINES) as session:
        # There is no public way to these engines but the session's; its client is a plain ipyparallel client.
        view = session._live().client[:]
        return medians(
            interleave(
                {
                    "view.execute(silent=False)": lambda: view.execute(CELL, silent=False).get(),
                    "%%global": lambda: shell.run_cell_magic("global", "", CELL),
                },
                rounds,
                calls,
            )
        )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=2, help="cells per round")
    args = parser.parse_args()
    time_s = measure(args.rounds, args.calls)
    bare, ours = time_s
    rows = [[name, f"{time * 1e3:.2f}"] for name, time in time_s.items()]
    how = f"An empty cell on {NUM_ENGINES} engines; medians of {args.rounds} rounds of {args.calls} cells."
    body = f"{how}\n\n{table(['', 'round trip, ms'], rows)}"
    publish("cell", "Round trip of an empty cell", body, time_s[ours] / time_s[bare], TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
