"""Torch's optimizers with the options that torch tests on distributed tensors: the weights of one device.

Written after test/distributed/tensor/test_optimizers.py of PyTorch. Not here: parameters of one model on two meshes
(stages; ``tests/pipeline``), and the hook that makes sums of gradients (here optimizers do it).
"""

import copy
import itertools

import pytest
import torch
from torch import nn, optim

import workbench as wb
from workbench.errors import LayoutError
from workbench.testing import run_ranks

RATE, RATES = torch.tensor(0.1), torch.tensor([0.1])
SHORT = {"betas": (0.6, 0.66), "eps": 1e-6, "weight_decay": 0.05}
DRIFT = {"weight_decay": 0.05, "eps": 1e-6, "maximize": True}
OPTIONS = [
    (optim.Adam, {"foreach": False}),
    (optim.Adam, {"weight_decay": 0.05, "amsgrad": True, "maximize": True}),
    (optim.Adam, {"lr": RATE, "fused": True, "amsgrad": True, "maximize": True}),
    (optim.Adam, {"lr": RATES, "fused": True}),
    (optim.AdamW, {**SHORT, "maximize": True, "amsgrad": True}),
    (optim.AdamW, {"lr": RATE, "fused": True, "weight_decay": 0.05}),
    (optim.AdamW, {"lr": RATE, "foreach": False}),
    (optim.SGD, {"momentum": 0.06, "dampening": 0.07}),
    (optim.SGD, {"momentum": 0.08, "weight_decay": 0.05, "nesterov": True, "maximize": True, "foreach": False}),
    (optim.SGD, {"momentum": 0.08, "fused": True}),
    (optim.Adagrad, {**DRIFT, "lr_decay": 0.02, "initial_accumulator_value": 0.03}),
    (optim.Adagrad, {"fused": True}),
    (optim.RMSprop, {**DRIFT, "alpha": 0.88, "momentum": 0.9, "centered": True}),
    (optim.RMSprop, {"foreach": False}),
    (optim.Adadelta, {**DRIFT, "rho": 0.88}),
    (optim.NAdam, {**SHORT, "decoupled_weight_decay": True}),
    (optim.RAdam, {**SHORT, "decoupled_weight_decay": True, "foreach": False}),
    (optim.Adamax, {**SHORT, "maximize": True}),
    (optim.ASGD, {"lambd": 0.001, "alpha": 0.85, "t0": 1e5, "weight_decay": 0.05, "foreach": True, "maximize": True}),
    (optim.Rprop, {"maximize": True}),
    (optim.Adafactor, {}),
]
STRATEGIES = ["0: data; 2: model", "*: data | zero=1", "*: model", "*: data | zero=3", "*: data | zero=2", "*: data"]
INPUTS = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def cases():
    """Every option under every strategy; in the quick part each under one, in turn."""
    for (number, (kind, options)), (position, strategy) in itertools.product(enumerate(OPTIONS), enumerate(STRATEGIES)):
        marks = () if number % len(STRATEGIES) == position else pytest.mark.slow
        yield pytest.param(kind, options, strategy, marks=marks, id=f"{kind.__name__} {number} {strategy}")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 4)).double()


def trained(module, kind, options):
    optimizer = kind(module.parameters(), **{"lr": 0.1, **copy.deepcopy(options)})
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        module(INPUTS).square().sum().backward()
        optimizer.step()
    return [p.full_tensor().detach() if isinstance(p, wb.GlobalTensor) else p.detach() for p in module.parameters()]


@pytest.mark.parametrize(("kind", "options", "strategy"), list(cases()))
def test_three_steps_are_those_of_one_device(kind, options, strategy):
    expected = trained(model(), kind, options)
    models = [model() for _ in range(2)]
    for found in run_ranks(lambda rank: trained(wb.parallelize(models[rank], strategy), kind, options), 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def search(module):
    optimizer = optim.LBFGS(module.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = module(INPUTS).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return [p.full_tensor().detach() if isinstance(p, wb.GlobalTensor) else p.detach() for p in module.parameters()]


@pytest.mark.filterwarnings("error")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=3", pytest.param("*: model", marks=pytest.mark.slow)])
def test_an_optimizer_that_computes_with_its_own_rates(strategy):
    """LBFGS adds vectors times numbers that are 0-dim tensors."""
    expected, models = search(model()), [model() for _ in range(2)]
    for found in run_ranks(lambda rank: search(wb.parallelize(models[rank], strategy)), 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("*: data | zero=1", r"evaluates the model several times.*Leave zero= out.*write zero=3"),
        (
            "pipeline",
            r"LBFGS.step\(\): 4 parameters on 2 .*ranks=\[0\].* and .*ranks=\[1\].*one vector.*Leave the stages",
        ),
    ],
)
def test_it_is_refused_where_sums_are_made_once_per_step_and_on_stages(strategy, message):
    models = [model() for _ in range(2)]
    with pytest.raises(LayoutError, match=message):
        run_ranks(lambda rank: search(wb.parallelize(models[rank], strategy)), 2)
