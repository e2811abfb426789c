"""Blocks of other stages: one autograd node replays what they leave on placeholders, where that is always the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.parallel import state_of
from workbench.training.pipelining.forward_cache import same
from workbench.training.pipelining.placeholder_forward import PlaceholderForward

ROWS = "a: data; b: data@1; c: data@2; head: data@2 | 3x1x1 mb=2 1f1b"


class Block(nn.Module):
    """A residual block with dropout and two results, of which one ignores the second input."""

    def __init__(self, width=8):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x, side):
        return x + self.drop(torch.tanh(self.one(x))), self.two(side)


class Counting(Block):
    """Counts its calls, so no call is like the one before."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, side):
        self.calls += 1
        return super().forward(x, side)


class Logging(Block):
    """Keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.seen, self.by_name = [], {}

    def forward(self, x, side):
        found = super().forward(x, side)
        self.seen.append(found[0].detach())
        self.by_name[len(self.by_name)] = side.shape
        return found


class Normed(Block):
    """Writes running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, side):
        return super().forward(self.norm(x), side)


class Writing(Block):
    """Writes to its input."""

    def forward(self, x, side):
        x, side = super().forward(x, side)
        return x, side.mul_(2.0)


class Cutting(Block):
    """Its first result has no history."""

    def forward(self, x, side):
        x, side = super().forward(x, side)
        return x.detach(), side


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.c, self.head = kind(), kind(), kind(), nn.Linear(8, 4)

    def forward(self, x):
        x, side = self.a(x, x * 1.0)
        x, side = self.b(x, side)
        x, side = self.c(x, side)
        return self.head(x + side)


def program_of(models, strategy, steps=3):
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(6) % 4

    def program(rank):
        torch.manual_seed(3) if rank == 0 else None  # one default generator serves all simulated ranks
        model = wb.parallelize(models[rank], strategy)
        losses = [wb.forward_backward(model, F.cross_entropy, inputs, targets).item() for _ in range(steps)]
        everywhere = wb.placement.all("cpu")
        grads = [
            None if p.grad is None else p.grad.to_global(placement=everywhere, sbp="B").full_tensor()
            for p in model.parameters()
        ]
        placeholders = state_of(model).forward_caches or []
        recorded = [
            record is not None
            for placeholder in placeholders
            for record in placeholder.records
            if type(placeholder) is PlaceholderForward
        ]
        assert not any("forward" in part.__dict__ for part in model.modules())
        return losses, grads, recorded, current().context.num_edges

    return program


@pytest.mark.parametrize(
    ("kind", "is_recorded"),
    [(Block, True), (Cutting, True), (Counting, False), (Logging, False), (Normed, False), (Writing, True)],
)
def test_numbers_are_those_of_one_device_whether_a_block_is_recorded_or_not(kind, is_recorded):
    torch.manual_seed(0)
    one = Model(kind)
    models = [copy.deepcopy(one) for _ in range(3)]
    truth = run_ranks(program_of([one], "*: data | mb=2"), 1)[0]
    for losses, grads, recorded, _ in run_ranks(program_of(models, ROWS), 3):
        assert losses == pytest.approx(truth[0], rel=1e-5)
        for grad, expected in zip(grads, truth[1], strict=True):
            assert (grad is None) == (expected is None)
            if grad is not None:
                torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
        assert recorded and any(recorded) == is_recorded


def test_a_recorded_block_is_not_run_again():
    torch.manual_seed(0)
    one = Model(Block)
    models, calls = [copy.deepcopy(one) for _ in range(3)], [0, 0, 0]

    def program(rank):
        models[rank].c.one.register_forward_hook(lambda *_: calls.__setitem__(rank, calls[rank] + 1))
        program_of(models, ROWS)(rank)

    run_ranks(program, 3)
    assert calls[2] == 3 * 2 and calls[0] == calls[1] == 1


def test_what_a_forward_changes_besides_its_result_is_noticed():
    """torch's own generator, an attribute, a buffer: any of them and a block runs unchanged."""
    block = Normed()
    placeholder = PlaceholderForward(block, None)

    def is_noticed(change):
        before = placeholder.state([])
        change()
        return not same(before, placeholder.state([]))

    assert not is_noticed(lambda: None)
    assert is_noticed(lambda: torch.rand([]))
    assert is_noticed(lambda: setattr(block, "calls", 1))
    assert is_noticed(lambda: block.norm.running_mean.add_(1))


def test_after_a_micro_batch_of_no_weight_the_others_leave_their_gradients_on_placeholders_too():
    torch.manual_seed(0)
    one = Model(Cutting)
    models = [copy.deepcopy(one) for _ in range(3)]
    inputs, targets = torch.randn(6, 8), torch.tensor([-100, -100, -100, 1, 2, 3])

    def program(rank):
        model, found = wb.parallelize(models[rank], ROWS), []
        for _ in range(2):  # the first call is recorded, the second replayed
            model.zero_grad()
            wb.forward_backward(model, F.cross_entropy, inputs, targets)
            found.append([p.grad is not None for p in model.parameters()])
        return found

    F.cross_entropy(one(inputs), targets).backward()
    learn = [p.grad is not None for p in one.parameters()]  # not what is before a cut
    assert 0 < sum(learn) < len(learn)
    assert run_ranks(program, 3) == [[learn, learn]] * 3


def test_a_program_may_ask_for_the_gradients_of_other_stages_itself():
    torch.manual_seed(0)
    one = Model(Block).eval()
    models = [copy.deepcopy(one) for _ in range(3)]
    inputs, targets = torch.randn(6, 8), torch.arange(6) % 4

    def loss_of(model, asked):
        def loss(scores, targets):
            value = F.cross_entropy(scores, targets)
            weights = [model.a.one.weight, model.c.two.weight]
            asked.extend(torch.autograd.grad(value, weights, retain_graph=True))
            return value

        return loss

    def program(rank):
        model, asked = wb.parallelize(models[rank], ROWS), []
        everywhere = wb.placement.all("cpu")
        for _ in range(2):
            wb.forward_backward(model, loss_of(model, asked), inputs, targets)
        return [grad.to_global(placement=everywhere, sbp="B").full_tensor() for grad in asked]

    wanted = []
    for rows in (slice(0, 3), slice(3, 6)):
        loss_of(one, wanted)(one(inputs[rows]), targets[rows])
    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, [*wanted, *wanted])


def test_hooks_of_parameters_are_called_on_every_rank_for_every_micro_batch():
    torch.manual_seed(0)
    one = Model(Block)
    models = [copy.deepcopy(one) for _ in range(3)]
    inputs, targets = torch.randn(6, 8), torch.arange(6) % 4

    def program(rank):
        model, calls = wb.parallelize(models[rank], ROWS), []
        wb.forward_backward(model, F.cross_entropy, inputs, targets)
        model.b.one.weight.register_hook(lambda grad: calls.append("hook"))
        for _ in range(2):
            wb.forward_backward(model, F.cross_entropy, inputs, targets)
        return calls

    assert run_ranks(program, 3) == [["hook"] * 4] * 3
