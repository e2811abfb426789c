"""Find the best strategy for a model on a machine that need not be here.

The model is the name of a transformer (workbench plan --models), or a file that defines
    model_fn()              makes the torch module; it is traced on metadata, no weight is allocated
    dataset                 as for workbench compare; or
    inputs                  a batch: a tensor, a tuple, a dict of keyword arguments, or the shape of a tensor
    loss_fn(out, target)    as for workbench compare; optional with inputs

    workbench plan gpt3-175b --hardware a100-80g-selene --ranks 3072 --batch 1536 --precision bf16
    workbench plan mine.py --hardware h200 --ranks 8 --batch 256 --constraint zero=1 --why-not "*: data"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.cli.outputs import check_output, write_text
from workbench.core.offload_kinds import CHOICES
from workbench.core.options import PRECISIONS
from workbench.core.recompute_kinds import KINDS
from workbench.cost.software import OPTIMIZERS
from workbench.errors import CommandError

_SWITCH = {"no": False, "yes": True, "false": False, "true": True}
_WORDS = {"sequence": _SWITCH | {"0": False, "1": True}, "recompute": _SWITCH}
"""Words for yes and no. Other constraints take numbers, and those of ``_CHECKED_LATER`` what the search knows."""
_CHECKED_LATER = ("schedule", "offload", "recompute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench plan``."""
    parser.add_argument("model", nargs="?", help="the name of a transformer, or a Python file")
    parser.add_argument("--hardware", default="a100-80g-selene", metavar="NAME",
                        help="a file, or one of workbench simulate --machines (default: %(default)s)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=64, help="samples per step, all ranks together (default: %(default)s)"
    )
    parser.add_argument("--objective", default="throughput", help="throughput, memory or cost (default: %(default)s)")
    parser.add_argument(
        "--memory", type=float, metavar="GB", help="the most that a rank may hold (default: the machine's memory)"
    )
    parser.add_argument("--precision", help=f"one of {', '.join(PRECISIONS)} (default: the model's)")
    parser.add_argument("--optimizer", default="adamw", help=f"one of {', '.join(OPTIMIZERS)} (default: %(default)s)")
    parser.add_argument("--constraint", action="append", default=[], metavar="NAME=VALUE",
                        help="limits the search: numbers of pipeline=, data=, model=, micro_batches=, zero=, shards=, "
                             "context=, overlap=, heads=; words of schedule=, recompute= "
                             f"(none, {', '.join(KINDS)}, or a number of blocks), "
                             f"offload= (none, {', '.join(CHOICES)}), sequence= (no, yes); "
                             "rows of layers=. Several: zero=1,2")  # fmt: skip
    parser.add_argument("--explain", metavar="LAYER", help="the other choices of a layer, and their costs")
    parser.add_argument("--why-not", metavar="STRATEGY", help="why the plan is not this strategy")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the strategy there, e.g. plan.strategy")
    parser.add_argument(
        "--table", action="store_true", help="the best strategy for every triple of degrees, and one device"
    )
    parser.add_argument("--models", action="store_true", help="list the transformers that are known by name, and stop")


def run(args: argparse.Namespace) -> int:
    """Plan and print. Returns 0; a mistake raises an error."""
    if args.models:
        return _list_models()
    if args.model is None:
        raise CommandError("which model? Give a file or a name; workbench plan --models lists the names.")
    from workbench.cost.hardware_files import load_hardware

    hardware, constraints = load_hardware(args.hardware), _constraints(args.constraint)
    check_output("--out", args.out, [args.model, args.hardware, args.why_not])
    # report mistakes in the options first: torch and the model's trace take seconds
    from workbench.session.planning import plan

    found = plan(
        _model(args.model),
        hardware,
        args.ranks,
        args.batch,
        objective=args.objective,
        memory_bytes=None if args.memory is None else args.memory * 1e9,
        precision=args.precision,
        optimizer=args.optimizer,
        **constraints,
    )
    print(found)
    if args.out:
        write_text("--out", args.out, f"{found.strategy}\n")
        print(f"strategy written to {args.out}")
    if args.table:
        print(f"\n{found.table.to_string(index=False)}")
    if args.explain:
        print(f"\n{found.explain(args.explain)}")
    if args.why_not:
        print(f"\nwhy not {args.why_not}?\n{found.why_not(args.why_not)}")
    return 0


def _constraints(texts: Sequence[str]) -> dict[str, Any]:
    """The options ``--constraint`` by name.

    Raises:
        CommandError: one of them has another form, or the name of an earlier one.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, value = parse_constraint(text)
        if name in found:
            raise CommandError(f"--constraint {text!r}: {name} is given twice. Give several values in one: zero=1,2.")
        found[name] = value
    return found


def parse_constraint(text: str) -> tuple[str, Any]:
    """``zero=1,2`` -> ("zero", (1, 2)), of which the search chooses.

    Raises:
        CommandError: the text has another form.
    """
    name, sign, value = text.partition("=")
    if not sign or not value.strip():
        raise CommandError(f"--constraint {text!r}: not of the form name=value, e.g. zero=1 or layers='head: data'.")
    if name == "layers":
        return name, value
    words, known = [word.strip() for word in value.split(",")], _WORDS.get(name, {})
    if name == "sequence" and not known.keys() >= set(words):
        raise CommandError(f"--constraint {text!r}: {name} is one of {', '.join(known)}.")
    values = tuple(known.get(word, int(word) if word.isdecimal() else word) for word in words)
    if name not in _CHECKED_LATER and not all(isinstance(one, int) for one in values):
        raise CommandError(f"--constraint {text!r}: {name} is a number, or several: {name}=1,2.")
    return name, values if len(values) > 1 else values[0]


def _model(name: str) -> Any:
    """Costs of a file's model, or the name of a transformer, even where a file or folder is called so."""
    from workbench.planning.published_models import TRANSFORMERS

    path = Path(name)
    if name in TRANSFORMERS or (path.suffix != ".py" and not path.exists()):
        return name
    from workbench.cli.compare import dataset_of, run_file, telling_mistakes_of
    from workbench.session.planning import layer_costs
    from workbench.ui.planning.offline_trainer import costs_of

    module = run_file(path)
    if not hasattr(module, "model_fn") or not (hasattr(module, "inputs") or hasattr(module, "dataset")):
        raise CommandError(f"{path}: the file needs model_fn, and dataset or inputs; see workbench plan --help.")
    loss_fn = getattr(module, "loss_fn", None)
    dataset = None if hasattr(module, "inputs") else dataset_of(module)
    with telling_mistakes_of(path):
        if dataset is None:
            targets = getattr(module, "targets", None)
            return layer_costs(module.model_fn, module.inputs, loss_fn=loss_fn, targets=targets)
        return costs_of(module.model_fn, dataset, loss_fn, getattr(module, "collate_fn", None))


def _list_models() -> int:
    from workbench.cost.transformer import transformer_costs
    from workbench.planning.published_models import TRANSFORMERS
    from workbench.units import format_count

    for name, one in TRANSFORMERS.items():
        number = format_count(transformer_costs(one).num_parameters)
        print(f"{name:12} {number:>7} parameters, {one.layers} blocks of {one.hidden}, {one.seq} positions")
    return 0
