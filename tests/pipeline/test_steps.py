"""Steps through a schedule: the numbers of the same micro-batches on one device, and what cannot run says why."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.models import Skip, make
from workbench.core.options import VIRTUAL_SCHEDULES
from workbench.errors import RunError, StrategyError
from workbench.testing import run_ranks

ONE_DEVICE = "*: data | 1x1x1 mb={}"


class Pair(nn.Module):
    """Two inputs by name, a dict as output; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, scale, offset=None):
        hidden = torch.tanh(self.mix(self.table(ids) * scale[:, None, None]))
        hidden = hidden if offset is None else hidden + offset
        return {"logits": self.head(hidden), "hidden": hidden}


TIED = "table: data; mix: data@1; head: data@2 | 3x1x1 mb={} {}"
LINEAR = "0: data; 2: data@1; 4: data@2; 6: data@2 | 3x1x1 mb={} {}"
ROUND = "0: data; 2: data@1; 4: data@2; 6: data@3 | 2x1x1 mb={} interleaved"


def whole(tensor):
    """The logical tensor on every rank."""
    return tensor.detach().to_global(placement=wb.placement.all("cpu"), sbp="B").full_tensor()


def step_of(model, strategy, loss_fn, batches, **options):
    """Losses, and gradients after the last of the steps, which add up over all of them."""
    model = wb.parallelize(model, strategy)
    losses = [wb.forward_backward(model, loss_fn, *batch, **options).item() for batch in batches]
    return losses, {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def plain_steps(model, loss_fn, cut_batches):
    """The truth in plain torch: micro-batches one after the other, each with its share."""
    losses = []
    for parts in cut_batches:
        losses.append(0.0)
        for run, share in parts:
            loss = run(model, loss_fn)
            if share:
                (loss * share).backward()
                losses[-1] += loss.item() * share
    return losses, {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, truth):
    for loss, expected in zip(found[0], truth[0], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found[1].keys() == truth[1].keys()
    for name, grad in truth[1].items():
        assert (found[1][name] is None) == (grad is None), name
        if grad is not None:
            largest = float(grad.abs().max())
            assert float((found[1][name] - grad).abs().max()) <= 1e-5 * largest + 1e-9, name


def linear_batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 16, generator=generator), torch.randint(0, 10, (n,), generator=generator)) for n in sizes]


def linear_truth(batches, num_micro_batches):
    def runs(inputs, targets):
        parts = min(num_micro_batches, len(inputs))
        for x, y in zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True):
            yield (lambda model, loss_fn, x=x, y=y: loss_fn(model(x), y)), len(x) / len(inputs)

    return plain_steps(make("mlp"), F.cross_entropy, [list(runs(*batch)) for batch in batches])


@pytest.mark.parametrize(
    ("schedule", "num_micro_batches"),
    [
        ("1f1b", 2),
        ("gpipe", 4),
        ("zero_bubble", 4),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name, n in (("1f1b", 1), ("1f1b", 4), ("gpipe", 2))),
        *(pytest.param("zero_bubble", n, marks=pytest.mark.slow) for n in (1, 2)),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(schedule, num_micro_batches):
    """Fewer micro-batches than stages, a last one that is smaller, shapes that differ from step to step."""
    batches, models = linear_batches(7, 3, 8), [make("mlp") for _ in range(3)]
    truth = linear_truth(batches, num_micro_batches)
    strategy = LINEAR.format(num_micro_batches, schedule)
    for found in run_ranks(lambda rank: step_of(models[rank], strategy, F.cross_entropy, batches), 3):
        assert_same(found, truth)


def test_the_comparison_finds_a_wrong_share():
    batches = linear_batches(7)
    found = linear_truth(batches, 2)
    wrong = plain_steps(
        make("mlp"),
        F.cross_entropy,
        [
            [
                (lambda m, f, x=x, y=y: f(m(x), y), 0.5)
                for x, y in zip(*(t.tensor_split(2) for t in batches[0]), strict=True)
            ]
        ],
    )
    with pytest.raises(AssertionError):
        assert_same(found, wrong)


def pair_batch(size):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 12, (size, 5), generator=generator)
    return {"ids": ids, "scale": torch.rand(size, generator=generator), "offset": torch.ones(1, 5, 8)}, ids.roll(1, 1)


def next_word(output, targets):
    return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten(), ignore_index=3)


def num_words(inputs, targets):
    return (targets != 3).sum()


@pytest.mark.parametrize(("schedule", "as_tuple"), [("gpipe", True), ("1f1b", False), ("zero_bubble", True)])
def test_named_inputs_a_tied_head_and_ignored_targets(schedule, as_tuple):
    """A mean over words is weighted by the words that count, and a micro-batch that has none changes nothing."""
    torch.manual_seed(0)
    one, (inputs, targets) = Pair(), pair_batch(5)
    targets[3:] = 3  # of 5 samples in 3 micro-batches, the last one has no word
    models = [copy.deepcopy(one) for _ in range(3)]
    mean = next_word(one(**inputs), targets)
    mean.backward()
    truth = [mean.item()], {name: p.grad for name, p in one.named_parameters()}
    given = tuple(inputs.values()) if as_tuple else inputs

    def program(rank):
        return step_of(models[rank], TIED.format(3, schedule), next_word, [(given, targets)], count=num_words)

    for found in run_ranks(program, 3):
        assert_same(found, truth)


def test_evaluation_goes_through_the_stages_in_micro_batches():
    torch.manual_seed(0)
    one, (inputs, _) = Pair().eval(), pair_batch(5)
    models = [copy.deepcopy(one).train() for _ in range(3)]
    with torch.no_grad():
        truth = one(**inputs)

    def program(rank):
        model = wb.parallelize(models[rank], TIED.format(2, "1f1b"))
        outputs = wb.evaluate(model, inputs)
        assert model.training and not outputs["logits"].requires_grad
        return {name: whole(value) for name, value in outputs.items()}

    for found in run_ranks(program, 3):
        for name, value in truth.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@dataclass
class Scores:
    scores: torch.Tensor
    nothing: None = None


@dataclass
class UnknownScores(Scores):
    pass


torch.export.register_dataclass(Scores)


class Scoring(nn.Module):
    """A dataclass as output."""

    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = make("mlp"), kind

    def forward(self, x):
        return self.kind(self.layers(x))


@pytest.mark.parametrize("strategy", [LINEAR, ROUND])
def test_dataclasses_are_put_together_if_torch_knows_them(strategy):
    inputs, num_ranks = torch.randn(5, 16), 3 if strategy is LINEAR else 2
    rows = "; ".join(f"layers.{row.strip()}" for row in strategy.format(2, "1f1b").split(";"))
    one, models = Scoring(Scores), [Scoring(Scores) for _ in range(num_ranks)]

    def program(rank):
        model = wb.parallelize(models[rank], rows)
        found = wb.evaluate(model, inputs)
        scores = whole(found.scores), found.nothing
        model.kind = UnknownScores
        if strategy is LINEAR:  # ranks of several stages end their world
            with pytest.raises(RunError, match=r"a UnknownScores, a dataclass.*register_dataclass\(UnknownScores\)"):
                wb.evaluate(model, inputs)
        return scores

    for scores, nothing in run_ranks(program, num_ranks):
        torch.testing.assert_close(scores, one(inputs).scores.detach())
        assert nothing is None


BAD = {
    "not parallelized": (None, F.cross_entropy, 4, "is not parallelized"),
    "no scalar": (None, lambda o, y: F.cross_entropy(o, y, reduction="none"), 4, r"shape \(2,\) with 1 dims.*mean"),
    "a pair": (None, lambda o, y: (o.sum(), 3), 4, "returned a tuple.*sum / count"),
    "no gradient": (None, lambda o, y: F.cross_entropy(o.detach(), y), 4, "depends on no parameter"),
    "unlike rows": (None, F.cross_entropy, 5, r"inputs \(4, 16\), targets \(5,\)\. .*along dim 0"),
    "no rows": (None, F.cross_entropy, 0, "0 samples"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_a_step_says_why(case):
    _, loss_fn, num_targets, message = BAD[case]
    models = [make("mlp") for _ in range(3)]
    inputs = torch.randn(4 if num_targets else 0, 16)
    targets = torch.zeros(num_targets, dtype=torch.long)

    def program(rank):
        model = models[rank] if case == "not parallelized" else wb.parallelize(models[rank], LINEAR.format(2, "1f1b"))
        with pytest.raises(StrategyError if case == "not parallelized" else RunError, match=message):
            wb.forward_backward(model, loss_fn, inputs, targets)

    run_ranks(program, 3)


SKIP = "a: data; b: data@1; c: data@1; d: data@1; head: data@1 | 2x1x1 mb={} 1f1b"


class Turning(Skip):
    """A forward that goes back to its first layer."""

    def forward(self, x):
        return self.head(self.d(self.a(self.b(self.c(x)))))


def test_a_layer_that_came_after_the_strategy_is_named():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def program():
        model = wb.parallelize(copy.deepcopy(layers), "0: data; 1: data@1 | 2x1x1 mb=2")
        nn.utils.parametrizations.weight_norm(model[0])
        with pytest.raises(StrategyError, match=r"0.parametrizations.weight came or went after wb.parallelize"):
            wb.forward_backward(model, lambda out, _: out.square().mean(), torch.ones(4, 4), torch.ones(4))

    run_ranks(program)


def test_an_edge_that_goes_back_runs_where_the_schedule_lets_it():
    torch.manual_seed(0)
    models = [Turning() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    one, inputs, targets = copy.deepcopy(models[0]), torch.randn(4, 12), torch.zeros(4, dtype=torch.long)
    F.cross_entropy(one(inputs), targets).backward()
    rows = "a: data; b: data@1; c: data@1; d: data@1; head: data@1 | 2x1x1"

    def program(rank):
        model = wb.parallelize(models[rank], f"{rows} mb=2 1f1b")
        with pytest.raises(StrategyError, match=r"'a' is on stage 0.*from stage 1.*deadlock.*gpipe"):
            wb.forward_backward(model, F.cross_entropy, inputs, targets)
        for options in ("mb=1 1f1b", "mb=2 gpipe"):
            model = wb.parallelize(model, f"{rows} {options}")
            model.zero_grad()
            wb.forward_backward(model, F.cross_entropy, inputs, targets)
            torch.testing.assert_close(whole(model.a.weight.grad), one.a.weight.grad, rtol=1e-4, atol=1e-7)

    run_ranks(program, 2)


class Failing(Skip):
    """Raises where a value is bad, which only the rank that holds it can see."""

    def forward(self, x):
        y = self.b(self.a(x))
        if not y.is_placeholder and bool((y.to_local() > -1e9).all()) and y.placement.ranks == [1]:
            raise ZeroDivisionError("the second stage has had enough")
        return self.head(self.d(self.c(y)))


def test_a_stage_that_raises_ends_all_ranks_and_its_error_comes_first():
    torch.manual_seed(0)
    models = [Failing() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def program(rank):
        model = wb.parallelize(models[rank], SKIP.format(4))
        wb.forward_backward(model, F.cross_entropy, torch.ones(8, 12), torch.zeros(8, dtype=torch.long))

    with pytest.raises(ZeroDivisionError, match="had enough") as caught:
        run_ranks(program, 2)
    assert "simulated rank 1" in caught.value.__notes__[0]


@pytest.mark.parametrize("num_micro_batches", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_several_stages_on_a_rank(num_micro_batches):
    batches, models = linear_batches(7, 3, 8), [make("mlp") for _ in range(2)]
    truth = linear_truth(batches, num_micro_batches)
    strategy = ROUND.format(num_micro_batches)
    for found in run_ranks(lambda rank: step_of(models[rank], strategy, F.cross_entropy, batches), 2):
        assert_same(found, truth)


class Weighing(nn.Module):
    """The first call replaces a buffer by a plain tensor, as rotary embeddings do for longer texts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("weights", torch.ones(1))

    def forward(self, x):
        if self.weights.shape[0] < x.shape[1]:
            self.weights = torch.linspace(0.5, 1.5, x.shape[1])
        return torch.tanh(self.layer(x)) * self.weights


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_forward_may_replace_a_buffer_by_a_plain_tensor(schedule):
    """Also if stages are made anew afterwards, as for a parameter that is frozen."""
    torch.manual_seed(0)
    one = nn.Sequential(*(Weighing() for _ in range(4)))
    models, (inputs, targets) = [copy.deepcopy(one) for _ in range(2)], torch.randn(2, 4, 8)
    stages = [0, 1, 2, 3] if schedule == "interleaved" else [0, 0, 1, 1]
    rows = "; ".join(f"{number}.layer: data@{stage}" for number, stage in enumerate(stages))

    def program(rank):
        model, losses = wb.parallelize(models[rank], f"{rows} | 2x1x1 mb=2 {schedule}"), []
        for _ in range(2):
            losses.append(wb.forward_backward(model, F.mse_loss, inputs, targets).item())
            model[0].layer.weight.requires_grad_(False)
        return losses, whole(model[3].layer.weight.grad)

    loss = F.mse_loss(one(inputs), targets)
    loss.backward()
    for losses, grad in run_ranks(program, 2):
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-5)
        torch.testing.assert_close(grad, 2 * one[3].layer.weight.grad)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "options",
    [
        "interleaved recompute",
        "interleaved zero=3",
        "interleaved zero=2",
        "zero_bubble zero=2",
        "zero_bubble recompute zero=2",
        "zero_bubble_v zero=3",
        *(pytest.param(f"interleaved {o}", marks=pytest.mark.slow) for o in ("zero=1", "zero=3 recompute")),
    ],
)
def test_schedules_and_options_of_memory_give_the_numbers_of_one_device(options):
    """Gradients too; the optimizer's step follows, as ZeRO is about that."""
    batches, models, one = linear_batches(7, 8), [make("mlp") for _ in range(4)], make("mlp")
    is_virtual = options.split()[0] in VIRTUAL_SCHEDULES
    rows = ROUND.partition("|")[0] if is_virtual else "0: data; 2: data; 4: data@1; 6: data@1"

    def program(model, strategy):
        model = wb.parallelize(model, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in batches:
            optimizer.zero_grad()
            wb.forward_backward(model, F.cross_entropy, *batch)
            optimizer.step()
        if "zero=2" in strategy:  # scattered after every backward
            assert all(p.grad.to_local().numel() < p.numel() for p in model.parameters())
        return [whole(tensor) for parameter in model.parameters() for tensor in (parameter, parameter.grad)]

    truth = run_ranks(lambda: program(one, "*: data | mb=3"), 1)[0]
    for found in run_ranks(lambda rank: program(models[rank], f"{rows} | 2x2x1 mb=3 {options}"), 4):
        for weight, expected in zip(found, truth, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
