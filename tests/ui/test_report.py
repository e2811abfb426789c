"""The report is one page that needs nothing else, and says in words whether the strategies are right."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from workbench.core.metrics import RunRecord
from workbench.core.verdict import TOLERANCES, Verdict
from workbench.session.comparison.compare import CompareResult
from workbench.session.comparison.subject import Subject
from workbench.ui.runs.report import report_html, verdict
from workbench.ui.short_names import short_names


@dataclass
class Comparison:
    baseline: RunRecord | None
    runs: list[RunRecord]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def baselines(self) -> list[RunRecord]:
        return [self.baseline] if self.baseline is not None else []


@pytest.fixture
def result(runs: list[RunRecord], baseline: RunRecord) -> Comparison:
    return Comparison(baseline, runs)


def test_the_page_stands_alone(result: Comparison):
    html = report_html(result)
    assert html.startswith("<!doctype html>")
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", html)
    assert "<script" not in html and len(html) < 100_000


def test_the_page_has_the_pictures_of_the_comparison(result: Comparison):
    result.runs[1] = replace(result.runs[1], verdict=Verdict(True, differences=(0.0, 7e-7, 0.0)))
    html = report_html(result)
    titles = (
        "Memory against throughput",
        "Loss by step",
        "Difference to one device",
        "Throughput by step",
        "Memory per rank",
    )
    assert [html.count(f">{title}<") for title in titles] == [1] * 5
    assert html.index(">data</b>") < html.index(">model</b>") < html.index(">1 device</b>"), (
        "one device is the last row"
    )


def test_runs_of_several_seeds_are_a_row_and_lines_of_one_colour(runs: list[RunRecord], baseline: RunRecord):
    first, *others = (
        [
            replace(run, name=f"{run.name}, seed {n}" if n else run.name, settings={"seed": n})
            for run in (runs[0], baseline)
        ]
        for n in (0, 1)
    )
    pairs = [first, *others]
    html = report_html(CompareResult(first[1], [run for run, _ in pairs], more_baselines=[one for _, one in pairs[1:]]))
    assert html.count("<tr") == 3 and html.count(">2 seeds<") == 2
    (lines,) = re.findall(r'<g data-key="data" style="">(.*?)</g>', html.partition(">Loss by step<")[2])[:1]
    assert lines.count("stroke-width: 1.5") == 2


def test_summary_names_what_was_run(result: Comparison):
    machine = {"machine": "Some CPU, 4 cores", "workbench": "0.2.0", "torch": "2.13.0", "python": "3.12.1"}
    result.settings = {"model": "make_mlp", "num_parameters": 116_618, "optimizer": "SGD(lr=0.1)", **machine}
    html = report_html(result, title="Digits & more")
    assert "make_mlp, 117 k parameters" in html and "SGD(lr=0.1)" in html
    assert "Digits &amp; more" in html
    assert "3 strategies, 3 steps each, batch 100, from the same weights in the same data order" in html
    assert "Some CPU, 4 cores" in html and "workbench 0.2.0, torch 2.13.0, Python 3.12.1" in html


def facts(html: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html))


def test_the_summary_of_runs_that_differ_says_what_each_has(runs: list[RunRecord]):
    small = {"model": "mlp", "num_parameters": 1000, "optimizer": "SGD()", "seed": 0, "machine": "A", "torch": "2.12.0"}
    large = {
        "model": "cnn",
        "num_parameters": 5000,
        "optimizer": "Adam()",
        "seed": 1,
        "machine": "B",
        "torch": "2.13.0",
    }
    first = replace(runs[0], settings=small)
    second = replace(runs[1], settings=large, losses=(1.0,) * 10, batch_size=64, num_ranks=4)
    found = facts(report_html(CompareResult(None, [replace(runs[2], settings=small), first, second])))
    assert found["Model"] == "mlp, 1.00 k parameters; cnn, 5.00 k parameters"
    assert found["What"] == "3 strategies, 3 to 10 steps each, batch 64 to 100"
    assert (found["Optimizer"], found["Machine"]) == ("SGD(); Adam()", "A; B")
    assert (found["Versions"], found["Seeds"], found["Ranks"]) == ("torch 2.12.0; torch 2.13.0", "0, 1", "2, 4")
    assert "steps" not in facts(report_html(CompareResult(None, [runs[2]])))["What"], "it never began"
    assert not {"Machine", "Versions"} & set(facts(report_html(CompareResult(None, runs)))), "not those of this process"


def test_strategies_of_the_same_seeds_have_the_same_weights(runs: list[RunRecord]):
    every = [
        replace(run, name=f"{run.name}, seed {n}" if n else run.name, settings={"seed": n})
        for run in runs[:2]
        for n in (0, 1)
    ]
    found = facts(report_html(CompareResult(None, every)))
    assert found["What"] == "2 strategies, 3 steps each, batch 100, from the same weights in the same data order"
    assert found["Seeds"] == "0, 1; numbers are means \u00b1 standard deviations"
    assert facts(report_html(CompareResult(None, every[1:])))["What"] == "2 strategies, 3 steps each, batch 100"


def make_tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_count_once():
    samples = torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    subject = Subject.of(make_tied, samples, nn.functional.cross_entropy, batch_size=2, steps=1)
    assert subject.settings()["num_parameters"] == 800


def test_long_names_are_short_beside_plots_and_stay_apart(result: Comparison):
    texts = [f"fc1: data; fc2: data@1; fc{n}: data@1 | 2x1x1 mb=4 1f1b" for n in (3, 4)]
    assert short_names(["data", texts[0]]) == ["data", "fc1: data; fc\u20262x1x1 mb=4 1f1b"]
    result.runs = [replace(run, name=text, strategy=text) for run, text in zip(result.runs, texts, strict=False)]
    html = report_html(result)
    assert all(f">{text}</b>" in html for text in texts), "in full in the table"
    assert short_names(texts) == [f"fc1: da\u2026fc{n}: data@1 | 2x1x1\u2026" for n in (3, 4)]
    assert all(f">{name}</span>" in html for name in short_names(texts)), "in the legends"


def test_losses_that_overflow_can_be_reported(result: Comparison):
    result.baseline = replace(result.baseline, losses=(2.0, 1e30, float("inf"), float("nan"), 0.5))
    losses = ((2.0, 2e30, float("inf"), float("nan"), 1e30), (2.0, float("inf"), float("inf"), 1.0, 0.5))
    differences = ((0.0, 1.0, float("nan"), float("nan"), 1e30), (0.0, float("inf"), float("nan"), 1e-5, 0.0))
    result.runs = [
        replace(run, equal=False, losses=own, verdict=Verdict(False, differences=apart))
        for run, own, apart in zip(result.runs, losses, differences, strict=False)
    ]
    html = report_html(result).partition(">Difference to one device<")[2].partition("<section")[0]
    ticks = re.findall(r">(1e-?\d+)<", html)
    assert {"1e-5", "1e22"} <= set(ticks) and len(ticks) < 8


def test_a_run_that_differs_says_by_how_much(result: Comparison):
    verdict = Verdict(False, "noise", text="the loss of step 2 differs by 1e-3, where at most 1e-5 is rounding")
    result.runs = [replace(result.runs[0], equal=False, verdict=verdict)]
    assert verdict.text in report_html(result)


def test_runs_without_a_one_device_run_can_be_reported(result: Comparison):
    result.baseline = None
    assert "Difference to one device" not in report_html(result)


def test_a_script_in_a_name_stays_text(result: Comparison):
    result.runs = [replace(result.runs[0], name="</script><script>alert(1)</script>")]
    assert "<script>alert" not in report_html(result)


def test_verdict(runs: list[RunRecord]):
    assert verdict(runs[:2]) == (
        "equal",
        "All 2 strategies equal one device (largest loss difference 2e-7, tolerance 1e-5)",
    )
    assert verdict(runs) == ("unknown", "Not run: pipeline")
    assert verdict([]) == ("unknown", "No runs")
    later = replace(runs[0], verdict=Verdict(True, note="then nan"))
    assert verdict([later, runs[1]])[0] == "warning"
    assert verdict([later, runs[1]])[1].endswith("tolerance 1e-5), but data: then nan")
    both = replace(runs[1], equal=None, verdict=Verdict(None, text="the loss is nan on both"))
    assert verdict([replace(runs[0], equal=None), both, later]) == (
        "unknown",
        "No verdict: data (unchecked); model (the loss is nan on both)",
    )
    assert verdict([replace(runs[0], equal=False), *runs]) == ("unequal", "Not equal to one device: data")


def test_the_largest_difference_stands_beside_the_tolerance_of_its_precision(runs: list[RunRecord]):
    half = replace(runs[1], loss_difference=6e-3, verdict=Verdict(True, tolerance=TOLERANCES["bf16"].loss))
    assert verdict([runs[0], half])[1].endswith("(largest loss difference 6e-3, tolerance 2e-2)")
    assert verdict([replace(runs[0], loss_difference=9e-6), half])[1].endswith("difference 9e-6, tolerance 1e-5)")
