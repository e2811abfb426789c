"""``recompute=attention``, ``cheap`` and a number of blocks: the numbers of one device, and bytes in their order."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.capture.captured_runs import assert_captured_like_uncaptured
from tests.training.training_runs import Setup, assert_trains_like_one_device
from workbench.core.strategy import Strategy
from workbench.cost.hardware_files import load_hardware
from workbench.cost.stage_settings import settings_of
from workbench.cost.stages import prices_of, stage_prices
from workbench.errors import StrategyError
from workbench.testing import run_ranks
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.diagnostics.memory import ActivationMeter
from workbench.training.strategies.state import describe

CASES = [
    ("llama", "data", "1x2x1 zero=3 recompute=cheap", 2),
    ("llama", "model", "1x1x2 recompute=attention", 2),
    ("cnn", "data", "1x2x1 mb=2 recompute=cheap", 2),
    ("llama", "data", "2x1x1 mb=3 1f1b recompute=attention", 2),
    ("llama", "data", "1x2x1 context=2 recompute=cheap", 2),
    ("mlp", "data", "1x2x1 recompute=2", 2),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "parallel", "options", "num_ranks"), CASES)
def test_a_few_steps_are_those_of_one_device(kind, parallel, options, num_ranks):
    """With dropout, whose numbers a second run draws again."""
    assert_trains_like_one_device(Setup(kind, num_steps=2), parallel, options, num_ranks)


class Block(nn.Module):
    """Attention whose scores are computed by products, and two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.projection = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.first(x)).split(32, -1)
        query, key, value = (part.view(batch, length, 4, 8).transpose(1, 2) for part in parts)
        weights = torch.softmax(query @ key.transpose(-1, -2) / 3, -1)
        x = x + self.projection((weights @ value).transpose(1, 2).reshape(batch, length, 32))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(32, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


INPUTS, TARGETS = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(0)), torch.arange(4)
KINDS = ("", "recompute=2", "recompute=cheap", "recompute=attention", "recompute")


@functools.cache
def costs_of_net():
    return layer_costs(Net, INPUTS, loss_fn=F.cross_entropy, targets=TARGETS)


def kept(text):
    """Bytes of activations that the cost model says a rank keeps."""
    costs = costs_of_net()
    resolved = Strategy(text).resolve(costs.layers, 2)
    settings = settings_of(costs, resolved, load_hardware("h200"), 4)
    prices = prices_of(costs.rows, resolved.layers, settings)
    (stage,) = stage_prices(costs, resolved.layers, prices, settings)
    return stage.kept_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", ["*: data | 1x2x1", "*: model | 1x1x2"])
def test_each_kind_keeps_less_and_gives_the_same_gradients(rows):
    torch.manual_seed(0)
    made = Net()

    def program(text):
        model = wb.parallelize(copy.deepcopy(made), text)
        meter = ActivationMeter(model)
        with meter.measure():
            loss = F.cross_entropy(model(INPUTS), TARGETS)
        loss.backward()
        return meter.size_bytes, [parameter.grad.full_tensor() for parameter in model.parameters()]

    texts = [f"{rows} {kind}" for kind in KINDS]
    found = [run_ranks(lambda text=text: program(text), 2)[0] for text in texts]
    for text, (size, gradients) in zip(texts, found, strict=True):
        assert all(map(torch.equal, gradients, found[0][1])), text
        batch = INPUTS.nbytes // 2 if "data" in text and "recompute" in text else 0  # the other rank's samples
        assert 0 <= size - kept(text) - batch < 100, text
    none, two, cheap, attention, full = (size for size, _ in found)
    assert none > cheap > attention > full and none > two > full


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["cheap", "attention", "1"])
def test_captured_steps_recompute_alike(kind):
    assert_captured_like_uncaptured("mlp", f"*: data | 1x2x1 recompute={kind}", "adamw", 4)


def test_mistakes_name_both_numbers_and_fixes():
    assert str(Strategy("*: data | recompute=full").options) == "recompute"
    assert Strategy("*: data").with_options(recompute=True) == Strategy("*: data | recompute")
    assert Strategy("*: data").with_options(recompute=1) == Strategy("*: data | recompute=1")
    assert str(Strategy("*: data | zero=1 recompute=cheap").with_options(recompute=False)) == "*: data | zero=1"
    with pytest.raises(StrategyError, match="recompute=0: at least 1 block"):
        Strategy("*: data | recompute=0")
    with pytest.raises(StrategyError, match="both recompute and recompute=cheap"):
        Strategy("*: data | recompute recompute=cheap")
    with pytest.raises(StrategyError, match=r"option 'recompute=cheep' .*did you mean 'recompute=cheap'"):
        Strategy("*: data | recompute=cheep")
    with pytest.raises(StrategyError, match="recompute=9, but the model has 4 blocks"):
        run_ranks(lambda: wb.parallelize(Net(), "*: data | recompute=9"), 1)
    for model, blocks in ((Net(), 4), (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)):  # each layer is one
        costs = layer_costs(model, torch.zeros(2, 3, 32 if blocks == 4 else 4))
        Strategy(f"*: data | recompute={blocks}").resolve(costs.layers, 1)
        for layers in (describe(model), costs.layers):
            with pytest.raises(StrategyError, match=f"recompute=5, but the model has {blocks} blocks"):
                Strategy("*: data | recompute=5").resolve(layers, 1)


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.write(self.layer(x))


@pytest.mark.parametrize("how", ["cheap", pytest.param("attention", marks=pytest.mark.slow)])
def test_a_second_backward_of_one_graph_says_which_option_allows_it(how):
    def program(how):
        model = wb.parallelize(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))), how)
        result = model(torch.ones(2, 4))
        result.sum().backward(retain_graph=True)
        result.square().sum().backward()

    run_ranks(lambda: program("*: data | recompute"), 1)
    with pytest.raises(
        StrategyError, match=r"Sequential runs again for the 2nd backward.*Use recompute, which keeps 0"
    ):
        run_ranks(lambda: program(f"*: data | recompute={how}"), 1)


class AddingToAProduct(nn.Module):
    """As Nystromformer does: the result of ``matmul`` is a view of the product that shares no version with it."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        mixed = torch.matmul(self.layer(x).view(-1, 1, 2, 2), self.other(x).view(-1, 1, 2, 2).sigmoid())
        mixed += x.view(-1, 1, 2, 2).sin()
        return mixed.tanh().view(-1, 4)


@pytest.mark.parametrize("block", [Writing, AddingToAProduct])
@pytest.mark.parametrize("how", ["cheap", "attention"])
def test_blocks_that_write_to_kept_results_give_the_same_gradients(block, how):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), block(), block()), torch.randn(4, 4)

    def gradients(strategy):
        parallel = wb.parallelize(copy.deepcopy(model), strategy)
        parallel(x).square().sum().backward()
        return [parameter.grad.full_tensor() for parameter in parallel.parameters()]

    expected, found = (
        run_ranks(lambda strategy=strategy: gradients(strategy), 2)[0]
        for strategy in ("*: data", f"*: data | recompute={how}")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN, nn.GRUCell])
def test_recurrent_layers_give_the_same_gradients(kind):
    """They write in place to results of products; those of a GRU are views whose writes no version counts."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Linear(3, 4), kind(4, 4)

        def forward(self, x):
            found = self.layer(self.first(x))
            return found if isinstance(found, torch.Tensor) else found[0]

    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), nn.Linear(4, 2)).double(), torch.linspace(-2, 2, 15).double().reshape(5, 3)
    models = [copy.deepcopy(model) for _ in range(2)]
    model(x).square().sum().backward()

    def program(rank):
        spread = wb.parallelize(models[rank], "*: data | recompute=cheap")
        spread(x).square().sum().backward()
        return [parameter.grad.full_tensor() for parameter in spread.parameters()]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("strategy", ["*: data | recompute", "*: model | recompute", "*: data | zero=3 recompute"])
def test_a_block_runs_again_with_the_tensors_that_stood_in_for_its_parameters(strategy):
    """The gradient through a step of gradient descent, as meta-learning takes it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double(), torch.linspace(-2, 2, 15).double()
    models = [copy.deepcopy(model) for _ in range(2)]

    def gradients(model):
        inputs, parameters = x.reshape(5, 3), dict(model.named_parameters())
        inner = torch.autograd.grad(model(inputs).square().sum(), list(parameters.values()), create_graph=True)
        stepped = {name: p - 0.1 * grad for (name, p), grad in zip(parameters.items(), inner, strict=True)}
        torch.func.functional_call(model, stepped, (inputs,)).cos().sum().backward()
        return [p.grad for p in model.parameters()]

    def program(rank):
        return [grad.full_tensor() for grad in gradients(wb.parallelize(models[rank], strategy))]

    truth = gradients(model)
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, truth)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return torch.tanh(self.last(torch.tanh(self.first(x)) * self.scale))


@pytest.mark.parametrize("options", ["recompute", "recompute=cheap", "zero=3 recompute"])
def test_a_block_runs_again_with_the_buffers_and_parameters_of_another_model(options):
    """Buffers too may have a gradient there."""
    torch.manual_seed(0)
    one, x = nn.Sequential(Scaled(), Scaled()).double(), torch.linspace(-2, 2, 15).double().reshape(5, 3)
    models = [copy.deepcopy(one) for _ in range(2)]

    def gradients(model, buffers_learn):
        others = {} if "zero" in options else {n: nn.Parameter(p.detach() * -2) for n, p in one.named_parameters()}
        scale = torch.full((3,), 3.0, dtype=torch.float64, requires_grad=buffers_learn)
        given = {**others, "0.scale": scale, "1.scale": scale * 0.5}
        torch.func.functional_call(model, given, (x,)).square().sum().backward()
        grads = [p.grad for p in (others.values() or model.parameters())]
        return [*grads, scale.grad] if buffers_learn else grads

    def program(rank, buffers_learn):
        found = gradients(wb.parallelize(models[rank], f"*: data | {options}"), buffers_learn)
        return [grad.full_tensor() if isinstance(grad, wb.GlobalTensor) else grad for grad in found]

    for buffers_learn in (False, True):
        one.zero_grad()
        truth = gradients(one, buffers_learn)
        models = [copy.deepcopy(one) for _ in range(2)]
        for found in run_ranks(lambda rank: program(rank, buffers_learn), 2):  # noqa: B023 - called here
            torch.testing.assert_close(found, truth)


class Codes(nn.Module):
    """Moves its codes in forward through ``.data``, as quantizers do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("codes", torch.linspace(-1, 1, 9).reshape(3, 3))

    def forward(self, x):
        hidden = self.first(x)
        self.codes.data.mul_(0.5).add_(hidden.detach().mean(0), alpha=0.5)
        return torch.tanh(self.last(torch.tanh(hidden @ self.codes)))


@pytest.mark.parametrize("strategy", ["*: data | recompute", "*: model | recompute"])
def test_a_block_runs_again_from_buffers_that_it_has_written_through_data(strategy):
    torch.manual_seed(0)
    model, x = nn.Sequential(Codes(), Codes()).double(), torch.linspace(-2, 2, 15).double().reshape(5, 3)
    models = [copy.deepcopy(model) for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        model(x).square().sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()] + [b.full_tensor() for b in model.buffers()]

    model(x).square().sum().backward()
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [*(p.grad for p in model.parameters()), *model.buffers()])


class Counting(nn.Module):
    """Depends on its mode, on a number and on a tensor that it changes, and keeps a loss of its own."""

    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.num_calls, self.last = 0, None

    def forward(self, x):
        self.num_calls += 1
        y = self.drop(self.fc(x)).tanh() * self.num_calls
        y, self.last = y if self.last is None else y * self.last, y.detach().mean(0)
        self.loss = y.square().mean()
        return y


def test_a_block_runs_again_from_the_attributes_of_its_first_run():
    """Its mode may change before backward, too. What the first run has left stays."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(*(nn.Sequential(Counting()) for _ in range(2))) for _ in range(2)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    x, pairs = torch.randn(6, 4), list(zip(blocks, ("mb=1", "recompute"), strict=True))

    def gradients(model):
        wb.manual_seed(0)
        for _ in range(2):
            loss = model(x).sum() + sum(block[0].loss for block in model)
            kept = [block[0].loss for block in model]
            model.eval()
            loss.backward()
            assert not model[0][0].drop.training and all(a is b[0].loss for a, b in zip(kept, model, strict=True))
            model.train()
        return [model[0][0].num_calls, *(p.grad.full_tensor() for p in model.parameters())]

    found = run_ranks(lambda: [gradients(wb.parallelize(block, f"*: data | {option}")) for block, option in pairs], 1)
    (kept, again) = found[0]
    torch.testing.assert_close(again, kept)
