"""Quantization-aware training with the modules of ``torch.ao.quantization``, against one device."""

import copy

import pytest
import torch
from torch import nn
from torch.ao import quantization

import workbench as wb
from tests.pipeline.test_hooks import whole
from workbench.errors import LayoutError, StrategyError
from workbench.testing import run_ranks

STRATEGIES = ["*: data", "0: model:column; 2: model:row", "0: data; 2: data@1", "data | zero=3"]
X, Y = torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 4


class Observed(nn.Module):
    """Quantizes the weight of a layer by a scale for each row, found by a module of Python."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.quantize = quantization.FakeQuantize(
            quantization.MovingAveragePerChannelMinMaxObserver, -128, 127,
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0,
        )  # fmt: skip

    def forward(self, x):
        return nn.functional.linear(x, self.quantize(self.layer.weight), self.layer.bias)


def prepared(model):
    """The first layer by torch's fused modules, the last one by ours."""
    model[0].qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model.train()
    quantization.prepare_qat(model, inplace=True)
    model[2] = Observed(model[2])
    return model


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def trained(model):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(X), Y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")  # of torch.ao, which is deprecated; of gathered weights
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_observers_that_have_seen_a_batch_train_as_on_one_device(strategy):
    model = prepared(plain())
    model(X)
    models = [copy.deepcopy(model) for _ in range(2)]
    expected = trained(model)
    for found in run_ranks(lambda rank: trained(wb.parallelize(models[rank], strategy)), 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (0, r"fused_moving_avg_obs_fake_quant.*the shape \(8,\) in place of .*once, before wb.parallelize"),
        (2, r"resize_.*with shape \(0,\).*once, before wb.parallelize"),
    ],
)
def test_observers_without_a_batch_are_refused(layer, message):
    """The scales got as many values as there are rows, and their layouts, which checkpoints save, had one."""
    models = [prepared(plain()) for _ in range(2)]
    x = torch.ones(4, 6 if layer == 0 else 8)

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        with pytest.raises(LayoutError, match=message):
            model[layer](x)

    run_ranks(program, 2)


@pytest.mark.filterwarnings("ignore")
def test_layers_that_are_prepared_after_the_strategy_are_refused():
    models = [plain() for _ in range(2)]

    def program(rank):
        model = prepared(wb.parallelize(models[rank], "*: data"))
        with pytest.raises(StrategyError, match=r"layer '0': this Linear has a copy of the hook.*before"):
            model(X)

    run_ranks(program, 2)
