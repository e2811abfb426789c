"""What a boxing returns may be written in place, as vision models do, over every transport and size class of it.

A part of a receive buffer would be a view to autograd, which forbids the write. Which results are parts depends on the
size.
"""

import itertools

import pytest
import torch

import workbench as wb
from tests.processes import run_processes
from workbench.testing import run_ranks
from workbench.transport.messaging import transfer_plan
from workbench.transport.network import gloo
from workbench.transport.shared import persistent, put, segment

WIDTH = 8
THRESHOLDS = (
    gloo.ONE_SHOT_BYTES,
    transfer_plan.WHOLE_SHARD_BYTES,
    segment.MIN_IN_PLACE_BYTES,
    transfer_plan.ONE_SHOT_BYTES,
    put.BLOCK_BYTES,
    persistent.PERSISTENT_BYTES,
)
ROWS = [4, *(2 * threshold // (4 * WIDTH) for threshold in THRESHOLDS)]
WAYS = ("add", "activation", "item")
LAYOUTS = ("S(0)", "S(1)", "B", "P")


def write(boxed, how):
    """One of the ways in which models write to what they have just computed."""
    if how == "add":
        boxed += 1.0
    elif how == "activation":
        torch.nn.functional.relu(boxed, inplace=True)
    else:
        boxed[0] = 3.0


def wrong_results(rows):
    """The combinations that raise or give other gradients than one device."""
    placement, found = wb.placement.all("cpu"), []
    whole = torch.linspace(0.5, 1.5, rows * WIDTH).reshape(rows, WIDTH)
    for source, target, how in itertools.product(LAYOUTS, LAYOUTS, WAYS if rows == ROWS[0] else WAYS[:1]):
        if target == "P" or source == target:  # a write to terms of a sum is another matter
            continue
        x = wb.to_global(whole, placement=placement, sbp="B").to_global(sbp=source).detach().requires_grad_()
        boxed = (x * 2).to_global(sbp=target)
        write(boxed, how)
        boxed.square().sum().backward()
        plain = whole.clone().requires_grad_()
        expected = plain * 2
        write(expected, how)
        expected.square().sum().backward()
        if not torch.allclose(x.grad.full_tensor(), plain.grad):
            found.append((rows, source, target, how))
    return found


def wrong_sums_with_frozen_parts(rows):
    """What a frozen part gives without a history, and a learned one is added to."""
    placement, found = wb.placement.all("cpu"), []
    whole = torch.linspace(0.5, 1.5, rows * WIDTH).reshape(rows, WIDTH)
    for source, target in itertools.product(LAYOUTS, LAYOUTS[:3]):
        x = wb.to_global(whole, placement=placement, sbp="B").to_global(sbp=source)
        bias = wb.ones(WIDTH, placement=placement, sbp="B").requires_grad_()
        with torch.no_grad():
            made = [x.to_global(sbp=target).clone() if source == target else x.to_global(sbp=target)]
            made += [x.std(0), x.cumsum(0), x.logsumexp(0), x.softmax(0)]
        for each in made:
            each += bias
        sum(each.sum() for each in made).backward()
        if not torch.allclose(bias.grad.full_tensor(), torch.full([WIDTH], 3.0 * rows + 2)):
            found.append((rows, source, target))
    return found


def wrong_results_at_all_sizes():
    return [case for rows in ROWS for case in wrong_results(rows) + wrong_sums_with_frozen_parts(rows)]


@pytest.mark.parametrize("rows", [ROWS[0], ROWS[-1]])
def test_simulated_ranks(rows):
    assert run_ranks(lambda: wrong_results(rows) + wrong_sums_with_frozen_parts(rows), 2) == [[], []]


@pytest.mark.procs
@pytest.mark.parametrize("transport", ["shared", pytest.param("gloo", marks=pytest.mark.slow)])
def test_processes(transport):
    found = run_processes(wrong_results_at_all_sizes, 2, environment={"WORKBENCH_TRANSPORT": transport})
    assert found == [[], []]
