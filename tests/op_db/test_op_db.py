"""torch's own sample inputs for every function, on random layouts, against one device.

``make test`` runs one sample of every ninety-sixth entry, as all of them take minutes; ``make test-full`` runs several
of each under other seeds, and methods and in-place forms.
"""

import pytest
import torch

from tests.op_db.compare import Wrong, assert_close
from tests.op_db.samples import EXEMPT, SHAPES_ONLY, entries
from tests.op_db.sweep import run_entry

PARTS = 12


def run(part, form, count, seed):
    return [run_entry(entry, count, seed) for entry in entries(form)[part::PARTS]]


def failures(results):
    return [f"{r.name}: {o.state}: {o.message} <{o.where}>" for r in results for o in r.failures]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("start", range(0, 96, 12))
def test_a_sample_of_every_ninety_sixth_function(start):
    results = [run_entry(entry, 1, 0) for entry in entries("function")[start::96]]
    assert not failures(results)
    fallen = [result.name for result in results if result.by == "fallback"]
    assert len(fallen) <= len(results) / 4, fallen


@pytest.mark.sampled(12)
@pytest.mark.parametrize("start", range(0, 72, 6))
def test_every_seventy_second_function_by_keywords(start):
    """Twice: the second call takes the plan of the first."""
    assert not failures([run_entry(entry, 1, 5) for entry in entries("keywords")[start::72]])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("form", "seed"), [("function", 1), ("function", 2), ("method", 3), ("in_place", 4), ("keywords", 5)]
)
@pytest.mark.parametrize("part", range(PARTS))
def test_more_samples_of_every_function(part, form, seed):
    assert not failures(run(part, form, count=4, seed=seed))


def test_the_exempt_are_entries_of_op_db():
    names = {entry.name for entry in entries()}
    assert set(EXEMPT) | set(SHAPES_ONLY) <= names


def test_the_comparison_notices_what_is_wrong():
    right = {"values": [torch.ones(3), 2.0, 1]}
    assert_close("same", {"values": [torch.ones(3), 2.0, 1]}, right)
    wrong = (
        {"values": [torch.ones(3) + 0.01, 2.0, 1]},
        {"values": [torch.ones(3, dtype=torch.float64), 2.0, 1]},
        {"values": [torch.ones(1, 3), 2.0, 1]},
        {"values": [torch.ones(3), 2.1, 1]},
        {"values": [torch.ones(3), 2.0, 0]},
        {"values": [1.0, 2.0, 1]},
        {"values": [torch.ones(3), 2.0]},
    )
    for other in wrong:
        with pytest.raises(Wrong):
            assert_close("other", other, right)
