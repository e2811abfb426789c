"""Traces name the line, the function and the bytes of every boxing, forward and backward."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.tensors.world import current
from workbench.testing import run_ranks


def _line_of(text):
    """The number of the line of this file that holds ``text``."""
    lines = inspect.getsource(inspect.getmodule(_line_of)).splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def _by_line(trace):
    return {(r.site.line_number, r.direction): r for r in trace.records}


def test_lines_functions_and_bytes_forward_and_backward():
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        x = wb.randn(5, 6, placement=p, sbp="S(1)", requires_grad=True)
        w = wb.randn(7, 6, placement=p, sbp="B", requires_grad=True)
        before = current().traffic.sent_bytes
        with wb.debug.trace() as trace:
            h = F.linear(x, w)  # line of linear
            y = torch.softmax(h, 0)  # line of softmax
            z = y.to_global(sbp="B")  # line of to_global
            z.sum().backward()
        assert trace.sent_bytes == current().traffic.sent_bytes - before
        found = _by_line(trace)
        softmax = found[_line_of("# line of " + "softmax"), "forward"]
        assert (softmax.function, softmax.change, softmax.kind, softmax.num_boxings) == (
            "softmax", "P -> S(1)", "reduce-scatter", 1,
        )  # fmt: skip
        assert softmax.wire_bytes == h.boxing_plan(sbp="S(1)").wire_bytes == 5 * 7 * 4
        assert softmax.sent_bytes == h.boxing_plan(sbp="S(1)").bytes_sent[rank]
        assert softmax.site.code.startswith("y = torch.softmax") and softmax.site.line.startswith(
            "test_boxing_trace.py:"
        )
        written = found[_line_of("# line of " + "to_global"), "forward"]
        assert (written.function, written.change, written.shape) == ("to_global", "S(1) -> B", (5, 7))
        back = found[_line_of("# line of " + "to_global"), "backward"]
        assert back.change == "P -> S(1)" and back.wire_bytes == written.wire_bytes
        assert found[_line_of("# line of " + "softmax"), "backward"].change == "S(1) -> B"
        assert (_line_of("# line of " + "linear"), "forward") in found
        assert trace.by_function["softmax"].num_boxings == 2
        return str(trace).splitlines(), trace.wire_bytes, [(r.change, r.wire_bytes) for r in trace.records]

    first, second = run_ranks(program, 2)
    assert first[1:] == second[1:] and first[0][:-1] == second[0][:-1]
    assert first[0][0].split() == ["function", "boxing", "of", "times", "moved", "pass", "line"]
    assert any("softmax" in line and "reduce-scatter" in line and "test_boxing_trace.py:" in line for line in first[0])


def test_a_module_is_named_by_its_own_line_and_steps_count():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
            nn.init.constant_(self.fc.weight, 0.5)
            nn.init.zeros_(self.fc.bias)

        def forward(self, x):
            return self.fc(x).softmax(0)  # line of a module

    def program(rank):
        model = wb.parallelize(Net(), "fc: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = current().traffic.sent_bytes
        with wb.debug.trace() as trace:
            (model(torch.ones(5, 4)) ** 2).sum().backward()
            optimizer.step()  # line of the step
        assert trace.sent_bytes == current().traffic.sent_bytes - before > 0
        found = _by_line(trace)
        assert {r.function for r in trace.records if r.site.line_number == _line_of("# line of a " + "module")} >= {
            "fc", "softmax",
        }  # fmt: skip
        step = found[_line_of("# line of the " + "step"), "step"]
        assert (step.function, step.shape) == ("gradients", (15,))

    run_ranks(program, 2)


def test_contexts_nest_and_end():
    def program(rank):
        p = wb.placement("cpu", ranks=[0, 1])
        x = wb.ones(4, 2, placement=p, sbp="S(0)")
        with wb.debug.trace() as outer:
            x.to_global(sbp="B")
            with wb.debug.trace() as inner:
                for _ in range(3):
                    x.to_global(sbp="S(1)")
        x.to_global(sbp="B")
        assert current().context.tracer is None
        assert [r.num_boxings for r in inner.records] == [3] and len(outer.records) == 2
        assert outer.wire_bytes == inner.wire_bytes + 32
        with wb.debug.trace() as empty:
            x + x
        return str(empty), repr(inner)

    assert run_ranks(program, 2)[0] == ("no boxings", "BoxingTrace(3 boxings, 48 B moved)")


def test_ranks_outside_count_the_same():
    def program(rank):
        x = wb.ones(4, 2, placement=wb.placement("cpu", ranks=[0, 2]), sbp="S(0)", requires_grad=True)
        with wb.debug.trace() as trace:
            x.to_global(sbp="B").sum().backward()
        return [(r.change, r.direction, r.num_boxings, r.wire_bytes) for r in trace.records], trace.sent_bytes

    results = run_ranks(program, 3)
    assert results[0][0] == results[1][0] == results[2][0] and results[1][1] == 0 < results[0][1]


@pytest.mark.parametrize("reads", ["item", "full_tensor"])
def test_reads_are_named(reads):
    def program(rank):
        x = wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        with wb.debug.trace() as trace:
            getattr(x.sum() if reads == "item" else x, reads)()
        return next(iter(trace.by_function))

    assert run_ranks(program, 2) == [reads] * 2
