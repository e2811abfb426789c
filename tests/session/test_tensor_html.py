"""A global tensor as a cell shows it: which numbers, who holds them, and what stands between the ranks."""

import re

import pytest
import torch

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.session.on_engine.tensor_html import MAX_RANKS, tensor_html
from workbench.session.on_engine.tensor_table import matrix_of, shown, written

TWO, GRID = Placement.of("cpu", [0, 1]), Placement.of("cpu", [[0, 1], [2, 3]])


def picture(shape, placement, sbp, values=True):
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) if values else None
    return tensor_html("float32", 4, tuple(shape), Layout.of(placement, sbp), numbers, "not collected: 4.3 GB")


def text_of(html):
    """What a reader sees, in order."""
    html = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)).strip()


class TestWhichNumbers:
    def test_a_small_dim_is_shown_whole(self):
        assert shown(8) == list(range(8))
        assert shown(0) == []

    def test_of_a_large_dim_the_ends_and_both_sides_of_every_edge(self):
        assert shown(100, [50]) == [0, 1, None, 49, 50, None, 98, 99]
        assert shown(100) == [0, 1, None, 98, 99]

    def test_no_mark_stands_for_a_single_line(self):
        assert shown(9, [4]) == [0, 1, 2, 3, 4, None, 7, 8]

    def test_of_many_edges_the_outer_ones(self):
        assert len(shown(1024, range(0, 1024, 16))) < 20

    def test_numbers_have_one_format(self):
        rows = [0, 1]
        assert written(torch.tensor([[0.5, -1.25]] * 2), rows, rows) == [["0.5000", "-1.2500"]] * 2
        assert written(torch.tensor([[1.0, 2e-9]] * 2), rows, rows)[0] == ["1.0000e+00", "2.0000e-09"]
        assert written(torch.tensor([[1, 20]] * 2), rows, rows)[0] == ["1", "20"]
        assert written(torch.tensor([[True, False]] * 2), rows, rows)[0] == ["True", "False"]
        assert written(torch.tensor([[1.0, float("nan")]] * 2), rows, rows)[0] == ["1.", "nan"]
        assert written(torch.tensor([[float("inf"), float("nan")]] * 2), rows, rows)[0] == ["inf", "nan"]
        assert written(torch.tensor([[1 + 2j, 0j]] * 2), rows, rows)[0] == ["1+2j", "0+0j"]

    def test_other_dims_are_shown_at_their_first_index(self):
        values = torch.arange(24.0).reshape(2, 3, 4)
        assert torch.equal(matrix_of(values, (0, 2)), values[:, 0, :])
        assert matrix_of(torch.tensor(3.0), (None, None)).shape == (1, 1)
        assert matrix_of(torch.arange(4), (None, 0)).shape == (1, 4)


class TestWhoHoldsWhat:
    def test_copies_are_equal_and_terms_are_added(self):
        assert "ranks 0 = 1" in text_of(picture((4, 4), GRID, ("S(0)", "B")))
        assert "ranks 2 + 3" in text_of(picture((4, 4), GRID, ("S(0)", "P")))
        assert "ranks 0 | 1" in text_of(picture((4, 4), TWO, "S(1)"))
        assert "ranks 0 max 1" in text_of(picture((4, 4), TWO, "P(max)"))

    def test_slices_are_named_with_their_rows_and_sizes(self):
        seen = text_of(picture((8, 6), GRID, ("S(0)", "S(1)")))
        assert "rank 1 [4, 3] rows 0-3 columns 3-5" in seen
        assert "rank 2 [4, 3] rows 4-7 columns 0-2" in seen

    def test_a_term_is_hatched_and_its_values_are_called_a_sum(self):
        html = picture((4, 4), TWO, "P")
        assert html.count("<path") == 2
        assert "values shown are summed over the ranks" in text_of(html)
        assert "<path" not in picture((4, 4), TWO, "B")

    def test_a_rank_with_nothing_has_an_empty_outline(self):
        html = picture((1, 8), Placement.of("cpu", [0, 1, 2]), "S(0)")
        assert text_of(html).count("no rows") == 2
        assert html.count("<rect") == 3 + 1

    @pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 4), (2, 0)])
    @pytest.mark.parametrize("sbp", ["B", "P"])
    def test_any_shape(self, shape, sbp):
        assert "rank 1" in text_of(picture(shape, TWO, sbp))

    def test_three_axes(self):
        cube = Placement.of("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
        seen = text_of(picture((8, 8), cube, ("S(0)", "B", "S(1)")))
        assert all(f"rank {rank} " in seen for rank in range(8))

    def test_of_many_ranks_the_first_and_the_last_are_drawn(self):
        many = Placement.of("cuda", list(range(4 * MAX_RANKS)))
        html = picture((256, 4), many, "S(0)")
        assert html.count("class='card'") == 3
        assert f"rank {4 * MAX_RANKS - 1} " in text_of(html)
        assert "0-63 as 64" in text_of(html)


def test_the_header_says_sizes_and_copies():
    assert text_of(picture((8, 16), GRID, ("S(0)", "B"))).startswith(
        "float32[8, 16] S(0), B on cpu [[0, 1], [2, 3]] &ensp;512 B logical &middot; 256 B per rank &middot; 2 copies"
    )


def test_without_values_it_says_why():
    assert "not collected: 4.3 GB" in text_of(picture((8, 16), TWO, "S(0)", values=False))


def test_names_are_escaped_and_it_holds_no_script():
    html = tensor_html("<b>", 4, (2,), Layout.of(TWO, "B"), None, "<script>alert(1)</script>")
    assert "<script>" not in html
    assert "&lt;b&gt;" in html
