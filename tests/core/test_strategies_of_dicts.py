"""Strategies from a dict: any name can be a pattern, and a value is one choice."""

from __future__ import annotations

import pickle

import pytest

from workbench.core.strategy import Strategy
from workbench.errors import StrategyError


@pytest.mark.parametrize("pattern", ["a;b", "a|b", "x: data; y", "a b", " a ", "blocks.[0-3];*", "a%3Bb", "a:model"])
def test_a_strategy_of_a_dict_survives_its_text(pattern: str) -> None:
    strategy = Strategy({pattern: "model@1", "*;": "data"})
    assert len(strategy.rows) == 2
    assert Strategy(str(strategy)) == pickle.loads(pickle.dumps(strategy)) == strategy
    if "[" not in pattern:
        assert strategy.rows[0].matches(pattern.strip().replace("%3B", ";"))


def test_a_choice_of_a_dict_is_one_choice() -> None:
    with pytest.raises(StrategyError, match=r"row 'x': 'data; y: model' is none of data \| model"):
        Strategy({"x": "data; y: model"})
