"""Layers of other stages that are in no block."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks

STAGES = "words: data; positions: data; blocks.0: data; blocks.1: data@1; norm: data@2; head: data@2 | 3x1x1 mb=2 1f1b"
WORDS, WIDTH = 11, 8


class Block(nn.Module):
    """A residual block that takes a mask."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return x + self.two(torch.tanh(self.one(x)) * mask)


class Model(nn.Module):
    """Embeddings of plain words and positions, two blocks, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.words(words) + self.positions(torch.arange(words.shape[1]))
        mask = (torch.arange(WIDTH) % 3 > 0).float()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class TwoLists(nn.Module):
    """A block and a layer that stand in two places each."""

    def __init__(self):
        super().__init__()
        self.first, shared = nn.Linear(WIDTH, WIDTH), Block()
        self.again = nn.ModuleList([self.first])
        self.one, self.two = nn.ModuleList([shared]), nn.ModuleList([shared])
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        mask = torch.ones(WIDTH)
        x = self.two[0](self.one[0](self.again[0](self.first(x)), mask), mask)
        return self.last(x)


def loss_of(scores, targets):
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


def words_of(num_rows, length, seed=1):
    words = torch.randint(0, WORDS, (num_rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return words[:, :-1], words[:, 1:].contiguous()


def trained(model, strategy, batches, before_step=lambda model, step: None):
    """Losses and weights after a step on each batch."""
    model = wb.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, batch in enumerate(batches):
        before_step(model, step)
        optimizer.zero_grad()
        losses.append(wb.forward_backward(model, loss_of, *batch).item())
        optimizer.step()
    everywhere = wb.placement.all("cpu")
    weights = [p.detach().to_global(placement=everywhere, sbp="B").full_tensor() for p in model.parameters()]
    return losses, weights, model


def assert_like_one_device(one, strategy, num_ranks, batches, before_step=lambda model, step: None):
    """Train on one device and on ranks; the ranks' models."""
    models = [copy.deepcopy(one) for _ in range(num_ranks)]
    mb = "mb=4" if "mb=4" in strategy else "mb=2"
    truth = run_ranks(lambda rank: trained(copy.deepcopy(one), f"*: data | {mb}", batches, before_step), 1)[0]
    found = run_ranks(lambda rank: trained(models[rank], strategy, batches, before_step), num_ranks)
    for losses, weights, _ in found:
        assert losses == pytest.approx(truth[0], rel=1e-5)
        for weight, expected in zip(weights, truth[1], strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
    return [model for *_, model in found]


def test_hooks_of_users_get_boxed_inputs_on_every_rank():
    torch.manual_seed(0)
    seen = []

    def before_step(model, step):
        if step == 1:
            model.words.register_forward_pre_hook(lambda m, args: seen.append((wb.rank(), "before", type(args[0]))))
            model.norm.register_forward_hook(lambda m, args, out: seen.append((wb.rank(), "behind", type(args[0]))))

    assert_like_one_device(Model(), STAGES, 3, [words_of(6, 5)] * 3, before_step)
    on_ranks = [entry for entry in seen if entry[0]]  # rank 0 is also the one device
    for rank in (1, 2):
        for kind in ("before", "behind"):
            assert [e for e in on_ranks if e[:2] == (rank, kind)] == [(rank, kind, wb.GlobalTensor)] * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [[8, 20], [20, 8]])
def test_positions_as_many_as_rows_are_another_call(rows):
    """With as many positions as samples in a micro-batch, an input hook takes positions for samples."""
    torch.manual_seed(0)
    hybrid = "words: data; positions: data; blocks.0: data; blocks.1: data@1; norm: data@1; head: data@1 | 2x2x1 mb=2"
    assert_like_one_device(Model(), hybrid, 4, [words_of(count, 4) for count in rows] * 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", [
    STAGES.replace("1f1b", "zero_bubble"),
    STAGES.replace("1f1b", "gpipe zero=1"),
    (
        "words: data; positions: data; blocks.0: data@1; blocks.1: data@2; norm: data@3; head: data@3 | "
        "2x1x1 mb=4 interleaved"
    ),
])  # fmt: skip
def test_under_every_schedule_weights_may_be_frozen_and_learn_again(strategy):
    torch.manual_seed(0)

    def before_step(model, step):
        model.words.weight.requires_grad_(step != 1)
        model.norm.bias.requires_grad_(step % 2 == 0)

    assert_like_one_device(Model(), strategy, 2 if "2x1x1" in strategy else 3, [words_of(8, 5)] * 4, before_step)


def test_a_block_or_layer_may_have_two_places():
    torch.manual_seed(0)
    batch = torch.randn(6, WIDTH), torch.arange(6) % WORDS
    rows = "first: data; one.0: data@1; last: data@2 | 3x1x1 mb=2 gpipe"
    for model in assert_like_one_device(TwoLists(), rows, 3, [batch] * 3):
        assert not any("forward" in part.__dict__ for part in model.modules())


def test_plain_tensors_are_compared_over_ranks_where_that_is_asked_for():
    """The mask is plain, and enters inside blocks on all ranks alike, whoever has the block."""
    torch.manual_seed(0)
    one = Model()

    def program(rank):
        model = wb.parallelize(copy.deepcopy(one), STAGES)
        plain = wb.forward_backward(model, loss_of, *words_of(6, 5)).item()
        with wb.debug.check_agreement():
            checked = wb.forward_backward(model, loss_of, *words_of(6, 5)).item()
        return plain, checked

    for plain, checked in run_ranks(program, 3):
        assert checked == plain
