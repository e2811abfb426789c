"""What the traces of simulations hold: every point that can be, its unit, what does not fit, and waiting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from workbench.cost.gpt3 import GPT3, gpt3_strategy
from workbench.cost.hardware_files import load_hardware
from workbench.errors import StrategyError
from workbench.pipeline.schedules import make_table
from workbench.pipeline.simulate import Timeline
from workbench.pipeline.simulate import simulate as run_table
from workbench.planning.sweep import simulate
from workbench.theme import DARK, LIGHT
from workbench.ui.planning.sweep_figures import METRICS, parts_figure, pipeline_figure, sweep_figure

MACHINE = load_hardware("a100-80g-selene")


@pytest.fixture(scope="module")
def sweep():
    return simulate(GPT3, gpt3_strategy, [MACHINE, "h200"], gpus=[1024, 1536, 1537], batch_size=1536)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_every_metric_is_a_curve_per_machine(sweep, metric, colours):
    figure = sweep_figure(sweep, metric, colours=colours)
    assert len(figure.data) == 2 and figure.data[0].name == MACHINE.name
    assert all(list(trace.x) == [1024, 1536] for trace in figure.data)
    assert all(np.isfinite(trace.y).all() for trace in figure.data)
    assert figure.layout.yaxis.title.text in (METRICS[metric].unit, "GB")
    assert figure.layout.xaxis.title.text == "GPUs"


def test_curves_are_the_table(sweep):
    table = sweep.table[sweep.table.hardware == MACHINE.name].dropna(subset=["step_s"])
    assert list(sweep_figure(sweep).data[0].y) == list(table.samples_per_s)
    assert list(sweep_figure(sweep, "memory").data[0].y) == list(table.peak_bytes / 1e9)
    shares = list(100 * table.bubble_s / table.step_s)
    assert list(sweep_figure(sweep, "bubble").data[0].y) == pytest.approx(shares)


def test_memory_has_its_limit_and_what_does_not_fit_is_hollow():
    small = replace(MACHINE, memory_bytes=9e9, name="small")
    sweep = simulate(GPT3, gpt3_strategy, small, gpus=[1024], batch_size=[512, 1536])
    figure = sweep_figure(sweep, "memory", "batch_size")
    assert figure.layout.shapes[0].y0 == 9.0 and "small" in figure.layout.annotations[0].text
    assert set(figure.data[0].marker.color) == {LIGHT.background}
    assert "hollow" in figure.layout.title.text


def test_parts_add_up_to_the_step(sweep):
    figure = parts_figure(sweep)
    totals = np.sum([trace.y for trace in figure.data], axis=0)
    assert totals == pytest.approx(list(sweep.table.step_s.dropna()))


def test_a_pipeline_is_drawn_as_it_runs():
    timeline = run_table(make_table("gpipe", 2, 2), 2, lambda action: 1.0)
    heatmap = pipeline_figure(timeline).data[0]
    assert heatmap.z.shape[0] == 2
    shares = [np.mean(heatmap.z == kind) for kind in range(3)]
    assert shares == pytest.approx([timeline.bubble, (1 - timeline.bubble) / 2, (1 - timeline.bubble) / 2], abs=0.01)
    assert heatmap.z[1][0] == 0 and heatmap.z[0][0] == 1 and heatmap.z[0][-1] == 2


def test_mistakes_are_named(sweep):
    with pytest.raises(StrategyError, match="throughput, per_gpu"):
        sweep_figure(sweep, "speed")
    with pytest.raises(StrategyError, match="'layers' was not swept; swept were hardware, gpus"):
        sweep_figure(sweep, x="layers")
    with pytest.raises(StrategyError, match="no number was swept"):
        sweep_figure(simulate(GPT3, gpt3_strategy, MACHINE, gpus=1024, batch_size=1536))
    with pytest.raises(StrategyError, match="0 actions"):
        pipeline_figure(Timeline(()))
