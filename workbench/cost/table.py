"""Tables of training runs of transformers: each row gives a predicted step.

Published results and your own rows use the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware import Hardware
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import megatron
from workbench.cost.transformer import (
    LOSS_IN_PLACE_SINCE,
    Transformer,
    stages_of,
    transformer_costs,
    transformer_strategy,
)
from workbench.errors import TableError, WorkbenchError

REQUIRED = (
    "name", "machine", "gpus", "heads", "hidden", "layers", "vocab", "seq", "tp", "pp", "dp", "micro_batch", "batch",
    "dtype", "software",
)  # fmt: skip
"""Columns that every row fills."""
OPTIONAL = {
    "kv_heads": "", "ffn": "", "gated_ffn": "0", "layers_per_virtual_stage": "", "recompute": "none",
    "sequence_parallel": "0", "zero": "0", "flash": "0", "cp": "1",
}  # fmt: skip
"""Columns that may be empty or missing, with their defaults."""
COLUMNS = (*REQUIRED, *OPTIONAL)
"""All columns that are read. Other columns are copied."""
ADDED = (
    "seconds", "memory_gib", "compute_s", "tensor_parallel_s", "data_parallel_s", "pipeline_bubble_s", "optimizer_s",
)  # fmt: skip
"""Columns that a prediction adds."""
_WORDS = {"recompute": ("none", "selective", "full"), "dtype": ("fp32", "fp16", "bf16", "fp8")}
_SWITCHES = ("gated_ffn", "sequence_parallel", "flash")
_LOWEST = {"zero": 0, "software": 2018}


@dataclass
class Reader:
    """Reads the values of one row and collects their mistakes."""

    row: Mapping[str, str]
    problems: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        """The value, stripped; the default of an optional column."""
        value = (self.row.get(column) or "").strip() or OPTIONAL.get(column, "")
        if not value and column in REQUIRED:
            self.problems.append(f"column {column!r}: the value is missing")
        if value and column in _WORDS and value not in _WORDS[column]:
            self.problems.append(f"column {column!r}: {value!r} is none of {', '.join(_WORDS[column])}")
        return value

    def number(self, column: str) -> int | None:
        """A whole number; None for an empty optional column or a wrong value."""
        value = self.text(column)
        if not value:
            return None
        try:
            number = int(float(value)) if float(value).is_integer() else None
        except ValueError:
            number = None
        lowest = _LOWEST.get(column, 0 if column in _SWITCHES else 1)
        highest = 3 if column == "zero" else 1 if column in _SWITCHES else None
        if number is None or number < lowest or (highest is not None and number > highest):
            wanted = f"{lowest} to {highest}" if highest is not None else f"from {lowest} on"
            self.problems.append(f"column {column!r}: {value!r} is not a whole number {wanted}")
            return None
        return number


def predict_row(row: Mapping[str, str], number: int = 1, machines: dict[str, Hardware] | None = None) -> Estimate:
    """The predicted step of a row.

    Args:
        row: values by column, as text.
        number: of the row, for errors; the first row after the header is 1.
        machines: loaded hardware by name; new machines are added.

    Raises:
        TableError: it names the row and every wrong column.
    """
    reader = Reader(row)
    texts = {column: reader.text(column) for column in ("name", "machine", "recompute", "dtype")}
    numbers = {c: reader.number(c) for c in COLUMNS if c not in texts}
    where = f"row {number} ({texts['name'] or 'no name'})"
    reader.problems += _inconsistencies(numbers, texts) if not reader.problems else []
    if reader.problems:
        raise TableError(f"{where}: " + "; ".join(dict.fromkeys(reader.problems)) + ".")
    machines = {} if machines is None else machines
    try:
        hardware = machines.get(texts["machine"]) or load_hardware(texts["machine"])
        machines[texts["machine"]] = hardware
        return _predict({c: n for c, n in numbers.items() if n is not None}, texts, hardware)
    except WorkbenchError as error:
        text = str(error)
        column = "dtype" if text.startswith("precision") else "machine" if "hardware" in text else "layers"
        raise TableError(f"{where}: column {column!r}: {error}") from None


def _predict(n: Mapping[str, int], texts: Mapping[str, str], hardware: Hardware) -> Estimate:
    model = Transformer(
        n["hidden"], n["heads"], n["layers"], n["vocab"], n["seq"], n.get("kv_heads"), n.get("ffn"),
        bool(n["gated_ffn"]), bool(n["flash"]), n["software"] >= LOSS_IN_PLACE_SINCE,
    )  # fmt: skip
    strategy = transformer_strategy(
        model,
        tensor=n["tp"],
        pipeline=n["pp"],
        data=n["dp"] * n["cp"],
        context=n["cp"],
        num_micro_batches=n["batch"] // (n["dp"] * n["micro_batch"]),
        layers_per_stage=n.get("layers_per_virtual_stage") if n["pp"] > 1 else None,
        zero=n["zero"],
        recompute=texts["recompute"] != "none",
        sequence=bool(n["sequence_parallel"]),
        precision=texts["dtype"],
    )
    software = megatron(n["software"], "selective" if texts["recompute"] == "selective" else "full")
    return estimate(transformer_costs(model), strategy, hardware, n["batch"], software=software)


def _inconsistencies(numbers: Mapping[str, int | None], texts: Mapping[str, str]) -> list[str]:
    """Values that are valid alone, but inconsistent together."""
    n: Mapping[str, Any] = numbers
    ranks, samples = n["tp"] * n["pp"] * n["dp"] * n["cp"], n["dp"] * n["micro_batch"]
    kv_heads, each = n["kv_heads"] or n["heads"], n["layers_per_virtual_stage"]
    rules: list[tuple[bool, str]] = [
        (n["gpus"] == ranks, f"column 'gpus': {n['gpus']}, but tp x pp x dp{' x cp' * (n['cp'] > 1)} is {ranks}"),
        (n["cp"] == 1 or bool(n["flash"]), f"column 'cp': {n['cp']} ranks of a ring, but flash is 0"),
        (
            n["batch"] % samples == 0,
            f"column 'batch': {n['batch']} is not a multiple of dp x micro_batch, which is {samples}",
        ),
        (n["hidden"] % n["heads"] == 0, f"column 'hidden': {n['hidden']} is not a multiple of {n['heads']} heads"),
        (n["heads"] % n["tp"] == 0, f"column 'heads': {n['heads']} is not a multiple of tp, which is {n['tp']}"),
        (
            n["heads"] % kv_heads == 0,
            f"column 'kv_heads': {n['heads']} heads are not a multiple of {kv_heads} heads of keys and values",
        ),
        (n["layers"] >= n["pp"], f"column 'layers': {n['layers']} on pp {n['pp']}; each stage takes at least one"),
        (
            each is None or stages_of(n["layers"], n["pp"], each) > 0,
            f"column 'layers_per_virtual_stage': {n['layers']} layers are not a multiple of {n['pp']} x {each}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def added_columns(found: Estimate) -> dict[str, float]:
    """The columns of ``ADDED``."""
    return {
        "seconds": found.step_s,
        "memory_gib": found.peak_bytes / 2**30,
        "compute_s": found.compute_s,
        "tensor_parallel_s": found.boxing_s,
        "data_parallel_s": found.gradient_s,
        "pipeline_bubble_s": found.bubble_s,
        "optimizer_s": found.optimizer_s,
    }


def predict_table(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """All rows with the added columns, as text.

    Raises:
        TableError: a column is missing, or rows are wrong; it lists all wrong rows.
    """
    given = set().union(*(row.keys() for row in rows)) if rows else set()
    missing = [column for column in REQUIRED if rows and column not in given]
    if missing:
        lacks = f"the table lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise TableError(f"{lacks}: only {', '.join(OPTIONAL)} may be missing.")
    predicted, problems = [], []
    machines: dict[str, Hardware] = {}
    for number, row in enumerate(rows, start=1):
        try:
            added = added_columns(predict_row(row, number, machines))
        except TableError as error:
            problems.append(str(error))
            continue
        predicted.append({**row, **{column: f"{value:.6g}" for column, value in added.items()}})
    if problems:
        raise TableError("\n".join(problems))
    return predicted
