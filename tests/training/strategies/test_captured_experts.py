"""Captured steps with experts: a replay sends as many rows as its own tokens ask for."""

import functools
import gc

import pytest
import torch

import workbench as wb
from tests.training.strategies.mixtures import Mixture, batch_of
from workbench.errors import CaptureError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.strategies.fused_experts import PASSING
from workbench.training.strategies.opaque_call import opaque_call

STEPS = 20
pytestmark = pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")


def made() -> Mixture:
    torch.manual_seed(5)
    return Mixture(experts=4, best=2, dropout=0.0).double()


def trained(model, strategy, captures):
    """Losses, weights after the last step, bytes that this rank sent for tokens in each step, and replays."""
    model = wb.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(x, classes):
        optimizer.zero_grad()
        loss = model(x, classes)
        loss.backward()
        optimizer.step()
        return loss

    run = wb.capture(step) if captures else step
    losses, sent, kinds = [], [], current().traffic.by_kind
    for number in range(STEPS):
        before = kinds.get("all-to-all", 0)
        losses.append(run(*batch_of(number)).item())
        sent.append(kinds.get("all-to-all", 0) - before)
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return losses, weights, sent, getattr(run, "num_replays", 0)


@functools.cache
def on_one_device():
    alone = made()
    (truth,) = run_ranks(lambda: trained(alone, "*: data", captures=False), 1)
    return truth


def assert_replays_equal_one_device(strategy, num_ranks):
    models = [made() for _ in range(num_ranks)]
    found = run_ranks(lambda rank: trained(models[rank], strategy, captures=True), num_ranks)
    for each in found:
        torch.testing.assert_close(each[:2], on_one_device()[:2], rtol=1e-9, atol=1e-9)
        assert each[3] == STEPS - 2
    return [each[2] for each in found]


def test_replays_send_what_their_own_choices_ask_for():
    sent = assert_replays_equal_one_device("*: expert", 2)
    models = [made() for _ in range(2)]
    assert sent == [each[2] for each in run_ranks(lambda rank: trained(models[rank], "*: expert", captures=False), 2)]
    assert len(set(sent[0][2:])) > 5, "tokens go elsewhere from step to step"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("*: data", 1), ("*: data", 2), ("*: model", 2), ("*: expert | recompute", 2), ("*: expert | zero=3", 2)],
)
def test_replays_with_other_choices_of_experts_equal_one_device(strategy, num_ranks):
    """Also experts that are whole on each rank, and those of blocks that run again."""
    assert_replays_equal_one_device(strategy, num_ranks)


def test_a_recording_keeps_no_experts_but_those_of_the_model():
    """A call makes a module of this rank's experts, and with it the tensors that ZeRO has gathered."""

    models = [made() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: expert | zero=3")
        step = wb.capture(lambda x, classes: model(x, classes).backward())
        for number in range(3):
            step(*batch_of(number))
        kept = [each for each in gc.get_objects() if isinstance(each, type(model.pool)) and PASSING in vars(each)]
        return step.num_replays, len(kept)

    assert run_ranks(program, 2) == [(1, 0)] * 2


def test_replays_in_stages_and_in_16_bits_equal_steps_as_they_are():
    strategy = "*: expert; shared: data@1; head: data@1 | 2x2x1 mb=2 zero_bubble bf16"
    models = [made().float() for _ in range(8)]

    def program(rank):
        return [losses(model, captures) for model, captures in zip(models[2 * rank :], (True, False), strict=False)]

    def losses(model, captures):
        parallel = wb.parallelize(model, strategy)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.3)

        def step(x, classes):
            optimizer.zero_grad()
            loss = wb.forward_backward(parallel, None, (x, classes))
            optimizer.step()
            return loss

        run = wb.capture(step) if captures else step
        return [run(x.float(), classes).item() for x, classes in map(batch_of, range(4))]

    for captured, plain in run_ranks(program, 4):
        assert captured == pytest.approx(plain, rel=1e-6)


def test_what_is_evaluated_without_gradients_is_captured():
    models = [made() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: expert").eval()
        run = wb.capture(torch.no_grad()(lambda x, classes: model(x, classes)))
        batches = [batch_of(number) for number in range(4)]
        return [run(*batch).item() for batch in batches], [model(*batch).item() for batch in batches], run.num_replays

    for captured, plain, replays in run_ranks(program, 2):
        assert captured == pytest.approx(plain, rel=1e-9)
        assert replays == 2


def test_a_gradient_that_the_recording_lacks_is_an_error():
    weight = torch.ones(2, requires_grad=True)

    def scaled(x, factor):
        return x * factor if bool(x.sum() > 0) else x * 2

    def step(x):
        inner = x.detach().requires_grad_()
        opaque_call(current(), "layer", scaled, (inner, weight)).sum().backward()
        return inner.grad

    def program():
        run = wb.capture(step)
        for _ in range(3):
            run(-torch.ones(2))
        with pytest.raises(CaptureError, match="layer has a gradient for 2 of its tensors, and had one for 1"):
            run(torch.ones(2))

    run_ranks(program, 1)


def test_a_graph_that_is_kept_for_a_second_backward_is_an_error():
    def step(x):
        inner = x.detach().requires_grad_()
        total = opaque_call(current(), "layer", torch.exp, (inner,)).sum()
        total.backward(retain_graph=True)
        total.backward()
        return inner.grad

    def program():
        run = wb.capture(step)
        run(torch.ones(2))
        with pytest.raises(CaptureError, match=r"2 backwards go through layer \(retain_graph=True\).*for 1\. Add the"):
            run(torch.ones(2))

    run_ranks(program, 1)
