"""``wb.log`` in training loops of one's own, on simulated ranks."""

from __future__ import annotations

import contextlib
import copy
import json
import sys

import pytest
import torch.nn.functional as F
from torch import nn, ones, optim, tensor, zeros

import workbench as wb
from workbench.core.metrics import LastSteps, LossTerm, StepBlock, StepSpans, joined
from workbench.errors import RunError
from workbench.session import engine
from workbench.testing import run_ranks
from workbench.training.runs import step_metrics, user_loops


@pytest.fixture
def received(monkeypatch):
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 0.0)  # every step is exchanged by itself
    messages: list[object] = []
    user_loops.listen(messages.append)
    yield messages
    user_loops.listen(None)


def blocks(messages) -> list[StepBlock]:
    return [message for message in messages if isinstance(message, StepBlock)]


def test_steps_losses_and_samples_are_reported(received):
    def program():
        placement = wb.placement("cpu", ranks=[0, 1])
        for step in range(3):
            loss = wb.ones(4, placement=placement, sbp=wb.sbp.split(0)).sum() * (step + 1)
            wb.log(loss=loss, samples=64)

    run_ranks(program)
    found = blocks(received)
    assert [loss for block in found for loss in block.losses] == [4.0, 8.0, 12.0]
    assert [block.first_step for block in found] == [0, 1, 2] and found[0].samples == (64,)
    assert found[0].step_times_s == (0.0,) and found[1].step_times_s[0] > 0, "the first call starts the clock"
    assert found[0].num_ranks == 2 and found[0].memory_bytes[0]["peak"] >= 0


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("interval_s", [0.0, 1000.0])
def test_a_loss_is_its_value_at_the_call(received, monkeypatch, shape, is_global, interval_s):
    """A loop may keep one tensor for all losses: an average, or the static output of a CUDA graph."""
    monkeypatch.setattr(step_metrics, "INTERVAL_S", interval_s)

    def program():
        kept = zeros(shape)
        if is_global:
            kept = wb.to_global(kept, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.broadcast)
        for step in range(5):
            kept.fill_(step)
            wb.log(loss=kept, samples=64)
        user_loops._loops[user_loops.current()].report(user_loops._listener)

    run_ranks(program)
    assert [loss for block in blocks(received) for loss in block.losses] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_model_gives_memory_by_kind_and_its_timeline(received):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def program():
        model = wb.parallelize(copy.deepcopy(plain), "0: data; 1: data@1 | 2x1x1 mb=2")
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = wb.forward_backward(model, F.mse_loss, ones(4, 4), ones(4, 2))
            optimizer.step()
            wb.log(loss=loss, samples=4, model=model, optimizer=optimizer)

    run_ranks(program)
    memory = blocks(received)[-1].memory_bytes
    assert [kinds["parameters"] for kinds in memory] == [80, 40] and memory[0]["optimizer"] == 80
    spans = {message.rank: message for message in received if isinstance(message, StepSpans) and message.step == 1}
    assert set(spans) == {0, 1} and [span.kind for span in spans[0].spans] == ["F", "F", "B", "B", "O"]


def test_another_cell_begins_another_loop(received):
    cell = [1]
    user_loops.listen(received.append, lambda: cell[0])

    def program():
        wb.log(loss=1.0)
        wb.barrier()
        cell[0] = 2
        wb.barrier()
        wb.log(loss=2.0)

    run_ranks(program)
    assert [block.first_step for block in blocks(received)] == [0, 0]


def test_where_nobody_listens_nothing_happens():
    assert set(run_ranks(lambda: wb.log(loss=1.0, samples=2))) == {None}


# ---- the last steps, which the ranks have not exchanged when a cell ends --------------------------------------------


@pytest.fixture
def heard_seldom(received, monkeypatch):
    """Two steps are exchanged, the first of which has no time; then nothing."""
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 1000.0)
    return received


def run_cell(program, num_ranks: int = 2):
    """A cell on all ranks, at whose end the engine has the loops tell the rest; an error ends it all the same."""

    def cell():
        with contextlib.suppress(ZeroDivisionError):
            program()
        world = user_loops.current()
        user_loops._loops[world].end(user_loops._listener)

    run_ranks(cell, num_ranks)


def last_steps(messages) -> StepBlock:
    return joined([message for message in messages if isinstance(message, LastSteps)])


@pytest.mark.parametrize(("ranks", "sbp"), [([0, 1], "S(0)"), ([0, 1], "B"), ([[0, 1]], "B, S(0)")])
def test_the_last_steps_arrive_when_the_cell_ends(heard_seldom, ranks, sbp):
    """Losses are read where they are: terms of a sum or a maximum on each rank, or copies."""

    def program():
        x = wb.ones(4, placement=wb.placement("cpu", ranks=ranks), sbp=sbp)
        for step in range(40):
            wb.log(loss=x.sum() * (step + 1), most=x.cumsum(0).amax(), samples=64)

    run_cell(program)
    reported, rest = blocks(heard_seldom)[-1], last_steps(heard_seldom)
    assert (reported.stop_step, rest.first_step, rest.stop_step) == (2, 2, 40)
    assert rest.losses == tuple(4.0 * step for step in range(3, 41)) and rest.samples == (64,) * 38
    assert rest.num_ranks == 2 and all(time > 0 for time in rest.step_times_s) and len(rest.memory_bytes) == 2
    assert [value for _, value in rest.values["most"]] == [4.0] * 38


def test_ranks_that_fail_at_different_steps_tell_of_those_they_have_in_common(heard_seldom):
    def program():
        for step in range(10):
            if step == 6 and wb.rank() == 1:
                raise ZeroDivisionError
            wb.log(loss=float(step))

    run_cell(program)
    assert last_steps(heard_seldom).losses == (2.0, 3.0, 4.0, 5.0)


def test_a_rank_that_is_lost_tells_nothing(heard_seldom):
    parts = [LastSteps(1, 3, 5, (8,), (LossTerm(2.0, 3),), (0.5,), (0.25,), (10,), {"peak": 1})]
    block = joined(parts)
    assert block.losses == (2.0,) and block.time_s == ((0.0,), (0.5,), (0.0,)) and block.memory_bytes == ()
    term = LossTerm(2.0, 1, "sum", num_holders=2)
    assert joined([LastSteps(0, 2, 0, (8,), (term,), (0.5,), (0.0,), (0,))]).losses == (None,), "half of a sum"


def test_ranks_of_which_one_has_taken_part_in_an_exchange_more():
    """It was interrupted in the middle of it."""
    early, late = (
        LastSteps(rank, 2, first, (8,) * (9 - first), tuple(map(LossTerm, range(first, 9))), *[(0,) * (9 - first)] * 3)
        for rank, first in enumerate((2, 6))
    )
    assert joined([early, late]).first_step == 6 and joined([early, late]).losses == (6, 7, 8)
    assert joined([early.cut(2, 3), late]) is None


def test_the_timeline_is_that_of_the_last_step_though_the_model_is_evaluated_after_it(heard_seldom):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def program():
        model = wb.parallelize(copy.deepcopy(plain), "0: data; 1: data@1 | 2x1x1 mb=2")
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = wb.forward_backward(model, F.mse_loss, ones(4, 4), ones(4, 2))
            optimizer.step()
            wb.log(loss=loss, samples=4, model=model, optimizer=optimizer)
            wb.evaluate(model, ones(4, 4))

    run_cell(program)
    spans = {m.rank: m for m in heard_seldom if isinstance(m, StepSpans) and m.step == 2}
    assert set(spans) == {0, 1} and [span.kind for span in spans[0].spans] == ["F", "F", "B", "B", "O"]
    assert last_steps(heard_seldom).stop_step == 3 and None not in last_steps(heard_seldom).losses


def test_another_model_in_the_same_cell_begins_another_loop(heard_seldom):
    def program():
        for width in (2, 3):
            model = nn.Linear(width, width)
            for step in range(4):
                wb.log(loss=float(10 * width + step), model=model)

    run_cell(program)
    found = [(block.first_step, block.losses) for block in blocks(heard_seldom)]
    assert found == [(0, (20.0,)), (1, (21.0,)), (2, (22.0, 23.0)), (0, (30.0,)), (1, (31.0,))]
    assert last_steps(heard_seldom).losses == (32.0, 33.0)


# ---- other values, and logs -----------------------------------------------------------------------------------------


def values_of(messages) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for block in blocks(messages):
        for name, pairs in block.values.items():
            found.setdefault(name, []).extend(pairs)
    return found


SLOPE = nn.Linear(2, 1, bias=False)


def three_steps(to=None):
    """A loop that reports what people report; its gradients are those of 3 x + 4 y."""
    placement = wb.placement("cpu", ranks=[0, 1])
    model = wb.parallelize(copy.deepcopy(SLOPE), "*: model:row | 1x1x2")
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = wb.zeros((), placement=placement, sbp="B")
    for step in range(3):
        optimizer.zero_grad()
        loss = model(tensor([[3.0, 4.0]])).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        seen += 1
        wb.log(loss=loss, samples=8, tokens=512, optimizer=optimizer, seen=seen, epoch=step // 2, own=wb.rank(), to=to)
        if step == 1:
            wb.log(evaluation={"accuracy": wb.ones(2, placement=placement, sbp="S(0)").mean()}, none=None, to=to)


@pytest.mark.parametrize("interval_s", [0.0, 1000.0])
def test_values_learning_rate_and_gradient_norm(received, monkeypatch, interval_s):
    """Each belongs to its step, also where steps are exchanged one by one and an evaluation comes later."""
    monkeypatch.setattr(step_metrics, "INTERVAL_S", interval_s)
    run_cell(three_steps)
    rest = last_steps(received) if interval_s else None
    found = values_of([*received, *([rest] if rest else [])])
    assert found["evaluation/accuracy"] == [(1, 1.0)] and "none" not in found
    assert found["seen"] == [(0, 1.0), (1, 2.0), (2, 3.0)], "though the loop goes on to add to it"
    assert found["epoch"] == [(0, 0.0), (1, 0.0), (2, 1.0)] and {value for _, value in found["own"]} == {0.0}
    assert found["learning_rate"][1:] == [(1, 0.25), (2, 0.125)], "of the step, not of the next one"
    norms = [(1, 5.0), (2, 5.0)]  # the optimizer is known from the first call on
    assert found["gradient_norm"] == (norms[:1] if interval_s else norms), "of fast steps some, see measures_norm"
    assert [step for step, _ in found["tokens_per_s"]] == [1, 2]


def test_rank_0_writes_the_log_of_a_loop_without_a_notebook(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def program():
        three_steps(f"jsonl:{path}")
        return user_loops.current()

    worlds = run_ranks(program)
    assert not any(world in user_loops._loops for world in worlds), "the loops end with their world"
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [row["step"] for row in rows][-1] == 3 and len({row["step"] for row in rows}) == 3
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 3 and None not in losses, "sums of two ranks' terms, also the last ones"
    assert any(row.get("evaluation/accuracy") == 1.0 and row["step"] == 2 for row in rows)


@pytest.mark.parametrize("interval_s", [0.0, 1000.0])
def test_tensors_that_count_samples_and_tokens_are_numbers(received, monkeypatch, interval_s):
    """Those of the call: a loop may count on in one tensor."""
    monkeypatch.setattr(step_metrics, "INTERVAL_S", interval_s)

    def program():
        samples, placement = zeros(()), wb.placement("cpu", ranks=[0, 1])
        for step in range(3):
            samples += 4
            words = wb.ones(4, placement=placement, sbp="S(0)").sum() if step else tensor([4])
            wb.log(samples=samples, tokens=words)

    run_cell(program)
    rest = [last_steps(received)] if interval_s else []
    found = [*blocks(received), *rest]
    json.dumps([block.to_dict() for block in found])
    assert [samples for block in found for samples in block.samples] == [4, 8, 12]
    assert {type(rate) for _, rate in values_of(found)["tokens_per_s"]} == {float}


def test_a_rank_that_has_failed_leaves_what_rank_0_knows_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(step_metrics, "INTERVAL_S", 1000.0)
    path = tmp_path / "metrics.jsonl"

    def program():
        three_steps(f"jsonl:{path}")
        user_loops._loops.pop(user_loops.current()).end(None)

    run_ranks(program)
    row = json.loads(path.read_text().splitlines()[-1])
    assert row["step"] == 3 and row["learning_rate"] == 0.125 and row["epoch"] == 1.0
    assert not {"loss", "gradient_norm"} & set(row), "sums of which rank 0 has one term"


@pytest.mark.parametrize("is_notebook", [False, True])
def test_the_log_has_the_error_that_ends_a_program(tmp_path, monkeypatch, is_notebook):
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(sys, "last_value", ValueError("no such batch"), raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)  # other tests begin an IPython
    if is_notebook:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)

    def program():
        three_steps(f"jsonl:{path}")
        user_loops._report_at_exit_of(user_loops.current())

    run_ranks(program)
    row = json.loads(path.read_text().splitlines()[-1])
    assert row.get("error") == (None if is_notebook else "ValueError: no such batch")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": 3}, "counts steps itself"),
        ({"run": 3}, "the name of the run"),
        ({"phase": "warm-up"}, "a str"),
        ({"loss": ones(2)}, r"wb.log\(loss=...\): a Tensor of shape \(2,\)"),
        ({"a": {"b": ones(2)}}, r"wb.log\(a/b=...\): a Tensor of shape \(2,\)"),
        ({"optimizer": [None, None]}, r"optimizer=...\): a list of 2; a step has 1 optimizer.*rates="),
        ({"model": [None] * 3}, r"model=...\): a list of 3; a step has 1 nn.Module"),
        ({"samples": ones(2)}, r"wb.log\(samples=...\): a Tensor of shape \(2,\)"),
        ({"tokens": "many"}, r"wb.log\(tokens=...\): a str"),
        ({"to": "jsn:x"}, "Did you mean 'jsonl'"),
    ],
)
def test_what_is_no_value_is_an_error(received, given, words):
    with pytest.raises(RunError, match=words):
        run_ranks(lambda: wb.log(**{"loss": 1.0, **given}))


def test_another_place_begins_another_loop(tmp_path):
    """Rows of a second phase went to the first one's place."""

    def program():
        first, second = (f"jsonl:{tmp_path / name}" for name in ("a.jsonl", "b.jsonl"))
        for place in (first, second):
            for step in range(2):
                wb.log(loss=step + 1.0, to=place)
                wb.log(accuracy=0.5)  # adds to the step
        with pytest.raises(RunError, match=r"wb.log\(to='jsonl:.*a.jsonl'\).*b.jsonl.*one place"):
            wb.log(loss=3.0, to=first)
        user_loops.report_remaining_steps()

    run_ranks(program, 1)
    for name in ("a.jsonl", "b.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [row["loss"] for row in rows if "loss" in row] == [1.0, 2.0]
        assert [row["accuracy"] for row in rows if "accuracy" in row] == [0.5, 0.5], "calls without a place"


@pytest.mark.parametrize("error", [None, "ZeroDivisionError: integer division or modulo by zero"])
def test_a_loop_of_a_submitted_function_ends_with_its_call(tmp_path, monkeypatch, error):
    def train():
        for step in range(3):
            wb.log(loss=step + 1.0, to=f"jsonl:{tmp_path / 'log'}")
        return 1 // (error is None)

    def program():
        with contextlib.suppress(ZeroDivisionError):
            engine.call(b"")
        return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    monkeypatch.setattr(engine, "_unpack", lambda payload: (train, (), {}))
    (rows,) = run_ranks(program, 1)
    assert [row["loss"] for row in rows if "loss" in row] == [1.0, 2.0, 3.0] and rows[-1].get("error") == error


def test_loops_end_with_their_listener(received):
    """The steps of one test's loop came to the listener of another test, now and then."""

    def program():
        wb.log(loss=1.0)
        wb.log(loss=2.0)
        return user_loops.current()

    worlds = run_ranks(program, 2)
    assert all(world in user_loops._loops for world in worlds)
    user_loops.listen(None)
    assert not any(world in user_loops._loops or world.context.action_timer for world in worlds)
    later: list[object] = []
    user_loops.listen(later.append)
    user_loops.report_remaining_steps()
    assert later == []
