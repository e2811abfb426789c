"""``fp8`` in layers other than ``nn.Linear`` under its own name: those of GPT-2, and experts of a list."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import workbench as wb
from workbench.core.float8_layers import left_in_16_bits
from workbench.core.model_costs import LayerCost, OpCost, in_8_bits
from workbench.core.rows import Layer
from workbench.core.verdict import TOLERANCES
from workbench.testing import run_ranks
from workbench.training.precision import LinearIn8Bits, compute_in

NUM_EXPERTS, STEPS = 4, 4
pytestmark = pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")


class Experts(nn.ModuleList):
    def forward(self, x, chosen, weights):
        result = torch.zeros_like(x)
        for number, expert in enumerate(self):
            rows, places = torch.where(chosen == number)
            result = result.index_add(0, rows, (expert(x[rows]) * weights[rows, places, None]).to(x.dtype))
        return result


class Net(nn.Module):
    """The last expert gets no token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.c_fc, self.c_proj = Conv1D(64, 32), Conv1D(32, 64)
        self.router = nn.Linear(32, NUM_EXPERTS - 1, bias=False)
        hidden = [(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(NUM_EXPERTS)]
        self.experts, self.head = Experts(nn.Sequential(*parts) for parts in hidden), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.c_proj(F.gelu(self.c_fc(x)))
        weights, chosen = self.router(x).float().softmax(-1).topk(2)
        return self.head(x + self.experts(x, chosen, weights))


def loss_of(output, targets):
    return F.cross_entropy(output.float(), targets)


def trained(model, strategy):
    model = wb.parallelize(model, strategy)
    assert isinstance(model.c_fc.forward, LinearIn8Bits)
    assert isinstance(model.experts[0][0].forward, LinearIn8Bits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        x = torch.randn(24, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses.append(wb.forward_backward(model, loss_of, x, x[:, :16].argmax(1)).item())
        optimizer.step()
    return losses


@functools.cache
def on_one_rank():
    model = Net()
    return run_ranks(lambda: trained(model, "*: data | fp8"), 1)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: data; *: expert | 1x2x1", "*: model | 1x1x2"])
def test_losses_of_one_device_in_fp8(strategy):
    truth = on_one_rank()
    models = [Net() for _ in range(2)]
    for losses in run_ranks(lambda rank: trained(models[rank], f"{strategy} fp8"), 2):
        assert losses == pytest.approx(truth, abs=TOLERANCES["fp8"].loss, rel=TOLERANCES["fp8"].loss)


def test_a_weight_of_inputs_and_outputs_has_the_8_bits_of_its_transpose():
    conv, linear = Conv1D(48, 32), nn.Linear(32, 48)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    results = []
    for layer in (conv, linear):
        compute_in(layer, "fp8", torch.device("cpu"), "cpu")
        x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        result = layer(x)
        result.float().square().sum().backward()
        results.append((result.detach(), x.grad, layer.bias.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(conv.weight.grad, linear.weight.grad.t())


def test_the_projection_of_torchs_attention_which_nobody_calls_stays_in_16_bits():
    """Under ZeRO 3 its weight then comes back for backward in 16 bits, too."""
    block = nn.TransformerEncoderLayer(32, 2, 64)
    compute_in(block, "fp8", torch.device("cpu"), "cpu")
    assert isinstance(block.linear1.forward, LinearIn8Bits)
    assert not isinstance(block.self_attn.out_proj.forward, LinearIn8Bits)


def test_what_is_counted_and_named():
    """A kept input has 8 bits, whichever dim of the weight is its own."""
    product = OpCost("linear", flops=4 * 2 * 32 * 48, moved_bytes=0, inner=32, saved_bytes=4 * 32 * 2)
    conv, linear = Layer("conv", "Conv1D", {"weight": (32, 48)}), Layer("linear", "Linear", {"weight": (48, 32)})
    kept = [in_8_bits(LayerCost(layer, (product,), num_cast=32 * 48)) for layer in (conv, linear)]
    assert [(row.own[0].saved_bytes, row.num_cast) for row in kept] == [(4 * 32, 0)] * 2
    assert left_in_16_bits([conv, Layer("odd", "Conv1D", {"weight": (32, 50)})])[0].name == "odd"
