"""Unmodified models under strategies: losses and final weights of one device, whatever is split where."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.models import batch_for, make
from tests.training.programs import training_equals_one_device
from workbench.errors import LayoutError, StrategyError
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.testing import run_ranks
from workbench.training.parallel import describe

STRATEGIES = [
    ("data", 2),
    ("data", 3),
    ("model", 2),
    ("model", 3),
    ("pipeline", 2),
    ("hybrid", 2),
    ("hybrid", 3),
    ("*: data | 1x2x2", 4),
    ("*: model | 1x2x2", 4),
]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "encoder", "attention", "skip"])
@pytest.mark.parametrize(("strategy", "num_ranks"), STRATEGIES)
def test_training_equals_one_device(kind, strategy, num_ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for losses, weights in run_ranks(lambda: training_equals_one_device(kind, strategy, num_ranks), num_ranks):
            assert losses < 1e-5 and weights < 1e-5


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["scaled table", "offset table", "own table"])
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("*: model", 2),
        ("*: model", 3),
        ("*: model | 1x2x2", 4),
        ("words: data; places: data; fc: model@1; head: data | 2x1x2 mb=3 1f1b", 4),
        ("*: model | 1x2x2 zero=3", 4),
    ],
)
def test_a_head_shares_the_weight_of_a_table_of_any_class(kind, strategy, num_ranks):
    def program():
        model = wb.parallelize(make(kind), strategy)
        assert model.head.weight is model.words.weight
        is_split = isinstance(model.words, nn.Embedding) and strategy.startswith("*")
        assert any(entry == wb.sbp.split(0) for entry in model.head.weight.sbp) == is_split
        return training_equals_one_device(kind, strategy, num_ranks)

    for losses, weights in run_ranks(program, num_ranks):
        assert losses < 1e-5 and weights < 1e-5


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize(("strategy", "num_ranks"), [("data", 3), ("model", 2), ("pipeline", 3), ("hybrid", 2)])
def test_dropout_drops_the_same_under_every_strategy(strategy, num_ranks):
    for losses, weights in run_ranks(lambda: training_equals_one_device("dropping", strategy, num_ranks), num_ranks):
        assert losses < 1e-5 and weights < 1e-5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", ["2x1x2 mb=3 gpipe", "2x2x1 mb=2 1f1b", "2x1x2 mb=9 1f1b"])
def test_pipelines_of_wide_stages(options):
    text = f"0: data; 2: model; 4: model@1; 6: data@1 | {options}"
    for losses, weights in run_ranks(lambda: training_equals_one_device("mlp", text, 4), 4):
        assert losses < 1e-5 and weights < 1e-5


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_skip_edge_and_a_tied_weight_across_stages(schedule):
    skip = f"a: data; b: data@1; c: data@1; d: data@2; head: data@2 | 3x1x1 mb=4 {schedule}"
    tied = f"tok: data; norm: data@0; q: data@1; head: data@2 | 3x1x1 mb=4 {schedule}"
    for kind, text in (("skip", skip), ("attention", tied)):
        for losses, weights in run_ranks(lambda k=kind, t=text: training_equals_one_device(k, t, 3), 3):
            assert losses < 1e-5 and weights < 1e-5


def test_what_lies_where():
    models = [make("mlp") for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: model")
        return {name: (str(p.sbp[0]), tuple(p.to_local().shape)) for name, p in model.named_parameters()}

    held = run_ranks(program, 2)[1]
    assert held["0.weight"] == ("S(0)", (16, 16)) and held["0.bias"] == ("S(0)", (16,))
    assert held["2.weight"] == ("S(1)", (24, 16)) and held["2.bias"] == ("B", (24,))


def test_a_stage_that_is_not_here_takes_no_memory():
    models = [make("mlp") for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "0: data; 4: data@1")
        loss = F.cross_entropy(model(torch.ones(6, 16)), torch.zeros(6, dtype=torch.long))
        loss.backward()
        return [p.is_placeholder for p in model.parameters()], [p.grad is None for p in model.parameters()]

    (placeholders0, none0), (placeholders1, none1) = run_ranks(program, 2)
    assert placeholders0 == [False] * 4 + [True] * 4 and placeholders1 == [True] * 4 + [False] * 4
    assert not any(none0) and not any(none1)


def test_the_boxings_of_data_parallelism_are_the_gradients_alone():
    models = [make("mlp") for _ in range(2)]
    inputs, targets = batch_for("mlp")

    def program(rank):
        from workbench.tensors.world import current

        model = wb.parallelize(models[rank], "*: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(model(inputs), targets).backward()
        assert current().traffic.sent_bytes == 0
        optimizer.step()
        return current().traffic.by_kind, sum(p.numel() for p in model.parameters())

    kinds, size = run_ranks(program, 2)[0]
    assert kinds == {"gradients": 4 * size}


def test_column_then_row_costs_one_all_reduce_forward_and_one_backward():
    models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def program(rank):
        from workbench.tensors.world import current

        model = wb.parallelize(models[rank], "*: model")
        x = torch.ones(4, 8, requires_grad=True)
        model(x).sum().backward()
        return current().traffic.by_kind

    kinds = run_ranks(program, 2)[0]
    assert set(kinds) <= {"all-reduce", "reduce-scatter", "all-gather"}, kinds
    assert sum(kinds.values()) <= 3 * 4 * 8 * 4, kinds


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_step_on_local_shards(name, foreach):
    models = [make("mlp") for _ in range(3)]
    inputs, targets = batch_for("mlp")

    def steps(model):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return optimizer

    one = models[2]
    steps(one)
    expected = [p.detach() for p in one.parameters()]

    def program(rank):
        model = wb.parallelize(models[rank], "0: data; 2: model; 4: model; 6: data | 1x1x2")
        optimizer = steps(model)
        assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
        assert all(g is p for g, p in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        return [p.full_tensor().detach() for p in model.parameters()]

    for found, truth in zip(run_ranks(program, 2)[0], expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=2e-5)


def test_gradients_accumulate_without_communication_and_clip_globally():
    models = [make("mlp") for _ in range(3)]
    inputs, targets = batch_for("mlp")

    def accumulate(model):
        for part in range(2):
            F.cross_entropy(model(inputs[part::2]), targets[part::2]).backward()

    accumulate(models[2])
    norm = torch.nn.utils.clip_grad_norm_(models[2].parameters(), 0.1)
    expected = [p.grad for p in models[2].parameters()]

    def program(rank):
        model = wb.parallelize(models[rank], "0: data; 2: data; 4: model; 6: model | 1x1x2")
        accumulate(model)
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return found.item(), [p.grad.full_tensor() for p in model.parameters()]

    with warnings.catch_warnings():  # filters belong to the process, so not by each rank
        warnings.simplefilter("ignore", FallbackWarning)
        ranks = run_ranks(program, 2)
    for found, grads in ranks:
        assert found == pytest.approx(norm.item(), rel=1e-4)
        for grad, truth in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, truth, rtol=1e-4, atol=1e-6)


def test_a_closure_runs_once_and_before_the_reduction():
    models = [make("mlp") for _ in range(2)]
    inputs, targets = batch_for("mlp")

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        optimizer, calls = torch.optim.SGD(model.parameters(), lr=0.1), []

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            calls.append(1)
            return loss

        before = model[0].weight.full_tensor().detach().clone()
        first = optimizer.step(closure).item()
        assert len(calls) == 1 and not torch.equal(before, model[0].weight.full_tensor())
        return first

    losses = run_ranks(program, 2)
    assert losses[0] == losses[1]


def test_another_strategy_keeps_the_weights():
    models = [make("mlp") for _ in range(2)]
    inputs, _ = batch_for("mlp")
    expected = make("mlp")(inputs)

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        for strategy in ("*: model", "0: data; 4: data@1", "*: data"):
            model = wb.parallelize(model, strategy)
            output = model(inputs).to_global(placement=wb.placement.all("cpu"), sbp="B")
            torch.testing.assert_close(output.full_tensor(), expected, rtol=1e-5, atol=1e-6)

    run_ranks(program, 2)


def test_tied_parameters_stay_one_object():
    models = [make("attention") for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        assert model.head.weight is model.tok.weight and isinstance(model.head.weight, nn.Parameter)

    run_ranks(program, 2)


def test_buffers_lie_on_the_stage_of_their_layers():
    """Also those of modules that have no parameters of their own: around a layer, or inside one (parametrizations)."""
    stages = "0: data; 1: data@1; 2: data@1; 3: data@1; 4: data@1"

    def program():
        buffers = wb.parallelize(make("remembering"), f"{stages} | 2x1x1").named_buffers()
        return {name: list(buffer.placement) for name, buffer in buffers}

    for placements in run_ranks(program, 2):
        assert set(placements) == {
            "0.0.weight_u",
            "0.0.weight_v",
            "1.0.parametrizations.weight.0._u",
            "1.0.parametrizations.weight.0._v",
            "2.mean",
            "3.mean",
        }
        assert all(ranks == [int(name[0] != "0")] for name, ranks in placements.items())


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3", "model | bf16 recompute"])
def test_a_module_without_parameters_is_one_layer(strategy):
    """It runs as it would inside a model, with the running statistics of the whole batch."""
    x = torch.arange(40.0).view(5, 8).sin()
    models = [nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.ReLU()) for _ in range(3)]
    expected = models[2](x)

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        output = model(x).full_tensor()
        wb.parallelize(nn.Identity(), strategy)(x)
        return output, {name: buffer.full_tensor() for name, buffer in model.named_buffers()}

    for output, buffers in run_ranks(program, 2):
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(buffers, dict(models[2].named_buffers()))


def test_weights_that_differ_between_ranks_are_named():
    models = [make("mlp") for _ in range(2)]
    with torch.no_grad():
        models[1][2].bias += 1

    def program(rank):
        with pytest.raises(LayoutError, match=r"'2.bias' differs between rank 0 and rank 1.*manual_seed"):
            wb.parallelize(models[rank], "*: data")

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("layer9: data", "no layer matches 'layer9'"),
        ("*: data | 1x4x1", "1 x 4 x 1 = 4, but there are 2 ranks"),
        ("*: data | 1x2x1 zero=4", "zero=4: ZeRO has stages 0 to 3"),
    ],
)
def test_strategies_that_do_not_fit_do_not_change_the_module(strategy, message):
    models = [make("mlp") for _ in range(2)]

    def program(rank):
        with pytest.raises(StrategyError, match=message):
            wb.parallelize(models[rank], strategy)
        assert type(models[rank][0].weight.data) is torch.Tensor

    run_ranks(program, 2)


def test_an_edge_that_goes_back_under_1f1b_is_an_error_not_a_hang():
    models = [make("skip") for _ in range(2)]
    for model in models:
        model.forward = lambda x, m=model: m.head(m.a(m.d(m.b(x))))

    def program(rank):
        return training_step(models[rank])

    def training_step(model):
        wb.parallelize(model, "a: data; b: data; c: data; d: data@1; head: data@1 | 2x1x1 mb=2 1f1b")
        wb.forward_backward(model, F.mse_loss, torch.ones(4, 12), torch.ones(4, 5))

    with pytest.raises(StrategyError, match="edge that goes back deadlocks"):
        run_ranks(program, 2)


def test_what_an_earlier_stage_is_to_take_is_named_by_its_line():
    class Gathered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x):
            x = self.layers[0](x)
            found = torch.zeros_like(x)
            found[1:] = self.layers[1](x)[1:]
            return found

    models = [Gathered()]
    models.append(copy.deepcopy(models[0]))

    def program(rank):
        model = wb.parallelize(models[rank], "*: data; layers.1: data@1 | 2x1x1 mb=2 1f1b")
        wb.forward_backward(model, F.mse_loss, torch.ones(4, 4), torch.ones(4, 4))

    line = r"index assignment in place at test_parallel.py:\d+: a tensor on stage 0 is to take what comes from stage 1"
    with pytest.raises(StrategyError, match=line + r".*torch.where in place of x\[mask\] = y"):
        run_ranks(program, 2)


def test_describe_lists_the_modules_that_own_parameters():
    layers = describe(make("cnn"))
    assert [layer.name for layer in layers] == ["conv1", "bn1", "conv2", "bn2", "fc1", "fc2"]
    assert layers[0].kind == "Conv2d" and layers[0].shapes["weight"] == (6, 1, 3, 3) and layers[0].num_parameters == 60


@pytest.mark.parametrize("strategy", [{"*": "data", "2": "model"}, {"*": "data@0", "6": "data@1"}])
def test_rows_are_given_as_a_dict_too(strategy):
    for losses, weights in run_ranks(lambda: training_equals_one_device("mlp", strategy, 2), 2):
        assert losses < 1e-5 and weights < 1e-5


def test_presets_are_made_for_the_module_and_the_ranks():
    models = [make("mlp") for _ in range(3)]

    def program(rank):
        with pytest.raises(StrategyError, match="did you mean 'pipeline'"):
            wb.parallelize(models[rank], "pipline")
        with pytest.raises(StrategyError, match=r"did you mean 'pipeline \| mb=2'"):
            wb.parallelize(models[rank], "pipline | mb=2")
        model = wb.parallelize(models[rank], "pipeline | mb=2")
        inputs, targets = batch_for("mlp")
        loss = wb.forward_backward(model, F.cross_entropy, inputs, targets)
        return {tuple(parameter.placement.ranks) for parameter in model.parameters()}, loss.item()

    found = run_ranks(program, 3)
    expected = F.cross_entropy(make("mlp")(batch_for("mlp")[0]), batch_for("mlp")[1]).item()
    assert all(places == {(0,), (1,), (2,)} and loss == pytest.approx(expected, rel=1e-5) for places, loss in found)


def test_a_row_that_names_a_layer_and_splits_nothing_of_it_warns():
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    with pytest.warns(UserWarning, match="parallelize: row '1: model' splits no weight: each of 2 ranks holds all 160"):
        run_ranks(lambda: wb.parallelize(copy.deepcopy(model), "0: data; 1: model"), 2)
