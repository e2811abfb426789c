"""Compare strategies on your own model, each checked against one device.

The file defines
    model_fn()              makes the torch module
    dataset                 arrays in a tuple or dict, e.g. (inputs, targets), or a torch Dataset; or a function that
                            returns one. A dict gives the model keyword arguments
    loss_fn(out, target)    a scalar, the mean over the samples. The target is a tuple's last entry, or a dict's
                            labels. Not needed if the model returns its own loss (transformers)
    optimizer_fn(params)    optional; default SGD with lr 0.1 and momentum 0.9
    collate_fn(samples)     optional: a batch from a list of samples, as for torch's DataLoader
    count(inputs, targets)  optional: the number of terms of a micro-batch's mean loss, if that is not its samples

    workbench compare mine.py data model "encoder*: data@0; head: model@1 | mb=4 1f1b"
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.cli import results
from workbench.core.options import PRESETS
from workbench.errors import CommandError

_MODULE_NAME = "workbench_compared_file"


def load_job(path: Path) -> dict[str, Any]:
    """Run the file and collect its definitions, by the names of ``wb.compare``.

    Raises:
        CommandError: there is no such file, or it does not define ``model_fn`` and ``dataset``.
    """
    module = run_file(path)
    missing = [name for name in ("model_fn", "dataset") if not hasattr(module, name)]
    if missing:
        raise CommandError(
            f"{path}: {', '.join(missing)} not defined there. "
            "The file needs model_fn and dataset, and a loss_fn unless the model returns its own loss; see workbench "
            "compare --help."
        )
    others = {name: getattr(module, name, None) for name in ("loss_fn", "optimizer_fn", "collate_fn", "count")}
    return {"model_fn": module.model_fn, "dataset": dataset_of(module), **others}


def dataset_of(module: ModuleType) -> Any:
    """The file's data set; calls it if it is a function or a class.

    Raises:
        CommandError: the function raises an error.
    """
    from workbench.session.scripts.sources import makes_dataset

    with telling_mistakes_of(Path(str(module.__file__))):
        return module.dataset() if makes_dataset(module.dataset) else module.dataset


def run_file(path: Path) -> ModuleType:
    """The definitions of a Python file. Its functions are sent to engines by value.

    Raises:
        CommandError: there is no such file, it is not Python, or it raises an error.
    """
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise CommandError(f"{path}: not a Python file. Give the path of one, e.g. mine.py")
    module = importlib.util.module_from_spec(spec)
    # As in a script: its classes are found by name, and modules in its folder can be imported.
    sys.modules[_MODULE_NAME] = module
    sys.path.insert(0, str(path.resolve().parent))
    with telling_mistakes_of(path):
        spec.loader.exec_module(module)
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # engines cannot import the file by name
    return module


@contextmanager
def telling_mistakes_of(path: Path) -> Iterator[None]:
    """Around code that runs a user's file.

    Raises:
        CommandError: for each error of the file, with the lines from the file on. Errors of other code pass.
    """
    try:
        yield
    except SyntaxError as error:
        line = f"{error.filename or path}, line {error.lineno or 1}: {error.msg}: {(error.text or '').strip()}"
        raise CommandError(line.removesuffix(": ")) from None
    except Exception as error:
        lines = error.__traceback__
        while lines is not None and Path(lines.tb_frame.f_code.co_filename).resolve() != path.resolve():
            lines = lines.tb_next
        if lines is None:
            raise
        told = "".join(traceback.format_exception(type(error), error, lines)).rstrip()
        raise CommandError(f"{path} raised an error.\n{told}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench compare``."""
    parser.add_argument("file", type=Path, help="Python file with model_fn, dataset and, if needed, loss_fn")
    parser.add_argument(
        "strategies",
        nargs="*",
        default=list(PRESETS),
        metavar="STRATEGY",
        help=f"presets ({', '.join(PRESETS)}), also with options ('pipeline | mb=8'), strategy texts, or files in "
        ".strategy; default: all presets",
    )
    results.add_run_arguments(parser, batch_size=64)
    results.add_output_arguments(parser, report=None)


def run(args: argparse.Namespace) -> int:
    """Compare the strategies on the file's model; the exit code is 0 if all equal one device."""
    results.check_outputs(args, [args.file, *args.strategies])
    job = load_job(args.file)
    with telling_mistakes_of(args.file):
        return results.compare_and_present(job, args.strategies, args)
