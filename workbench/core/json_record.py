"""Data classes that are written to JSON and read back."""

from __future__ import annotations

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
