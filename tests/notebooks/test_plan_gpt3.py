"""The notebook that plans GPT-3 runs from top to bottom, and says what is true."""

from __future__ import annotations

from typing import Any

import pytest

from tests.notebooks.cells import FOLDER, execute, outputs, read, stored_size, text_of

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def executed() -> Any:
    return execute(read(FOLDER / "04-plan-gpt3.ipynb"))


def test_the_example_is_64_x_6_x_8(executed: Any) -> None:
    assert "64x6x8" in text_of(executed, '"gradient_s", "bubble_s", "optimizer_s"]].round(3)')


@pytest.mark.parametrize("cell", ["pipeline_figure(step", '"throughput")', '"bubble")', '"memory")', "parts_figure("])
def test_every_picture_is_there(executed: Any, cell: str) -> None:
    (figure,) = outputs(executed, cell)
    assert figure.data["application/vnd.plotly.v1+json"]["data"]


def test_the_plan_is_faster_than_the_example(executed: Any) -> None:
    assert "best throughput" in text_of(executed, "plan = wb.planner.plan(")
    assert "layers.0.qkv" in text_of(executed, 'plan.explain("layers.0.qkv")')
    assert text_of(executed, "plan.diff(fewer)")


def test_the_dry_run_counts_48_ranks(executed: Any) -> None:
    assert "48 ranks send" in text_of(executed, "wb.planner.dry_run(Perceptron")


def test_it_is_small_to_store(executed: Any) -> None:
    assert stored_size(executed) < 2_500_000
