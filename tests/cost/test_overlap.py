"""What ``overlap=`` hides of the sums of row-split layers, against sums done here by hand."""

from dataclasses import replace

import pytest

from tests.planning.problems import linear
from workbench.core.model_costs import ModelCosts
from workbench.core.options import Options
from workbench.core.strategy import Strategy
from workbench.cost.boxings import Overlap
from workbench.cost.estimate import estimate
from workbench.cost.hardware import Link
from workbench.cost.hardware_files import load_hardware
from workbench.cost.stage_settings import settings_of
from workbench.errors import StrategyError
from workbench.planning.candidates import Candidate
from workbench.planning.incumbents import Incumbents
from workbench.planning.problem import DATA, Constraints, Problem
from workbench.planning.search import search

WIDTH, SAMPLES = 4096, 16
COSTS = ModelCosts(tuple(linear(f"fc{n}", WIDTH, WIDTH, samples=512) for n in range(8)), (512, WIDTH))
GPU = replace(load_hardware("h200"), op_s=0.0, links=(Link(8, 0.0, 450e9),))
"""Neither functions nor exchanges take time to start."""
CPU = replace(GPU, exchanges_on_cores=True)


def predicted(options, machine=GPU, num_ranks=2):
    return estimate(COSTS, Strategy(f"*: model | {options}").resolve(COSTS.layers, num_ranks), machine, SAMPLES)


@pytest.mark.parametrize(
    ("machine", "piece_s", "exposed_s"),
    [(GPU, 1.0, 1.0), (GPU, 3.0, 3.0 + 3 * (3.0 - 2.0)), (replace(GPU, op_s=0.5), 1.0, 1.0 + 3 * 0.5)],
)
def test_a_product_of_eight_seconds_in_four_pieces(machine, piece_s, exposed_s):
    """The first product and the last exchange have nothing beside them."""
    (setting,) = settings_of(COSTS, Strategy("*: model").resolve(COSTS.layers, 2), machine, SAMPLES)
    assert Overlap(4, 8.0, 1).exposed_s(piece_s, setting) == exposed_s


def test_a_gpu_waits_for_one_piece_in_four_and_a_cpu_for_the_whole():
    """Products of this width take longer than their sums."""
    whole, pieces = predicted(""), predicted("overlap=4")
    assert pieces.boxed_bytes == pytest.approx(whole.boxed_bytes)
    assert pieces.compute_s == pytest.approx(whole.compute_s)
    assert pieces.boxing_s == pytest.approx(whole.boxing_s / 4)
    assert pieces.step_s == pytest.approx(whole.step_s - 3 / 4 * whole.boxing_s)
    assert predicted("overlap=4", CPU) == predicted("", CPU)


def test_there_are_no_more_pieces_than_samples_or_positions():
    several = predicted("sequence overlap=16"), predicted("sequence overlap=17")
    assert several[0].boxing_s == several[1].boxing_s < predicted("sequence").boxing_s


def searched(hardware=GPU, **constraints):
    return search(COSTS, hardware, 2, SAMPLES, constraints=Constraints(**constraints)).strategy.options.overlap


def test_the_search_overlaps_where_it_is_asked_to():
    assert searched(model=2) == 1
    assert [searched(model=2, overlap=asked) for asked in (4, (1, 4), (1, 2, 4, 8))] == [4, 4, 8]
    assert searched(replace(CPU, op_s=1e-5), model=2, overlap=(1, 4)) == 1


def test_choices_that_split_rows_overlap_as_asked_after_others_that_cannot():
    """A search that changes a strategy without row-split layers, and an explanation, come to such choices."""
    problem = Problem(COSTS, GPU, 2, SAMPLES, constraints=Constraints(model=2, overlap=4))
    stages, incumbents, candidate = [0] * len(COSTS.rows), Incumbents(problem), Candidate(Options((1, 1, 2)), 1)
    whole = incumbents.add(candidate, [DATA] * len(stages), stages)
    split = incumbents.add(Candidate(whole.strategy.options, 1), [("model", "row")] * len(stages), stages)
    assert (whole.strategy.options.overlap, split.strategy.options.overlap) == (1, 4)
    assert split.estimate.step_s == pytest.approx(problem.estimate(split.strategy).step_s)


def test_nothing_overlaps_on_one_model_rank():
    rule = "model=1 and overlap=4 cannot be: .*overlap is at least 1, and above 1 needs model above 1"
    with pytest.raises(StrategyError, match=rule):
        searched(model=1, overlap=4)
    with pytest.raises(StrategyError, match="overlap=0 cannot be"):
        searched(overlap=0)
