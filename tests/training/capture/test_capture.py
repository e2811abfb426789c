"""A captured step gives the losses of the same step uncaptured, bit for bit, whatever changes between its calls."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.processes import run_processes
from tests.training.capture.captured_runs import (
    MODELS,
    OPTIMIZERS,
    assert_captured_like_uncaptured,
    assert_same,
    called,
    filled,
    step_of,
)
from workbench.errors import CaptureError, CaptureWarning
from workbench.tensors.world import current
from workbench.testing import run_ranks


def test_a_captured_step_trains_alike():
    assert_captured_like_uncaptured("mlp", "*: data | 1x2x1", "adamw", 5)


@pytest.mark.procs
def test_real_processes_train_alike():
    assert_captured_like_uncaptured("mlp", "*: data | 1x2x1", "adamw", 5, run=run_processes)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("strategy", "num_ranks"), [("*: data | 1x2x1", 2), ("*: model | 1x1x2", 2), ("*: model | 1x2x2", 4)]
)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_alike(model, strategy, num_ranks, optimizer):
    assert_captured_like_uncaptured(model, strategy, optimizer, 20, num_ranks=num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [(m, o) for m in MODELS for o in ("zero=1", "zero=2", "zero=3", "recompute", "bf16")],
)
def test_options_of_a_strategy_train_alike(model, options):
    assert_captured_like_uncaptured(model, f"*: data | 1x2x1 {options}", "adamw", 6)


def layer():
    """A parallelized layer with its optimizer."""
    module = wb.parallelize(filled(nn.Linear(4, 3)), f"*: data | 1x{wb.world_size()}x1")
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_program_is_printed_as_it_runs():
    def program():
        step = wb.capture(step_of(*layer()))
        called(step)
        return str(step.traces[0])

    text = run_ranks(program)[0]
    assert "aten.addmm" in text and "transport.start_all_reduce" in text and "SGD.step" in text
    assert "aten.t(" not in text.splitlines()[0] and "detach" not in text  # views of weights are made once


REFUSED = {
    "item": (lambda loss: loss.item(), "the value of a tensor is read.*test_capture.py, line"),
    "tolist": (lambda loss: loss.tolist(), r"tolist\(\): the value of a tensor is read.*test_capture.py, line"),
    "numpy": (
        lambda loss: loss.detach().to_local().numpy(),
        r"numpy\(\): the value of a tensor is read.*Return the tensor",
    ),
    "asarray": (lambda loss: np.asarray(loss.detach().full_tensor()), r"numpy.asarray\(\): the value of a tensor"),
    "branch": (lambda loss: loss if loss > 3 else -loss, "the value of a tensor is read"),
    "mask": (lambda loss: loss.detach().to_local().reshape(1)[torch.tensor([True])], "depends on values"),
    "binomial": (
        lambda loss: torch.binomial(torch.full_like(loss.detach(), 9.0), torch.full_like(loss.detach(), 0.5)),
        "cannot draw again",
    ),
}


def test_printing_within_the_step_is_no_reading():
    def program():
        return called(
            wb.capture(step_of(*layer(), after=lambda loss: (str(loss.detach()), loss.detach())[1]))
        ).full_tensor()

    assert run_ranks(program)[0].isfinite()


@pytest.mark.parametrize("name", REFUSED)
def test_what_decides_by_values_is_refused(name):
    after, message = REFUSED[name]

    def program():
        called(wb.capture(step_of(*layer(), after=after)))

    with pytest.raises(CaptureError, match=message):
        run_ranks(program)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_scheduler_within_the_step_is_refused(where):
    def program():
        module, optimizer = layer()

        def schedule(_loss=None):
            optimizer.param_groups[0]["lr"] *= 0.5

        called(wb.capture(step_of(module, optimizer, **{where: schedule})))

    with pytest.raises(CaptureError, match="lr of SGD changed within the step"):
        run_ranks(program)


def test_a_closure_is_refused():
    def program():
        module, optimizer = layer()

        @wb.capture
        def step(x):
            def closure():
                loss = module(x).sum()
                loss.backward()
                return loss

            optimizer.step(closure)

        called(step)

    with pytest.raises(CaptureError, match=r"SGD.step\(\) was called with a closure"):
        run_ranks(program)


def test_what_outlives_the_step_is_refused():
    kept = []

    def program():
        called(wb.capture(step_of(*layer(), after=lambda loss: kept.append(loss.detach() * 2))))

    with pytest.raises(CaptureError, match=r"1 tensor .* outlives"):
        run_ranks(program)


def test_stages_without_micro_batches_are_captured():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def program(capture):
        module = filled(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)))
        module = wb.parallelize(module, "0: data@0; 2: data@1 | 2x1x1")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        step = step_of(module, optimizer)
        step = wb.capture(step) if capture else step
        losses = torch.stack([torch.tensor(step(x).item()) for _ in range(5)])
        return losses, capture and step.num_replays

    plain, captured = (run_ranks(lambda capture=capture: program(capture)) for capture in (False, True))
    assert captured[0][1] == captured[1][1] == 3
    assert torch.equal(plain[0][0], captured[0][0]) and torch.equal(plain[1][0], captured[1][0])


def test_other_shapes_are_recorded_anew_up_to_a_bound():
    def program():
        step = wb.capture(step_of(*layer()), max_recordings=2)
        for rows in (4, 5, 4, 5, 4, 5, 6):
            called(step, 1, (rows, 4))
        counts = (step.num_recordings, step.num_replays)
        with pytest.warns(CaptureWarning, match=r"\(6, 4\).*none of the 2 kinds"):
            called(step, 1, (6, 4))
        return counts, step.num_recordings

    with warnings.catch_warnings():
        warnings.simplefilter("always", CaptureWarning)
        assert run_ranks(program, 1) == [((2, 2), 2)]


@pytest.mark.parametrize("memory_bytes", [None, 2**20])
def test_an_lstm_on_cpus_is_replayed(memory_bytes):
    """Its forward makes what its backward reads in replays too, which have gradients off."""
    layers = [nn.LSTM(4, 4, num_layers=2) for _ in range(4)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())

    def losses_of(layer, take):
        layer = wb.parallelize(layer, "*: data")
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x):
            loss = layer(x)[0].square().sum()
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            return loss.detach()

        step = take(step)
        return [step(torch.ones(3, 2, 4)).item() for _ in range(5)]

    def program(rank):
        captured = losses_of(layers[rank], lambda step: wb.capture(step, memory_bytes=memory_bytes))
        return captured == losses_of(layers[rank + 2], lambda step: step)

    assert run_ranks(program, 2) == [True] * 2


def test_layouts_of_inputs_are_recorded_apart():
    def program():
        p = wb.placement("cpu", ranks=[0, 1])
        double = wb.capture(lambda batch, by: {"out": batch["x"] * by, "by": by})
        whole = wb.to_global(torch.arange(6.0).reshape(3, 2), placement=p, sbp="B")
        for sbp in ("S(0)", "B", "S(0)", "B", "S(0)", "B"):
            found = double({"x": whole.to_global(sbp=sbp)}, 3)
            assert found["by"] == 3 and str(found["out"].sbp) == str(whole.to_global(sbp=sbp).sbp)
            assert torch.equal(found["out"].full_tensor(), torch.arange(6.0).reshape(3, 2) * 3)
        return double.num_recordings, double.num_replays

    assert run_ranks(program) == [(2, 2)] * 2


def test_parameters_that_moved_are_recorded_anew():
    def program():
        module, optimizer = layer()
        step = wb.capture(step_of(module, optimizer))
        called(step, 4)
        module.weight.data = module.weight.data.clone()
        before = module.weight.full_tensor().clone()
        called(step, 2)
        assert not torch.equal(before, module.weight.full_tensor())
        return step.num_recordings

    assert run_ranks(program) == [2, 2]


def test_captured_and_uncaptured_calls_take_turns():
    def program(turns):
        module, optimizer = layer()
        plain = step_of(module, optimizer)
        captured = wb.capture(plain)
        x = torch.linspace(-1, 1, 16).reshape(4, 4)
        return [(captured if turn else plain)(x * i).full_tensor() for i, turn in enumerate(turns)]

    mixed = run_ranks(lambda: program([1, 0, 1, 0, 1, 1, 0, 1]))
    plain = run_ranks(lambda: program([0] * 8))
    assert_same(mixed, plain)


def test_gradients_add_up_outside_of_the_captured_function():
    def program(capture):
        module, optimizer = layer()

        def passes(x):
            loss = module(x).square().mean()
            loss.backward()
            return loss.detach()

        run = wb.capture(passes) if capture else passes
        losses = []
        for number in range(6):
            losses.append(run(torch.full((4, 4), float(number))).full_tensor())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses + [p.full_tensor() for p in module.parameters()]

    assert_same(run_ranks(lambda: program(True)), run_ranks(lambda: program(False)))


def test_random_numbers_go_on_as_uncaptured():
    def program(capture):
        p = wb.placement("cpu", ranks=[0, 1])
        x = wb.ones(6, 4, placement=p, sbp="S(0)")

        def draw(x):
            return F.dropout(x, 0.4) + torch.rand_like(x)

        run = wb.capture(draw) if capture else draw
        return torch.stack([run(x).full_tensor() for _ in range(5)]), wb.rand(3, placement=p, sbp="B").full_tensor()

    for one, other in zip(run_ranks(lambda: program(True)), run_ranks(lambda: program(False)), strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert not torch.equal(one[0][3], one[0][4])


def test_traffic_is_counted_in_replays():
    def program():
        step = wb.capture(step_of(*layer()))
        sent = []
        for _ in range(4):
            current().traffic.reset()
            called(step, 1)
            sent.append((current().traffic.sent_bytes, current().traffic.num_exchanges))
        return sent

    for sent in run_ranks(program):
        assert sent[1] == sent[2] == sent[3] and sent[2][0] > 0


def test_an_input_that_needs_a_gradient_is_refused():
    def program():
        step = wb.capture(lambda x: x * 2)
        for _ in range(2):
            step(torch.ones(2, requires_grad=True))

    with pytest.raises(CaptureError, match="requires a gradient"):
        run_ranks(program, 1)


def test_wrong_labels_are_found_before_anything_is_recorded():
    def program():
        p = wb.placement("cpu", ranks=[0, 1])
        loss = wb.capture(lambda x, y: F.cross_entropy(x, y))
        loss(wb.zeros(2, 4, placement=p, sbp="S(1)"), torch.tensor([1, 4]))

    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        run_ranks(program)


@pytest.mark.parametrize("sbp", ["B", "S(0)"])
def test_what_a_replay_writes_is_boxed_anew(sbp):
    """By the version of a tensor it is known whether it has changed since it was boxed."""

    built = nn.Linear(4, 4)

    def program():
        layer, scale = copy.deepcopy(built), torch.zeros(4)
        model = wb.parallelize(layer, "*: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ones = wb.ones(4, placement=wb.placement.all("cpu"), sbp=sbp)

        def train(x):
            scale.add_(1).mul_(2).sub_(1)
            model(x).sum().backward()
            optimizer.step()

        step, found = wb.capture(train), []
        for _ in range(5):
            step(torch.ones(2, 4))
            found.append(((ones * scale).full_tensor().sum().item(), scale._version, layer.weight._version))
        return list(zip(*found, strict=True))

    for sums, versions, of_weights in run_ranks(program):
        assert sums == (4.0, 12.0, 28.0, 60.0, 124.0)
        assert sorted(set(versions)) == list(versions)
        assert sorted(set(of_weights)) == list(of_weights)


@pytest.mark.parametrize("sbp", ["B", "S(0)"])
def test_global_inputs_may_be_boxed_within_the_step(sbp):
    """As the targets of a loader are, to the layout of the output."""

    def program(capture):
        module = wb.parallelize(filled(nn.Linear(4, 4)), "*: model")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        ranks = wb.placement.all("cpu")

        def step(inputs, targets):
            optimizer.zero_grad()
            loss = F.mse_loss(module(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss.detach()

        called = capture(step)
        batches = [[wb.full((8, 4), k + part, placement=ranks, sbp=sbp) for part in (0.5, 0.25)] for k in range(4)]
        return [called(*batch).full_tensor() for batch in batches]

    assert_same(run_ranks(lambda: program(wb.capture)), run_ranks(lambda: program(lambda step: step)))


def test_tensors_from_outside_and_results_may_be_boxed_within_the_step():
    """As masks and tables are. They do not keep what the recording has boxed them to."""

    def program(capture):
        ranks, found = wb.placement.all("cpu"), []
        scale, x = (wb.ones(*shape, placement=ranks, sbp="S(0)") for shape in ((4,), (4, 4)))

        @capture
        def step(x):
            rows = x * scale
            return rows, rows + x.to_global(sbp="S(1)")

        for _ in range(4):
            found += step(x)
            scale.mul_(2)
        return [each.full_tensor() for each in found]

    assert_same(run_ranks(lambda: program(wb.capture)), run_ranks(lambda: program(lambda step: step)))
