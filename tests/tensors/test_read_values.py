"""Values of tensors that lie on another stage: every rank reads them, in a script, after steps, in captured steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.processes import run_processes
from workbench.errors import ExplicitBoxingError, StrategyError, WorkbenchError
from workbench.testing import run_ranks

STAGES = "0: data@0; 2: data@1"


def make():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator), torch.arange(5) % 3


READINGS = {
    "item": lambda loss: loss.item(),
    "full_tensor": lambda loss: loss.full_tensor().item(),
    "float": float,
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: loss.detach().numpy().item(),
    "format": lambda loss: float(f"{loss:.9f}"),
    "print": lambda loss: float(str(loss).partition("(")[2].partition(")")[0]),
    "bool": lambda loss: 2.0 if loss > 0.5 else 0.0,
    "detached": lambda loss: loss.detach().full_tensor().item(),
}


@pytest.mark.parametrize("how", READINGS)
@pytest.mark.parametrize(("strategy", "num_ranks"), [(STAGES, 2), ("0: model@0; 2: data@1 | 1x2+1x1", 3)])
def test_every_rank_reads_what_lies_on_the_last_stage(how, strategy, num_ranks):
    x, y = batch()
    truth = F.cross_entropy(make()(x), y).item()

    def program(rank):
        model = wb.parallelize(make(), strategy)
        return READINGS[how](F.cross_entropy(model(x), y))

    expected = 2.0 if how == "bool" else truth
    assert run_ranks(program, num_ranks) == [pytest.approx(expected, abs=1e-4 if how == "print" else 1e-6)] * num_ranks


def test_a_value_in_a_hook_on_a_parameter_of_one_stage():
    """The ranks run the hooks before accumulation in different orders, and those after it in one."""
    x, y = batch()

    def program(rank):
        model, norms = make() if rank is None else wb.parallelize(make(), STAGES), {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: norms.__setitem__(name, p.grad.norm().item())
            )
        F.cross_entropy(model(x), y).backward()
        if rank is not None:
            model[2].weight.register_hook(lambda grad: grad if grad.isfinite().all() else None)
            with pytest.raises(StrategyError, match=r"shape \(\).*1 of 2 ranks.*register_post_accumulate_grad_hook"):
                F.cross_entropy(model(x), y).backward()
        return norms

    expected = program(None)
    assert run_ranks(program, 2) == [pytest.approx(expected)] * 2


def test_a_whole_tensor_keeps_its_history():
    """A plain loss that every rank makes of the whole output: the gradients are those of one device."""
    x, y = batch()
    one = make()
    expected = F.cross_entropy(one(x), y)
    expected.backward()

    def program(rank):
        model = wb.parallelize(make(), STAGES)
        loss = F.cross_entropy(model(x).full_tensor(), y)
        loss.backward()
        return loss, [parameter.grad.full_tensor() for parameter in model.parameters()]

    for loss, grads in run_ranks(program, 2):
        torch.testing.assert_close(loss.detach(), expected.detach())
        torch.testing.assert_close(grads, [parameter.grad for parameter in one.parameters()])


def test_losses_of_scheduled_and_captured_steps_and_evaluations_are_read_everywhere():
    x, y = batch()
    one = make()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    truth = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(one(x), y)
        loss.backward()
        optimizer.step()
        truth.append(loss.item())

    def program(rank, captures):
        model = wb.parallelize(make(), f"{STAGES} | 2x1x1 mb=2 1f1b")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(inputs, targets):
            optimizer.zero_grad()
            loss = wb.forward_backward(model, F.cross_entropy, inputs, targets)
            optimizer.step()
            return loss

        run = wb.capture(step) if captures else step
        losses = [run(x, y).full_tensor().item() for _ in range(3)] + [run(x, y).item()]
        return losses, wb.evaluate(model, x).full_tensor()

    for captures in (False, True):
        for losses, output in run_ranks(lambda rank, c=captures: program(rank, c), 2):
            assert losses == pytest.approx(truth, rel=1e-5)
            torch.testing.assert_close(output, one(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_captured_step_hands_out_whole_tensors_of_other_stages():
    x, y = batch()

    def program(rank, captures):
        model = wb.parallelize(make(), STAGES)

        def step(inputs, targets):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            return loss.detach().full_tensor()

        run = wb.capture(step) if captures else step
        return [run(x, y).item() for _ in range(4)]

    plain, captured = (run_ranks(lambda rank, c=c: program(rank, c), 2) for c in (False, True))
    assert plain[0] == plain[1] == pytest.approx(captured[0]) == captured[1] and len(set(plain[0])) == 4


@pytest.mark.filterwarnings("ignore::workbench.training.pipelining.running_step.ValueReadWarning")
@pytest.mark.parametrize("how", ["item", "full_tensor", "bool", "print"])
def test_inside_a_scheduled_step_every_rank_reads_it(how):
    x, y = batch()

    def program(rank):
        found = []

        def loss_fn(output, targets):
            loss = F.cross_entropy(output, targets)
            found.append(READINGS[how](loss))
            return loss

        model = wb.parallelize(make(), f"{STAGES} | 2x1x1 mb=2 1f1b")
        wb.forward_backward(model, loss_fn, x, y)  # the first step tries the loss on samples too
        found.clear()
        wb.forward_backward(model, loss_fn, x, y)
        return found

    one = make()
    losses = [F.cross_entropy(one(rows), wanted).item() for rows, wanted in zip(x.split(3), y.split(3), strict=True)]
    expected = [2.0 if how == "bool" else loss for loss in losses]
    assert run_ranks(program, 2) == [pytest.approx(expected, abs=1e-4 if how == "print" else 1e-6)] * 2


@pytest.mark.parametrize("how", ["item", "full_tensor", "bool", "print"])
def test_explicit_mode_says_what_moves(how):
    x, y = batch()

    def program(rank):
        model = wb.parallelize(make(), STAGES)
        loss = F.cross_entropy(model(x), y)
        with wb.debug.explicit_boxing():
            with pytest.raises(ExplicitBoxingError) as caught:
                READINGS[how](loss)
            whole = loss.to_global(placement=wb.placement("cpu", ranks=[0, 1]), sbp="B")
            assert READINGS[how](whole) > 0
        return str(caught.value)

    for message in run_ranks(program, 2):
        assert "P@1 -> B@0,1" in message or "B@1 -> B@0,1" in message
        assert 'to_global(placement=wb.placement("cpu", ranks=[0, 1]), sbp="B")' in message and "send" in message


@pytest.mark.parametrize("how", ["item", "full_tensor", "print"])
def test_explicit_mode_reads_a_grid_of_all_ranks(how):
    def program():
        grid = wb.placement("cpu", ranks=[[0, 1], [2, 3]])
        with wb.debug.explicit_boxing():
            return READINGS[how](wb.ones(4, 4, placement=grid, sbp="S(0), S(1)").sum())

    assert run_ranks(program, 4) == [16.0] * 4


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_read_is_found(absent):
    """It sends to nobody, or waits for nobody: an error at once, as for every exchange."""
    x, y = batch()

    def program(rank):
        loss = F.cross_entropy(wb.parallelize(make(), STAGES)(x), y)
        if rank != absent:
            loss.item()

    with pytest.raises(WorkbenchError):
        run_ranks(program, 2)


def read_in_processes():
    x, y = batch()
    loss = F.cross_entropy(wb.parallelize(make(), STAGES)(x), y)
    whole = loss.full_tensor()
    assert whole.item() == loss.item() == float(loss) and wb.rank() in (0, 1)
    return whole.item()


@pytest.mark.procs
def test_processes_read_it_too():
    first, second = run_processes(read_in_processes, 2)
    assert first == second == pytest.approx(F.cross_entropy(make()(batch()[0]), batch()[1]).item(), rel=1e-5)


def test_a_tensor_of_one_value_is_that_value_in_an_f_string():
    """As models name their experts: ``self.experts[f"expert_{number}"]``."""

    def program():
        x = wb.ones(4, 3, placement=wb.placement.all("cpu"), sbp="S(0)")
        return f"{x.sum()} {x.sum():.2f} {x.long().sum()}", "on cpu" in f"{x}"

    assert run_ranks(program, 2) == [("12.0 12.00 12", True)] * 2
