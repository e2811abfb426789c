"""Shared by ``demo`` and ``compare``: options of a run, the run, and its output."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.outputs import check_output, write_text
from workbench.core.extras import install_command
from workbench.errors import CommandError
from workbench.units import counted

if TYPE_CHECKING:
    from workbench.core.metrics import RunRecord
    from workbench.session.cluster import Session
    from workbench.session.comparison.compare import CompareResult

EQUAL, UNEQUAL = 0, 1


def require(extra: str, *modules: str) -> None:
    """Check that the modules of an extra are installed.

    Raises:
        CommandError: a module is missing; it says how to install the extra.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"{' and '.join(missing)} not installed here. Install what it needs: {install_command(extra)}"
        )


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def seeds(text: str) -> int | list[int]:
    """A number of seeds, or seeds with commas in between, for argparse.

    >>> seeds("3"), seeds("0,7")
    (3, [0, 7])
    """
    return [int(each) for each in text.split(",")] if "," in text else positive(text)


def add_run_arguments(parser: argparse.ArgumentParser, batch_size: int) -> None:
    """Options of the training."""
    parser.add_argument("--engines", type=positive, default=2, help="processes to train on (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="training steps per strategy (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=batch_size, help="samples per step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order (default: %(default)s)")
    which = "train with so many seeds, from --seed on, or with those listed: 3 or 0,7,9 (default: %(default)s)"
    parser.add_argument("--seeds", type=seeds, default=1, metavar="N|LIST", help=which)


def add_output_arguments(parser: argparse.ArgumentParser, report: str | None) -> None:
    """Options of the output files."""
    default = "default: %(default)s" if report else "default: none"
    parser.add_argument("--out", metavar="FILE", type=Path, default=report, help=f"HTML report ({default})")
    parser.add_argument("--json", metavar="FILE", type=Path, help="the result as data, for CompareResult.from_json")


def check_outputs(args: argparse.Namespace, inputs: Sequence[str | Path] = ()) -> None:
    """Check that the output files can be made, before anything is trained.

    Raises:
        CommandError: a file cannot be written, or both are the same, or one is among the inputs.
    """
    for option, path in (("--out", args.out), ("--json", args.json)):
        check_output(option, path, inputs)
    if args.json is not None and args.out is not None and args.out.resolve() == args.json.resolve():
        raise CommandError(f"--out and --json are both {args.out}, and one would replace the other. Give two files.")


def compare_and_present(
    job: Mapping[str, Any], strategies: Sequence[str], args: argparse.Namespace, session: Session | None = None
) -> int:
    """Compare the strategies, in a new session if none is given; show the result and return the exit code.

    Args:
        job: arguments of ``wb.compare``: model, data, loss and others.
    """
    from workbench.session.comparison.compare import compare

    result = compare(
        **job,
        strategies=strategies,
        batch_size=args.batch,
        steps=args.steps,
        session=session,
        engines=args.engines,
        seed=args.seed,
        seeds=args.seeds,
    )
    return present(result, args.out, args.json)


def present(result: CompareResult, report: Path | None, json_file: Path | None = None) -> int:
    """Print the table and the verdict, write the files, and return the exit code."""
    from workbench.core.seeds import over_seeds
    from workbench.ui.runs.render_table import comparison_table_text

    means = over_seeds(result.runs)
    print(comparison_table_text(means, *over_seeds(result.baselines)[:1]))
    print(_legend(means))
    for line in _threads(result.settings):
        print(line)
    mistakes = differences(result.runs)
    print(*(mistakes or [_all_equal(means)]), *_notes(result.runs), sep="\n", flush=True)
    for option, path, make in (("--out", report, _report), ("--json", json_file, type(result).to_json)):
        if path is not None:
            write_text(option, path, make(result))
            print(f"written: {path}")
    return UNEQUAL if mistakes else EQUAL


def differences(runs: Sequence[RunRecord]) -> list[str]:
    """A sentence for each run whose numbers differ from those of one device."""
    return [f"{run.name}: {_difference(run)}." for run in runs if run.error is not None or not run.equal]


def _all_equal(runs: Sequence[RunRecord]) -> str:
    return f"All {len(runs)} strategies train as one device does." if len(runs) > 1 else "It trains as one device does."


def _notes(runs: Sequence[RunRecord]) -> list[str]:
    """A sentence for each run whose tick says less than it seems to: of a loss that is nan later, for example."""
    return [f"{run.name}: {run.verdict.text}." for run in runs if run.equal and run.verdict.note]


def _difference(run: RunRecord) -> str:
    if run.error is not None:
        return f"did not run: {run.error.strip().splitlines()[0].rstrip('.')}"
    if run.equal is None:
        return f"has no verdict: {run.verdict.text}" if run.verdict.text else "was not compared with one device"
    return f"does not train as one device does: {run.verdict.text or 'its losses or weights differ'}"


def _legend(runs: Sequence[RunRecord]) -> str:
    named = [run for run in runs if run.name != run.strategy]
    width = max((len(run.name) for run in named), default=0)
    columns = (
        "peak: process memory above the warm engine; boxed: bytes sent by all ranks; equal: largest loss difference"
    )
    return "\n".join([columns, *(f"  {run.name:<{width}}  {run.strategy}" for run in named)])


def _threads(settings: Mapping[str, Any]) -> list[str]:
    """The threads of the engines and of one device, which a speed-up compares; empty for results without them."""
    if "threads" not in settings:
        return []
    engines, threads = (counted(settings[key], word) for key, word in (("engines", "engine"), ("threads", "thread")))
    return [f"{engines} with {threads} each; one device is one of them with {threads}, while no other works"]


def _report(result: CompareResult) -> str:
    from workbench.ui.runs.report import report_html

    return report_html(result)
