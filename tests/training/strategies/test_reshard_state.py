"""A module changes its strategy while it is trained: the losses and weights of an uninterrupted run."""

import copy
from dataclasses import replace

import pytest
import torch

import workbench as wb
from tests.models.training import whole
from tests.training.strategies.scaled import ON_TWO_STAGES, Scaled, train_scaled
from tests.training.training_runs import OPTIMIZERS, Run, Setup, assert_runs_agree, on_one_device, strategy_text, train
from workbench.errors import LayoutError, StrategyError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.gradients.stale_optimizer import mark_stateful, optimizers_of

WAYS = {
    2: [("data", "1x2x1"), ("model", "1x1x2"), ("data", "2x1x1 1f1b")],
    4: [("data", "1x4x1"), ("model", "2x1x2 gpipe"), ("model", "1x2x2"), ("data", "4x1x1 1f1b"), ("data", "2x2x1")],
}
"""One after the other, by number of ranks: other degrees, other stages, other numbers of stages."""
OPTIONS = {
    2: [
        ("data", "2x1x1 interleaved"),
        ("data", "1x2x1 zero=2"),
        ("model", "1x1x2 sequence"),
        ("data", "2x1x1 zero_bubble"),
        ("data", "2x1x1 interleaved zero=1"),
        ("data", "2x1x1 gpipe recompute"),
    ],
    3: [("model", "1x2+1x1 1f1b"), ("data", "1x3x1 zero=3"), ("model", "1x1+1x2 gpipe zero=1"), ("data", "3x1x1")],
}
"""The same with other schedules, ZeRO stages and widths."""


def one_step(model, optimizer, setup, number):
    inputs, targets = setup.batch(number)
    optimizer.zero_grad()
    loss = wb.forward_backward(model, torch.nn.functional.cross_entropy, inputs, targets)
    optimizer.step()
    return loss.item()


def in_turns(setup, texts, num_ranks, steps_each):
    """A run that goes on under the next strategy every so many steps."""
    models = [setup.model() for _ in range(num_ranks)]

    def program(rank):
        run, model = Run(), wb.parallelize(models[rank], texts[0])
        optimizer = OPTIMIZERS[setup.optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        parameters = dict(model.named_parameters())
        for turn, text in enumerate(texts):
            wb.parallelize(model, text, optimizer=optimizer)
            assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
            steps = range(turn * steps_each, (turn + 1) * steps_each)
            train(setup, model, optimizer, run, steps, (0, setup.num_steps - 1))
            scheduler.step()
        run.weights = {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        return run

    return run_ranks(program, num_ranks)


def assert_goes_on(kind, optimizer, num_ranks, steps_each, extra="", ways=WAYS):
    ways = ways[num_ranks]
    setup = Setup(kind, optimizer, torch.float64 if optimizer == "adamw" else torch.float32)
    setup = replace(setup, num_steps=steps_each * len(ways))
    texts = [f"{strategy_text(kind, parallel, options)} mb=3{extra}" for parallel, options in ways]
    truth = on_one_device(setup, 3)
    for found in in_turns(setup, texts, num_ranks, steps_each):
        assert_runs_agree(found, truth, setup)


@pytest.mark.parametrize(
    ("kind", "optimizer", "num_ranks"), [("mlp", "adamw", 2), pytest.param("cnn", "sgd", 4, marks=pytest.mark.slow)]
)
def test_training_goes_on(kind, optimizer, num_ranks):
    assert_goes_on(kind, optimizer, num_ranks, 1)


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", " zero=1", " zero=3"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("num_ranks", WAYS)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_training_goes_on_under_every_strategy(kind, num_ranks, optimizer, extra):
    assert_goes_on(kind, optimizer, num_ranks, 5, extra)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", OPTIONS)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_options_change_too(kind, num_ranks):
    assert_goes_on(kind, "adamw", num_ranks, 2, ways=OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", WAYS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_go_on(kind, num_ranks):
    assert_goes_on(kind, "sgd", num_ranks, 5)


def test_an_optimizer_over_plain_parameters_is_taken_along():
    setup = Setup("mlp", "adamw", torch.float64, rate=0.0, num_steps=4)
    models = [setup.model() for _ in range(3)]

    def steps(model, optimizer, numbers):
        for step in numbers:
            inputs, targets = setup.batch(step)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, range(2))
    steps(models[2], optimizers[2], range(2, 4))

    def program(rank):
        model = wb.parallelize(models[rank], "*: model", optimizer=optimizers[rank])
        steps(model, optimizers[rank], range(2, 4))
        held = {key: tuple(value.shape) for key, value in optimizers[rank].state[model[0].weight].items()}
        return held, [whole(parameter) for parameter in model.parameters()]

    for held, weights in run_ranks(program, 2):
        assert held == {"step": (), "exp_avg": (12, 12), "exp_avg_sq": (12, 12)}
        for found, truth in zip(weights, models[2].parameters(), strict=True):
            torch.testing.assert_close(found, truth.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers_are_taken_along(together):
    """In one call, or each in a call of its own, of which the first one moves the weights."""
    setup = Setup("mlp", dtype=torch.float64, rate=0.0)

    def trained(model, texts):
        parameters = list(wb.parallelize(model, texts[0]).parameters())
        optimizers = [OPTIMIZERS["adamw"](half) for half in (parameters[:3], parameters[3:])]
        for step, text in enumerate(texts):
            for given in [optimizers] if together else optimizers:
                wb.parallelize(model, text, optimizer=given)
            inputs, targets = setup.batch(step)
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [whole(parameter) for parameter in parameters]

    models = [setup.model() for _ in range(3)]
    [expected] = run_ranks(lambda: trained(models[2], ["*: data"] * 4), 1)
    texts = ["*: data; 6: data@1 | 2x1x1", "*: data", "*: model", "*: data | zero=1"]
    for weights in run_ranks(lambda rank: trained(models[rank], texts), 2):
        torch.testing.assert_close(weights, expected, rtol=1e-8, atol=1e-10)


def test_gradients_move_with_their_parameters():
    setup = Setup("mlp", rate=0.0)
    models, (inputs, targets) = [setup.model() for _ in range(3)], setup.batch(0)
    loss = torch.nn.functional.cross_entropy
    loss(models[2](inputs), targets).backward()
    expected = [parameter.grad for parameter in models[2].parameters()]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        loss(model(inputs), targets).backward()
        wb.parallelize(model, "*: model; 6: model@1 | 2x1x1")
        return [whole(parameter.grad) for parameter in model.parameters()]

    for grads in run_ranks(program, 2):
        for found, truth in zip(grads, expected, strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("after", ["*: data", "*: data | zero=1", "*: data | zero=2", "*: model", "*: data | zero=3"])
def test_shards_of_gradients_are_added_to_after_a_change(after):
    """Under ZeRO 2 a gradient is a shard; where its parameter lies as before, the next term came in its place."""
    setup = Setup("mlp", rate=0.0)
    models, batches = [setup.model() for _ in range(3)], [setup.batch(step) for step in range(2)]
    loss = torch.nn.functional.cross_entropy
    for inputs, targets in batches:
        loss(models[2](inputs), targets).backward()
    expected = [parameter.grad for parameter in models[2].parameters()]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data | zero=2")
        wb.forward_backward(model, loss, *batches[0])
        wb.parallelize(model, after)
        wb.forward_backward(model, loss, *batches[1])
        return [whole(parameter.grad) for parameter in model.parameters()]

    for grads in run_ranks(program, 2):
        for found, truth in zip(grads, expected, strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)


def test_a_change_of_strategy_exchanges_all_tensors_together():
    """Parameters in one exchange of a rank, and the state of the optimizer in one."""
    built = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))

    def program(rank):
        world, sent = current(), []
        model = wb.parallelize(copy.deepcopy(built), "*: model")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        start = world.transport.start_exchange

        def counted(sends, receives, tag, header):
            sent.append(header)
            return start(sends, receives, tag, header)

        world.transport.start_exchange = counted
        wb.parallelize(model, "*: data", optimizer=optimizer)
        return [header.split(",")[0] for header in sent if "boxing" in header]

    together = ["fused boxing of 9 tensors", "fused boxing of 18 tensors"]  # three biases are whole
    assert run_ranks(program, 2) == [together] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, lr_decay=0.3),  # has state from the beginning
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    ],
)
def test_state_comes_from_the_stage_that_has_used_it(make, is_read):
    """Also if somebody has looked for it on other ranks, where that makes an empty one."""
    torch.manual_seed(0)
    one = Scaled().double()

    def trained(model, then=None):
        optimizer, losses = make(model.parameters()), []
        for strategy in (None, then):
            if is_read:
                assert not any("exp_avg" in optimizer.state[parameter] for parameter in model.parameters())
            if strategy is not None:
                wb.parallelize(model, strategy, optimizer=optimizer)
            losses += train_scaled(model, optimizer, 3)
        return losses

    alone = copy.deepcopy(one)
    [expected] = run_ranks(lambda: trained(wb.parallelize(alone, "data")), 1)
    models = [copy.deepcopy(one) for _ in range(2)]
    for found in run_ranks(lambda rank: trained(wb.parallelize(models[rank], ON_TWO_STAGES), "data"), 2):
        assert found == pytest.approx(expected, rel=1e-12)


def test_an_optimizer_of_another_model_is_an_error():
    setup = Setup("mlp")
    models, others = ([setup.model() for _ in range(2)] for _ in range(2))

    def program(rank):
        optimizer = torch.optim.SGD(others[rank].parameters(), lr=0.1)
        with pytest.raises(StrategyError, match="8 of the optimizer's 8 parameters are not among"):
            wb.parallelize(models[rank], "*: data", optimizer=optimizer)
        assert type(models[rank][0].weight.data) is torch.Tensor

    run_ranks(program, 2)


def test_state_of_parameters_outside_of_the_module_stays():
    setup = Setup("mlp", rate=0.0)
    models, others = ([setup.model() for _ in range(2)] for _ in range(2))

    def program(rank):
        model, other = (wb.parallelize(each[rank], "*: model") for each in (models, others))
        optimizer = OPTIMIZERS["adamw"]([*model.parameters(), *other.parameters()])
        for each in (model, other):
            one_step(each, optimizer, setup, 0)
        wb.parallelize(other, "*: data")
        with pytest.raises(LayoutError, match="parameters have other layouts"):
            wb.parallelize(model, "*: data", optimizer=optimizer)
        wb.parallelize(other, "*: model")
        wb.parallelize(model, "*: data", optimizer=optimizer)
        assert [optimizer.state[each[0].weight]["exp_avg"].shape for each in (model, other)] == [(24, 12), (12, 12)]

    run_ranks(program, 2)


def test_state_that_cannot_be_cut_anew_is_an_error():
    setup = Setup("mlp")
    models = [setup.model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: model")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model[0].weight] = {"rows": torch.zeros(5)}
        with pytest.raises(StrategyError, match=r"state 'rows' of a parameter \(24, 12\) has shape \(5,\)"):
            wb.parallelize(model, "*: data", optimizer=optimizer)

    run_ranks(program, 2)


def test_state_in_lists_does_not_move():
    setup = Setup("mlp")
    models = [setup.model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: model")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model[0].weight] = {"newest": [torch.zeros(12, 12)]}
        with pytest.raises(StrategyError, match=r"'newest' of a parameter \(24, 12\) is a list with 1 tensors.*wb\.ch"):
            wb.parallelize(model, "*: data", optimizer=optimizer)

    run_ranks(program, 2)


@pytest.mark.parametrize("freezes", [False, True])
def test_a_loss_that_is_still_held_does_not_hold_on_to_the_old_shards(freezes):
    """Nor if the weight is frozen while the strategy changes."""

    def train(module, texts, optimizer):
        losses = []
        for text in texts:
            module.weight.requires_grad_(not freezes)
            if text:
                wb.parallelize(module, text, optimizer=optimizer)
            module.weight.requires_grad_(True)
            optimizer.zero_grad()
            loss = module(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean()  # alive in the next round
            loss.backward()
            optimizer.step()
            losses.append(loss.full_tensor().detach() if text else loss.detach())
        return losses

    def run(texts):
        module = torch.nn.Linear(4, 6).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
        return train(module, texts, torch.optim.SGD(module.parameters(), lr=0.1))

    def program():
        return run(["*: model | 1x1x2", "*: data | 1x2x1", "*: data | 1x2x1 zero=3", "*: model | 1x1x2"])

    torch.set_default_dtype(torch.float64)
    try:
        expected = run([None] * 4)
        for found in run_ranks(program):
            torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


def test_all_ranks_find_the_same_optimizers_in_the_same_order():
    """A rank may hold more of them, such as one in a traceback, and others know them in another order."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(8)))
    modules = [copy.deepcopy(module) for _ in range(2)]

    def program(rank):
        parallel = wb.parallelize(modules[rank], "*: data | 1x2x1")
        left_over = [torch.optim.SGD(parallel[3].parameters(), lr=0.5) for _ in range(rank)]
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in parallel]
        others = torch.optim.SGD([torch.ones(1)], lr=0.1)
        for optimizer in (*left_over, *(optimizers[::-1] if rank else optimizers), others):
            mark_stateful(optimizer)
        found = optimizers_of(parallel, current())
        assert all(one is other for one, other in zip(found, optimizers, strict=True))
        return len(left_over)

    assert run_ranks(program, 2) == [0, 1]
