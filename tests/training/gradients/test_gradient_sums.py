"""Sums of gradients in buckets: over several groups, in many small buckets, a few under way at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.models import batch_for, make
from tests.training.programs import training_equals_one_device
from workbench.errors import StrategyError
from workbench.tensors.global_tensor import local_torch
from workbench.testing import run_ranks
from workbench.training.gradients import reduction
from workbench.transport.threads import ThreadTransport


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: data | 1x2x2", "hybrid"])
def test_many_small_buckets_give_the_same_training(strategy, monkeypatch):
    under_way, most = [0], [0]
    plain_start = ThreadTransport.start_all_reduce

    def counted_start(transport, tensors, *rest):
        finish = plain_start(transport, tensors, *rest)
        if transport.rank != 0:
            return finish
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])

        def counted_finish():
            under_way[0] -= 1
            return finish()

        return counted_finish

    monkeypatch.setattr(reduction, "BUCKET_BYTES", 64)
    monkeypatch.setattr(ThreadTransport, "start_all_reduce", counted_start)
    for losses, weights in run_ranks(lambda: training_equals_one_device("mlp", strategy, 4, steps=3), 4):
        assert losses < 1e-5 and weights < 1e-5
    assert under_way == [0] and most == [4]


@pytest.mark.parametrize("zero", [1, 2])
def test_few_buckets_of_parameters_come_back_at_a_time(zero, monkeypatch):
    """Each takes memory: all of them together took that of all parameters, at the end of each step."""
    under_way, most, started = [0], [0], [0]
    cut, start = reduction.cut_into_buckets, reduction._start_gather

    def counted_start(bucket):
        finish = start(bucket)
        if wb.rank() != 0:
            return finish
        under_way[0], started[0] = under_way[0] + 1, started[0] + 1
        most[0] = max(most[0], under_way[0])

        def counted_finish():
            under_way[0] -= 1
            return finish()

        return counted_finish

    monkeypatch.setattr(reduction, "cut_into_buckets", lambda items, kind, size, *_: cut(items, kind, size, 64))
    monkeypatch.setattr(reduction, "_start_gather", counted_start)
    for losses, weights in run_ranks(
        lambda: training_equals_one_device("mlp", f"*: data | zero={zero}", 2, steps=2), 2
    ):
        assert losses < 1e-5 and weights < 1e-5
    assert under_way == [0] and most == [2] and started[0] > 4


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_sum_is_not_used_for_a_later_gradient_at_the_same_address():
    """With ``create_graph`` autograd makes a new gradient in every backward, where an earlier one may have been."""
    module = torch.nn.Linear(1024, 1024, bias=False)

    def program():
        weight = wb.parallelize(copy.deepcopy(module), "*: data | 1x2x1").weight
        addresses, norms = [], []
        for number in range(1, 41):
            weight.sum().mul(number).backward(create_graph=True)
            with local_torch():
                addresses.append(weight.grad.data_ptr())
            if number % 2 == 0:
                norms.append(torch.nn.utils.get_total_norm([weight.grad]).item() / (number * (number + 1) / 2))
        return addresses, norms

    for addresses, norms in run_ranks(program):
        assert len(set(addresses)) < len(addresses), "else this test says nothing"
        assert norms == pytest.approx([1024.0] * 20, rel=1e-2)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=1", "*: model | 1x2x2"])
def test_ranks_may_list_the_parameters_in_another_order(strategy):
    """As ``list(set(model.parameters()))`` does: a set goes by addresses, which differ between processes."""
    inputs, targets = batch_for("mlp")
    models = [make("mlp") for _ in range(5)]

    def trained(model, step):
        parameters = list(model.parameters())[::step]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
        return [p.detach().full_tensor() if isinstance(p, wb.GlobalTensor) else p.detach() for p in model.parameters()]

    expected = trained(models[4], 1)
    for weights in run_ranks(lambda rank: trained(wb.parallelize(models[rank], strategy), 1 - rank % 2 * 2), 4):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def test_no_sync_of_a_module_that_is_not_parallelized():
    message = r"no_sync\(Linear\): 0 of its 2 parameters.*wb.parallelize"
    with pytest.raises(StrategyError, match=message), wb.no_sync(nn.Linear(2, 2)):
        pass


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("*: data | zero=2", 2), ("*: model | 1x2x2 zero=2", 4), ("0: data; 2: data; 4: data@1 | 2x2x1 zero=2", 4)],
)
def test_gradients_are_differentiated_again_between_micro_batches(strategy, num_ranks):
    """AdaHessian: the second of three backwards has ``create_graph=True``; shards of gradients have no history."""
    inputs, targets = (part[:8] for part in batch_for("mlp"))
    models = [make("mlp").double() for _ in range(num_ranks + 1)]

    def program(model):
        parameters, found = list(model.parameters()), []
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for number in range(3):
                loss = F.cross_entropy(model(inputs[number::3].double()), targets[number::3])
                loss.backward(create_graph=number == 1)
                if number == 1:
                    grads = [p.grad for p in parameters]
                    curves = torch.autograd.grad(grads, parameters, [torch.ones_like(grad) for grad in grads])
                    found += [curve.square().sum().item() for curve in curves]
            optimizer.step()
            found += [p.grad.square().sum().item() for p in parameters]
        return found

    expected = program(models.pop())
    for found in run_ranks(lambda rank: program(wb.parallelize(models[rank], strategy)), num_ranks):
        assert found == pytest.approx(expected, rel=1e-9)
