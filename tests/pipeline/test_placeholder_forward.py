"""Blocks of other stages: one autograd node replays what they leave on placeholders, where that is always the same."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.tensors.program_state import ProgramState
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.parallel import state_of
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


class Attending(nn.Module):
    """An operation has views that nothing else has, of a product that nothing else has."""

    def __init__(self):
        super().__init__()
        self.products, self.two = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, side):
        parts = (part.unflatten(-1, (2, 4)).transpose(0, 1) for part in self.products(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(*parts).transpose(0, 1).flatten(1), self.two(side)


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
            for record in placeholder.records.values()
            if type(placeholder) is PlaceholderForward
        ]
        assert not any("forward" in part.__dict__ for part in model.modules())
        return losses, grads, recorded, current().context.num_edges

    return program


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "is_recorded"),
    [
        (Attending, True),
        (Block, True),
        (Cutting, True),
        (Counting, False),
        (Logging, False),
        (Normed, False),
        (Writing, True),
    ],
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


class Projector(nn.Module):
    """A block of one layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


class WithAPool(nn.Module):
    """The loss does not use what the pool makes of the features, as of the vision tower of many a language model."""

    def __init__(self):
        super().__init__()
        self.a, self.pool, self.b, self.head = nn.Linear(8, 8), Projector(), Projector(), nn.Linear(8, 4)

    def forward(self, x):
        x = self.a(x)
        pooled = self.pool(x)
        return self.head(self.b(x)) + 0 * pooled.detach().mean()


def test_a_block_whose_input_another_block_has_boxed_is_linked_to_it():
    """Micro-batches after the recorded one: their gradient passes the boxing that the pool has made."""
    torch.manual_seed(0)
    one = WithAPool()
    models = [copy.deepcopy(one) for _ in range(2)]
    truth = run_ranks(program_of([one], "*: data | mb=2"), 1)[0]
    strategy = "a: data; pool: data@1; b: data@1; head: data@1 | 2x1x1 mb=2 1f1b"
    for losses, grads, recorded, _ in run_ranks(program_of(models, strategy), 2):
        assert losses == pytest.approx(truth[0], rel=1e-5) and (not recorded or all(recorded))
        torch.testing.assert_close(grads[0], truth[1][0], rtol=1e-4, atol=1e-6)


class WithAnIndexer(nn.Module):
    """A block that reads views of another stage's numbers twice without gradients, and once with."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), Projector(), nn.Linear(8, 4)

    def forward(self, x):
        angles = self.a(x)
        hidden = self.b(x)
        with torch.no_grad():
            some = angles.unsqueeze(1)
            chosen = (hidden.unsqueeze(1) * some + some).squeeze(1) > 0
        return self.head(hidden * angles.unsqueeze(0).squeeze(0) * chosen)


def test_views_without_gradients_are_boxed_alike_on_all_ranks():
    torch.manual_seed(0)
    one = WithAnIndexer()
    models = [copy.deepcopy(one) for _ in range(2)]
    truth = run_ranks(program_of([one], "*: data | mb=2"), 1)[0]
    for losses, grads, *_ in run_ranks(program_of(models, "a: data; b: data@1; head: data@1 | 2x1x1 mb=2 1f1b"), 2):
        assert losses == pytest.approx(truth[0], rel=1e-5)
        torch.testing.assert_close(grads, truth[1], rtol=1e-4, atol=1e-6)


CALLS = [0, 0, 0]


class Counted(nn.Linear):
    """Counts its calls on each rank, in no attribute of its own."""

    def forward(self, x):
        CALLS[current().rank] += 1
        return super().forward(x)


def test_a_recorded_block_is_not_run_again():
    torch.manual_seed(0)
    one = Model(Block)
    one.c.one = Counted(8, 8)
    models = [copy.deepcopy(one) for _ in range(3)]
    CALLS[:] = 0, 0, 0
    run_ranks(program_of(models, ROWS), 3)
    assert CALLS[2] == 3 * 2 and CALLS[0] == CALLS[1] == 1


def test_after_a_rebuild_all_ranks_see_the_order_of_calls_anew():
    one = Model(Block)
    models = [copy.deepcopy(one) for _ in range(3)]

    def program(rank):
        model, found = wb.parallelize(models[rank], ROWS), []
        for _ in range(2):
            wb.forward_backward(model, F.cross_entropy, torch.ones(6, 8), torch.arange(6) % 4)
            found.append([name for name, _ in state_of(model).layouts.plan.calls.found])
            current().num_rebuilds += 1
        return found

    for first, second in run_ranks(program, 3):
        assert first == second and {"a.two", "b.two", "c.two"} <= {*first}


class Capturing(nn.Module):
    """Uses what a hook has kept of a layer inside a block, as models do that return hidden states."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = Block(), Block(), nn.Linear(8, 4)
        self.a.one.register_forward_hook(lambda module, args, output: kept_now().append(output))

    def forward(self, x):
        kept_now().clear()
        x, side = self.b(*self.a(x, x * 1.0))
        return self.head(x + side + kept_now()[0])


_kept = threading.local()


def kept_now():
    if not hasattr(_kept, "outputs"):
        _kept.outputs = []
    return _kept.outputs


def test_hooks_inside_a_block_of_another_stage_are_called_in_every_micro_batch():
    torch.manual_seed(0)
    one = Capturing().eval()
    models = [copy.deepcopy(one) for _ in range(2)]
    truth = run_ranks(program_of([one], "*: data | mb=2"), 1)[0]
    for losses, grads, *_ in run_ranks(program_of(models, "a: data; b: data@1; head: data@1 | 2x1x1 mb=2 1f1b"), 2):
        assert losses == pytest.approx(truth[0], rel=1e-5)
        torch.testing.assert_close(grads, truth[1], rtol=1e-4, atol=1e-6)


def test_what_a_forward_changes_besides_its_result_is_noticed():
    """torch's own generator, an attribute, a buffer: any of them and a block runs unchanged."""
    block = Normed()
    placeholder = PlaceholderForward(block, SimpleNamespace(device=torch.device("cpu")))

    def is_noticed(change):
        versions, program = placeholder.versions([]), ProgramState([block], torch.device("cpu"))
        change()
        return versions != placeholder.versions([]) or not program.is_unchanged()

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


class UsesOneResult(Model):
    """The last block's second result is in no loss, as the layout stream of LiLT."""

    def forward(self, x):
        x, side = self.b(*self.a(x, x * 1.0))
        x, _ = self.c(x + side, side)
        return self.head(x)


def test_only_parameters_of_the_results_that_are_used_have_gradients():
    torch.manual_seed(0)
    one = UsesOneResult(Block)
    models = [copy.deepcopy(one) for _ in range(3)]
    inputs, targets = torch.randn(6, 8), torch.arange(6) % 4

    def program(rank):
        model = wb.parallelize(models[rank], ROWS)
        for _ in range(2):
            model.zero_grad()
            wb.forward_backward(model, F.cross_entropy, inputs, targets)
        return [p.grad is not None for p in model.parameters()]

    F.cross_entropy(one(inputs), targets).backward()
    learn = [p.grad is not None for p in one.parameters()]
    assert not all(learn)
    assert run_ranks(program, 3) == [learn] * 3


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
