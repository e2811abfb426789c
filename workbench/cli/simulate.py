"""Predict the training steps of a table of transformers, without any device.

Columns: name, machine (a known one, or the path of a hardware file), gpus, heads, kv_heads, hidden, ffn, gated_ffn,
layers, vocab, seq, tp, pp, dp, cp (ranks of a context), layers_per_virtual_stage, micro_batch, batch, recompute
(none, selective, full), sequence_parallel, dtype (fp32, fp16, bf16, fp8), zero (0 to 3), flash, software (the year of
Megatron-LM). Other columns are copied.

These may be empty or missing: kv_heads (then as heads), ffn (4 hidden), gated_ffn (0), layers_per_virtual_stage (no
interleaving), recompute (none), sequence_parallel (0), zero (0), flash (0), cp (1).

Added columns: seconds, memory_gib, compute_s, tensor_parallel_s, data_parallel_s, pipeline_bubble_s, optimizer_s.

    workbench simulate --table rows.csv --out predicted.csv
    workbench simulate --machines
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from workbench.cli.outputs import check_output, writing
from workbench.errors import CommandError, TableError
from workbench.units import format_bytes, format_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--table", type=Path, metavar="FILE", help="the rows, a CSV file")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file for the predicted rows; without it they are printed"
    )
    parser.add_argument("--machines", action="store_true", help="list the machines that are known by name, and stop")


def run(args: argparse.Namespace) -> int:
    """Predict every row; 0, or an error that names rows and columns."""
    if args.machines:
        return _list_machines()
    if args.table is None:
        raise CommandError("which rows? Give --table rows.csv; its columns: workbench simulate --help.")
    from workbench.cost.table import ADDED, predict_table

    check_output("--out", args.out, [args.table])
    columns, rows = read_table(args.table)
    try:
        predicted = predict_table(rows)
    except TableError as error:
        raise TableError(f"{args.table}: {error}") from None
    every = [*columns, *(column for column in ADDED if column not in columns)]
    if args.out is None:
        _write(sys.stdout, every, predicted)
        return 0
    with writing("--out", args.out), args.out.open("w", newline="", encoding="utf-8") as file:
        _write(file, every, predicted)
    print(f"{len(predicted)} rows predicted: {args.out}")
    return 0


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """(columns, rows) of a CSV file.

    Raises:
        CommandError: there is no such file, or it is not text.
        TableError: no header, a column twice, or a row with more values than columns.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [column.strip() for column in reader.fieldnames or ()]
            reader.fieldnames = columns
            rows = list(reader)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise CommandError(f"{path} is not a CSV file in UTF-8: {error}.") from None
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if not rows or twice:
        what = f"the column {twice[0]!r} stands there twice" if twice else "there are no rows behind the header"
        raise TableError(f"{path}: {what}.")
    long = [number for number, row in enumerate(rows, start=1) if None in row]
    if long:
        raise TableError(
            f"{path}: row {long[0]} has more values than the header has columns, which are {len(columns)}."
        )
    return columns, [{column: value or "" for column, value in row.items()} for row in rows]


def _write(file: TextIO, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _list_machines() -> int:
    from workbench.cost.hardware_files import known_machines, load_hardware

    for name in known_machines():
        machine = load_hardware(name)
        names = {"fp32": "fp32 (TF32)"} if machine.fp32_is_tf32 else {}
        flops = machine.matmul_flops_per_s.items()
        rates = ", ".join(f"{names.get(dtype, dtype)} {format_number(rate / 1e12)}" for dtype, rate in flops)
        print(f"{name:18} {format_bytes(machine.memory_bytes):>8}   TFLOP/s of large products: {rates}")
    return 0
