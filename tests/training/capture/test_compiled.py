"""A captured step with compiled parts trains as the step that is replayed operator by operator."""

from functools import partial

import pytest
import torch
from torch import nn

import workbench as wb
from tests.training.capture import captured_runs
from tests.training.capture.captured_runs import MODELS, start
from workbench.testing import run_ranks
from workbench.training.capture.compiled import CaptureWarning, Program


@pytest.fixture
def run_as_graphs(monkeypatch):
    """Programs run as graphs of torch's operators: what is compiled, without the time of a compiler."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, values, dynamic_shapes: graph)


def train(model_name, strategy, state, batches, backend):
    """On one rank: what ``captured_runs.train`` gives, how many calls a replay has, and which programs are compiled."""
    steps = []

    def capture(step):
        steps.append(wb.capture(step, backend=backend))
        return steps[-1]

    left = captured_runs.train(model_name, strategy, "adamw", state, batches, capture)
    calls = steps[0].traces[0].calls
    return left, len(calls), [call.function.is_compiled for call in calls if isinstance(call.function, Program)]


def assert_compiled_like_captured(model_name, strategy, num_ranks, num_steps=5):
    given = (model_name, strategy, *start(model_name, num_steps))
    captured, compiled = (run_ranks(partial(train, *given, backend), num_ranks) for backend in (None, "inductor"))
    for (one, num_calls, _), (other, fewer_calls, are_compiled) in zip(captured, compiled, strict=True):
        assert len(one) == len(other) > num_steps
        assert all(map(torch.equal, one, other))
        assert are_compiled
        assert all(are_compiled)
        assert fewer_calls < num_calls


@pytest.mark.parametrize(
    ("model", "strategy", "num_ranks"),
    [
        *((model, "*: data", 2) for model in MODELS),
        *((model, "*: model", 2) for model in MODELS),
        ("writes", "*: data", 1), ("writes", "*: data | zero=3", 2), ("mlp", "*: data | zero=3", 2),
        ("writes", "*: data | recompute", 2),
    ],
)  # fmt: skip
def test_programs_do_what_their_operators_do(run_as_graphs, model, strategy, num_ranks):
    assert_compiled_like_captured(model, strategy, num_ranks)


def test_a_step_in_stages_is_compiled_between_its_exchanges(run_as_graphs):
    assert_compiled_like_captured("mlp", "0: data; 3: data@1", 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # Inductor uses deprecated functions of torch
def test_inductor_trains_alike(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    weights = nn.Linear(6, 4).state_dict()

    def losses(backend):
        layer = nn.Linear(6, 4)
        layer.load_state_dict(weights)
        layer = wb.parallelize(layer, "*: data")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = layer(x).sigmoid().square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wb.capture(step, backend=backend)
        batch = torch.linspace(-1, 1, 24).reshape(4, 6)
        batch = wb.to_global(batch, wb.placement("cpu", [0]), wb.sbp.split(0))
        found = [run(batch).full_tensor() for _ in range(5)]
        programs = [call.function for call in run.traces[0].calls if isinstance(call.function, Program)]
        return torch.stack(found), [program.is_compiled for program in programs]

    (captured, _), (compiled, are_compiled) = (
        run_ranks(partial(losses, backend), 1)[0] for backend in (None, "inductor")
    )
    assert are_compiled
    assert all(are_compiled)
    torch.testing.assert_close(captured, compiled, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("no such operator"), "RuntimeError: no such operator"),
        (RuntimeError("No working C++ compiler found in config.cpp.cxx"), "apt-get install g"),
    ],
)
def test_a_step_that_cannot_be_compiled_is_replayed_operator_by_operator(monkeypatch, error, message):
    def fails(graph, values, dynamic_shapes):
        raise error

    monkeypatch.setattr(torch._inductor, "standalone_compile", fails)
    given = ("mlp", "*: data", *start("mlp", 4))
    captured = run_ranks(partial(train, *given, None), 1)
    with pytest.warns(CaptureWarning, match=message):
        compiled = run_ranks(partial(train, *given, "inductor"), 1)
    assert all(map(torch.equal, captured[0][0], compiled[0][0]))
    assert not any(compiled[0][2])


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend='tvm'.*write 'inductor'"):
        wb.capture(lambda x: x, backend="tvm")
