"""A captured step with compiled parts trains as the step that is replayed operator by operator."""

import warnings
from functools import partial
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.capture import captured_runs
from tests.training.capture.captured_runs import MODELS, start
from workbench.errors import CaptureWarning
from workbench.testing import run_ranks
from workbench.training.capture import compiled
from workbench.training.capture.compiled import Program


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_shared", WeakValueDictionary())


@pytest.fixture
def run_as_graphs(monkeypatch):
    """Programs run as graphs of torch's operators: what is compiled, without the time of a compiler."""
    graphs = []

    def compile_nothing(graph, values, dynamic_shapes):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_nothing)
    return graphs


def train(model_name, strategy, state, batches, backend):
    """On one rank: what ``captured_runs.train`` gives, names of a replay's calls, and which programs are compiled."""
    steps = []

    def capture(step):
        steps.append(wb.capture(step, backend=backend))
        return steps[-1]

    left = captured_runs.train(model_name, strategy, "adamw", state, batches, capture)
    calls = steps[0].traces[0].calls
    return (
        left,
        [call.name for call in calls],
        [call.function.is_compiled for call in calls if isinstance(call.function, Program)],
    )


def assert_compiled_like_captured(model_name, strategy, num_ranks, num_steps=5):
    given = (model_name, strategy, *start(model_name, num_steps))
    before, after = (run_ranks(partial(train, *given, backend), num_ranks) for backend in (None, "inductor"))
    for (one, calls, _), (other, fewer_calls, are_compiled) in zip(before, after, strict=True):
        assert len(one) == len(other) > num_steps
        assert all(map(torch.equal, one, other))
        assert are_compiled
        assert all(are_compiled)
        assert len(fewer_calls) < len(calls)
        assert fewer_calls.count("draw_key") == calls.count("draw_key")
        assert not [name for name in fewer_calls if "fill_random" in name or "scaled_dot_product" in name]


@pytest.mark.sampled(4)
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


def test_equal_programs_are_compiled_once(run_as_graphs):
    """On two ranks, and in two blocks between which model parallelism exchanges."""

    def work():
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)]
        model = wb.parallelize(nn.Sequential(*map(captured_runs.filled, blocks)), "*: model")
        step = wb.capture(captured_runs.step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)), backend="inductor")
        captured_runs.called(step, shape=(4, 8))
        return sum(isinstance(call.function, Program) for call in step.traces[0].calls)

    counts = run_ranks(work, 2)
    assert min(counts) >= 4
    assert len(run_as_graphs) <= max(counts)  # ranks differ: one of them adds the biases


def test_a_hundred_steps_are_recorded_and_compiled_once(run_as_graphs):
    """A learning rate that changes with every step is no reason to do it again."""

    def work():
        torch.manual_seed(0)
        model = wb.parallelize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)), "*: data")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        captured = wb.capture(step, backend="inductor")
        compiled = []
        for number in range(102):
            captured(torch.full((4, 4), float(number)))
            scheduler.step()
            compiled.append(len(run_as_graphs))
        return captured.num_recordings, captured.num_replays, compiled

    [(num_recordings, num_replays, compiled)] = run_ranks(work, 1)
    assert (num_recordings, num_replays) == (1, 100)
    assert compiled[2] == compiled[-1] > 0


def test_keys_stay_behind_operators_that_draw_from_their_generator(run_as_graphs):
    def work(backend):
        layer = nn.Dropout(0.5)

        def step(x):
            y = layer(wb.to_global(torch.rand(4, 4), wb.placement("cpu", [0]), wb.sbp.broadcast) + x).sin().exp()
            return (layer(y).cos() * 2 + 1).detach()

        torch.manual_seed(0)
        run = wb.capture(step, backend=backend)
        x = wb.to_global(torch.ones(4, 4), wb.placement("cpu", [0]), wb.sbp.broadcast)
        return [run(x).full_tensor() for _ in range(4)]

    (one,), (other,) = (run_ranks(partial(work, backend), 1) for backend in (None, "inductor"))
    assert all(map(torch.equal, one, other))
    assert not torch.equal(one[2], one[3])
    assert run_as_graphs


def test_a_library_that_a_killed_compiler_left_is_made_again(monkeypatch, tmp_path):
    library = tmp_path / "ab.main.so"
    library.touch()

    def load(graph, values, dynamic_shapes):
        if library.exists():
            raise RuntimeError(f"ImportError: {library}: file too short")
        return graph

    monkeypatch.setattr(torch._inductor, "standalone_compile", load)
    _, _, are_compiled = run_ranks(partial(train, "mlp", "*: data", *start("mlp", 4), "inductor"), 1)[0]
    assert are_compiled
    assert all(are_compiled)
    assert not library.exists()


def test_a_warning_of_the_compiler_does_not_stop_it_where_warnings_are_errors(monkeypatch):
    def compile_and_warn(graph, values, dynamic_shapes):
        warnings.warn("tensor cores are not enabled", UserWarning, stacklevel=1)
        return graph

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_and_warn)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("error")
        _, _, are_compiled = run_ranks(partial(train, "mlp", "*: data", *start("mlp", 4), "inductor"), 1)[0]
        with pytest.raises(UserWarning):
            warnings.warn("another one", UserWarning, stacklevel=1)
    assert are_compiled and all(are_compiled)
    assert {str(each.message) for each in said} == {"tensor cores are not enabled"}


@pytest.mark.timeout(600)  # on a busy machine
def test_inductor_trains_alike():
    torch.manual_seed(0)
    weights = nn.Linear(6, 4).state_dict()

    def losses(backend):
        layer = nn.Linear(6, 4)
        layer.load_state_dict(weights)
        layer = wb.parallelize(layer, "*: data")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = F.dropout(layer(x), 0.3).sigmoid().square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        wb.manual_seed(0)
        run = wb.capture(step, backend=backend)
        batch = torch.linspace(-1, 1, 24).reshape(4, 6)
        batch = wb.to_global(batch, wb.placement("cpu", [0]), wb.sbp.split(0))
        found = [run(batch).full_tensor() for _ in range(5)]
        programs = [call.function for call in run.traces[0].calls if isinstance(call.function, Program)]
        return torch.stack(found), [program.is_compiled for program in programs]

    (one, _), (other, are_compiled) = (run_ranks(partial(losses, backend), 1)[0] for backend in (None, "inductor"))
    assert are_compiled
    assert all(are_compiled)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


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
    one = run_ranks(partial(train, *given, None), 1)[0]
    with pytest.warns(CaptureWarning, match=message):
        other = run_ranks(partial(train, *given, "inductor"), 1)[0]
    assert all(map(torch.equal, one[0], other[0]))
    assert not any(other[2])


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend='tvm'.*write 'inductor'"):
        wb.capture(lambda x: x, backend="tvm")
