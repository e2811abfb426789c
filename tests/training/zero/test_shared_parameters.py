"""zero=3 on ranks that share memory: whole parameters are there once, and nobody may write to them."""

import copy
import itertools

import pytest
import torch
from torch import nn

import workbench as wb
from tests.training.block_models import Chain, Skipping, Twice, loss_of, made, value
from tests.transport.shared_ranks import assert_all_returned, run_in_worlds
from workbench.errors import StrategyError
from workbench.tensors.global_tensor import local_torch
from workbench.testing import run_ranks
from workbench.transport.shared.transport import SharedTransport


def train(model, steps=4):
    """Weights after some steps, without dropout: threads that stand for processes draw keys as they come."""
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return [value(p) for p in model.parameters()]


@pytest.fixture
def rooms(monkeypatch):
    """Whether each gathering of rank 0 found room."""
    found = []
    start = SharedTransport.start_shared_all_gather

    def started(self, *args):
        is_filled, finish = start(self, *args)
        if self.rank == 0:
            found.append(is_filled)
        return is_filled, finish

    monkeypatch.setattr(SharedTransport, "start_shared_all_gather", started)
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", ["", "recompute"])
@pytest.mark.parametrize("kind", [Chain, Twice, Skipping])
def test_training_in_place_equals_one_device(rooms, kind, options):
    models = [made(kind) for _ in range(3)]
    [truth] = run_ranks(lambda: train(wb.parallelize(made(kind), "*: data | 1x1x1")), 1)

    def program(world):
        return train(wb.parallelize(models[world.rank], f"*: data | 1x3x1 zero=3 {options}"))

    for found in assert_all_returned(run_in_worlds(program, 3)):
        for ours, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert rooms.count(True) > 0.9 * len(rooms) > 40


def test_a_parameter_that_is_kept_keeps_its_values(rooms):
    """Code that holds on to a whole parameter gets another way of gathering, and no other numbers."""
    models = [made(Chain) for _ in range(2)]
    [truth] = run_ranks(lambda: train(wb.parallelize(made(Chain), "*: data | 1x1x1")), 1)

    def program(world):
        kept = []

        def keep(module, args, output):
            if not kept and world.rank == 1:
                with local_torch():
                    whole = module.weight.detach()
                    kept.append((whole, whole.clone()))

        models[world.rank].blocks[1].up.register_forward_hook(keep)
        weights = train(wb.parallelize(models[world.rank], "*: data | 1x2x1 zero=3"))
        with local_torch():
            assert all(torch.equal(whole, copy) for whole, copy in kept)
        return weights, len(kept)

    (found, none), (_, one) = assert_all_returned(run_in_worlds(program, 2))
    assert (none, one) == (0, 1)
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert not any(rooms[6:])


def test_a_recorded_step_gathers_by_messages(rooms):
    """A replay does not ask whether there is room; steps that are recorded and others go on beside each other."""
    models, num_asked = [made(Chain).eval() for _ in range(2)], ([], [])
    [truth] = run_ranks(lambda: train(wb.parallelize(made(Chain), "*: data | 1x1x1"), steps=6), 1)

    def program(world):
        model = wb.parallelize(models[world.rank], "*: data | 1x2x1 zero=3")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step():
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()

        captured = wb.capture(step)
        for run in (captured, captured, step, captured, step, captured):
            run()
            num_asked[world.rank].append(len(rooms))
        return [value(p) for p in model.parameters()]

    for found in assert_all_returned(run_in_worlds(program, 2)):
        for ours, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    runs = list(itertools.pairwise([0, *num_asked[0]]))
    assert [after > before for before, after in runs] == [True, False] * 3  # the first call runs as it is


class Clamping(nn.Linear):
    """Writes to its weight in forward."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampingData(nn.Linear):
    """The same through ``.data``, of which no version tells."""

    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Casting(nn.Linear):
    """Casts its weight in forward, as routers of experts do."""

    def forward(self, x):
        self.weight.data = self.weight.data.double()
        return nn.functional.linear(x.double(), self.weight)


@pytest.mark.parametrize("kind", [Clamping, ClampingData, Casting])
def test_a_forward_that_writes_to_its_parameters_is_told(kind):
    torch.manual_seed(0)
    layers = [kind(4, 4)]
    layers.append(copy.deepcopy(layers[0]))

    def program(rank):
        model = wb.parallelize(layers[rank], "*: data | 1x2x1 zero=3")
        says = rf"{kind.__name__}: forward .* 1 of 2 gathered parameters \(weight of {kind.__name__}\).*use zero=2"
        with pytest.raises(StrategyError, match=says):
            model(torch.ones(2, 4))
        with pytest.raises(StrategyError, match=says), torch.no_grad():
            model(torch.ones(2, 4))

    run_ranks(program, 2)


def test_a_forward_may_look_at_the_data_of_its_parameters():
    class Looking(nn.Linear):
        def forward(self, x):
            return super().forward(x) / self.weight.data.norm()

    layer = Looking(4, 4)
    truth = layer(torch.ones(2, 4)).detach()
    layers = [copy.deepcopy(layer) for _ in range(2)]

    def program(rank):
        return wb.parallelize(layers[rank], "*: data | zero=3")(torch.ones(2, 4)).full_tensor().detach()

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, truth)


class Momentum(nn.Module):
    """Two encoders; in forward the second follows the first, through ``.data``."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.assigns = assigns

    def forward(self, x):
        query = self.query(x)
        for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
            if self.assigns:
                own.data = own.data * 0.5 + other.data * 0.5
            else:
                own.data.mul_(0.5).add_(other.data, alpha=0.5)
        return query * self.key(x)


@pytest.mark.parametrize("assigns", [True, False])
def test_parameters_that_change_between_two_units_are_gathered_as_they_are(assigns):
    def train(model):
        optimizer, losses = torch.optim.SGD(model.query.parameters(), lr=0.5), []
        for _ in range(4):
            loss = model(torch.linspace(-1, 1, 20).double().reshape(5, 4)).cos().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    models = [Momentum(assigns).double()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    truth = train(models[2])
    for found in run_ranks(lambda rank: train(wb.parallelize(models[rank], "*: data | zero=3")), 2):
        assert found == pytest.approx(truth, rel=1e-12)
