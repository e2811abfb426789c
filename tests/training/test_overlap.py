"""``overlap=``: row-split layers in pieces, whose exchanges overlap with the next products, train like one device."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole
from tests.processes import run_processes
from tests.training.capture.captured_runs import assert_captured_like_uncaptured
from tests.training.programs import training_equals_one_device
from tests.training.training_runs import Setup, assert_trains_like_one_device
from workbench.core.strategy import Strategy
from workbench.tensors.boxing.exchange import Exchange
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.parallel import describe

CASES = [
    ("gpt2", "model", "1x1x2 overlap=2", 2),
    ("llama", "model", "1x1x2 overlap=4 recompute", 2),
    ("llama", "model", "1x1x2 overlap=3 recompute=cheap", 2),
    ("gpt2", "model", "1x2x2 overlap=3 sequence mb=2", 4),
    ("gpt2", "model", "1x2x2 overlap=2 zero=3", 4),
    ("llama", "model", "2x1x2 overlap=2 mb=3 1f1b zero=1", 4),
    ("gpt2", "model", "2x1x2 overlap=2 mb=3 zero_bubble", 4),
    ("llama", "model", "2x1x2 overlap=2 mb=3 interleaved", 4),
    ("llama", "model", "1x2x2 overlap=2 context=2", 4),
    ("mlp", "model", "1x1x3 overlap=4", 3),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("kind", "parallel", "options", "num_ranks"), CASES)
def test_a_few_steps_are_those_of_one_device(kind, parallel, options, num_ranks):
    """With dropout and an odd number of samples, which no number of pieces divides."""
    assert_trains_like_one_device(Setup(kind, num_steps=2), parallel, options, num_ranks)


@pytest.mark.slow
def test_twenty_steps_are_those_of_one_device():
    assert_trains_like_one_device(Setup("gpt2"), "model", "1x1x2 overlap=3", 2)


class Pair(nn.Module):
    """Columns, rows, and a layer behind them."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x):
        """(samples, words, 8) -> the same."""
        return self.norm(x + self.down(F.gelu(self.up(x))))


torch.manual_seed(0)
PAIR = Pair()
ROWS = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(1))


def test_the_exchange_of_a_piece_runs_beside_the_next_product(monkeypatch):
    """Forward and backward: a piece is waited for after the product of the next one has been called."""
    start, forward, events = Exchange.start, nn.Linear.forward, []

    def log(*event):
        if wb.rank() == 0:
            events.append(event)

    def started(self, local, tag):
        number = sum(event[0] == "start" for event in events)
        log("start", number)
        finish = start(self, local, tag)
        return lambda: (log("wait", number), finish())[1]

    def product(self, rows):
        log("product", len(rows))
        result = forward(self, rows)
        with local_torch():
            node = result.grad_fn
            node = node if node.name().startswith("Addmm") else node.next_functions[0][0]
        assert node.name().startswith("Addmm")
        node.register_hook(lambda *_: log("backward", len(rows)))
        return result

    monkeypatch.setattr(Exchange, "start", started)
    monkeypatch.setattr(nn.Linear, "forward", product)
    run_ranks(lambda: wb.parallelize(copy.deepcopy(PAIR), "*: model | overlap=2")(ROWS).sum().backward(), 2)
    assert events == [
        ("product", 5), ("product", 3), ("start", 0), ("product", 2), ("start", 1), ("wait", 0), ("wait", 1),
        ("start", 2), ("start", 3), ("wait", 2), ("backward", 2), ("wait", 3), ("backward", 3),
        ("backward", 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "num_ranks"), [("", 2), ("", 3), ("1x2x2 mb=2", 4), ("sequence recompute", 2), ("1x2x2 zero=3 bf16", 4)]
)
def test_as_many_bytes_are_boxed_as_without(options, num_ranks):
    def program(overlap):
        model = wb.parallelize(copy.deepcopy(PAIR), f"*: model | {options} overlap={overlap}")
        with wb.debug.trace() as trace:
            wb.forward_backward(model, lambda out, targets: out.square().mean(), ROWS[:4], ROWS[:4])
        return (
            trace.wire_bytes,
            {name: total[1:] for name, total in trace.by_function.items()},
            current().traffic.sent_bytes,
        )

    whole, pieces = (run_ranks(functools.partial(program, overlap), num_ranks) for overlap in (1, 2))
    assert whole == pieces and whole[0][0] > 0


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [(ROWS, 2), (ROWS, 5), (ROWS, 50), (ROWS[:1], 3), (ROWS[:, :1], 3), (ROWS[:1, :1], 3), (ROWS[0], 4), (ROWS[:0], 2)],
)
def test_more_pieces_than_rows_are_fewer_pieces(rows, pieces):
    """Few samples, few words, neither, no words at all, and no samples."""

    def program(options):
        model = wb.parallelize(copy.deepcopy(PAIR), f"*: model{options}")
        inputs = rows.clone().requires_grad_()
        out = model(inputs)
        out.square().sum().backward()
        return [whole(out), *(whole(p.grad) for p in model.parameters())]

    (truth,) = run_ranks(functools.partial(program, ""), 1)
    for found in run_ranks(functools.partial(program, f" | overlap={pieces}"), 2):
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_gradients_may_be_differentiated_again_and_asked_for_twice():
    def program(options):
        model = wb.parallelize(copy.deepcopy(PAIR), f"*: model{options}")
        out = model(ROWS).square().sum()
        grads = torch.autograd.grad(out, model.parameters(), create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
        penalty.backward(retain_graph=True)
        penalty.backward()
        return [whole(p.grad) for p in model.parameters()]

    (truth,) = run_ranks(functools.partial(program, ""), 1)
    for found in run_ranks(functools.partial(program, " | overlap=2"), 2):
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_layers_that_compute_something_else_are_left_whole():
    """A forward of the user's own need not be a function of each row. Explicit mode refuses the boxing as ever."""

    class Mixing(nn.Linear):
        def forward(self, rows):
            return super().forward(rows + rows.mean(1, keepdim=True))

    def program(model, options):
        model = wb.parallelize(copy.deepcopy(model), f"*: model{options}")
        with pytest.raises(wb.errors.ExplicitBoxingError, match="down"), wb.debug.explicit_boxing():
            model(wb.to_global(ROWS, wb.placement("cpu", ranks=list(range(wb.world_size()))), "B"))
        return whole(model(ROWS))

    other = copy.deepcopy(PAIR)
    other.down = Mixing(12, 8)
    truth = other(ROWS)
    for found in run_ranks(functools.partial(program, other, " | overlap=2"), 2):
        torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)


def test_weights_that_came_as_plain_tensors_are_multiplied_whole():
    def program():
        model = wb.parallelize(copy.deepcopy(PAIR), "*: model | overlap=2")
        model.load_state_dict(copy.deepcopy(PAIR.state_dict()), assign=True)
        model(ROWS).square().sum().backward()
        return [whole(p.grad) if isinstance(p.grad, wb.GlobalTensor) else p.grad for p in model.parameters()]

    truth = torch.autograd.grad(PAIR(ROWS).square().sum(), [*PAIR.parameters()])
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [*truth], atol=1e-4, rtol=1e-4)


def test_another_strategy_gives_the_layer_its_own_forward_back():
    def program():
        model = wb.parallelize(copy.deepcopy(PAIR), "*: model | overlap=2")
        layouts = [parameter.sbp for parameter in model.parameters()]
        copied = copy.deepcopy(model)
        assert copied.down.forward._module is copied.down
        wb.parallelize(model, "*: model")
        assert "forward" not in model.down.__dict__ and layouts == [parameter.sbp for parameter in model.parameters()]

    run_ranks(program, 2)


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("options", ["1x1x2 overlap=2", "1x1x2 overlap=3 sequence"])
def test_a_captured_step_trains_alike(options):
    assert_captured_like_uncaptured("gpt", f"*: model | {options}", "adamw", 4)


def training(strategies):
    for kind, strategy in strategies:
        losses, weights = training_equals_one_device(kind, strategy, wb.world_size(), steps=2)
        assert losses < 1e-5 and weights < 1e-5, (kind, strategy, losses, weights)
    model = wb.parallelize(copy.deepcopy(PAIR), "*: model | overlap=3")
    with wb.debug.trace() as trace:
        model(ROWS)
    return trace.by_function["down"].num_boxings


@pytest.mark.procs
@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize(("transport", "num_pieces"), [("shared", 1), ("gloo", 3)])
def test_real_processes_train_like_one_device(transport, num_pieces):
    """In shared memory nothing would overlap, and nothing is cut."""
    strategies = [("attention", "*: model | overlap=2"), ("encoder", "*: model | overlap=3 sequence")]
    found = run_processes(training, 2, strategies, environment={"WORKBENCH_TRANSPORT": transport})
    assert found == [num_pieces] * 2


def test_mistakes_are_named():
    layers = describe(PAIR)
    for text, num_ranks, words in [
        ("*: data | overlap=4", 2, "overlap=4, but 0 of 3 layers are linear and split by rows over 2 ranks or more"),
        ("*: model | 1x2x1 overlap=4", 2, "overlap=4, but 0 of 3 layers"),
        ("*: model:column | overlap=4", 2, "overlap=4, but 0 of 3 layers"),
    ]:
        with pytest.raises(wb.errors.StrategyError, match=words) as raised:
            Strategy(text).resolve(layers, num_ranks)
        assert "leave overlap out" in str(raised.value)
    with pytest.raises(wb.errors.StrategyError, match="overlap=0: a product has at least 1 piece"):
        Strategy("*: model | overlap=0")
    with pytest.raises(wb.errors.StrategyError, match=r"'overlap' is none of .*did you mean 'overlap=4'"):
        Strategy("*: model | overlap")
    assert str(Strategy("*: model | overlap=4 sequence").options) == "sequence overlap=4"
    assert Strategy("*: model").with_options(overlap=2) == Strategy("*: model | overlap=2")
