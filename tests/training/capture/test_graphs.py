"""A captured step whose parts are CUDA graphs trains as the step that is replayed operator by operator.

Without a GPU, graphs are played: a launch runs the operators on the recorded operands and writes the recorded results.
"""

from functools import partial
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.capture import captured_runs
from tests.training.capture.captured_runs import start
from workbench.errors import CaptureWarning
from workbench.testing import run_ranks
from workbench.training.capture import compiled as module_of_programs
from workbench.training.capture import graphs
from workbench.training.capture.graphs import GraphProgram

CASES = [
    ("mlp", "*: data", 1),
    ("mlp", "*: data | 1x2x1", 2),
    ("mlp", "*: data | 1x2x1 zero=3", 2),
    ("cnn", "*: data | 1x2x1", 2),
    ("writes", "*: data | 1x2x1", 2),
    ("writes", "*: data", 1),
    ("gpt", "*: data | 1x1x1", 1),
    ("gpt", "*: model | 1x1x2", 2),
    ("gpt", "hybrid", 4),
]


@pytest.fixture
def played(monkeypatch):
    """Graphs on the CPU; a list of the parts that were recorded."""
    recorded = []

    def record(shared, run, operands):
        results = []

        def launch():
            made = run(*operands)
            if results:
                for kept, value in zip(results, made, strict=True):
                    kept.copy_(value)
            else:
                results.extend(value.clone() for value in made)

        recorded.append(operands)
        return launch, results

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    return recorded


def train(model, strategy, state, batches, backend):
    """What ``captured_runs.train`` gives, the names of a replay's calls, and which parts are graphs."""
    steps = []

    def capture(step):
        steps.append(wb.capture(step, backend=backend))
        return steps[-1]

    left = captured_runs.train(model, strategy, "adamw", state, batches, capture)
    calls = steps[0].traces[0].calls
    programs = [call.function for call in calls if isinstance(call.function, GraphProgram)]
    return left, [call.name for call in calls], [program.is_graph for program in programs], steps[0].problem


def assert_graphs_like_captured(model, strategy, num_ranks, num_steps=6, run=run_ranks, backend="cudagraphs"):
    given = (model, strategy, *start(model, num_steps))
    before, after = (run(partial(train, *given, backend), num_ranks) for backend in (None, backend))
    for (one, calls, _, _), (other, fewer_calls, are_graphs, problem) in zip(before, after, strict=True):
        assert not problem
        assert len(one) == len(other) > num_steps
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert are_graphs
        assert all(are_graphs)
        assert len(fewer_calls) < len(calls)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("model", "strategy", "num_ranks"), CASES)
def test_graphs_do_what_their_operators_do(played, model, strategy, num_ranks):
    assert_graphs_like_captured(model, strategy, num_ranks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("model", "strategy", "num_ranks"), CASES[3:8:2])
def test_graphs_of_compiled_operators(played, monkeypatch, model, strategy, num_ranks):
    compiled = []
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, *_, **__: compiled.append(graph) or graph)
    monkeypatch.setattr(module_of_programs, "_shared", WeakValueDictionary())
    assert_graphs_like_captured(model, strategy, num_ranks, backend="inductor+cudagraphs")
    assert compiled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("model", "strategy", "num_ranks"), CASES)
def test_graphs_on_a_gpu_do_what_their_operators_do(model, strategy, num_ranks):
    assert_graphs_like_captured(model, strategy, num_ranks, run=partial(run_ranks, device="cuda:0"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["inductor", "inductor+cudagraphs"])
@pytest.mark.parametrize(("model", "strategy", "num_ranks"), [CASES[1], CASES[6]])
def test_compiled_steps_on_a_gpu_train_as_captured_ones(model, strategy, num_ranks, backend):
    """Dropout is the same; sums are taken in another order."""
    given = (model, strategy, *start(model, 6))
    before, after = (run_ranks(partial(train, *given, each), num_ranks, device="cuda:0") for each in (None, backend))
    for (one, *_), (other, *_, problem) in zip(before, after, strict=True):
        assert not problem
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


def test_a_model_on_one_rank_is_one_graph(played):
    def work():
        model = wb.parallelize(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), "*: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = wb.capture(step, backend="cudagraphs")
        losses = [captured(torch.ones(4, 6)) for _ in range(5)]
        return losses, [call.name for call in captured.traces[0].calls]

    [(losses, names)] = run_ranks(work, 1)
    assert [name.partition(".")[0] for name in names] == ["graph", "SGD", "copies"]
    kept = [loss.item() for loss in losses]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 5


def test_gradients_of_an_earlier_step_stay_as_they_were(played):
    def work():
        model = wb.parallelize(nn.Linear(3, 2), "*: data")

        def step(x):
            model.zero_grad()
            model(x).square().sum().backward()

        captured = wb.capture(step, backend="cudagraphs")
        gradients = []
        for number in range(6):
            captured(torch.full((2, 3), float(number)))
            gradients.append(model.weight.grad)
        return [gradient.norm().item() for gradient in gradients]

    [norms] = run_ranks(work, 1)
    assert norms == sorted(norms)
    assert len(set(norms)) == 6


def test_a_part_writes_to_what_comes_from_outside(played):
    """Gradients that a step adds to are operands at changing addresses."""

    def work(backend):
        torch.manual_seed(0)
        model = wb.parallelize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "*: data")

        def step(x):
            F.mse_loss(model(x), x[:, :2]).backward()

        captured = step if backend is None else wb.capture(step, backend=backend)
        batches = torch.randn(12, 5, 3, generator=torch.Generator().manual_seed(3))
        for number, x in enumerate(batches):
            if number % 3 == 0:
                model.zero_grad(set_to_none=number == 6)
            captured(x)
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    [plain], [graphed] = (run_ranks(partial(work, backend), 1) for backend in (None, "cudagraphs"))
    assert all(map(torch.equal, plain, graphed))


class FakeGraph:
    """A graph whose launch does nothing."""

    begun = None

    def capture_begin(self, pool, capture_error_mode):
        self.used = pool
        self.begun.append((pool, torch.cuda.current_stream()))

    def capture_end(self):
        """Nothing is recorded."""

    def pool(self):
        return self.used

    def replay(self):
        """The results stay those of the recording."""


class FakeStream:
    present = None

    def __enter__(self):
        FakeStream.present = self

    def __exit__(self, *_):
        FakeStream.present = None

    def wait_stream(self, _):
        """All is done."""


def test_recordings_for_other_numbers_share_the_memory_of_their_graphs(monkeypatch):
    begun = []
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(FakeGraph, "begun", begun)
    fakes = {
        "CUDAGraph": FakeGraph,
        "Stream": FakeStream,
        "stream": lambda stream: stream,
        "current_stream": lambda: FakeStream.present or FakeStream(),
        "graph_pool_handle": object,
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.tau = nn.Linear(3, 3), 1.0

        def forward(self, x):
            return (self.layer(x) / self.tau).tanh()

    def work():
        model = Model()

        def step(x):
            model.zero_grad()
            model(x).sum().backward()

        captured = wb.capture(step, backend="cudagraphs")
        for value in range(1, 6):
            model.tau = float(value)
            for _ in range(4):
                captured(torch.ones(2, 3))
        programs = [each.function for trace in captured.traces for each in trace.calls if each.name.startswith("graph")]
        operands = {place.untyped_storage().data_ptr() for each in programs for _, place in each._copied}
        del programs
        model.layer = nn.Linear(3, 3)  # all recordings are forgotten
        for _ in range(4):
            captured(torch.ones(2, 3))
        return len(operands)

    assert run_ranks(work, 1) == [1]
    assert len(begun) == 6
    pools, streams = ([each[at] for each in begun] for at in (0, 1))
    assert len(set(pools[:5])) == len(set(streams[:5])) == 1
    assert pools[5] not in pools[:5]


def test_expanded_operands_are_copied_once(played):
    def work():
        captured = wb.capture(lambda x: (x * 2 + 1).relu() - x, backend="cudagraphs")
        return [captured(torch.full((1, 3), float(n)).expand(4, 3)).tolist() for n in range(5)]

    [found] = run_ranks(work, 1)
    assert found == [[[n + 1.0] * 3] * 4 for n in range(5)]


def test_without_a_gpu_a_step_is_replayed_operator_by_operator():
    def work():
        captured = wb.capture(lambda x: (x * 2 + 1) * 3 - 4, backend="cudagraphs")
        return [captured(torch.ones(3)).tolist() for _ in range(4)]

    with pytest.warns(CaptureWarning, match="no part that runs on a GPU alone; its tensors are on: cpu"):
        [found] = run_ranks(work, 1)
    assert found == [[5.0] * 3] * 4


def test_a_part_that_cannot_be_recorded_is_replayed_operator_by_operator(played, monkeypatch):
    def fails(shared, run, operands):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nsecond line")

    monkeypatch.setattr(graphs, "record", fails)

    def work():
        captured = wb.capture(lambda x: (x * 2 + 1) * 3 - 4, backend="cudagraphs")
        return [captured(torch.full((3,), float(n))).tolist()[0] for n in range(5)]

    with pytest.warns(CaptureWarning, match="not permitted when stream is capturing"):
        [found] = run_ranks(work, 1)
    assert found == [6.0 * n - 1 for n in range(5)]
