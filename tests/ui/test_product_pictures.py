"""Pictures of products: they show what the ranks really hold, and boxings of as many bytes as really move."""

import re
from itertools import pairwise, product
from xml.etree import ElementTree

import pytest
import torch

import workbench as wb
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.errors import LayoutError
from workbench.pipeline.schedules import Action, make_table
from workbench.pipeline.simulate import Span, Timeline, simulate
from workbench.testing import run_ranks
from workbench.theme import DARK, LIGHT
from workbench.ui.pictures.matmul import check_ranks, role_colour
from workbench.ui.pictures.stages import shown
from workbench.ui.pictures.svg import lengths
from workbench.units import format_bytes

SVG = "{http://www.w3.org/2000/svg}"


def elements(picture, tag, kind=None):
    found = ElementTree.fromstring(picture.svg).iter(f"{SVG}{tag}")
    return [element.attrib for element in found if kind is None or element.get("class") == kind]


def texts(picture):
    return [element.text for element in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def tensors(x_sbp, w_sbp, shape=(4, 5, 8), ranks=(0, 1)):
    n, k, m = shape
    placement = wb.placement("cpu", ranks=list(ranks))
    return wb.randn(n, k, placement=placement, sbp=x_sbp), wb.randn(k, m, placement=placement, sbp=w_sbp)


def drawn(x_sbp, w_sbp, num_ranks=2, **sizes):
    """The picture, and by rank the shapes of the shards of x, w and out."""

    def body():
        x, w = tensors(x_sbp, w_sbp, **sizes)
        out = x @ w
        return wb.draw.matmul(x, w, out), [tuple(t.to_local().shape) for t in (x, w, out)]

    results = run_ranks(body, num_ranks)
    assert len({picture for picture, _ in results}) == 1, "all ranks draw the same, so that a notebook shows it once"
    return results[0][0], [shapes for _, shapes in results]


@pytest.mark.parametrize(
    ("sbps", "kind"),
    [
        (("S(0)", "B"), "data parallel on 2 ranks"),
        (("B", "S(1)"), "model parallel on 2 ranks"),
        (("S(1)", "S(0)"), "split sum on 2 ranks"),
        (("B", "B"), "the same product on 2 ranks"),
    ],
)
def test_every_rank_shows_what_it_holds(sbps, kind):
    picture, shards = drawn(*sbps, shape=(5, 7, 9))
    assert kind in texts(picture) and kind in str(picture)
    whole = elements(picture, "rect", "whole")
    held = elements(picture, "rect", "held")
    assert len(whole) == 3 and len(held) == 6
    for rank, shapes in enumerate(shards):
        for index, shape in enumerate(shapes):
            outline, part = whole[index], held[3 * rank + index]
            logical = [(5, 7), (7, 9), (5, 9)][index]
            for side, size, full in zip(("height", "width"), shape, logical, strict=True):
                assert float(part[side]) / float(outline[side]) == pytest.approx(size / full, abs=0.02)
            assert part["fill"] == role_colour(index, LIGHT)
    assert len(elements(picture, "rect", "term")) == (2 if sbps == ("S(1)", "S(0)") else 0)


def test_slices_are_named_as_torch_names_them():
    picture, _ = drawn("S(0)", "B")
    assert {"x[0:2, :]", "x[2:4, :]", "all of w", "out[2:4, :]", "logical", "rank 1"} <= set(texts(picture))
    assert "rank 0: x[:, 0:3] @ w[0:3, :] = a term of out" in str(drawn("S(1)", "S(0)")[0])


def test_two_axes_and_the_weight_of_a_linear_layer():
    def body():
        grid = wb.placement("cpu", ranks=[[0, 1], [2, 3]])
        x = wb.randn(6, 5, placement=grid, sbp="S(0), B")
        w = wb.randn(10, 5, placement=grid, sbp="B, S(0)")
        return wb.draw.matmul(x, w, torch.nn.functional.linear(x, w), theme="dark")

    picture = run_ranks(body, 4)[0]
    assert "data parallel on 2 × model parallel on 2 ranks" in texts(picture)
    assert {"w[0:5, :].T", "(1, 0)", "(B, S(0)) of w 10 × 5", "w.T 5 × 10"} <= set(texts(picture))
    whole, held = elements(picture, "rect", "whole")[1], elements(picture, "rect", "held")[1]
    assert float(held["width"]) == pytest.approx(float(whole["width"]) / 2, abs=0.1)
    assert held["height"] == whole["height"] and held["fill"] == DARK.stages[0].shades[0]


def test_what_is_said_of_a_linear_layer_is_its_equation():
    """Words and slices were of the stored weight, beside the shape of the turned one."""

    def body():
        x = wb.randn(4, 5, placement=wb.placement("cpu", ranks=[0, 1]), sbp="B")
        w, square = (wb.randn(n, 5, placement=x.placement, sbp="S(0)") for n in (8, 5))
        out = torch.nn.functional.linear(x, w)
        said = str(wb.draw.matmul(x, w, out))
        for line in said.splitlines()[1:]:
            _, factors, result = re.split(r": | = ", line.replace("all of ", ""))
            part = eval(factors, {"x": x, "w": w})  # what a reader would write down
            assert torch.allclose(part.full_tensor(), eval(result, {"out": out}).full_tensor(), atol=1e-6)
        return said, str(wb.draw.matmul(x, square, torch.nn.functional.linear(x, square)))

    said, of_square = run_ranks(body)[0]
    assert said.splitlines()[:2] == [
        "x[4, 5] B @ (w[8, 5] S(0)).T = out[4, 8] S(1): model parallel on 2 ranks",
        "  rank 0: all of x @ w[0:4, :].T = out[:, 0:4]",
    ]
    assert "  rank 1: all of x @ w[3:5, :].T = out[:, 3:5]" in of_square


def test_plain_tensors_are_one_device():
    picture = wb.draw.matmul(torch.zeros(4, 5), torch.zeros(5, 8), torch.zeros(4, 8), names=("a", "b", "c"))
    assert str(picture) == "a[4, 5] @ b[5, 8] = c[4, 8]: one device"
    assert len(elements(picture, "rect", "whole")) == 3 and not elements(picture, "rect", "held")


def test_ranks_without_rows_hold_nothing():
    picture, _ = drawn("S(0)", "B", num_ranks=3, shape=(2, 3, 4), ranks=(0, 1, 2))
    assert "rank 2: nothing @ all of w = nothing" in str(picture)


def test_what_an_operation_boxes_is_said():
    picture, _ = drawn("S(0)", "S(1)", shape=(8, 5, 4))
    words = "w is boxed before: S(1) -> B, 80 B"
    assert words in texts(picture) and words in str(picture)
    assert "rank 0: x[0:4, :] @ all of w = out[0:4, :]" in str(picture)


SIGNATURES = {"S(0) B S(0)", "B S(1) S(1)", "S(1) S(0) P", "B B B", "P B P", "B P P"}
"""Layouts of x, w and x @ w for which each rank multiplies what it has."""


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize("sbps", [*product(("S(0)", "S(1)", "B", "P"), repeat=2)])
def test_products_of_all_layouts_are_drawn_as_they_run(sbps, is_linear):
    def body():
        found = []
        for shape in ((5, 7, 3), (1, 2, 1), (4, 0, 3)):
            x, w = tensors(*sbps, shape=shape)
            w = w.T if is_linear else w
            out = torch.nn.functional.linear(x, w) if is_linear else x @ w
            found.append((str(wb.draw.matmul(x, w, out)), str(out.sbp[0])))
        return found

    turned = {"S(0)": "S(1)", "S(1)": "S(0)"} if is_linear else {}  # the weight's layout is that of w.T
    for words, result in run_ranks(body)[0]:
        of_x, of_w, of_out = re.findall(r"\] ([^\s:]+?)(?:\)\.T)?(?=[: ])", words.splitlines()[0])
        assert f"{of_x} {turned.get(of_w, of_w)} {of_out}" in SIGNATURES and of_out == result
        assert "rank 0: " in words and "rank 1: " in words
        for name, given, used in (("x", sbps[0], of_x), ("w", turned.get(sbps[1], sbps[1]), of_w)):
            assert (f"{name} is boxed before: {given} -> {used}, " in words) == (given != used), words


def test_a_picture_can_be_shown_and_saved(tmp_path):
    picture, _ = drawn("S(0)", "B")
    assert picture._repr_mimebundle_() == {"image/svg+xml": picture.svg, "text/plain": str(picture)}
    picture.save(tmp_path / "product.svg")
    assert (tmp_path / "product.svg").read_text(encoding="utf-8") == picture.svg


PURE_DATA, PURE_MODEL, MIXED = ("S(0)", "B", None, "B"), ("B", "S(1)", "B", "S(1)"), ("S(0)", "B", "B", "S(1)")


def two_layers(x_sbp, w0_sbp, between, w1_sbp, shape=(5, 6, 7, 9), num_ranks=2):
    """Picture of two layers, and the bytes that a training step of them has moved."""
    n, k, m, o = shape

    def body():
        x, w0 = tensors(x_sbp, w0_sbp, (n, k, m), range(num_ranks))
        w1 = wb.randn(m, o, placement=x.placement, sbp=w1_sbp).requires_grad_()
        w0.requires_grad_()
        with wb.debug.trace() as trace:
            h = x @ w0
            x1 = h if between is None else h.to_global(sbp=between)
            out = x1 @ w1
            picture = wb.draw.network((x, w0, h), (x1, w1, out))
            out.sum().backward()
            for w in (w0, w1):
                w.grad.to_global(sbp=w.sbp)
        return picture, [record.wire_bytes for record in trace.records if record.wire_bytes]

    return run_ranks(body, num_ranks)[0]


@pytest.mark.parametrize("choice", [PURE_DATA, PURE_MODEL, MIXED], ids=["data", "model", "mixed"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_boxings_of_a_network_are_those_that_run(choice, num_ranks):
    picture, moved = two_layers(*choice, num_ranks=num_ranks)
    said = [line.rpartition(", ")[2] for line in str(picture).splitlines() if ", " in line]
    assert sorted(said) == sorted([format_bytes(size) for size in moved] + ["0 B"] * said.count("0 B"))
    badges = elements(picture, "rect", "boxing")
    assert len(badges) == len(said) and all(float(a["x"]) != float(b["x"]) for a, b in pairwise(badges))


def test_every_boxing_of_a_gradient_between_two_layers_is_drawn():
    picture, _ = two_layers("B", "S(1)", "S(0)", "S(1)")
    lines = [line for line in str(picture).splitlines() if line.rpartition(", ")[2].endswith("B")]
    assert str(picture).count("gradient of h1: ") == 2
    badges = elements(picture, "rect", "boxing")
    places = {(badge["x"], badge["y"]) for badge in badges}
    assert len(places) == len(badges) == len(lines)
    height = float(ElementTree.fromstring(picture.svg).attrib["height"])
    assert all(float(badge["y"]) + float(badge["height"]) <= height for badge in badges)


def test_data_parallel_layers_share_their_matrix_and_sum_gradients():
    picture, _ = two_layers(*PURE_DATA)
    assert len(elements(picture, "rect", "held")) == 2 * 5
    assert texts(picture).count("P → B") == 2 and "boxing" not in texts(picture)


def test_model_parallel_layers_need_a_boxing_between_them():
    picture, _ = two_layers(*PURE_MODEL)
    assert len(elements(picture, "rect", "held")) == 2 * 6
    assert {"boxing", "all-gather, 140 B", "S(1) → B", "reduce-scatter, 140 B", "stays, 0 B"} <= set(texts(picture))


def test_a_pipeline_is_drawn_where_its_stages_live():
    def body():
        first, second = (wb.placement("cpu", ranks=[rank]) for rank in (0, 1))
        x, w0 = wb.randn(4, 5, placement=first, sbp="B"), wb.randn(5, 8, placement=first, sbp="B")
        h, w1 = x @ w0, wb.randn(8, 3, placement=second, sbp="B")
        there = h.to_global(second, "B")
        return wb.draw.network((x, w0, h), (there, w1, there @ w1), names=("first", "second"), theme="dark")

    picture = run_ranks(body)[0]
    assert {"send, 128 B", "B@0 → B@1", "on rank 0", "on rank 1", "second 8 × 3"} <= set(texts(picture))
    assert "backward" not in texts(picture)
    assert len(elements(picture, "rect", "held")) == 6


def grid_layouts(num_stages, num_hosts, num_gpus, sbp="B, S(1)"):
    per_stage = num_hosts * num_gpus
    for stage in range(num_stages):
        ranks = [[stage * per_stage + host * num_gpus + gpu for gpu in range(num_gpus)] for host in range(num_hosts)]
        yield Layout.of(Placement.of("cuda", ranks), sbp), (1024, 4096)


def test_a_grid_of_thousands_of_ranks_is_one_stage_and_cards():
    picture = wb.draw.stages(*grid_layouts(64, 6, 8), names=("host", "GPU"))
    assert {"stage 0", "stage 1", "stage 63", "60 more", "3024-3071", "host 5", "GPU 7"} <= set(texts(picture))
    assert len(elements(picture, "rect", "stage")) == 4
    assert len(elements(picture, "rect", "held")) == 48
    assert "64 stages x 6 x 8 = 3072 ranks" in str(picture) and len(picture.svg) < 60_000


def test_unlike_stages_are_listed_one_by_one():
    ranks = [[[0, 1], [2, 3]], [[4, 5, 6, 7]]]
    stages = [(Layout.of(Placement.of("cpu", grid), "B, S(0)"), (8, 8)) for grid in ranks]
    picture = wb.draw.stages(*stages)
    assert "unlike grids" in str(picture) and "stage 1: ranks 4-7" in str(picture)


def test_numbers_of_unlike_stages_are_those_of_the_first_one():
    layouts = [Layout.of(Placement.of("cpu", ranks), "B") for ranks in ([0, 1], [2, 3])]
    alike, unlike = (
        wb.draw.stages(*zip(layouts, [(4, 8), shape], strict=True), names=("data",)) for shape in [(4, 8), (8, 2)]
    )
    for picture, words in ((alike, "data: data parallel on 2"), (unlike, "data in stage 0: data parallel on 2")):
        assert str(picture).startswith("2 stages x 2 = 4 ranks") and f"\n{words}" in str(picture)
        assert any((text or "").startswith(words) for text in texts(picture))
    assert "in every stage" in str(alike) and "in every stage" not in str(unlike)


@pytest.mark.parametrize(
    ("sbp", "shape", "words"),
    [
        ("S(1)", (10, 10), "2 to 3 columns each"),
        ("S(1)", (10, 8), "2 columns each"),
        ("S(0)", (1, 8), "0 to 1 rows each"),
    ],
)
def test_slices_of_unlike_sizes_are_a_range(sbp, shape, words):
    layout = Layout.of(Placement.of("cpu", [0, 1, 2, 3]), sbp)
    assert f", {words}\n" in str(wb.draw.stages((layout, shape)))


def test_stages_of_live_tensors():
    def body():
        placements = [wb.placement("cpu", ranks=[[4 * s, 4 * s + 1], [4 * s + 2, 4 * s + 3]]) for s in (0, 1)]
        return wb.draw.stages(*(wb.zeros(8, 6, placement=p, sbp="B, S(1)") for p in placements))

    picture = run_ranks(body, 8)[0]
    assert str(picture).startswith("2 stages x 2 x 2 = 8 ranks") and len(elements(picture, "rect", "held")) == 8


def test_a_timeline_has_a_bar_per_action():
    timeline = simulate(make_table("1f1b", 2, 4), 2, lambda action: 2.0 if action.kind == "B" else 1.0)
    picture = wb.draw.timeline(timeline)
    bars = elements(picture, "rect", "action")
    assert len(bars) == 16 and {"rank 1", "F0", "B3", "F: forward"} <= set(texts(picture))
    first, backward = bars[0], next(bar for bar in bars if bar["fill"] == LIGHT.backward)
    assert float(backward["width"]) == pytest.approx(2 * float(first["width"]), abs=0.2)
    assert str(picture) == f"2 ranks, 16 actions in 15.0 s, ranks wait {timeline.bubble:.0%} of the time"


def test_what_an_action_waited_is_striped():
    span = Span(0, Action(0, "F", 0), 0.0, 2.0, waited_s=1.0)
    picture = wb.draw.timeline(Timeline(((span,),)), theme="dark")
    (bar,), (waited,) = elements(picture, "rect", "action"), elements(picture, "rect", "waited")
    assert float(waited["width"]) == pytest.approx(float(bar["width"]) / 2, abs=0.1)
    with pytest.raises(ValueError, match="0 ranks"):
        wb.draw.timeline(Timeline(((),)))


def test_lengths_keep_proportions_while_they_are_readable():
    assert lengths({"a": 4, "b": 8}, 80, 20) == {"a": 40, "b": 80}
    assert lengths({"a": 1, "b": 10_000}, 80, 20) == pytest.approx({"a": 20, "b": 80})
    assert lengths({"a": 0}, 80, 20) == {"a": 2}
    assert shown(9) == [0, 1, 2, 3, 4, None, 8]


class TestBadInput:
    def test_shapes_of_no_product(self):
        with pytest.raises(ValueError, match=r"x \(4, 5\), w \(6, 8\), out \(4, 8\) are no matrix product"):
            wb.draw.matmul(torch.zeros(4, 5), torch.zeros(6, 8), torch.zeros(4, 8))

    def test_an_out_of_another_layout(self):
        def body():
            x, w = tensors("S(0)", "B")
            wb.draw.matmul(x, w, (x @ w).to_global(sbp="S(1)"))

        with pytest.raises(LayoutError, match=r"x S\(0\).*out S\(1\).*does not lie like this out"):
            run_ranks(body)

    def test_global_and_plain_tensors(self):
        def body():
            x, w = tensors("S(0)", "B")
            wb.draw.matmul(x, torch.zeros(5, 8), x @ w)

        with pytest.raises(ValueError, match="w plain"):
            run_ranks(body)

    def test_layers_that_do_not_follow(self):
        layer = torch.zeros(4, 5), torch.zeros(5, 8), torch.zeros(4, 8)
        with pytest.raises(ValueError, match=r"layer 0 gives \(4, 8\) and layer 1 takes \(4, 5\)"):
            wb.draw.network(layer, layer)
        with pytest.raises(ValueError, match="0 layers"):
            wb.draw.network()

    def test_more_ranks_than_fit(self):
        with pytest.raises(ValueError, match=r"17 ranks \(0-16\); a picture has room for 16"):
            check_ranks(range(17), "draw_matmul")

    def test_stages_without_a_layout(self):
        with pytest.raises(ValueError, match="stage 0 has a weight of 2 dims and no placement"):
            wb.draw.stages(torch.zeros(4, 4))
        with pytest.raises(ValueError, match="0 stages"):
            wb.draw.stages()
