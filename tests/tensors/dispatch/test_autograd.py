"""Gradients of gradients, seeds, hooks: one device's numbers under every layout, with a rank of placeholders."""

import pytest
import torch

import workbench as wb
from tests.tensors.dispatch.against_one_device import DATA, LAYOUTS, PARTIAL, Layer, assert_as_one_device
from workbench.errors import LayoutError, SbpError
from workbench.testing import run_ranks

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


@program
def gradients_by_function(make):
    a, w = make("a"), make("w")
    found = torch.autograd.grad((a @ w).tanh().sum(), [a, w])
    return found, a.grad is None, w.grad is None


@program
def several_outputs(make):
    a, w, b = make("a"), make("w"), make("b", False)
    both = torch.autograd.grad([a * 2, (a @ w).sum()], [a, w], [b, None])
    return both, torch.autograd.grad([a * 2], a, [DATA["b"]])


@program
def unused_inputs(make):
    a, w = make("a"), make("w")
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(a.sum(), [a, w])
    allowed = torch.autograd.grad(a.sum(), [a, w], allow_unused=True)
    return allowed, torch.autograd.grad((a * 2).sum(), [a, w], materialize_grads=True)


@program
def backward_by_function(make):
    a, w, b = make("a"), make("w"), make("b", False)
    torch.autograd.backward([(a @ w).sum(), a * 2, a * 3], [None, b, DATA["b"]])
    return a.grad, w.grad


@program
def backward_to_some_inputs(make):
    a, w = make("a"), make("w")
    loss = (a @ w).sin().sum()
    loss.backward(inputs=[w], retain_graph=True)
    untouched = a.grad is None
    loss.backward(inputs=a)
    return untouched, a.grad, w.grad


@program
def seeds(make):
    a, b = make("a"), make("b")
    (a * b).backward(gradient=DATA["a"], retain_graph=True)
    (a * b).backward(b.detach())
    (a * b).sum(0, keepdim=True).sum(1, keepdim=True).backward()
    return a.grad, b.grad


@program
def gradient_of_gradient(make):
    a, w = make("a"), make("w")
    of_a, of_w = torch.autograd.grad((a @ w).tanh().sum(), [a, w], create_graph=True)
    (of_a.pow(2).sum() + of_w.sin().sum()).backward()
    return of_a, of_w, of_a.requires_grad, a.grad, w.grad


@program
def mixed_second_derivative(make):
    a, b = make("a"), make("b")
    (of_b,) = torch.autograd.grad((a * b * b).sum(), [b], create_graph=True)
    (of_a,) = torch.autograd.grad(of_b.sum(), [a], create_graph=True)
    return of_b, of_a, of_b.requires_grad, of_a.requires_grad


@program
def backward_that_makes_a_graph(make):
    a, w = make("a"), make("w")
    (a @ w).pow(3).sum().backward(create_graph=True)
    penalty = (a.grad**2).sum() + (w.grad**2).sum()
    a.grad = w.grad = None
    penalty.backward()
    return a.grad, w.grad


@program
def second_order_through_writes(make):
    a, w = make("a"), make("w")
    y = a * 2
    y.mul_(a)
    y[1:3] = 1.0
    (of_a,) = torch.autograd.grad((y @ w).pow(2).sum(), [a], create_graph=True)
    (of_a**2).sum().backward()
    return a.grad, w.grad


@program
def third_order(make):
    a = make("a")
    first = torch.autograd.grad(a.pow(4).sum(), a, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), a, create_graph=True)[0]
    return torch.autograd.grad((second * a).sum(), a)[0]


@program
def gradient_of_the_seed(make):
    a, b = make("a"), make("b")
    (of_a,) = torch.autograd.grad(a.pow(2), a, b, create_graph=True)
    return of_a, torch.autograd.grad(of_a.sum(), b)


@program
def global_seeds_of_plain_outputs(make):
    x, b = DATA["a"].clone().requires_grad_(), make("b")
    (of_x,) = torch.autograd.grad(x**3, x, b, create_graph=True)
    (of_b,) = torch.autograd.grad(of_x, b, grad_outputs=[make("a", False)], retain_graph=True)
    of_x.backward(make("b", False), retain_graph=True, inputs=[x, b])
    torch.autograd.backward([x * 2, of_x.sum()], grad_tensors=[b.detach(), None], inputs=[x])
    return isinstance(of_x, wb.GlobalTensor), of_x, of_b, x.grad, b.grad


@program
def global_gradients_of_plain_tensors(make):
    x, b = DATA["a"].clone().requires_grad_(), make("b", False)
    y = TimesHidden.apply(x * 2, lambda: b)
    y.register_hook(lambda grad: grad * b.exp())
    ((y * y).sum() + (make("a") * x).sum()).backward()
    return isinstance(x.grad, wb.GlobalTensor), x.grad


class TimesHidden(torch.autograd.Function):
    """Its first argument; the gradient is multiplied with a tensor that no argument shows."""

    @staticmethod
    def forward(ctx, x, get):
        ctx.get = get
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.get(), None


@program
def plain_learnable_operand(make):
    a, w = make("a"), DATA["w"].clone().requires_grad_()
    (of_w,) = torch.autograd.grad((a @ w).tanh().sum(), [w], create_graph=True)
    of_w.pow(2).sum().backward()
    (a @ w).sum().backward()
    return of_w, a.grad, w.grad


@program
def retained_gradient(make):
    a, b = make("a"), make("b")
    y = a * b
    y.retain_grad()
    (y * y).sum().backward()
    return y.grad, y.retains_grad, a.grad, b.grad


@program
def hooks_see_and_change_whole_gradients(make):
    a, w = make("a"), make("w")
    seen, norms, y = [], [], a @ w

    def clamp(grad):
        seen.append((grad * 1.0, tuple(grad.shape)))
        return grad.clamp(-0.5, 0.5)

    y.register_hook(clamp)
    a.register_hook(lambda grad: norms.append(grad.norm().item()))
    w.register_hook(lambda grad: grad * 100).remove()
    (y * y).sum().backward()
    return a.grad, w.grad, seen, norms


@program
def hook_that_returns_a_plain_tensor(make):
    a, w = make("a"), make("w")
    y = a @ w
    y.register_hook(lambda grad: torch.ones(5, 4, dtype=torch.float64))
    (y * y).sum().backward()
    return a.grad, w.grad


@program
def hooks_after_accumulation(make):
    a, w = make("a"), make("w")
    seen = []

    def take(leaf):
        seen.append(leaf.grad.norm().item())
        leaf.grad = None

    a.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.sum().item()))
    w.register_post_accumulate_grad_hook(take)
    ((a @ w) ** 2).sum().backward()
    return a.grad, w.grad is None, sorted(seen)


@program
def hooks_of_modules(make):
    layer, a, seen = Layer(make), make("a"), []

    def after(module, grad_inputs, grad_outputs):
        seen.extend([grad_inputs[0] * 1, grad_outputs[0] * 1])
        return (grad_inputs[0].clamp(-0.1, 0.1),)

    layer.register_full_backward_hook(after)
    layer.register_full_backward_pre_hook(lambda module, grad_outputs: (grad_outputs[0] * 2,))
    (layer(a) ** 2).sum().backward()
    return a.grad, layer.weight.grad, seen


@program
def one_hook_for_several_tensors(make):
    a, w, seen = make("a"), make("w"), []
    y, z = a * 2, w * 3
    torch.autograd.graph.register_multi_grad_hook((y, z), lambda grads: seen.extend(grad * 1 for grad in grads))
    (y @ z).sin().sum().backward()
    return a.grad, w.grad, seen


@program
def hooks_on_saved_tensors(make):
    a, w = make("a"), make("w")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 1,), lambda kept: kept[0]):
        y = (a @ w).tanh().exp()
    with torch.autograd.graph.save_on_cpu():
        y = y * y
    y.sum().backward()
    return a.grad, w.grad


@program
def grad_modes(make):
    a, w = make("a"), make("w", False)
    with torch.no_grad():
        y = a * 2
    with torch.inference_mode():
        z = ((a * 3) @ w).softmax(-1)
        flags = (y.requires_grad, z.requires_grad)
        z = z * 1
    (a @ w).relu().sum().backward()
    return flags, y, z, a.grad


@program
def jacobians(make):
    v = make("v")
    functional = torch.autograd.functional
    return functional.jacobian(lambda x: x * x.sum(), v), functional.hessian(lambda x: (x**3).sum(), v)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.filterwarnings("ignore:Using backward\\(\\)")
def test_as_one_device(program, turn):
    assert_as_one_device(program, [*LAYOUTS, *PARTIAL][turn::4])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode():
    with torch.autograd.detect_anomaly():  # it is one for the process, so not inside the simulated ranks
        assert_as_one_device(seeds)


def test_the_oracle_notices_a_wrong_gradient():
    def wrong(make):
        a = make("a")
        return torch.autograd.grad((a * a).sum() if isinstance(a, wb.GlobalTensor) else a.sum(), a)

    with pytest.raises(AssertionError, match="wrong, "):
        assert_as_one_device(wrong)


@pytest.mark.parametrize(("sbp", "seed"), [("B", 0.25), (("B", "P"), 0.5), ("P", 1.0), (("P", "P"), 1.0)])
def test_a_loss_is_seeded_with_one_over_its_copies(sbp, seed):
    ranks = [[0, 1], [2, 3]] if isinstance(sbp, tuple) else [0, 1, 2, 3]

    def local_seed():
        loss = wb.ones((), placement=wb.placement("cpu", ranks=ranks), sbp=sbp, requires_grad=True)
        loss.backward()
        return loss.grad.to_local().item()

    assert run_ranks(local_seed, 4) == [seed] * 4


def test_gradients_of_what_leaves():
    def gradients(rank):
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="B", requires_grad=True)
        (x.to_local() * 3).sum().backward()
        same = x.grad.full_tensor().tolist()
        x.grad = None
        (x.to_local(grad_sbp="P") * (rank + 1)).sum().backward()
        with pytest.raises(SbpError, match=r"grad_sbp=.*S\(0\).*P for a loss of each rank's own"):
            x.to_local(grad_sbp="S(0)")
        return same, x.grad.full_tensor().tolist()

    assert run_ranks(gradients, 2) == [([3.0] * 4, [3.0] * 4)] * 2


def test_gradient_of_the_gradient_of_what_leaves():
    def gradients():
        x = wb.tensor([1.0, 2.0], placement=wb.placement("cpu", ranks=[0, 1]), sbp="B", requires_grad=True)
        (first,) = torch.autograd.grad((x.to_local() ** 3).sum(), x, create_graph=True)
        first.sum().backward()
        return first.to_global(sbp="B").to_local().tolist(), x.grad.to_global(sbp="B").to_local().tolist()

    assert run_ranks(gradients, 2) == [([3.0, 12.0], [6.0, 12.0])] * 2


@pytest.mark.parametrize("source", [None, 1])
def test_gradients_of_what_enters(source):
    def gradients(rank):
        rows = torch.full((rank + 1, 2), 2.0, requires_grad=rank < 2)  # uneven, and not all of them learn
        placement = wb.placement("cpu", ranks=[0, 1])
        if source is None:
            x = wb.to_global(rows, placement=placement, sbp="S(0)")
        else:
            x = wb.to_global(rows, placement=placement, sbp="S(0)", broadcast_from=source)
        (x**2).sum().backward()
        return x.shape[0], x.requires_grad, None if rows.grad is None else rows.grad.tolist()

    found = run_ranks(gradients, 3)
    if source is None:
        assert found == [(3, True, [[4.0, 4.0]]), (3, True, [[4.0, 4.0]] * 2), (3, True, None)]
    else:
        assert found == [(2, True, None), (2, True, [[4.0, 4.0]] * 2), (2, True, None)]


def test_a_placeholders_grad_is_there_when_its_owners_is():
    def flags():
        x = wb.ones(4, placement=wb.placement("cpu", ranks=[0]), sbp="B", requires_grad=True)
        y = wb.ones(4, placement=wb.placement("cpu", ranks=[0]), sbp="B", requires_grad=True)
        torch.autograd.grad((x * y).sum(), x)
        after_grad = x.grad is None, y.grad is None
        (x * y).sum().backward(inputs=[y])
        after_inputs = x.grad is None, y.grad is None, y.grad is y.grad, tuple(y.grad.shape)
        (x.expand_as(y.view(4)) * 2).sum().backward()
        x.grad, both = None, (x.grad is None, x.requires_grad, (x * y).is_leaf)
        return after_grad, after_inputs, both, x.grad is None

    assert len(set(run_ranks(flags, 2))) == 1


def test_a_placeholder_is_linked_to_what_its_owner_is_linked_to():
    """``expand_as`` takes the shape of y only: a backward that reached y on one rank only would wait for ever."""

    def grads():
        y = wb.ones(4, placement=wb.placement("cpu", ranks=[1]), sbp="B", requires_grad=True)
        x = wb.ones((), placement=wb.placement("cpu", ranks=[0]), sbp="B", requires_grad=True)
        moved = (y * 2).to_global(placement=wb.placement("cpu", ranks=[0]))
        x.expand_as(moved).sum().backward()
        return x.grad is None, y.grad is None

    assert run_ranks(grads, 2) == [(False, True)] * 2


def test_hooks_of_old_are_refused():
    def program():
        layer = torch.nn.Identity()
        layer.register_backward_hook(lambda module, grad_inputs, grad_outputs: None)
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        with pytest.raises(LayoutError, match=r"register_backward_hook.*\(4,\), S\(0\).*register_full_backward_hook"):
            layer(x * 2)

    run_ranks(program, 2)


def test_errors_name_what_to_write():
    def program():
        x = wb.ones(4, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        with pytest.raises(RuntimeError, match=r"scalar outputs.*\(4,\)"):
            x.backward()
        with pytest.raises(RuntimeError, match=r"\(3,\) and the output \(4,\)"):
            x.backward(torch.ones(3))
        with pytest.raises(LayoutError, match=r"is_grads_batched.*once per gradient"):
            torch.autograd.grad(x, x, torch.ones(2, 4), is_grads_batched=True)
        y = x * 1
        y.register_hook(lambda grad: torch.ones(2))
        with pytest.raises(RuntimeError, match=r"hook returned a gradient of shape \(2,\).*\(4,\)"):
            y.sum().backward()

    run_ranks(program, 2)
