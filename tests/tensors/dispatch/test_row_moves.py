"""Row maps: what a slice, a flip, a join or a pad of a split dim moves between ranks, forward and backward."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.oracle import assert_holds, shard
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Split
from workbench.errors import ExplicitBoxingError
from workbench.tensors.rules.views.row_moves import Segment, Side, move_rows, plan_rows
from workbench.tensors.world import current
from workbench.testing import run_ranks

MAPS = {
    "slice": ([Segment(0, 1, 2, 0, 0, 3)], [7], [3]),
    "flip": ([Segment(0, 6, -1, 0, 0, 7)], [7], [7]),
    "join": ([Segment(0, 0, 1, 0, 0, 5), Segment(1, 0, 1, 0, 5, 4)], [5, 4], [9]),
    "cut": ([Segment(0, 0, 1, 0, 0, 3), Segment(0, 3, 1, 1, 0, 4)], [7], [3, 4]),
    "reflect": ([Segment(0, 2, -1, 0, 0, 2), Segment(0, 0, 1, 0, 2, 7), Segment(0, 5, -1, 0, 9, 2)], [7], [11]),
}
LAYOUTS = [
    ([0, 1, 2], ["S(0)"], ["S(0)"]),
    ([2, 0, 1], ["S(0)"], ["B"]),
    ([[3, 0], [1, 2]], ["S(0)", "S(0)"], ["S(0)", "S(0)"]),
    ([[3, 0], [1, 2]], ["S(1)", "S(0)"], ["S(1)", "B"]),
]


def expected_of(segments, inputs, sizes):
    results = [torch.zeros(size, 3, dtype=torch.float64) for size in sizes]
    for s in segments:
        for i in range(s.length):
            results[s.result] = results[s.result].index_add(
                0, torch.tensor([s.first + i]), inputs[s.source][s.start + i * s.step][None]
            )
    return results


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("grid", "before", "after"), LAYOUTS, ids=str)
def test_rows_arrive_and_gradients_return(name, grid, before, after):
    segments, sources, results = MAPS[name]
    placement = Placement.of("cpu", grid)
    source_layout, result_layout = Layout.of(placement, before), Layout.of(placement, after)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 3, dtype=torch.float64, generator=generator).requires_grad_() for n in sources]
    expected = expected_of(segments, inputs, results)
    weights = [torch.randn(e.shape, dtype=torch.float64, generator=generator) for e in expected]
    sum((e * w).sum() for e, w in zip(expected, weights, strict=True)).backward()
    sides = [
        tuple(Side(layout, (n, 3)) for n in ns) for layout, ns in ((source_layout, sources), (result_layout, results))
    ]
    plan = plan_rows(0, tuple(segments), *sides)

    def part(tensor, layout, rank):
        return torch.from_numpy(np.array(shard(tensor.detach().numpy(), layout)[rank]))

    def program(rank):
        shards = [part(t, source_layout, rank).requires_grad_() for t in inputs]
        outputs = move_rows(plan, current(), shards)
        terms = [part(w, result_layout.dual(), rank) for w in weights]
        sum((o * t).sum() for o, t in zip(outputs, terms, strict=True)).backward()
        for output, whole in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output.detach(), part(whole, result_layout, rank))
        return [s.grad.numpy() for s in shards]

    grads = run_ranks(program, placement.num_ranks)
    for k, t in enumerate(inputs):
        assert_holds({rank: grads[rank][k] for rank in placement}, source_layout.dual(), t.grad.numpy())


FUNCTIONS = {
    "x[2:10]": (lambda x: x[2:10], 0),  # rows 2 to 5 stay on rank 0, 6 to 9 on rank 1
    "x[7]": (lambda x: x[7], 1),
    "flip": (lambda x: x.flip(0), 12),
    "roll": (lambda x: x.roll(2, 0), 4),
    "pad": (lambda x: F.pad(x, (0, 0, 2, 2)), 0),
    "cat": (lambda x: torch.cat([x, x]), 12),
    "chunk": (lambda x: x.chunk(2)[1] + 0, 6),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_many_rows_move_as_have_to(name):
    """On 2 ranks, 12 rows of 3 floats; nothing falls back to a gather (a warning would be an error)."""
    function, num_rows = FUNCTIONS[name]

    def program(rank):
        placement = wb.placement("cpu", ranks=[0, 1])
        x = wb.randn(12, 3, placement=placement, sbp=wb.sbp.split(0))
        traffic = current().traffic
        sent = traffic.sent_bytes
        result = function(x)
        sent = traffic.sent_bytes - sent
        return sent, function(x.full_tensor()), result.full_tensor(), Split(0) in result.sbp

    parts = run_ranks(program)
    assert sum(sent for sent, *_ in parts) == num_rows * 3 * 4
    for _, expected, value, stays_split in parts:
        torch.testing.assert_close(value, expected)
        assert stays_split or name == "x[7]"


def test_explicit_boxing_refuses_to_move_rows():
    def program(rank):
        x = wb.randn(12, 3, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.split(0))
        with wb.debug.explicit_boxing():
            assert x[:, 1:].shape == (12, 2)
            with pytest.raises(ExplicitBoxingError, match=r"rows of \(12, 3\).*to_global"):
                x.flip(0)

    run_ranks(program)


def test_a_trace_counts_rows_that_move():
    def program(rank):
        x = wb.randn(12, 3, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.split(0)).requires_grad_()
        before = current().traffic.sent_bytes
        with wb.debug.trace() as trace:
            x.flip(0).square().sum().backward()
        rows = [record for record in trace.records if record.kind == "rows"]
        assert {record.direction for record in rows} == {"forward", "backward"}
        assert "test_row_moves.py" in rows[0].site.line
        return sum(record.sent_bytes for record in rows), current().traffic.sent_bytes - before, rows[0].wire_bytes

    assert run_ranks(program) == [(2 * 72, 2 * 72, 144)] * 2


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)"])
def test_a_dim_without_rows_is_cut_into_nothing(sbp):
    def program():
        return wb.zeros(3, 0, placement=wb.placement("cpu", ranks=[0, 1]), sbp=sbp).unbind(1)

    assert run_ranks(program, 3) == [()] * 3
