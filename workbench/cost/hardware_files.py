"""Machines as JSON files: the fields of ``Hardware``, and a source for every number.

Files of the package are known by name (``known_machines()``), others by their path. ``machines/h200.json`` is an
example.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from importlib import resources
from pathlib import Path
from typing import Any

from workbench.core.suggest import suggest
from workbench.cost.hardware import Hardware, Link
from workbench.cost.software import ITEMSIZES
from workbench.errors import HardwareError

_SWITCHES = ("exchanges_on_cores", "fp32_is_tf32")
_RATES = ("matmul_flops_per_s", "function_bytes_per_s", "function_flops_per_s")
_LINK = ("span", "latency_s", "bandwidth_bytes_per_s", "hop_s")
_RANGES = {
    "memory_bytes": (1e6, 1e14),
    "memory_bandwidth_bytes_per_s": (1e6, 1e15),
    "matmul_half_size": (0, 1e5),
    "op_s": (0, 1),
    "alone_speedup": (1, 1e5),
    "step_s": (0, 60),
    "weight_bytes_per_s": (0, 1e15),
    "one_shot_bytes": (0, 1e12),
    "offload_bytes_per_s": (0, 1e13),
    "matmul_flops_per_s": (1e6, 1e18),
    "function_bytes_per_s": (1e5, 1e15),
    "function_flops_per_s": (1e6, 1e18),
    "span": (1, 1e7),
    "latency_s": (0, 1),
    "hop_s": (0, 1),
    "bandwidth_bytes_per_s": (1e4, 1e14),
}
"""The smallest and largest number in SI units; numbers outside are mistakes of units (GB for bytes, TFLOP/s for
FLOP/s).
"""


def known_machines() -> list[str]:
    """Names of the machines in the package."""
    folder = resources.files("workbench.cost") / "machines"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A machine by its name or from a file.

    Raises:
        HardwareError: no such machine or file; or a number is missing, is not a number, or is impossible in SI units.

    >>> load_hardware("h200").memory_bytes > 1e11
    True
    """
    text = str(name_or_path)
    if text in known_machines():
        return _parse(text, (resources.files("workbench.cost") / "machines" / f"{text}.json").read_text("utf-8"))
    path = Path(text)
    if not path.is_file():
        near = suggest(text, known_machines())
        known = ", ".join(known_machines())
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise HardwareError(f"hardware {text!r}: neither a file nor one of {known}.{hint}")
    try:
        return _parse(path.name, path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise HardwareError(f"hardware {path.name}: no text in UTF-8 at byte {error.start}; a file is JSON.") from None


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a file that ``load_hardware`` reads."""
    Path(path).write_text(json.dumps(asdict(hardware), indent=2) + "\n", "utf-8")


def _parse(name: str, text: str) -> Hardware:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise HardwareError(f"hardware {name}: line {error.lineno} is not JSON: {error.msg}.") from None
    if not isinstance(data, dict):
        raise HardwareError(f"hardware {name}: expected an object with the fields of Hardware.")
    problems = _problems(data)
    if problems:
        raise HardwareError(f"hardware {name}: " + "; ".join(problems) + ".")
    links = tuple(Link(**{**link, "span": int(link["span"])}) for link in data["links"])
    exchanges = {kind: tuple(pair) for kind, pair in data.get("exchanges", {}).items()}
    return Hardware(**{**data, "links": links, "exchanges": exchanges})


def _problems(data: Mapping[str, Any]) -> list[str]:
    """All mistakes of a file, so that one error lists them all."""
    names = [field.name for field in fields(Hardware)]
    needed = [field.name for field in fields(Hardware) if field.default is field.default_factory is MISSING]
    problems = [f"{name} is missing" for name in needed if name not in data]
    problems += [f"{name} is no field; fields are {', '.join(names)}" for name in data if name not in names]
    for name in _RANGES:
        if name in data and name not in (*_RATES, *_LINK):
            problems += _out_of_range(name, name, data[name])
    if not isinstance(data.get("name", ""), str):
        problems.append(f"name is {data['name']!r}, not a text")
    switches = [name for name in _SWITCHES if not isinstance(data.get(name, False), bool)]
    problems += [f"{name} is {data[name]!r}, not true or false" for name in switches]
    objects = {name: data.get(name, {}) for name in (*_RATES, "exchanges", "sources")}
    problems += [f"{name} is not an object" for name, value in objects.items() if not isinstance(value, dict)]
    objects = {name: value if isinstance(value, dict) else {} for name, value in objects.items()}
    for name in _RATES:
        for key, rate in objects[name].items():
            problems += _out_of_range(f"{name}[{key}]", name, rate)
    for key in objects["matmul_flops_per_s"]:
        if key not in ITEMSIZES:
            problems.append(f"matmul_flops_per_s[{key}] is of no precision; there are {', '.join(ITEMSIZES)}")
    if "matmul_flops_per_s" in data and not data["matmul_flops_per_s"]:
        problems.append("matmul_flops_per_s has no rate of any precision")
    for kind, pair in objects["exchanges"].items():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            problems.append(f"exchanges[{kind}] is not [latency_s, bandwidth_bytes_per_s]")
            continue
        problems += _out_of_range(f"exchanges[{kind}][0]", "latency_s", pair[0])
        problems += _out_of_range(f"exchanges[{kind}][1]", "bandwidth_bytes_per_s", pair[1])
    return problems + _problems_of_links(data.get("links", []), "links" in data)


def _problems_of_links(links: Any, is_given: bool) -> list[str]:
    if not isinstance(links, list | tuple) or (is_given and not links):
        return ["links is not a list of at least one link"]
    problems = []
    for number, link in enumerate(links):
        for name in _LINK[:3]:
            where = f"links[{number}].{name}"
            if not isinstance(link, dict) or name not in link:
                problems.append(f"{where} is missing")
        for name, value in link.items() if isinstance(link, dict) else ():
            where = f"links[{number}].{name}"
            problems += _out_of_range(where, name, value) if name in _LINK else [f"{where} is no field of a link"]
            if name == "span" and isinstance(value, float) and not value.is_integer():
                problems.append(f"{where} is {value:g}, not a whole number of ranks")
    spans: list[Any] = [link.get("span") for link in links if isinstance(link, dict)]
    if not problems and spans != sorted(set(spans)):
        problems.append(f"links have spans {spans}, which do not ascend")
    return problems


def _out_of_range(where: str, name: str, value: Any) -> list[str]:
    low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [f"{where} is {value!r}, not a number"]
    if low <= value <= high:
        return []
    return [f"{where} is {value:g}, but lies between {low:g} and {high:g} in SI units (bytes, seconds, FLOP/s)"]
