"""A split backward of layers that run again: once, in the part for inputs; what weights need is kept for the other."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import workbench as wb
from tests.pipeline.test_split_backward import Counting, Frozen, Model, Plain, Shared, run
from tests.training.test_recompute_kinds import INPUTS, TARGETS, Net
from tests.training.training_runs import Setup, assert_trains_like_one_device, strategy_text
from workbench.core.strategy import Strategy
from workbench.cost.hardware_files import load_hardware
from workbench.cost.stage_settings import settings_of
from workbench.cost.stages import prices_of, stage_prices
from workbench.errors import StrategyError
from workbench.tensors.global_tensor import plain
from workbench.tensors.torch_patches.checkpoint import _Saved
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.offload import activations
from workbench.training.pipelining.running_step import RunningStep
from workbench.training.pipelining.split_backward import WeightGradients, backward_of_inputs


class Normalized(Plain):
    """A weight that is computed from two parameters, in a function that saves them."""

    def __init__(self):
        super().__init__()
        self.one = parametrizations.weight_norm(self.one)


class HalfShared(Plain):
    """A function of two parameters, one of which another function reads too."""

    def forward(self, x):
        weight = self.one.weight * self.two.weight.t().exp()
        return x + self.two(F.linear(self.norm(x), weight, self.one.bias))


KINDS = [Plain, Shared, Frozen, Normalized, HalfShared]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("recompute", ["recompute", "recompute=cheap", "recompute=attention", "recompute=2"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_backward(kind, recompute):
    torch.manual_seed(0)
    one = Model(kind)
    whole, split = run(one, "1f1b")[0], run(one, f"zero_bubble {recompute}")[0]
    assert any(grad is not None for grad in whole.values())
    for name, grad in whole.items():
        assert (grad is None) == (split[name] is None), name
        assert grad is None or torch.equal(grad, split[name]), name


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("kind", [Plain, Normalized])
def test_the_first_part_gives_no_parameter_its_gradient(kind, monkeypatch):
    monkeypatch.setattr(WeightGradients, "accumulate", lambda self: None)

    def early(model, step):
        step()
        return [name for name, p in model.named_parameters() if not p.is_placeholder and p.grad is not None]

    torch.manual_seed(0)
    assert run(Model(kind), "zero_bubble recompute", early)[1] == []


class Gelu(Plain):
    """Its activation function reads what no weight needs."""

    def forward(self, x):
        return x + self.two(F.gelu(self.one(self.norm(x))))


def kept_bytes(of):
    """What checkpoints keep for gradients of weights, apart from the weights themselves."""
    gc.collect()
    weights = {p.untyped_storage().data_ptr() for p in of.parameters()}
    kept = [one.kept for one in gc.get_objects() if isinstance(one, _Saved) and one.kept is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(plain, kept)}
    return sum(size for address, size in storages.items() if address not in weights)


def test_layers_run_again_once_and_keep_what_their_weights_need():
    """The second part has the products of weights alone, from the inputs of layers; nothing is left afterwards."""
    torch.manual_seed(0)
    block, x = Gelu(), torch.randn(64, 8)

    def program():
        model = wb.parallelize(block, "*: data")
        given = wb.to_global(x, placement=wb.placement.all("cpu"), sbp="B").requires_grad_()
        running = RunningStep((), "zero_bubble", [], 1, splits_backward=True)
        with current().context.temporarily(running=running):
            with Counting() as whole:
                model(given).sum().backward()
            loss = checkpoint(model, given, use_reentrant=False).sum()
            with Counting() as first:
                weights = backward_of_inputs(loss, running)
            held = kept_bytes(model)
            with Counting() as second:
                weights.accumulate()
        assert (whole.products, first.products, second.products) == (6, 2 + 2, 2)
        assert held == 4 * 64 * (8 + 2 + 8 + 16)  # of the norm: its input, mean and deviation; of the layers: theirs
        assert kept_bytes(model) == 0

    run_ranks(program, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", ["recompute", "recompute=2"])
def test_what_blocks_keep_for_their_weights_is_predicted(recompute):
    """Besides their inputs."""
    torch.manual_seed(0)
    made = Net()
    costs = layer_costs(Net, INPUTS, loss_fn=F.cross_entropy, targets=TARGETS)
    resolved = Strategy(f"*: data | {recompute}").resolve(costs.layers, 1)
    settings = settings_of(costs, resolved, load_hardware("h200"), len(INPUTS))
    (stage,) = stage_prices(costs, resolved.layers, prices_of(costs.rows, resolved.layers, settings), settings)

    def program():
        model = wb.parallelize(made, f"*: data | {recompute}")
        given = wb.to_global(INPUTS, placement=wb.placement.all("cpu"), sbp="B").requires_grad_()
        running = RunningStep((), "zero_bubble", [], 1, splits_backward=True)
        with current().context.temporarily(running=running):
            weights = backward_of_inputs(F.cross_entropy(model(given), TARGETS), running)
            inputs = (4 if recompute == "recompute" else 2) * INPUTS.nbytes
            assert kept_bytes(model) == inputs + stage.operands_bytes
            weights.accumulate()

    run_ranks(program, 1)


class Checkpointed(nn.Module):
    """A checkpoint of the model's own."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)
        return self.last(x)


class Nested(Checkpointed):
    """A checkpoint in a checkpoint."""

    def forward(self, x):
        inner = lambda x: checkpoint(self.block, self.last(x).tanh() @ self.last.weight, use_reentrant=False)  # noqa: E731
        return self.last(checkpoint(inner, self.first(x), use_reentrant=self.use_reentrant))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Checkpointed, Nested])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_the_models_own_runs_under_a_split_backward(kind, use_reentrant):
    torch.manual_seed(0)
    one = kind(use_reentrant)

    def program(rank, models, schedule):
        model = wb.parallelize(models[rank], f"first: data@0; block.0: data@1; last: data@1 | 2x1x1 mb=3 {schedule}")
        for _ in range(2):
            loss = wb.forward_backward(model, F.mse_loss, torch.ones(6, 6), torch.ones(6, 4))
        return loss.item(), [parameter.grad.full_tensor() for parameter in model.parameters()]

    found = {}
    for schedule in ("1f1b", "zero_bubble"):
        models = [copy.deepcopy(one) for _ in range(2)]
        found[schedule] = run_ranks(lambda rank, s=schedule, m=models: program(rank, m, s), 2)[0]
    assert found["1f1b"][0] == found["zero_bubble"][0]
    assert all(map(torch.equal, found["1f1b"][1], found["zero_bubble"][1]))


def test_a_second_recomputation_is_refused(monkeypatch):
    """A function that reads for its weights what it did not read for its inputs."""
    monkeypatch.setattr(WeightGradients, "watch", watch_without_keeping)
    torch.manual_seed(0)
    with pytest.raises(StrategyError, match=r"zero_bubble: a layer would run again 2 times.*Use 1f1b"):
        run(Model(Plain), "zero_bubble recompute")


def watch_without_keeping(self, node, parameters, between):
    grads = []
    node.register_prehook(grads.extend)
    self._left.append((node, grads, parameters))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "options", "num_ranks"),
    [
        ("mlp", "2x1x1 mb=3 zero_bubble recompute", 2),
        ("gpt2", "2x1x1 mb=3 zero_bubble recompute", 2),
        ("gpt2", "2x1x1 mb=5 zero_bubble_v recompute", 2),
        ("llama", "2x1x1 mb=5 dualpipe_v recompute=cheap", 2),
        pytest.param("gpt2", "2x2x1 mb=3 zero_bubble_v recompute zero=2", 4, marks=pytest.mark.slow),
        ("cnn", "2x1x1 mb=3 zero_bubble_v recompute", 2),
        pytest.param("gpt2", "2x2x1 mb=3 zero_bubble_v recompute=attention zero=3", 4, marks=pytest.mark.slow),
        pytest.param("gpt2", "2x1x2 mb=3 zero_bubble recompute sequence", 4, marks=pytest.mark.slow),
        pytest.param("mlp", "2x2x1 mb=3 dualpipe_v recompute zero=1", 4, marks=pytest.mark.slow),
    ],
)
def test_a_few_steps_are_those_of_one_device(kind, options, num_ranks):
    """With dropout, whose numbers a second run draws again."""
    parallel = "model" if "x1x2 " in options else "data"
    assert_trains_like_one_device(Setup(kind, num_steps=2), parallel, options, num_ranks)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", "2x1x1 mb=3 zero_bubble_v recompute"),
        pytest.param("llama", "2x1x1 mb=5 dualpipe_v recompute=cheap", marks=pytest.mark.slow),
        pytest.param("gpt2", "2x1x1 mb=3 interleaved recompute=1", marks=pytest.mark.slow),
    ],
)
def test_offloaded_inputs_of_blocks_come_back_as_they_were_boxed(kind, options, monkeypatch):
    """Else a block asks the stage before it again, which is on the same rank at the turn of a V."""
    monkeypatch.setattr(activations, "MIN_BYTES", 64)
    assert_trains_like_one_device(Setup(kind, num_steps=1), "data", f"{options} offload=activations", 2)


@pytest.mark.parametrize(
    "schedule", ["zero_bubble", *(pytest.param(each, marks=pytest.mark.slow) for each in ("1f1b", "gpipe"))]
)
def test_a_block_over_several_stages_runs_again_where_each_has_a_rank(schedule):
    assert_trains_like_one_device(Setup("gpt2", num_steps=1), "data", f"8x1x1 mb=3 {schedule} recompute", 8)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble_v", "dualpipe_v"])
def test_a_block_over_several_stages_does_not_run_again_where_ranks_have_several(schedule):
    """Its stages would wait for each other for ever."""
    models = [Setup("gpt2").model() for _ in range(4)]
    rows_of_eight_stages = strategy_text("gpt2", "data", "8x1x1").partition(" | ")[0]

    def program(rank):
        with pytest.raises(StrategyError, match=r"recompute runs transformer\.h\.0 again, which lies on stages 0 to 3"):
            wb.parallelize(models[rank], f"{rows_of_eight_stages} | 4x1x1 mb=7 {schedule} recompute")

    run_ranks(program, 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ["zero_bubble recompute", "zero_bubble_v recompute", "dualpipe_v recompute=cheap"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "cnn"])
def test_twenty_steps_are_those_of_one_device(kind, options):
    for setup in (Setup(kind), Setup(kind, "adamw", torch.float64)):
        assert_trains_like_one_device(setup, "data", f"2x1x1 mb=5 {options}", 2)
