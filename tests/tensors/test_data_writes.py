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


def transposed(z, new):
    z.t_()


def swapped(z, new):
    z.transpose_(0, 1)


def unsqueezed(z, new):
    z.unsqueeze_(0)


def squeezed_again(z, new):
    z.unsqueeze_(1).squeeze_(1)


def given_data(z, new):
    z.data = new


def set_to(z, new):
    z.set_(new)


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 2]])
@pytest.mark.parametrize(
    "change", [transposed, swapped, unsqueezed, squeezed_again, given_data, set_to], ids=lambda each: each.__name__
)
def test_a_boxed_view_keeps_its_memory_when_its_base_changes(change, ranks, sbp):
    def run(z, new):
        row, rows, corner = z[0], list(z), z[1:3, 2:].T
        change(z, new)
        seen = [row * 1, rows[2] * 1, corner * 1]
        row.fill_(7)
        corner.mul_(-1)
        last = rows[3]
        last.add_(row)
        seen += [z * 1, new * 1, row * 1, rows[1] * 1]
        new.add_(1)
        return [*seen, z * 1, row * 1, last * 1]

    values = torch.arange(16.0).view(4, 4), torch.full((4, 4), 100.0)
    expected = run(*(value.clone() for value in values))

    def program():
        placement = wb.placement(ranks=ranks)
        z, new = (wb.tensor(value, placement=placement, sbp="B").to_global(sbp=sbp) * 1 for value in values)
        return [each.full_tensor() for each in run(z, new)]

    for found in run_ranks(program, max(ranks) + 1):
        for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, theirs), (position, ours, theirs)


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B"])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 2]])
@pytest.mark.parametrize("is_written", [False, True])
def test_gradients_of_a_boxed_view_whose_base_is_transposed(is_written, ranks, sbp):
    def run(x, weight):
        z = x * 1
        row = z[0]
        z.t_()
        if is_written:
            row.mul_(5)
        return torch.autograd.grad((z * weight).sum() + (row * row).sum(), x)[0]

    weight, values = torch.arange(9.0).view(3, 3), torch.arange(1.0, 10).view(3, 3)
    expected = run(values.clone().requires_grad_(), weight)

    def program():
        x = wb.tensor(values, placement=wb.placement(ranks=ranks), sbp="B").to_global(sbp=sbp).requires_grad_()
        return run(x, weight).full_tensor()

    for found in run_ranks(program, max(ranks) + 1):
        assert torch.equal(found, expected)
