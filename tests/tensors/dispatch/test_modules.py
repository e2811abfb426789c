"""Modules, optimizers' helpers and torch.nn.utils on global parameters, against one device."""

import functools

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import workbench as wb
from tests.tensors.dispatch.against_one_device import DATA, LAYOUTS, assert_as_one_device
from workbench.testing import run_ranks

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


class Layer(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(make("w", False))
        self.scale = nn.Parameter(make("v", False))

    def forward(self, x):
        return ((x * self.scale) @ self.weight).tanh()


@program
def state_dicts(make):
    layer = Layer(make)
    layer.load_state_dict({"weight": DATA["w"] * 2, "scale": torch.ones(3, dtype=torch.float64)})
    plain = layer.weight * 1
    layer.load_state_dict({name: value * 3 for name, value in layer.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"size mismatch for weight.*\[5, 3\].*\[3, 4\]"):
        layer.load_state_dict({"weight": DATA["a"], "scale": DATA["v"]})
    return plain, layer.weight, layer.scale, sorted(layer.state_dict()), isinstance(layer.weight, nn.Parameter)


@program
def assigned_state(make):
    layer = Layer(make)
    layer.load_state_dict({"weight": DATA["w"] * 2, "scale": DATA["v"].clone()}, assign=True)
    y = layer(make("a"))
    y.sum().backward()
    return y, layer.weight, layer.weight.grad


@program
def casts_of_modules(make):
    layer, a = Layer(make), make("a")
    layer(a).sum().backward()
    layer.float()
    dtypes = [str(layer.weight.dtype), str(layer.weight.grad.dtype)]
    layer.half()
    dtypes.append(str(layer.scale.dtype))
    layer.double()
    layer(a.detach()).sum().backward()
    found = layer.weight.grad.float(), layer.to("cpu").weight, layer.to(torch.float32).weight
    layer.zero_grad()
    return dtypes, found, layer.weight.grad is None, layer.requires_grad_(False).weight.requires_grad


class Square(nn.Module):
    def forward(self, x):
        return x * x


@program
def parametrizations(make):
    layer, a = Layer(make), make("a", False)
    nn.utils.parametrize.register_parametrization(layer, "weight", Square())
    y = layer(a)
    y.sum().backward()
    normed, whole = Layer(make), Layer(make)
    nn.utils.parametrizations.weight_norm(normed, "weight")
    nn.utils.parametrizations.weight_norm(whole, "weight", dim=None)  # one norm of all
    (normed(a) + whole(a)).sum().backward()
    grads = [parameter.grad for parameter in (*normed.parameters(), *whole.parameters())]
    return y, layer.parametrizations.weight.original.grad, layer.weight, normed.weight, whole.weight, grads


def clipped(make, order=2.0, foreach=None):
    layer = Layer(make)
    (layer(make("a", False)) * 7).sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    before = nn.utils.get_total_norm(grads, order)
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.5, norm_type=order, foreach=foreach, error_if_nonfinite=True)
    return before, norm, nn.utils.get_total_norm(grads, order), grads


for _order in (2.0, 1.0, 0.5, -1.0, float("inf")):
    PROGRAMS.append(functools.partial(clipped, order=_order))
    PROGRAMS[-1].__name__ = f"clipped_by_norm_{_order}"
PROGRAMS.append(clipped)


@program
def clipped_by_value(make):
    layer = Layer(make)
    (layer(make("a", False)) * 7).sum().backward()
    nn.utils.clip_grad_value_(layer.parameters(), 0.3)
    return [parameter.grad for parameter in layer.parameters()]


@program
def vectors(make):
    layer = Layer(make)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector * 2, layer.parameters())
    return vector, layer.weight, layer.scale


@program
def averages(make):
    layer, a = Layer(make), make("a", False)
    mean = swa_utils.AveragedModel(layer)
    moving = swa_utils.AveragedModel(layer, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(a).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(layer)
        moving.update_parameters(layer)
    return mean.module.weight, moving.module.weight, layer.weight, mean(a), int(mean.n_averaged)


@program
def functional_calls(make):
    layer, a = Layer(make), make("a", False)
    y = torch.func.functional_call(layer, {"weight": layer.weight * 2}, (a,))
    y.sum().backward()
    return y, layer.weight.grad, torch.func.functional_call(layer, {"weight": DATA["w"]}, (a,))


@program
def lists_of_tensors(make):
    a, b = make("a", False), make("b", False)
    x = [a.clone(), b.clone()]
    torch._foreach_mul_(x, 2.0)
    torch._foreach_add_(x, [b, a], alpha=0.5)
    torch._foreach_addcmul_(x, [a, b], [b, a], 0.1)
    torch._foreach_clamp_max_(x, 1.5)
    roots = torch._foreach_sqrt(torch._foreach_abs(x))
    torch._foreach_lerp_(x, list(roots), 0.25)
    torch._foreach_zero_([b])
    return x, roots, b, torch._foreach_norm(x), torch._foreach_maximum([a], 0.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta")
def test_as_one_device(program, turn):
    assert_as_one_device(program, LAYOUTS[turn::2])


def test_the_norm_is_over_all_stages():
    def norms():
        torch.manual_seed(0)
        x = [
            wb.full((4,), 2.0, placement=wb.placement("cpu", ranks=[rank]), sbp="B", requires_grad=True)
            for rank in (0, 1)
        ]
        for tensor in x:
            (tensor * 3).sum().backward()
        norm = nn.utils.clip_grad_norm_(x, 1.0)
        return norm.item(), [tensor.grad.norm().item() for tensor in x]

    for norm, grads in run_ranks(norms, 3):
        assert norm == pytest.approx(72**0.5) and grads == pytest.approx([0.5**0.5] * 2, rel=1e-5)


def test_overflow_in_the_sum_is_seen_by_the_norm():
    def norm():
        x = wb.ones(2, placement=wb.placement.all("cpu"), sbp="B", dtype=torch.float32, requires_grad=True)
        x.grad = wb.full((2,), 3e38, placement=wb.placement.all("cpu"), sbp="B") * 1
        x.grad = wb.to_global(torch.full((2,), 3e38), placement=wb.placement.all("cpu"), sbp="P")
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_([x], 1.0, error_if_nonfinite=True)
        return True

    assert run_ranks(norm, 2) == [True, True]
