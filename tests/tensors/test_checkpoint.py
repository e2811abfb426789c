"""Recomputation: numbers of one device, and the same point of the backward on every rank."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import workbench as wb
from tests.tensors.dispatch.against_one_device import DATA, LAYOUTS, PARTIAL, assert_as_one_device
from workbench.testing import run_ranks

held_before = functools.partial(checkpoint, use_reentrant=False)
"""As transformers holds it: the name is bound before the workbench is loaded."""
PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


def region(x, w):
    y = torch.tanh(x @ w)
    return torch.relu(y) * y.sum(0), y


@program
def two_results(make):
    a, w = make("a"), make("w")
    y, z = held_before(region, a * 1.5, w)
    ((y.sin() ** 2).sum() + z.sum()).backward()
    return y, a.grad, w.grad


@program
def reentrant(make):
    a, w = make("a"), make("w")
    y, z = checkpoint(region, a * 1.5, w, use_reentrant=True)
    ((y.sin() ** 2).sum() + z.sum()).backward()
    return y, a.grad, w.grad


@program
def nested(make):
    a, w = make("a"), make("w")

    def outer(x):
        return held_before(lambda y: torch.tanh(y) * 2, x @ w).softmax(0)

    y = held_before(outer, a)
    (y**2).sum().backward()
    return y, a.grad, w.grad


@program
def weights_of_a_closure(make):
    w = make("w")
    y = held_before(lambda x: (x @ w).sin(), DATA["a"].clone())
    (y**2).sum().backward()
    return y, w.grad


@program
def second_order(make):
    a, w = make("a"), make("w")
    y, _ = held_before(region, a, w)
    (of_a,) = torch.autograd.grad((y**2).sum(), [a], create_graph=True)
    (of_a**2).sum().backward()
    return of_a, a.grad, w.grad


@program
def without_gradient(make):
    with torch.no_grad():
        return held_before(region, make("a"), make("w"))


@program
def two_backwards(make):
    a, w = make("a"), make("w")
    y, _ = held_before(region, a, w)
    loss = (y**2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return a.grad, w.grad


@program
def sequential(make):
    weight = torch.nn.Parameter(make("w", False))

    class Layer(torch.nn.Module):
        def forward(self, x):
            return (x @ weight).tanh()

    a = make("a")
    y = checkpoint_sequential(torch.nn.Sequential(Layer(), torch.nn.ReLU(), torch.nn.Tanh()), 2, a, use_reentrant=False)
    y.sum().backward()
    return y, a.grad, weight.grad


@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("turn", range(4))
def test_as_one_device(program, turn):
    assert_as_one_device(program, [*LAYOUTS, *PARTIAL][turn::4])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_stages_inside_a_checkpoint(use_reentrant):
    """Each rank needs other saved tensors, so each would begin to recompute at another time."""

    def gradients():
        first, second = (wb.placement("cpu", ranks=[rank]) for rank in (0, 1))
        u = wb.full((3,), 0.5, placement=first, sbp="B", requires_grad=True)
        v = wb.full((3,), 2.0, placement=second, sbp="B", requires_grad=True)
        x = wb.ones(3, placement=first, sbp="B", requires_grad=True)

        def both(x):
            y = (x * u).tanh().to_global(placement=second)
            y = (y * v).tanh().to_global(placement=first).to_global(placement=second)
            return y.exp()

        checkpoint(both, x, use_reentrant=use_reentrant).sum().backward()
        return [t.grad.sum().item() for t in (x, u, v)]

    u, v, x = (torch.full((3,), value, requires_grad=True) for value in (0.5, 2.0, 1.0))
    ((x * u).tanh() * v).tanh().exp().sum().backward()
    expected = [float(t.grad.sum()) for t in (x, u, v)]
    for found in run_ranks(gradients, 2):
        assert found == pytest.approx(expected, rel=1e-5)


def test_dropout_is_drawn_again_alike():
    def gradient_and_output():
        wb.manual_seed(3)
        x = wb.ones(40, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        y = held_before(lambda x: torch.nn.functional.dropout(x.exp(), 0.5), x)
        y.sum().backward()
        return y.full_tensor().tolist(), x.grad.full_tensor().tolist()

    output, gradient = run_ranks(gradient_and_output, 2)[0]
    assert gradient == pytest.approx(output) and 0.0 in output


def test_plain_tensors_in_a_world_are_recomputed_too():
    def gradient():
        x = DATA["a"].clone().requires_grad_()
        checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum().backward()
        return x.grad

    x = DATA["a"].clone().requires_grad_()
    x.sin().exp().sum().backward()
    assert torch.equal(run_ranks(gradient, 2)[1], x.grad)


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_the_second_run_is_given_what_the_first_one_was(is_looked_at):
    """Also while something looks at what autograd saves (the meter of a run): torch may hand aliases on then."""

    def program():
        seen = []

        def recorded(x, rate, *, scale, bias, mask):
            seen.append([(type(t), tuple(t.shape)) for t in (x, scale, bias)])
            return torch.tanh(x * scale) * rate + bias

        x, scale = (wb.ones(4, 3, placement=wb.placement.all("cpu"), sbp="S(0)").requires_grad_() for _ in range(2))
        with saved_tensors_hooks(lambda t: t.view_as(t), lambda t: t) if is_looked_at else nullcontext():
            y = held_before(recorded, x * 1.0, 2.0, scale=scale * 2.0, bias=torch.ones(3), mask=None)
        y.sum().backward()
        return seen, scale.grad.full_tensor()

    for seen, grad in run_ranks(program, 2):
        assert len(seen) == 2 and seen[0] == seen[1] == [*[(wb.GlobalTensor, (4, 3))] * 2, (torch.Tensor, (3,))]
        torch.testing.assert_close(grad, 4 * (1 - torch.tanh(torch.full((4, 3), 2.0)) ** 2))


def test_an_error_leaves_nothing_entered():
    def program():
        def fails(x):
            raise ValueError("by the user's function")

        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="B", requires_grad=True)
        with pytest.raises(ValueError, match="by the user's function") as caught:
            held_before(fails, x)
        left = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return left, caught.value.__context__

    assert run_ranks(program, 2) == [(None, None)] * 2


def writing(x, w, in_place):
    hidden = torch.sigmoid(x @ w)
    result = hidden @ w
    return result + (hidden.mul_(2) if in_place else hidden * 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_write_to_what_the_second_run_has_saved_is_an_error(num_ranks):
    """A checkpoint of torch's stops before it; here the second run goes on."""

    def gradient(x, w, in_place):
        held_before(writing, x, w.requires_grad_(), in_place).sum().backward()
        return w.grad

    def program(in_place):
        x, w = (wb.to_global(t, placement=wb.placement.all("cpu"), sbp=wb.sbp.broadcast) for t in operands)
        return gradient(x, w.detach(), in_place).full_tensor()

    operands = torch.ones(4, 4), torch.full((4, 4), 0.1)
    expected = gradient(operands[0], operands[1].clone(), True)
    for found in run_ranks(lambda: program(False), num_ranks):
        torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*Compute a new tensor"):
        run_ranks(lambda: program(True), num_ranks)
