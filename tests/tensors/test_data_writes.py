"""Writes through ``.data``, which torch counts apart: boxings, gatherings and sums from before are not used."""

import copy

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.testing import run_ranks


def _through_data(made, summed):
    """What boxings of tensors show that share memory by ``.data``, after each of several writes."""
    x = made()
    first, found = x.data, []

    def show(*tensors):
        found.append([summed(tensor) for tensor in tensors])

    show(x, first)
    first.add_(1)
    show(x, first)
    x.add_(1)
    show(x, first)
    x.data[0].zero_()
    show(x, first)
    with torch.inference_mode():
        x.data.add_(1)
    show(x, first)
    y = made().mul_(5)
    x.data = y
    show(x, y, first)
    y.add_(1)
    show(x, y)
    x.add_(1)
    show(x, y)
    first.sub_(3)
    show(x, first)
    for _ in range(3):
        x.data = x.data * 2
        show(x)
        x.data.sub_(1)
        show(x)
    return found


def test_boxings_are_those_of_the_present_values():
    """Rank 2 holds nothing, and takes part in as many boxings."""
    expected = _through_data(lambda: torch.ones(4, 4), lambda tensor: (1 + tensor).sum().item())

    def program():
        here, turned = wb.placement("cpu", ranks=[0, 1]), wb.placement("cpu", ranks=[1, 0])
        ones = wb.ones(4, 4, placement=turned, sbp="S(0)")
        made = lambda: wb.ones(4, 4, placement=here, sbp="S(0)")  # noqa: E731
        return _through_data(made, lambda tensor: (ones + tensor).sum().item())

    assert run_ranks(program, 3) == [expected] * 3


@pytest.mark.parametrize("strategy", ["*: model", "*: data", "*: data | zero=3"])
def test_a_rank_may_look_at_data_alone(strategy):
    """At that of parameters, gradients and activations: ranks communicate as before."""
    inputs, classes = torch.linspace(-1, 1, 24).double().reshape(6, 4), torch.arange(6) % 3

    def train(model, looks):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if looks:
            model[1].register_forward_hook(lambda module, args, out: shapes.append(out.data.shape))
        for _ in range(3):
            if looks:
                assert sum(parameter.data.numel() for parameter in model.parameters()) == 67
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), classes).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if looks:
                assert all(parameter.grad.data.shape == parameter.shape for parameter in model.parameters())
            optimizer.step()
        return list(model.parameters())

    shapes = []
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    truth = [parameter.detach() for parameter in train(models[2], False)]

    def program(rank):
        return [p.full_tensor().detach() for p in train(wb.parallelize(models[rank], strategy), rank == 0)]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, truth)
    assert shapes == [(6, 8)] * 3


def test_a_rank_may_look_at_the_data_of_what_is_boxed_twice():
    def program(rank):
        here, turned = wb.placement("cpu", ranks=[0, 1]), wb.placement("cpu", ranks=[1, 0])
        x, ones = wb.ones(4, 4, placement=here, sbp="S(0)"), wb.ones(4, 4, placement=turned, sbp="S(0)")
        if rank == 0:
            assert x.data.shape == (4, 4)
        return [(ones + x).sum().item() for _ in range(2)]

    assert run_ranks(program, 2) == [[32.0, 32.0]] * 2


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x, mask):
        x = self.linear(x)
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(x, x, x, mask), x, x, mask)


def test_a_plain_mask_may_be_written_between_two_calls():
    """Through numpy, and through ``.data``: neither counts as a write. Within a call it is cut once."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 5, 3)

    def results(model):
        table = torch.ones(4, 1, 5, 5, dtype=torch.bool).numpy()
        mask, added, found = torch.from_numpy(table), torch.zeros(4, 1, 5, 5), []
        for column in range(3):
            found += [model(x, mask), model(x, added)]
            table[..., column] = False
            added.data[..., column].sub_(5)
        return found

    one = Masked()
    models = [copy.deepcopy(one) for _ in range(2)]

    def program(rank):
        return [out.full_tensor().detach() for out in results(wb.parallelize(models[rank], "*: data"))]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [out.detach() for out in results(one)])
