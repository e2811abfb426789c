"""Write a strategy as a script that trains under torchrun, without a notebook.

The file is as for workbench compare: model_fn, dataset, and if needed loss_fn, optimizer_fn, collate_fn and count. The
script imports it.

    workbench script mine.py "*: data; blocks: model" --ranks 8 --out train.py
    workbench script mine.py "*: data | zero=3" --ranks 8 --torch
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType

from workbench.cli.compare import telling_mistakes_of
from workbench.cli.outputs import check_output, write_text
from workbench.cli.results import positive
from workbench.errors import CommandError

_ROLES = ("model_fn", "dataset", "loss_fn", "optimizer_fn", "collate_fn", "count")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench script``."""
    parser.add_argument("file", type=Path, help="Python file with model_fn, dataset and, if needed, loss_fn")
    parser.add_argument("strategy", help="the text of a strategy, a file in .strategy, or a preset")
    parser.add_argument("--ranks", type=positive, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=100, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=64, help="samples per step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order (default: %(default)s)")
    parser.add_argument("--torch", action="store_true", help="train with torch alone: DDP, FSDP2, DTensor")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the script there; default: print it")


def _imported(path: Path) -> ModuleType:
    """The module that a script gets by the file's name, from the file's folder.

    Raises:
        CommandError: the file raises an error, or the name is that of another module.
    """
    sys.path.insert(0, str(path.resolve().parent))
    with telling_mistakes_of(path):
        module = importlib.import_module(path.stem)
    found = getattr(module, "__file__", None)
    if found is None or not path.samefile(found):
        what = found or "a part of Python"
        raise CommandError(f"{path}: a script that imports {path.stem!r} gets {what}. Give the file another name.")
    return module


def run(args: argparse.Namespace) -> int:
    """Print or write the script. Returns 0; a mistake raises an error."""
    path: Path = args.file
    from workbench.session.scripts.sources import is_importable

    if not path.is_file() or not is_importable(path.stem):
        raise CommandError(
            f"{path}: not a Python file that a script can import. Give the path of one with the name of a module, e.g. "
            "mine.py"
        )
    check_output("--out", args.out, [path, args.strategy])
    module = _imported(path)
    missing = [role for role in _ROLES[:2] if not hasattr(module, role)]
    if missing:
        raise CommandError(f"{path}: {', '.join(missing)} not defined there; see workbench script --help.")
    from workbench.session.scripts import script

    with telling_mistakes_of(path):
        text = script(
            args.strategy,
            args.ranks,
            **{role: f"{path.stem}:{role}" for role in _ROLES if hasattr(module, role)},
            batch_size=args.batch,
            steps=args.steps,
            seed=args.seed,
            library="torch" if args.torch else "workbench",
        )
    if args.out is None:
        print(text, end="")
        return 0
    write_text("--out", args.out, text)
    print(f"script written to {args.out}: {_command(args.ranks, args.out, path)}")
    return 0


def _command(num_ranks: int, script: Path, imported: Path) -> str:
    """What starts a script in a shell, in this folder. Python finds what it imports beside it, or on PYTHONPATH."""
    command = f"torchrun --nproc-per-node {num_ranks} {shlex.quote(str(script))}"
    if script.resolve().parent == imported.resolve().parent:
        return command
    return f"PYTHONPATH={shlex.quote(str(imported.parent))}:$PYTHONPATH {command}"
