"""A captured step within less memory: the same numbers from values that are computed again."""

from collections import Counter
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import workbench as wb
from tests.training.capture import captured_runs
from tests.training.capture.captured_runs import mlp, start
from workbench.errors import CaptureWarning
from workbench.testing import run_ranks
from workbench.training.capture.value_memory import limit_memory, peak_bytes

CASES = [
    ("mlp", "*: data", 1),
    ("cnn", "*: data | 1x2x1", 2),
    ("writes", "*: data | 1x2x1", 2),
    ("gpt", "*: data | 1x2x1 zero=3", 2),
    pytest.param("gpt", "*: model | 1x1x2", 2, marks=pytest.mark.slow),
    ("gpt", "hybrid", 4),
]


class HeldBytes(TorchDispatchMode):
    """The most bytes of tensors that are made in this context and held at one time."""

    def __init__(self):
        super().__init__()
        self.held, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.held = {key: item for key, item in self.held.items() if not item[0].expired()}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in old:
                storage = leaf.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self.held.values()))
        return out


def transformer(dropout=0.0):
    width = 32
    torch.manual_seed(0)
    block = partial(nn.TransformerEncoderLayer, width, 2, 4 * width, dropout=dropout, batch_first=True, norm_first=True)
    blocks = [block(activation="gelu") for _ in range(2)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 4))


@cache
def traced(**options):
    """The trace of a step on one rank, and its batch."""

    def work():
        model = wb.parallelize(transformer(**options), "*: data")
        x = torch.randn((8, 16, 8), generator=torch.Generator().manual_seed(1))

        def step(x):
            model.zero_grad()
            F.mse_loss(model(x), x[..., :4]).backward()

        captured = wb.capture(step)
        for _ in range(2):
            captured(x)
        return captured.traces[0], x

    [found] = run_ranks(work, 1)
    return found


def replayed(trace, x):
    """Results of a replay, and the most bytes that it held."""
    with torch.no_grad(), HeldBytes() as held:
        made = trace.compile()(x)
    return made, held.most


def test_the_estimate_is_what_a_replay_holds():
    trace, x = traced()
    _, held = replayed(trace, x)
    assert 0.9 * held <= peak_bytes(trace) <= 1.1 * held


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_replay_holds_less(share):
    trace, x = traced()
    wanted, before = replayed(trace, x)
    limit = int(share * peak_bytes(trace))
    smaller = limit_memory(trace, limit)
    made, after = replayed(smaller, x)
    assert peak_bytes(smaller) <= limit
    assert after <= 1.1 * limit
    assert after < before
    assert all(map(torch.equal, made, wanted))


def test_values_of_fast_operators_are_computed_again_first():
    """Activations between two products, not the products."""

    def work():
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
        model = wb.parallelize(nn.Sequential(*layers), "*: data")
        captured = wb.capture(lambda x: model(x).square().sum().backward())
        for _ in range(2):
            model.zero_grad()
            captured(torch.ones(2048, 256))
        return captured.traces[0]

    [trace] = run_ranks(work, 1)
    smaller = limit_memory(trace, int(0.75 * peak_bytes(trace)))
    before, after = (Counter(call.name for call in each.calls) for each in (trace, smaller))
    assert (after - before)["aten.gelu"]
    assert not [name for name in after - before if "mm" in name]
    assert peak_bytes(smaller) <= 0.75 * peak_bytes(trace)


def test_enough_memory_changes_nothing():
    trace, _ = traced()
    assert limit_memory(trace, peak_bytes(trace)) is trace


def train(model, strategy, state, batches, options):
    run = partial(wb.capture, **options) if options is not None else wb.capture
    return captured_runs.train(model, strategy, "adamw", state, batches, run)


@pytest.mark.filterwarnings("ignore:capture.memory_bytes")
@pytest.mark.sampled(4, start=1)
@pytest.mark.parametrize(("model", "strategy", "num_ranks"), CASES)
def test_training_in_the_least_memory_has_the_same_numbers(model, strategy, num_ranks):
    given = (model, strategy, *start(model, 5))
    before, after = (run_ranks(partial(train, *given, options), num_ranks) for options in (None, {"memory_bytes": 1}))
    for one, other in zip(before, after, strict=True):
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other))


def test_too_little_memory_says_how_much_there_must_be():
    def work():
        model = wb.parallelize(mlp(), "*: data")
        captured = wb.capture(lambda x: model(x).sum().backward(), memory_bytes=1000)
        for _ in range(3):
            captured(torch.ones(40, 6))

    with pytest.warns(CaptureWarning, match=r"memory_bytes=1000.*values of this step take [\d.]+ kB at a time"):
        run_ranks(work, 1)


@pytest.mark.parametrize("memory_bytes", [0, -5])
def test_no_memory_is_refused(memory_bytes):
    with pytest.raises(ValueError, match=f"memory_bytes={memory_bytes}.*above 0"):
        wb.capture(lambda x: x, memory_bytes=memory_bytes)


@pytest.mark.parametrize(
    "options", [{}, {"memory_bytes": 1}, pytest.param({"backend": "inductor"}, marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore:capture.memory_bytes")
def test_statistics_of_batch_norm_move_once_in_a_step(options):
    """torch does not say that the operator writes to them. Nothing reads its result, or it is computed again."""

    def work():
        norms = [nn.BatchNorm1d(64) for _ in range(2)]
        layers = nn.Sequential(nn.Linear(8, 64), norms[0], nn.GELU(), nn.Linear(64, 64), norms[1], nn.Tanh())

        def step(x):
            layers.zero_grad()
            layers(x).square().mean().backward()
            with torch.no_grad():
                norms[1](x.repeat(1, 8))

        step, statistics = wb.capture(step, **options), []
        for _ in range(4):
            for norm in norms:
                norm.reset_running_stats()
            step(torch.arange(128.0).reshape(16, 8).sin())
            statistics.append([buffer.clone() for norm in norms for buffer in norm.buffers()])
        assert step.num_replays == 2
        return statistics

    [(first, *others)] = run_ranks(work, 1)
    for other in others:
        torch.testing.assert_close(other, first)
