"""A captured step with compiled parts trains as the step that is replayed operator by operator."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.capture.test_capture import MODELS, OPTIMIZERS, start
from workbench.testing import run_ranks
from workbench.training.capture.compiled import CaptureWarning, Program


class Writes(nn.Module):
    """Writes in place to what it made, to a view of it, and to a buffer that it reads through a view."""

    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(2, 8))

    def forward(self, x):
        y = self.linear(x)
        row = self.seen[1]
        with torch.no_grad():
            self.seen += 1
            row.mul_(0.5)
        z = y + 1
        left, right = z[:, :4], z[:, 4:]
        left += right
        z.mul_(row.mean() + 0.5)
        return self.head(F.relu(z, inplace=True))


MODELS = MODELS | {"writes": (Writes, MODELS["mlp"][1])}


@pytest.fixture
def run_as_graphs(monkeypatch):
    """Programs run as graphs of torch's operators: what is compiled, without the time of a compiler."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, values, dynamic_shapes: graph)


def train(model_name, strategy, optimizer_name, state, batches, backend):
    """On one rank: losses, weights, buffers and gradients, and how much of the step is compiled."""
    model = MODELS[model_name][0]()
    model.load_state_dict(state)
    model = wb.parallelize(model, strategy)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    run = wb.capture(step, backend=backend)
    left = [run(x, y).full_tensor() for x, y in batches]
    left += [value.full_tensor().detach() for value in model.state_dict().values()]
    left += [parameter.grad.full_tensor() for parameter in model.parameters()]
    programs = [call.function for call in run.traces[0].calls if isinstance(call.function, Program)]
    return left, [program.is_compiled for program in programs], len(run.traces[0].calls)


def assert_compiled_like_captured(model_name, strategy, num_ranks, close=torch.equal, num_steps=5):
    given = (model_name, strategy, "adamw", *start_of(model_name, num_steps))
    captured, compiled = (run_ranks(partial(train, *given, backend), num_ranks) for backend in (None, "inductor"))
    for (one, _, num_calls), (other, are_compiled, fewer_calls) in zip(captured, compiled, strict=True):
        assert len(one) == len(other) > num_steps
        assert all(close(a, b) for a, b in zip(one, other, strict=True))
        assert are_compiled
        assert all(are_compiled)
        assert fewer_calls < num_calls


def start_of(model_name, num_steps):
    if model_name != "writes":
        return start(model_name, num_steps)
    torch.manual_seed(0)
    return Writes().state_dict(), start("mlp", num_steps)[1]


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
    rows = "0: data; 3: data@1"
    assert_compiled_like_captured("mlp", rows, 2)


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
        found = [run(torch.linspace(-1, 1, 24).reshape(4, 6)).full_tensor() for _ in range(5)]
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
    given = ("mlp", "*: data", "adamw", *start("mlp", 4))
    captured = run_ranks(partial(train, *given, None), 1)
    with pytest.warns(CaptureWarning, match=message):
        compiled = run_ranks(partial(train, *given, "inductor"), 1)
    assert all(map(torch.equal, captured[0][0], compiled[0][0]))
    assert not any(compiled[0][1])


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend='tvm'.*write 'inductor'"):
        wb.capture(lambda x: x, backend="tvm")
