"""Strategies that guides name for people who come from elsewhere are right."""

import re
from pathlib import Path

import pytest

from workbench.core.options import PRESETS, parse_options
from workbench.core.strategy import Strategy

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
QUOTED = re.compile(r'`"([^"`]*[:|][^"`]*)"`')


@pytest.mark.parametrize("page", ["from-torch.md", "from-others.md", "which-strategy.md"])
def test_all_can_be_read(page):
    found = [text for row in ROW.findall((GUIDES / page).read_text("utf-8")) for text in QUOTED.findall(row)]
    assert len(found) >= 2
    for text in (text.replace(r"\|", "|") for text in found):
        rows, _, options = text.partition("|")
        if rows.strip() in PRESETS:
            mistakes = []
            parse_options(options, mistakes)
            assert not mistakes
        elif "..." not in text:
            assert Strategy(text).rows
