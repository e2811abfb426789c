"""Machine files: what comes with the package, and what is said about wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.cost.hardware_files import known_machines, load_hardware, save_hardware
from workbench.errors import HardwareError


def written(folder: Path, **changes: Any) -> Path:
    """A good file, with changes; None takes a field out."""
    path = folder / "mine.json"
    save_hardware(load_hardware("h200"), path)
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in data.items() if value is not None}))
    return path


@pytest.mark.parametrize("name", known_machines())
def test_machines_of_the_package_load_and_say_where_every_number_is_from(name: str) -> None:
    machine = load_hardware(name)
    assert machine.name == name
    missing = [field for field in ("memory_bytes", "memory_bandwidth_bytes_per_s", "matmul_flops_per_s",
                                   "matmul_half_size", "op_s", "links") if not machine.sources.get(field)]  # fmt: skip
    assert missing == []


def test_a_saved_machine_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "copy.json"
    save_hardware(load_hardware("a100-80g-selene"), path)
    assert load_hardware(path) == load_hardware("a100-80g-selene")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op_s": None}, "op_s is missing"),
        ({"memory_bytes": 80}, "memory_bytes is 80, but lies between 1e\\+06 and 1e\\+14 in SI units"),
        ({"matmul_flops_per_s": {"bf16": 989}}, r"matmul_flops_per_s\[bf16\] is 989"),
        ({"matmul_flops_per_s": {}}, "no rate of any precision"),
        ({"op_s": "5us"}, "op_s is '5us', not a number"),
        ({"op_s": float("nan")}, "op_s is nan"),
        ({"op_seconds": 1}, "op_seconds is no field; fields are name, memory_bytes"),
        ({"links": []}, "links is not a list of at least one link"),
        ({"links": [{"span": 8, "latency_s": 0}]}, r"links\[0\].bandwidth_bytes_per_s is missing"),
        ({"exchanges": {"send": [1]}}, r"exchanges\[send\] is not \[latency_s"),
        ({"weight_bytes_per_s": -1}, "weight_bytes_per_s is -1, but lies between 0 and 1e\\+15"),
        ({"alone_speedup": 0.5}, "alone_speedup is 0.5, but lies between 1 and 100000"),
        ({"one_shot_bytes": 1e30}, "one_shot_bytes is 1e\\+30, but lies between 0 and 1e\\+12"),
        ({"op_s": float("inf")}, "op_s is inf, but lies between 0 and 1"),
        ({"step_s": True}, "step_s is True, not a number"),
        (
            {"matmul_flops_per_s": {"fp31": 1e12}},
            r"matmul_flops_per_s\[fp31\] is of no precision; there are fp32, fp16",
        ),
        (
            {"links": [{"span": 8.5, "latency_s": 0, "bandwidth_bytes_per_s": 1e9}]},
            r"links\[0\].span is 8.5, not a whole",
        ),
        ({"links": [{"span": 0, "latency_s": 0, "bandwidth_bytes_per_s": 1e9}]}, r"links\[0\].span is 0, but lies"),
        ({"links": [8]}, r"links\[0\].span is missing"),
        ({"exchanges": [1]}, "exchanges is not an object"),
        ({"exchanges": {"send": [1e-5, 25]}}, r"exchanges\[send\]\[1\] is 25, but lies between 10000"),
        ({"sources": "the web"}, "sources is not an object"),
        ({"name": 7}, "name is 7, not a text"),
        ({"op_s": None, "memory_bytes": -1}, "op_s is missing; memory_bytes is -1"),
    ],
)
def test_wrong_numbers_are_named_all_at_once(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        load_hardware(written(tmp_path, **changes))


def test_a_folder_or_a_binary_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="neither a file nor one of"):
        load_hardware(tmp_path)
    path = tmp_path / "picture.json"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(HardwareError, match=r"hardware picture.json: no text in UTF-8"):
        load_hardware(path)


def test_an_unknown_machine_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(HardwareError, match=r"'h20': neither a file nor one of .*Did you mean 'h200'\?"):
        load_hardware("h20")


def test_a_file_that_is_no_json_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"name": "x",\n oops}')
    with pytest.raises(HardwareError, match="line 2 is not JSON"):
        load_hardware(path)
