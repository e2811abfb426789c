"""Tables of runs: what a row needs, what it gives, and what is said about a wrong one."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from workbench.cli import main, simulate
from workbench.cost.table import ADDED, COLUMNS, OPTIONAL, predict_row, predict_table
from workbench.errors import TableError

ROW = {
    "name": "small", "machine": "a100-80g-selene", "gpus": "16", "heads": "16", "hidden": "1024", "layers": "8",
    "vocab": "51200", "seq": "1024", "tp": "2", "pp": "4", "dp": "2", "micro_batch": "2", "batch": "32",
    "dtype": "bf16", "software": "2022",
}  # fmt: skip


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_gets_its_columns_and_parts_add_up() -> None:
    (row,) = predict_table([ROW])
    parts = [float(row[c]) for c in ADDED if c.endswith("_s")]
    assert float(row["seconds"]) == pytest.approx(sum(parts), rel=1e-4)
    assert 1 < float(row["memory_gib"]) < 80
    assert {key: row[key] for key in ROW} == ROW


def test_whole_numbers_may_be_written_as_pandas_writes_a_column_with_gaps() -> None:
    assert predict_row(ROW | {"kv_heads": "8.0"}) == predict_row(ROW | {"kv_heads": "8"})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_without_stages_nothing_waits_for_them(tp: int) -> None:
    """Not even -3e-16 s."""
    rows = [
        ROW | {"tp": str(tp), "pp": "1", "gpus": str(tp * int(ROW["dp"])), "batch": str(8 * n)} for n in range(1, 9)
    ]
    assert {row["pipeline_bubble_s"] for row in predict_table(rows)} == {"0"}


def test_interleaving_and_recomputation_act_as_they_should() -> None:
    plain, virtual_stages = predict_row(ROW), predict_row(ROW | {"layers_per_virtual_stage": "1"})
    assert virtual_stages.bubble_s < plain.bubble_s
    full = predict_row(ROW | {"recompute": "full"})
    selective = predict_row(ROW | {"recompute": "selective"})
    assert plain.compute_s < selective.compute_s < full.compute_s
    assert plain.peak_bytes > selective.peak_bytes > full.peak_bytes


def test_ranks_that_share_a_sequence_share_its_work_and_its_activations() -> None:
    one = predict_row(ROW | {"flash": "1"})
    two = predict_row(ROW | {"flash": "1", "cp": "2", "gpus": "32"})
    assert two.compute_s < 0.7 * one.compute_s
    activations = [max(kinds["activations"] for kinds in found.memory) for found in (one, two)]
    assert activations[1] == pytest.approx(activations[0] / 2, rel=1e-6)
    with pytest.raises(TableError, match="column 'gpus': 16, but tp x pp x dp x cp is 32"):
        predict_row(ROW | {"flash": "1", "cp": "2"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": ""}, r"row 1 \(small\): column 'hidden': the value is missing"),
        ({"hidden": "1k"}, "column 'hidden': '1k' is not a whole number from 1 on"),
        ({"zero": "4"}, "column 'zero': '4' is not a whole number 0 to 3"),
        ({"flash": "yes"}, "column 'flash': 'yes' is not a whole number 0 to 1"),
        ({"recompute": "some"}, "column 'recompute': 'some' is none of none, selective, full"),
        ({"gpus": "8"}, "column 'gpus': 8, but tp x pp x dp is 16"),
        ({"gpus": "32", "cp": "2"}, "column 'cp': 2 ranks of a ring, but flash is 0"),
        ({"batch": "33"}, "column 'batch': 33 is not a multiple of dp x micro_batch, which is 4"),
        ({"heads": "10"}, "column 'hidden': 1024 is not a multiple of 10 heads"),
        ({"kv_heads": "5"}, "column 'kv_heads': 16 heads are not a multiple of 5 heads"),
        ({"layers_per_virtual_stage": "3"}, "column 'layers_per_virtual_stage': 8 layers are not a multiple of 4 x 3"),
        ({"machine": "a100"}, "column 'machine': hardware 'a100': neither a file nor one of"),
        ({"dtype": "fp8"}, "column 'dtype': precision fp8: hardware 'a100-80g-selene' has"),
        ({"gpus": "8", "batch": "33"}, "column 'gpus'.*column 'batch'"),
    ],
)  # fmt: skip
def test_errors_name_row_and_column(changes: dict[str, str], message: str) -> None:
    with pytest.raises(TableError, match=message):
        predict_row(ROW | changes)


def test_all_wrong_rows_are_named_at_once() -> None:
    with pytest.raises(TableError, match=r"(?s)row 1 .*column 'gpus'.*row 3 .*column 'batch'"):
        predict_table([ROW | {"gpus": "8"}, ROW, ROW | {"batch": "33"}])


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TableError, match=r"the table lacks the column vocab: only kv_heads, .* may be missing"):
        predict_table([{key: value for key, value in ROW.items() if key != "vocab"}])


def test_the_help_lists_the_columns_that_may_be_missing() -> None:
    listed = str(simulate.__doc__).partition("may be empty or missing: ")[2].partition(".\n")[0]
    assert set(re.findall(r"(\w+) \(", listed)) == set(OPTIONAL)


def test_the_command_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "rows.csv", ROW, ROW | {"name": "large", "hidden": "2048"})
    assert main(["simulate", "--table", str(table), "--out", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*COLUMNS, *ADDED]
    assert float(rows[1]["seconds"]) > float(rows[0]["seconds"])
    assert "2 rows predicted" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "rows.csv", ROW | {"tp": "3"})
    assert main(["simulate", "--table", str(table)]) == 2
    error = capsys.readouterr().err
    assert "row 1 (small): column 'gpus': 16, but tp x pp x dp is 24" in error
    assert main(["simulate", "--table", str(tmp_path / "none.csv")]) == 2
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "empty.csv").write_text("")
    assert main(["simulate", "--table", str(tmp_path / "empty.csv")]) == 2
    assert "no rows" in capsys.readouterr().err


def test_the_command_lists_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """In the units of all commands: bytes were in GiB, and 14.1 TFLOP/s were 14."""
    assert main(["simulate", "--machines"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " 141 GB " in listed["h200"] and " 34.4 GB " in listed["v100-dgx2"]
    assert "fp16 623" in listed["h200"] and "fp32 (TF32) 311" in listed["h200"] and "fp32 14.1" in listed["v100-dgx2"]
