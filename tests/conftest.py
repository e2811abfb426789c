"""The order of the tests: what takes milliseconds first, so that a mistake shows before a browser has started."""

from __future__ import annotations

import pytest

_LATER = ("procs", "engines", "browser", "slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by the most expensive marker; within a marker, the order of the files stays."""
    items.sort(key=_cost)


def _cost(item: pytest.Item) -> int:
    return max((1 + place for place, name in enumerate(_LATER) if item.get_closest_marker(name)), default=0)
