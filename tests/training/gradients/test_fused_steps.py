"""Adam and SGD in one pass over memory, where the user leaves it to torch: the numbers of torch's own choice."""

import copy

import pytest
import torch

import workbench as wb
from workbench.testing import run_ranks
from workbench.training.gradients.fused_steps import fuse, unfuse

OPTIONS = [
    {},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"lr": torch.tensor(0.02, dtype=torch.float64)},
]


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((33, 17), (129,), (0, 3), ())]


def train(parameters, optimizer, may_fuse=True, transposed=False):
    """Some steps; whether each was fused."""
    generator, fused = torch.Generator().manual_seed(1), []
    for _ in range(4):
        for p in parameters:
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = grad.mT.contiguous().mT if transposed and p.dim() == 2 else grad
        groups = fuse(optimizer) if may_fuse else []
        fused.append(bool(groups))
        optimizer.step()
        unfuse(groups)
    return fused


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_step_has_the_numbers_of_torchs_choice(kind, options, dtype):
    found, wanted = parameters(dtype), parameters(dtype)
    optimizer, plain = kind(found, **options), kind(wanted, **options)
    assert all(train(found, optimizer))
    train(wanted, plain, may_fuse=False)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert optimizer.param_groups[0]["fused"] is None
    torch.testing.assert_close(optimizer.state_dict(), plain.state_dict(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True},
        {"dampening": 0.3},
        {"maximize": True, "weight_decay": 0.1},
        {"nesterov": True, "maximize": True, "weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_step_of_sgd_has_the_numbers_of_torchs_choice(options, dtype):
    found, wanted = parameters(dtype), parameters(dtype)
    options = {"lr": 0.1, "momentum": 0.9, **options}
    optimizer, plain = torch.optim.SGD(found, **options), torch.optim.SGD(wanted, **options)
    assert all(train(found, optimizer))
    train(wanted, plain, may_fuse=False)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(optimizer.state_dict(), plain.state_dict(), rtol=tolerance, atol=tolerance)


def test_sgd_is_not_fused_while_some_parameters_have_a_momentum_and_others_have_none():
    found, wanted, fused = parameters(), parameters(), []
    optimizers = [torch.optim.SGD(ps, lr=0.1, momentum=0.9) for ps in (found, wanted)]
    for step in range(4):
        for params, optimizer in zip((found, wanted), optimizers, strict=True):
            for number, p in enumerate(params):
                p.grad = None if number == 1 and step in (0, 3) else torch.full_like(p, 1.0 + step)
            if params is found:
                groups = fuse(optimizer)
                fused.append(bool(groups))
                optimizer.step()
                unfuse(groups)
            else:
                optimizer.step()
    assert fused == [True, False, True, True]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, foreach=False),
        lambda p: torch.optim.AdamW(p, fused=False),
        lambda p: torch.optim.AdamW(p, differentiable=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, differentiable=True),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
        lambda p: torch.optim.NAdam(p, lr=0.1),
    ],
)
def test_what_the_user_or_torch_has_settled_stays(optimizer):
    assert fuse(optimizer(parameters())) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_less_than_single_precision_it_would_be_other_numbers(dtype):
    assert fuse(torch.optim.AdamW(parameters(dtype))) == []


def test_gradients_that_are_not_contiguous_are_not_given_to_a_step_that_reads_them_as_if():
    found = parameters()
    assert not any(train(found, torch.optim.AdamW(found), transposed=True))


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=1"])
def test_transposed_gradients_and_states_of_global_parameters_are_read_as_they_are(strategy, fused):
    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(8, 6, bias=False).double()

    models = [model() for _ in range(3)]
    grads = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = torch.optim.Adam(models[2].parameters(), lr=0.1)

    def saved_transposed(optimizer):
        """A state as a file may hold it: the same numbers in another order in memory."""
        state = copy.deepcopy(optimizer.state_dict())
        for values in state["state"].values():
            values["exp_avg"] = values["exp_avg"].mT.contiguous().mT
        return state

    models[2].weight.grad = grads[0].T.contiguous()
    plain.step()
    saved = saved_transposed(plain)
    before = models[2].weight.detach().clone()
    for grad in grads[1:]:
        models[2].weight.grad = grad.T.contiguous()
        plain.step()

    def body(rank):
        model = models[rank]
        with torch.no_grad():
            model.weight.copy_(before)
        model = wb.parallelize(model, strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        optimizer.load_state_dict({**copy.deepcopy(saved), "param_groups": optimizer.state_dict()["param_groups"]})
        for grad in grads[1:]:
            whole = wb.tensor(grad.T, placement=model.weight.placement, sbp="B")
            model.weight.grad = whole.to_global(sbp=model.weight.sbp)
            optimizer.step()
        assert optimizer.param_groups[0]["fused"] is fused
        return model.weight.full_tensor().detach()

    for found in run_ranks(body, 2):
        torch.testing.assert_close(found, models[2].weight.detach(), rtol=1e-12, atol=1e-12)
