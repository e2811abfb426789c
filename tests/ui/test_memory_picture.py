"""Memory over a step as a picture."""

import re

import pytest

import workbench as wb
from workbench.core.profile import MemoryCurve, Profile
from workbench.theme import palette


def curve(rank, **sizes):
    return MemoryCurve(rank, (0.0, 0.5, 2.0), {kind: tuple(found) for kind, found in sizes.items()})


CURVES = (
    curve(0, parameters=(100, 100, 100), activations=(0, 300, 0)),
    curve(1, parameters=(100, 100, 100), activations=(0, 100, 0), other=(50, 0, 0)),
)


def heights(svg, kind):
    """The highest and the lowest point of a kind's area, per rank."""
    areas = re.findall(rf'<path d="M([^"]*)Z" fill="[^"]*" class="{kind}"/>', svg)
    return [[float(place.split()[1]) for place in area.split("L")] for area in areas]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_areas_are_as_high_as_the_sizes(theme):
    picture = wb.draw.memory(Profile(memory=CURVES), theme=theme)
    assert repr(picture) == "memory over a step, at most 400 B on a rank"
    assert palette(theme).memory["activations"] in picture.svg
    first, second = heights(picture.svg, "activations")
    full = max(first) - min(first) + (max(heights(picture.svg, "parameters")[0]) - max(first))
    assert (max(first) - min(first)) / full == pytest.approx(300 / 400, abs=0.01)
    assert max(second) - min(second) == pytest.approx(full / 4, abs=0.2), "one scale for all ranks"
    assert "rank 1" in picture.svg and "peak 400 B" in picture.svg and "other, of the allocator" in picture.svg


@pytest.mark.parametrize(
    ("given", "message"),
    [(object(), "a object is no profile"), (Profile(), r"memory of 0 ranks.*wb.debug.profile\(warmup=3\)"),
     (Profile(memory=CURVES * 9), "memory of 18 ranks; a picture has room for 1 to 16")],
)  # fmt: skip
def test_bad_input(given, message):
    with pytest.raises(ValueError, match=message):
        wb.draw.memory(given)
