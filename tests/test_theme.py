"""The colour tables: complete, readable, and the same in style sheets and figures."""

from __future__ import annotations

import re

import pytest

from workbench.core.metrics import MEMORY_KINDS
from workbench.theme import DARK, LIGHT, Palette, css_variables, palette, style_sheet


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21."""
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_black_on_white_is_21():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=lambda colours: colours.name)
@pytest.mark.parametrize("role", ["ink", "muted", "error", "ok", "warning"])
def test_text_is_readable_on_its_ground(colours: Palette, role: str):
    grounds = {"error": colours.error_tint, "warning": colours.warning_tint}
    assert contrast(getattr(colours, role), grounds.get(role, colours.background)) >= 4.6


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=lambda colours: colours.name)
def test_every_kind_of_memory_has_its_own_colour(colours: Palette):
    assert tuple(colours.memory) == MEMORY_KINDS
    assert len(set(colours.memory.values())) == len(MEMORY_KINDS)


def test_stage_is_hue_and_rank_is_shade():
    assert LIGHT.rank_colour(0, 0) == "#0b5a9d"
    assert LIGHT.rank_colour(0, 1) == LIGHT.rank_colour(0, 3) == "#6fb1e0"
    assert LIGHT.rank_colour(5, 0) == LIGHT.rank_colour(1, 0) == "#a84f00"


def test_both_themes_define_the_same_variables():
    assert css_variables(LIGHT).keys() == css_variables(DARK).keys()
    assert css_variables(DARK)["--wb-memory-activations"] == "#d9bd58"


def test_style_sheet_prefers_jupyterlab_and_falls_back_to_light():
    sheet = style_sheet(".wb")
    assert "--wb-ink: var(--jp-ui-font-color1, #212121)" in sheet
    assert sheet.index("#0b5a9d") < sheet.index('[data-jp-theme-light="false"] .wb') < sheet.rindex("#5aa5e2")
    assert re.findall(r"{[^{}]*{[^{}]*}\s*}", sheet), "the media query must be balanced"


def test_unknown_theme_names_the_known_ones():
    with pytest.raises(ValueError, match="light, dark"):
        palette("sepia")
