"""What a dry run counts is what ranks send: on simulated ranks with real tensors, byte by byte."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from tests.training.block_models import Chain
from tests.training.models import CNN
from workbench.errors import CheckpointError, StrategyError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.dry_run import dry_run
from workbench.training.parallel import parallelize
from workbench.training.pipelining.step import forward_backward
from workbench.training.strategies.state import state_of


def perceptron():
    return nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 6)
    )


def gpt():
    return GPT(64, 2, 50, 8)


def words():
    return torch.arange(64).view(8, 8) % 50


MODELS = {
    "perceptron": (perceptron, lambda: torch.ones(8, 12), lambda: torch.arange(8) % 6, F.cross_entropy),
    "gpt": (gpt, words, words, next_word_loss),
    "cnn": (CNN, lambda: torch.ones(8, 1, 8, 8), lambda: torch.arange(8) % 10, F.cross_entropy),
}


def test_a_model_with_its_own_loss():
    from tests.models.zoo import batch_for, make

    batch, models = batch_for("gpt2", size=6), [make("gpt2") for _ in range(2)]
    rows = {"*": "data", "transformer.h.*": "model"}

    def program(rank):
        model, world = parallelize(models[rank], rows), current()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        world.traffic.reset()
        forward_backward(model, inputs=batch)
        optimizer.step()
        return world.traffic.sent_bytes

    # Built here: what is made inside a dry run lies on metadata, and `make` remembers it for other tests.
    built = {attention: make("gpt2", attention) for attention in ("eager", "sdpa")}

    def on_meta(attention="eager"):
        return type(built[attention])(built[attention].config)

    assert tuple(run_ranks(program, 2)) == dry_run(on_meta, rows, 2, batch).sent_bytes
    masked = {**batch, "attention_mask": torch.ones(6, 7, dtype=torch.long)}
    with pytest.raises(StrategyError, match=r"reads values of tensors.*attention_mask"):
        dry_run(lambda: on_meta("sdpa"), rows, 2, masked)


def test_a_loss_that_reads_values_is_named():
    def of_known(output, labels):
        return F.cross_entropy(output[labels > 0], labels[labels > 0])

    with pytest.raises(StrategyError, match=r"the forward or loss_fn reads values.*nonzero"):
        dry_run(perceptron, "data", 2, torch.empty(4, 12), torch.empty(4, dtype=torch.int64), of_known)


def really_sent(name, strategy, num_ranks, batch_size=8):
    """Bytes that simulated ranks send in a step in which layers box for those that are called next, and by rank."""
    make, inputs, targets, loss_fn = MODELS[name]
    torch.manual_seed(0)
    state = make().state_dict()

    def program():
        model = make()
        model.load_state_dict(state)
        model = parallelize(model, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        traffic, plan = current().traffic, state_of(model).layouts.plan
        for _ in range(2):
            traffic.reset()
            with wb.debug.trace() as trace:
                forward_backward(model, loss_fn, inputs()[:batch_size], targets()[:batch_size])
                optimizer.step()
            if not plan.settle():
                break  # else the next step is like all later ones
        return dict(traffic.by_kind), traffic.sent_bytes, trace.sent_bytes

    return run_ranks(program, num_ranks)


def counted(name, strategy, num_ranks, batch_size=8):
    make, inputs, targets, loss_fn = MODELS[name]
    return dry_run(make, strategy, num_ranks, inputs()[:batch_size], targets()[:batch_size], loss_fn)


def random_strategy(rng, name, num_ranks):
    """A strategy that fits the model: choices per layer, degrees, stages, micro-batches, options."""
    rows = {
        "perceptron": ["0", "2", "4", "6"],
        "cnn": ["conv*", "fc1", "fc2"],
        "gpt": ["blocks.*.qkv", "blocks.*.out", "blocks.*.fc1", "blocks.*.fc2", "head", "words"],
    }[name]
    pipeline = rng.choice([p for p in (1, 2, 4) if num_ranks % p == 0 and p <= (2 if name != "perceptron" else 4)])
    model = rng.choice([m for m in (1, 2, 4) if num_ranks // pipeline % m == 0])
    degrees = f"{pipeline}x{num_ranks // pipeline // model}x{model}"
    choices = [f"{row}: {rng.choice(['data', 'model', 'model:column', 'model:row'])}" for row in rows]
    if pipeline > 1:
        kind = rng.choice(["data", "model"])
        choices = {
            "perceptron": [
                f"{layer}: {rng.choice(['data', 'model'])}@{i * pipeline // 4}" for i, layer in enumerate(rows)
            ],
            "gpt": [f"blocks.1: {kind}@1", "norm: data@1", "head: data@1"],
            "cnn": [f"fc1: {kind}@1", "fc2: data@1"],
        }[name]
    choices = ["*: data", *choices]
    words_ = [degrees, f"mb={rng.choice([1, 2, 4])}"]
    words_ += [rng.choice(["gpipe", "1f1b"])] if pipeline > 1 else []
    words_ += [f"zero={rng.choice([0, 1, 2, 3])}"] if pipeline == 1 else []
    words_ += ["recompute"] if name == "gpt" and rng.random() < 0.3 else []
    return f"{'; '.join(choices)} | {' '.join(words_)}"


CASES = [(seed, name, 2 + 2 * (seed % 2)) for seed in range(4) for name in MODELS]
MORE_CASES = [(seed, name, num_ranks) for seed in range(4, 20) for name in MODELS for num_ranks in (2, 4)]
# Autocast decides product by product, whatever the strategy: two of each model, on two ranks and four, have them all.
IN_16_BITS = [(*case, "bf16") for case in CASES if case[0] < 2]
SLOW = [(*case, "bf16") for case in CASES if case[0] >= 2]
SLOW += [(*case, precision) for case in MORE_CASES for precision in ("fp32", "bf16")]


@pytest.mark.sampled(16, start=8)
@pytest.mark.parametrize(
    ("seed", "name", "num_ranks", "precision"),
    [
        *((*case, "fp32") for case in CASES),
        *IN_16_BITS,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_bytes_are_those_that_ranks_send(seed, name, num_ranks, precision):
    strategy = random_strategy(random.Random(f"{seed} {name} {num_ranks}"), name, num_ranks) + f" {precision}"
    try:
        real = really_sent(name, strategy, num_ranks)
    except StrategyError:
        with pytest.raises(StrategyError):
            counted(name, strategy, num_ranks)
        return
    run = counted(name, strategy, num_ranks)
    assert list(run.sent_bytes) == [sent for _, sent, _ in real], strategy
    kinds = {kind: sum(by_kind.get(kind, 0) for by_kind, _, _ in real) for by_kind, _, _ in real for kind in by_kind}
    assert run.by_kind == {kind: size for kind, size in kinds.items() if size}


def test_a_wrong_count_is_seen():
    assert counted("perceptron", "data", 2).boxed_bytes != counted("perceptron", "model", 2).boxed_bytes
    real = really_sent("perceptron", "model", 2)
    assert counted("perceptron", "data", 2).boxed_bytes != sum(sent for _, sent, _ in real)


def test_uneven_shares_are_counted_rank_by_rank():
    run = counted("perceptron", "model", 4, batch_size=7)
    assert list(run.sent_bytes) == [sent for _, sent, _ in really_sent("perceptron", "model", 4, batch_size=7)]
    assert len(set(run.sent_bytes)) > 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_products_make_is_sent_in_16_bits_and_what_they_take_as_it_comes(precision):
    whole, half = (counted("gpt", f"*: model | 1x1x2 {word}", 2).by_kind for word in ("fp32", precision))
    assert 2 * half["rows"] == whole["rows"]  # of queries, keys and values
    assert half["all-reduce"] < whole["all-reduce"]
    assert [half[kind] for kind in ("all-gather", "gradients")] == [whole[kind] for kind in ("all-gather", "gradients")]


def test_many_ranks_are_known_from_few():
    """Sixteen ranks one by one, sixty-four by the corners of their grid, and the corners say what each would."""
    make, _, _, loss_fn = MODELS["perceptron"]
    batch = torch.empty(512, 12), torch.empty(512, dtype=torch.int64)
    run = dry_run(make, "*: model | 1x16x4", 64, *batch, loss_fn)
    assert run.num_run == 4 and len(run.sent_bytes) == 64 and len(set(run.sent_bytes)) == 1


def test_alike_stages_are_known_from_one(monkeypatch):
    """Eight stages: the first, the last and their neighbours, and those in the middle where the layers change."""

    def chain():
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)), nn.Linear(8, 6))

    rows = "; ".join(f"{i}: {'data' if i < 4 else 'model'}@{i}" for i in range(8))
    batch = torch.empty(8, 8), torch.empty(8, dtype=torch.int64)
    few = dry_run(chain, f"*: data; {rows} | 8x1x2 mb=2", 16, *batch, F.cross_entropy)
    monkeypatch.setattr("workbench.training.costs.dry_run._MAX_STAGES_ONE_BY_ONE", 8)
    every = dry_run(chain, f"*: data; {rows} | 8x1x2 mb=2", 16, *batch, F.cross_entropy)
    assert (every.num_run, few.num_run) == (16, 12)
    assert few.sent_bytes == every.sent_bytes and few.by_kind == every.by_kind


class Skipping(nn.Module):
    """Equal layers, of which one result goes to a later one, too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x):
        results = [x]
        for number, layer in enumerate(self.layers):
            x = layer(results[-1])
            results.append(x + results[3] if number == 5 else x)
        return results[-1]


def pooled():
    """Equal layers, of which the later ones take a quarter of the numbers."""
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(8)]
    return nn.Sequential(*layers[:4], nn.MaxPool2d(2), *layers[4:])


@pytest.mark.parametrize(("make", "shape"), [(Skipping, (8, 8)), (pooled, (8, 8, 8, 8))])
def test_stages_with_equal_layers_are_alike_if_they_exchange_the_same(monkeypatch, make, shape):
    names = [name for name, module in make().named_modules() if list(module.parameters(recurse=False))]
    strategy = "; ".join(f"{name}: data@{stage}" for stage, name in enumerate(names)) + " | 8x1x1 mb=2"

    def run():
        return dry_run(make, strategy, 8, torch.empty(shape), torch.empty(8), lambda output, _: output.mean())

    few = run()
    monkeypatch.setattr("workbench.training.costs.dry_run._MAX_STAGES_ONE_BY_ONE", 8)
    every = run()
    assert few.num_run < every.num_run == 8
    assert few.sent_bytes == every.sent_bytes and len(set(few.sent_bytes)) > 2


def test_micro_batches_are_known_from_two():
    few, many = (counted("perceptron", f"*: model | 1x1x2 mb={n}", 2) for n in (2, 4))
    real = really_sent("perceptron", "*: model | 1x1x2 mb=4", 2)
    assert list(many.sent_bytes) == [sent for _, sent, _ in real]
    assert few.by_kind.keys() == many.by_kind.keys()


class Contraction(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x):
        return torch.einsum("bi,ji->bj", self.inner(x), self.inner(x)[:3])


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_einsum_is_counted_at_its_precision(precision, itemsize):
    batch = torch.empty(4, 6), torch.empty(4, 3)
    run = dry_run(Contraction, f"*: model:column | 1x1x2 {precision}", 2, *batch, lambda x, y: x.float().square().sum())
    assert run.by_kind == {"reduce-scatter": 12 * itemsize, "all-gather": 12 * itemsize}


def test_a_model_that_loads_its_weights(tmp_path):
    """Its ranks ask each other whether all of them could, and all but one do not run."""
    file = tmp_path / "model.safetensors"
    wb.checkpoint.export_safetensors(nn.Linear(4, 4), file)

    def run(**options):
        model_fn = lambda: wb.checkpoint.load_safetensors(nn.Linear(4, 4, **options), file)  # noqa: E731
        return dry_run(model_fn, "*: data", 2, torch.ones(4, 4), torch.ones(4, 4), F.mse_loss)

    assert sum(run(device="cpu").sent_bytes) > 0
    with pytest.raises(CheckpointError, match="on meta, without storage"):
        run()


def test_a_strategy_that_does_not_fit_is_an_error():
    with pytest.raises(StrategyError, match="3 ranks"):
        counted("perceptron", "*: data | 1x2x1", 3)


def test_tied_weights_and_blocks():
    batch = torch.zeros(4, 5, dtype=torch.int64), torch.zeros(4, 5, dtype=torch.int64)
    run = dry_run(Chain, "*: data | 1x2x1 zero=3", 2, *batch, next_word_loss)
    assert run.by_kind["parameters"] > run.by_kind["gradients"] > 0 and "2 ranks send" in str(run)


ALONE = """
import torch
from workbench.training.costs.dry_run import dry_run

def chain():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 6))

batch = torch.empty(8, 4), torch.empty(8, dtype=torch.int64)
print(dry_run(chain, "data | recompute", 2, *batch, torch.nn.functional.cross_entropy).by_kind)
"""


@pytest.mark.slow
def test_it_needs_nothing_but_what_it_imports():
    """Recomputation compares tensors by methods that no other import has brought along here."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{'gradients': 576}\n"), done.stderr[-500:]
