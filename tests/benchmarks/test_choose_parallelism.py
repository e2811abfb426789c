"""Data against model parallelism: the two compute the same, and move what the table says. No time is judged here."""

from __future__ import annotations

import pytest

from benchmarks.choose_parallelism import HEADER, Layer, Shape, byte_rule, row, winner
from workbench.testing import run_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("shape", [Shape(24, 7, 5), Shape(4, 11, 13)], ids=str)
def test_both_compute_the_same_and_move_what_was_predicted(shape: Shape, num_ranks: int) -> None:
    moved = run_ranks(lambda: Layer(shape).check(), num_ranks)[0]
    if num_ranks == 2:
        assert moved == {"data": 2 * 4 * shape.inputs * shape.outputs, "model": 2 * 4 * shape.batch * shape.inputs}


def test_a_difference_is_found() -> None:
    def body() -> None:
        layer = Layer(Shape(6, 4, 4))
        layer._model[2] = layer._model[2] * 2
        layer.check()

    with pytest.raises(AssertionError, match="differ by"):
        run_ranks(body)


def test_a_line_of_the_table() -> None:
    line = row(Shape(100, 784, 512, "hidden"), {"data": 3_211_264, "model": 627_200}, {"data": 2e-3, "model": 2.1e-3})
    assert line == ["100 x 784 x 512 hidden", "3.21 MB", "627 kB", "model", "2.00", "2.10", "1.05", "even"]
    assert len(line) == len(HEADER) and winner({"data": 1.0, "model": 2.0}) == "data"


def test_only_shapes_that_differ_clearly_judge_the_rule_of_bytes() -> None:
    pairs = [("data", "data"), ("model", "data"), ("even", "data"), ("model", "even")]
    judged = byte_rule([["", "", "", fewer, "", "", "", faster] for fewer, faster in pairs])
    assert judged.value == 0.5 and "1 of 2" in judged.what
