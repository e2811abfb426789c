"""The picture of a plan: what it shows is what the plan says, and the one in the docs is up to date."""

from xml.etree import ElementTree

import pytest

from workbench.core.boxing import LinkCost, plan_boxing
from workbench.core.boxing_path import find_boxing_path
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.theme import DARK, LIGHT
from workbench.ui.pictures.boxing import draw_boxing, plan_picture

SVG = "{http://www.w3.org/2000/svg}"


def plan(source, source_sbp, target, target_sbp, shape):
    layouts = (
        Layout.of(Placement.of("cpu", ranks), sbp) for ranks, sbp in ((source, source_sbp), (target, target_sbp))
    )
    return plan_boxing(*layouts, shape, 4)


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_one_line_per_slice_that_moves_and_every_slice_says_where_it_comes_from():
    one = plan([0, 1, 2, 3], "S(0)", [0, 1, 2, 3], "S(1)", (7, 10))
    svg = plan_picture(one)
    assert len(ElementTree.fromstring(svg).findall(f"{SVG}path")) == 12
    shown = texts(svg)
    assert "all-to-all of a tensor of 7 × 10: 208 B on the wire" in shown
    assert {"has S(0)", "gets S(1)", "rank 3", "sends 64 B", "receives 40 B", "→ 3", "own"} <= set(shown)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=lambda colours: colours.name)
def test_terms_of_a_sum_share_their_place(colours):
    svg = plan_picture(plan([0, 1, 2], "P", [2, 3], "S(0)", (6, 9)), colours)
    assert texts(svg).count("+ 1") == 2 and "+ own" in texts(svg) and colours.background in svg


@pytest.mark.parametrize("shape", [(5,), (4, 1), (0, 3)])
def test_odd_shapes_have_a_picture(shape):
    for source, target in (("S(0)", "B"), ("B", "S(0)"), ("P", "B")):
        root = ElementTree.fromstring(plan_picture(plan([0, 1], source, [1, 2, 0], target, shape)))
        assert root.tag == f"{SVG}svg" and root.findall(f"{SVG}rect")


@pytest.mark.parametrize(("shape", "side"), [((20_000, 2), "width"), ((2, 20_000), "height")])
def test_a_long_tensor_is_as_wide_as_can_be_seen(shape, side):
    root = ElementTree.fromstring(plan_picture(plan([0, 1], "S(0)", [0, 1], "B", shape)))
    assert all(float(shape.get(side)) >= 14 for shape in root.findall(f"{SVG}rect"))


def test_a_boxing_is_drawn_from_its_plan():
    one = plan([0, 1], "S(0)", [0, 1], "B", (4, 4))
    picture = draw_boxing(one, theme="dark")
    assert picture.svg == plan_picture(one, DARK) and str(picture) == str(one)
    a, b = (Layout.of(Placement.of("cpu", ranks), sbp) for ranks, sbp in (([0, 1, 2, 3], "P"), ([4, 5, 6, 7], "B")))
    with pytest.raises(ValueError, match="a path of 2 boxings"):
        draw_boxing(find_boxing_path(a, b, (1024, 1024), 4, LinkCost(1e-5, 1e9)))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="3 dims between 2 ranks"):
        plan_picture(plan([0, 1], "S(0)", [0, 1], "B", (2, 2, 2)))
    with pytest.raises(ValueError, match="between 17 ranks"):
        plan_picture(plan(list(range(17)), "S(0)", [0], "B", (17, 2)))
