"""Where things are made and moved: default devices, a device without a number, modules moved by the user, and keys."""

import copy
from itertools import islice

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.checked_device import DEVICE, counted, kernels
from tests.checked_device.test_training import TRUTH, X, Y, mlp, train
from workbench.tensors import default_generator, world
from workbench.testing import run_ranks
from workbench.training.datasets import epoch_by_epoch


@pytest.fixture
def own_world(monkeypatch):
    """This process joins worlds of its own."""
    monkeypatch.setattr(world, "_process_world", None)
    monkeypatch.setattr(world, "_left_world", None)
    yield
    world.shutdown()


def test_a_rank_launches_on_the_device_that_it_names(own_world):
    kernels.chosen.clear()
    assert wb.init(0, 1, device="checked:0").device == DEVICE
    assert kernels.chosen == [0]


def test_a_device_without_a_number_is_the_present_one(own_world):
    assert wb.init(0, 1, device="checked").device == DEVICE
    assert torch.ones(2, device="checked").device == world.current().device


def test_simulated_ranks_know_the_number_of_their_device():
    assert run_ranks(lambda: world.current().device, device="checked") == [DEVICE, DEVICE]


def test_terms_of_a_sum_stay_terms_where_they_are_moved_to_their_own_device():
    def program():
        terms = wb.ones(4, placement=wb.placement(ranks=[0, 1]), sbp="P")
        moved = [terms.to("checked"), terms.to("checked:0"), terms.to(DEVICE, non_blocking=True)]
        return [each is terms for each in moved]

    assert run_ranks(program, 2, device=DEVICE) == [[True] * 3] * 2


def test_ranks_begin_with_the_random_state_of_rank_0_on_the_device_too():
    def states_after(seed):
        torch.manual_seed(seed)
        return default_generator.states(DEVICE)

    of_rank_0 = states_after(0)
    remaining = iter(of_rank_0)

    class Transport:
        def all_gather(self, own, header):
            return [torch.cat([next(remaining).to(own.device), own[-1:]]), own]

    states_after(1)
    world._share_random_state(1, Transport(), DEVICE)
    assert len(of_rank_0) == 2
    assert all(map(torch.equal, default_generator.states(DEVICE), of_rank_0))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("moved", ["before", "after"])
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3", "pipeline | mb=2"])
def test_a_module_may_be_moved_to_the_device_before_and_after(strategy, moved):
    built = mlp()

    def program():
        model = copy.deepcopy(built)
        model = wb.parallelize(model.to(DEVICE), strategy) if moved == "before" else wb.parallelize(model, strategy)
        if moved == "after":
            model.to(DEVICE)
        return train(model, lambda model: wb.forward_backward(model, F.cross_entropy, X, Y))[0]

    for losses in run_ranks(program, device=DEVICE):
        assert losses == pytest.approx(TRUTH, rel=1e-4)


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=2", "pipeline | mb=2"])
def test_torchs_default_device_may_be_the_device(strategy):
    built = mlp()

    def program():
        torch.set_default_device(DEVICE)  # of this thread
        try:
            model = wb.parallelize(copy.deepcopy(built), strategy)
            return train(model, lambda model: wb.forward_backward(model, F.cross_entropy, X, Y))[0]
        finally:
            torch.set_default_device(None)

    for losses in run_ranks(program, device=DEVICE):
        assert losses == pytest.approx(TRUTH, rel=1e-4)


def test_keys_of_random_numbers_are_drawn_on_the_host():
    """A process of its own has torch's default generator, which is shared with nobody here."""

    def program(device):
        torch.set_default_device(device)
        try:
            with world.current().context.temporarily(generator=None), default_generator.seeded(7), counted() as counts:
                dropped = F.dropout(wb.rand(4, 6, placement=wb.placement(device.type, ranks=[0]), sbp="B"), 0.5)
            assert not counts.waits, counts
            return dropped.to_local().cpu()
        finally:
            torch.set_default_device(None)

    [expected] = run_ranks(lambda: program(torch.device("cpu")), 1)
    [found] = run_ranks(lambda: program(DEVICE), 1, device=DEVICE)
    assert torch.equal(found, expected)


def test_epochs_keep_their_order_under_another_default_device():
    def order(default):
        torch.set_default_device(default)
        try:
            return [order.tolist() for order in islice(epoch_by_epoch(len(X), shuffle=True, seed=0), 2)]
        finally:
            torch.set_default_device(None)

    assert order(DEVICE) == order(None)
