"""Data classes that are written to JSON and read back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any


class JsonRecord:
    """A data class that is written to JSON and read back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data, for JSON."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The record that ``to_dict`` wrote; unknown keys are ignored, so that files of other versions load."""
        return cls(**{f.name: _frozen(data[f.name]) for f in fields(cls) if f.name in data})  # type: ignore[arg-type]


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def finite(value: Any) -> tuple[Any, dict[str, str]]:
    """Plain data with None for all numbers that are not finite, for which JSON has no word; and these numbers' texts,
    by their JSON pointers (RFC 6901).

    >>> finite({"losses": [1.0, float("nan")]})
    ({'losses': [1.0, None]}, {'/losses/1': 'nan'})
    """
    texts: dict[str, str] = {}

    def without(value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            return {key: without(each, f"{place}/{_escaped(str(key))}") for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [without(each, f"{place}/{index}") for index, each in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            texts[place] = str(value)
            return None
        return value

    return without(value, ""), texts


def restore(value: Any, texts: Mapping[str, str]) -> None:
    """Put the numbers that `finite` took out back into lists and dicts.

    >>> data = {"losses": [1.0, None]}
    >>> restore(data, {"/losses/1": "nan"})
    >>> data
    {'losses': [1.0, nan]}
    """
    for place, text in texts.items():
        *outer, last = map(_plain, place.split("/")[1:])
        holder = value
        for part in outer:
            holder = holder[int(part) if isinstance(holder, list) else part]
        holder[int(last) if isinstance(holder, list) else last] = float(text)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _plain(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
