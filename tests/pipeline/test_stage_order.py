"""Stages follow the order in which a forward calls the layers, in whatever order a model lists them."""

import copy
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.core.strategy import Strategy
from workbench.errors import StrategyError
from workbench.testing import run_ranks
from workbench.training.parallel import describe, state_of
from workbench.training.strategies.call_order import recorded_calls

WORDS = torch.arange(24).view(8, 3) % 10
CLASSES = torch.arange(8) % 4


class HeadFirst(nn.Module):
    """The head is listed first, and its weight is that of the words, as in RoBERTa."""

    def __init__(self, is_tied=False):
        super().__init__()
        self.head = nn.Linear(8, 10 if is_tied else 4)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.words = nn.Embedding(10, 8)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words).mean(1)
        for layer in self.body:
            x = F.dropout(layer(x).tanh(), 0.0, self.training)
        return self.head(self.norm(x))


class SideBySide(nn.Module):
    """Layers of a kind stand in one list, as in Flaubert."""

    def __init__(self):
        super().__init__()
        self.firsts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.seconds = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.words = nn.Embedding(10, 8)

    def forward(self, words):
        x = self.words(words).mean(1)
        for first, second in zip(self.firsts, self.seconds, strict=True):
            x = second(first(x).tanh())
        return x[:, :4]


class ComesBack(nn.Module):
    """Two layers take turns, so every cut between them goes back."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = x.double()
        for _ in range(2):
            x = self.two(self.one(x).tanh())
        return self.one(x)


class AddsInPlace(nn.Module):
    """Tables of several kinds are summed in place, as in TAPAS: none can be on a later stage than the first."""

    def __init__(self):
        super().__init__()
        self.words, self.kinds = nn.Embedding(10, 8), nn.Embedding(50, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, words):
        x = self.words(words) * 2
        x += self.kinds(words)
        x[:, 0] += 1
        return self.head(self.norm(x).mean(1))


class UsesAWeight(nn.Module):
    """The first layers use the weight of one that is listed last and never called, as LayoutLMv3's biases."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.bias = nn.Linear(8, 8)

    def forward(self, words):
        x = self.words(words).mean(1)
        bias = self.bias.weight.t()[0] * 2
        for layer in self.body:
            x = layer(x + bias).tanh()
        return x[:, :4]


def train(model, step, num_steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(num_steps):
        losses.append(float(step()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_one_device(model, num_parts):
    def step():
        parts = zip(WORDS.chunk(num_parts), CLASSES.chunk(num_parts), strict=True)
        losses = [F.cross_entropy(model(words), classes) / num_parts for words, classes in parts]
        for loss in losses:
            loss.backward()
        return sum(losses).detach()

    return train(model, step)


def trained(model, strategy, num_ranks):
    """(losses, the last weights, the strategy in force) of each rank."""
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]

    def program(rank):
        parallel = wb.parallelize(copies[rank], strategy)
        losses = train(parallel, lambda: wb.forward_backward(parallel, F.cross_entropy, WORDS, CLASSES))
        state = {name: value.full_tensor() for name, value in parallel.state_dict().items()}
        return losses, state, str(state_of(parallel).strategy)

    return run_ranks(program, num_ranks)


def assert_trains_as_one_device(model, strategy, num_ranks, num_parts):
    truth = copy.deepcopy(model)
    losses = on_one_device(truth, num_parts)
    found = trained(model, strategy, num_ranks)
    for own, state, _ in found:
        torch.testing.assert_close(own, losses)
        torch.testing.assert_close(state, dict(truth.state_dict()))
    return found[0][2]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_that_is_listed_first_is_on_the_last_stage(is_tied):
    used = assert_trains_as_one_device(HeadFirst(is_tied).double(), "pipeline | mb=2", 3, 2)
    stages = [row.stage for row in Strategy(used).rows_of(describe(HeadFirst(is_tied)))]
    assert stages[0] == 2 and stages[-1] == 0 and stages[2:-1] == sorted(stages[2:-1])


def test_lists_side_by_side_are_cut_between_their_elements():
    used = assert_trains_as_one_device(SideBySide().double(), "pipeline | mb=2 1f1b", 2, 2)
    stages = {row.pattern: row.stage for row in Strategy(used).rows}
    assert stages == {"firsts.0": 0, "firsts.[1-2]": 1, "seconds.0": 0, "seconds.[1-2]": 1, "words": 0}


def test_layers_that_take_turns_run_by_a_schedule_that_goes_back():
    used = assert_trains_as_one_device(ComesBack().double(), "pipeline", 2, 4)
    assert used == "one: data@0; two: data@1 | 2x1x1 mb=4 gpipe"


def test_gathering_the_weights_of_a_block_is_no_use_of_them():
    blocks = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(3, 4)).double()

    def program(rank):
        parallel = wb.parallelize(copies[rank], "pipeline | 2x2x1 mb=2 zero=3")
        with recorded_calls(parallel) as calls:
            parallel(torch.ones(4, 3).double())
        return calls

    copies = [copy.deepcopy(model) for _ in range(4)]
    found = run_ranks(program, 4)
    with recorded_calls(model) as truth:
        model(torch.ones(4, 3).double())
    assert found == [truth] * 4


def test_several_virtual_stages_follow_the_order_of_calls():
    assert_trains_as_one_device(HeadFirst().double(), "pipeline | mb=2 interleaved", 2, 2)


@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_in_the_order_of_calls_run_under_1f1b(is_tied):
    rows = "words: data@0; body.[0-1]: data@0; body.[2-3]: data@1; norm: data@1; head: data@1 | mb=2 1f1b"
    assert_trains_as_one_device(HeadFirst(is_tied).double(), rows, 2, 2)


def test_rows_that_go_back_are_refused_by_their_layer():
    with pytest.raises(StrategyError, match=r"'body.1' is on stage 0, but its input comes from stage 1.*1f1b"):
        trained(HeadFirst(), "*: data@0; body.0: data@1 | mb=2 1f1b", 2)


def test_optimizers_that_have_state_already_go_on(tmp_path):
    """Also with that of parameters outside of the model."""
    model = HeadFirst().double()
    truth = copy.deepcopy(model)
    losses = on_one_device(truth, 2)
    copies = [copy.deepcopy(model) for _ in range(4)]

    def step(parallel, beside, optimizer):
        loss = wb.forward_backward(parallel, F.cross_entropy, WORDS, CLASSES).item()
        beside[0].grad = torch.ones_like(beside[0])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def program(rank):
        found, beside = [], nn.ParameterList([torch.zeros(1).double()])
        for part in (0, 1):
            parallel = wb.parallelize(copies[rank + 2 * part], "pipeline | mb=2")
            optimizer = torch.optim.SGD([*parallel.parameters(), *beside.parameters()], lr=0.1, momentum=0.9)
            parts = {"model": parallel, "beside": beside, "optimizer": optimizer}
            if part:
                wb.checkpoint.load(tmp_path / "one", **parts)
            found += [step(parallel, beside, optimizer) for _ in range(1 + part)]
            wb.checkpoint.save(tmp_path / "one", **parts)
        return found, beside[0].item()

    for found, weight in run_ranks(program, 2):
        torch.testing.assert_close(found, losses)
        assert weight == pytest.approx(-0.1 * (1 + 1.9 + 2.71))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_before_the_first_step_settles_the_stages(mode):
    model = HeadFirst().double()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def program(rank):
        parallel, with_grad = wb.parallelize(copies[rank], "pipeline | mb=2"), []
        parallel.register_forward_pre_hook(lambda *_: with_grad.append(torch.is_grad_enabled()))
        with mode():
            output = wb.evaluate(parallel, WORDS.clone()).full_tensor()
        assert (state_of(parallel).preset, set(with_grad)) == (None, {False})
        return output, wb.forward_backward(parallel, F.cross_entropy, WORDS, CLASSES).item()

    loss, *_ = on_one_device(copy.deepcopy(model), 2)
    with torch.no_grad():
        truth = model.eval()(WORDS)
    for output, found in run_ranks(program, 2):
        torch.testing.assert_close(output, truth)
        assert found == pytest.approx(loss)


class KeepsAMean(nn.Linear):
    """A running mean of its inputs is a parameter, as the weights of key encoders and codebooks are."""

    def __init__(self):
        super().__init__(8, 8)
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x):
        if self.training:
            self.mean.data.mul_(0.5).add_(x.detach().mean(0))
        return super().forward(x - self.mean)


def test_a_first_look_leaves_parameters_that_a_forward_writes():
    model = HeadFirst()
    model.body[1] = KeepsAMean()

    def program():
        parallel = wb.parallelize(copy.deepcopy(model), "pipeline | mb=2")
        wb.evaluate(parallel, WORDS)  # writes nothing itself
        return parallel.body[1].mean.full_tensor()

    for mean in run_ranks(program, 2):
        assert torch.equal(mean, torch.zeros(8))


class FailsAtFirst(HeadFirst):
    """The first call leaves what it has counted, and raises."""

    def __init__(self):
        super().__init__()
        self.calls, self.fails = [], True

    def forward(self, words):
        self.calls.append(len(words))
        x = super().forward(words)
        if self.fails:
            raise ValueError("stop")
        return x * len(self.calls)


def step(model):
    wb.forward_backward(model, F.cross_entropy, WORDS, CLASSES)


@pytest.mark.parametrize("call", [step, lambda model: wb.evaluate(model, WORDS)])
def test_a_first_look_that_fails_leaves_nothing_behind_and_comes_again(call):
    model = FailsAtFirst().double()
    models = [copy.deepcopy(model) for _ in range(2)]

    def program(rank):
        parallel = wb.parallelize(models[rank], "pipeline | mb=2")
        before = [buffer.full_tensor() for buffer in parallel.buffers()]
        with pytest.raises(ValueError, match="stop"):
            call(parallel)
        assert parallel.calls == []
        torch.testing.assert_close([buffer.full_tensor() for buffer in parallel.buffers()], before)
        parallel.fails = False
        step(parallel)
        assert parallel.calls == [4, 4] and state_of(parallel).preset is None
        return str(state_of(parallel).strategy)

    used = run_ranks(program, 2)[0]
    stages = [row.stage for row in Strategy(used).rows_of(describe(HeadFirst()))]
    assert stages[0] == 1 and stages[-1] == 0


def test_stages_that_are_refused_are_asked_for_again(monkeypatch):
    """Else the next step would train on the stages of the list. Here the disk is full for two steps."""
    free = [*[10**9] * 2, *[10] * 4, *[10**9] * 2]  # for both ranks each time
    monkeypatch.setattr(psutil, "disk_usage", lambda folder: SimpleNamespace(free=free.pop(0)))
    models = [copy.deepcopy(one) for one in [HeadFirst().double()] * 2]

    def program(rank):
        parallel = wb.parallelize(models[rank], "pipeline | mb=2 offload=optimizer")
        for _ in range(2):
            with pytest.raises(StrategyError, match="10 B are free"):
                step(parallel)
        step(parallel)
        return str(state_of(parallel).strategy)

    stages = [row.stage for row in Strategy(run_ranks(program, 2)[0]).rows_of(describe(HeadFirst()))]
    assert stages[0] == 1 and stages[-1] == 0


def test_calls_are_recorded_in_their_order():
    with recorded_calls(model := ComesBack().double()) as calls:
        model(torch.ones(1, 3))
    assert calls == {"": (0, 0), "one": (1, 5), "two": (2, 4)}


def test_a_layer_whose_dtype_is_read_is_called_where_it_is_called():
    class ReadsDtype(nn.Sequential):
        def forward(self, x):
            return super().forward(x.to(self[2].weight.dtype))

    with recorded_calls(model := ReadsDtype(*(nn.Linear(3, 3) for _ in range(3)))) as calls:
        model(torch.ones(1, 3))
    assert [calls[str(n)] for n in range(3)] == [(1, 1), (2, 2), (3, 3)]


def test_stages_are_partitioned_and_counted_in_the_order_of_calls():
    balance = run_ranks(lambda: wb.planner.partition_stages(SideBySide(), F.cross_entropy, WORDS, CLASSES, 3), 1)[0]
    assert list(balance.stages.values()) == sorted(balance.stages.values())
    assert list(balance.stages)[:3] == ["words", "firsts.0", "seconds.0"]
    run = wb.planner.dry_run(HeadFirst, "pipeline | mb=2", 2, WORDS, CLASSES, F.cross_entropy)
    assert {layer.name: layer.stage for layer in run.strategy.layers}["head"] == 1


def test_what_is_added_in_place_is_made_on_one_stage():
    used = assert_trains_as_one_device(AddsInPlace().double(), "pipeline | mb=2", 2, 2)
    assert used == "words: data@0; kinds: data@0; norm: data@1; head: data@1 | 2x1x1 mb=2 1f1b"


def test_a_layer_whose_weight_is_used_without_a_call_is_where_it_is_used():
    used = assert_trains_as_one_device(UsesAWeight().double(), "pipeline | mb=2", 2, 2)
    stages = {row.pattern: row.stage for row in Strategy(used).rows}
    assert stages["bias"] == 0 and "1f1b" in used


def test_where_every_cut_goes_through_what_is_added_in_place_a_schedule_goes_back():
    assert "gpipe" in assert_trains_as_one_device(AddsInPlace().double(), "pipeline | mb=2", 4, 2)


def test_a_write_in_place_to_an_earlier_stage_is_named():
    rows = "words: data; kinds: data@1; norm: data@1; head: data@1 | 2x1x1 mb=2 1f1b"

    models = [copy.deepcopy(one) for one in [AddsInPlace()] * 2]

    def program(rank):
        model = wb.parallelize(models[rank], rows)
        wb.forward_backward(model, F.cross_entropy, WORDS, CLASSES)

    with pytest.raises(StrategyError, match=r"in place.*stage 0.*stage 1.*one stage.*x = x \+ y.*gpipe"):
        run_ranks(program, 2)
