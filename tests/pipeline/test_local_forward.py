"""Blocks of a stage of one rank run as plain torch, wherever that surely gives the same."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import workbench as wb
from workbench.tensors.global_tensor import GlobalTensor
from workbench.testing import run_ranks
from workbench.training.parallel import state_of
from workbench.training.pipelining.local_forward import LocalForward

ROWS = "a: data; b: data@{}; c: data@{}; head: data@{} | 2x1x1 mb=2 {}"
TWO_STAGES, INTERLEAVED = ROWS.format(0, 1, 1, "1f1b"), ROWS.format(1, 2, 3, "interleaved")


class Kinds:
    """Takes notes that are no state of a block's, which would have it run as written: slots are not looked at."""

    __slots__ = ("found",)

    def __init__(self):
        self.found = []


class Block(nn.Module):
    """A residual block that looks at the kind of its tensors."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.norm, self.one, self.two, self.drop = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(drop)
        self.kinds = Kinds()

    def forward(self, x, scale=None):
        y = self.drop(self.two(torch.tanh(self.one(self.norm(x)))))
        self.kinds.found.append(type(y))
        return x + y, y.mean() + 2.0 if scale is None else scale * y.mean()


class Dropping(Block):
    """Draws random numbers."""

    def __init__(self):
        super().__init__(0.3)


class Normed(Block):
    """Writes running statistics."""

    def __init__(self):
        super().__init__()
        self.running = nn.BatchNorm1d(8)

    def forward(self, x, scale=None):
        return super().forward(self.running(x), scale)


class Recomputing(Block):
    """Runs itself again in backward."""

    def forward(self, x, scale=None):
        return checkpoint(super().forward, x, scale, use_reentrant=False)


class Asking(Block):
    """Asks for a layout."""

    def forward(self, x, scale=None):
        x, scale = super().forward(x, scale)
        assert x.placement.num_ranks == 1
        return x, scale


class Keeping(Block):
    """Keeps its results in a list, for somebody who reads them with their layouts."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x, scale=None):
        self.kept.append(super().forward(x, scale))
        return self.kept[-1]


class Passing(Block):
    """Gives its input back."""

    def forward(self, x, scale=None):
        y, scale = super().forward(x, scale)
        return x, y if scale is None else scale + y.mean()


class Model(nn.Module):
    """Three blocks, of which the last also takes what the first has made, and a head."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.c, self.head = kind(), kind(), kind(), nn.Linear(8, 4)

    def forward(self, x):
        first, scale = self.a(x * 1.0)
        x, scale = self.b(first, scale=scale)
        x, scale = self.c(x + first, scale)
        return self.head(x * scale)


def program_of(models, strategy, steps=3, between=lambda model: None):
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(6) % 4

    def program(rank):
        torch.manual_seed(3) if rank == 0 else None  # one default generator serves all simulated ranks
        model, losses = wb.parallelize(models[rank], strategy), []
        for _ in range(steps):
            losses.append(wb.forward_backward(model, F.cross_entropy, inputs, targets).item())
            between(model)
        everywhere = wb.placement.all("cpu")
        grads = [
            None if p.grad is None else p.grad.to_global(placement=everywhere, sbp="B").full_tensor()
            for p in model.parameters()
        ]
        output = wb.evaluate(model, inputs).to_global(placement=everywhere, sbp="B").full_tensor()
        forward_caches = state_of(model).forward_caches or []
        records = [[*s.records.values()] for s in forward_caches if isinstance(s, LocalForward)]
        kinds = [block.kinds.found for block in (model.a, model.b, model.c)]
        assert not any("forward" in part.__dict__ for part in model.modules())
        assert all(part._forward_pre_hooks for part in model.modules() if isinstance(part, nn.Linear))
        return (losses, grads, output), records, kinds

    return program


def assert_alike(found, truth):
    losses, grads, output = found
    assert losses == pytest.approx(truth[0], rel=1e-5)
    torch.testing.assert_close(output, truth[2], rtol=1e-5, atol=1e-6)
    for grad, expected in zip(grads, truth[1], strict=True):
        assert (grad is None) == (expected is None)
        if grad is not None:
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


QUICK = [
    (Block, True, TWO_STAGES),
    (Recomputing, False, TWO_STAGES),
    (Keeping, False, TWO_STAGES),
]
CASES = [
    (Block, True, INTERLEAVED),
    (Dropping, False, TWO_STAGES),
    (Normed, False, TWO_STAGES),
    (Asking, False, TWO_STAGES),
    (Passing, False, TWO_STAGES),
    *((kind, False, INTERLEAVED) for kind in (Recomputing, Dropping, Normed, Asking, Passing)),
]


@pytest.mark.parametrize(
    ("kind", "is_local", "strategy"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_numbers_are_those_of_one_device_whether_a_block_runs_as_plain_torch_or_not(kind, is_local, strategy):
    torch.manual_seed(0)
    one = Model(kind)
    models = [copy.deepcopy(one) for _ in range(2)]
    truth = run_ranks(program_of([one], "*: data | mb=2"), 1)[0][0]
    for found, records, kinds in run_ranks(program_of(models, strategy), 2):
        assert_alike(found, truth)
        if strategy is TWO_STAGES:
            assert records and all((in_training is not None) == is_local for in_training, *_ in records)
            assert is_local <= any(torch.Tensor in seen for seen in kinds)


def test_a_first_call_and_calls_with_other_keys_run_unchanged():
    torch.manual_seed(0)
    one = Model(Block)
    models = [copy.deepcopy(one) for _ in range(2)]
    (_, _, kinds), _ = run_ranks(program_of(models, TWO_STAGES), 2)
    # 3 steps of 2 micro-batches, the first as written; an evaluation of 2, the first as written.
    assert kinds[0] == [GlobalTensor, *[torch.Tensor] * 5, GlobalTensor, torch.Tensor]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [float, np.float32])
def test_a_setting_that_changes_between_steps_is_looked_at_on_all_ranks(kind):
    """Dropout that begins later draws the numbers of one device, on the block's rank and on that of others."""

    def begin(model):
        model.a.drop.p = model.c.drop.p = kind(0.4)

    torch.manual_seed(0)
    one = Model(Block)
    one.a.drop.p = one.c.drop.p = kind(0)
    models = [copy.deepcopy(one) for _ in range(2)]
    truth = run_ranks(program_of([one], "*: data | mb=2", between=begin), 1)[0][0]
    for found, _, _ in run_ranks(program_of(models, TWO_STAGES, between=begin), 2):
        assert_alike(found, truth)


def test_hooks_inside_a_block_meet_global_tensors():
    torch.manual_seed(0)
    models, seen = [Model(Block)], []
    models.append(copy.deepcopy(models[0]))

    def program(rank):
        models[rank].c.one.register_forward_hook(lambda part, args, output: seen.append((rank, type(output))))
        program_of(models, TWO_STAGES)(rank)

    run_ranks(program, 2)
    assert {kind for _, kind in seen} == {GlobalTensor} and sum(rank == 1 for rank, _ in seen) == 8


def test_torchs_transformer_layers_keep_their_functions_in_evaluation():
    """For plain tensors they call one fused function, whose result under autocast has another dtype."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

        def forward(self, x):
            return self.last(self.first(x))

    torch.manual_seed(0)
    samples, models = torch.randn(1, 3, 8).expand(8, 3, 8), [Encoder()]
    models.append(copy.deepcopy(models[0]))

    def program(rank):
        model = wb.parallelize(models[rank], "first.*: data; last.*: data@1 | 2x1x1 mb=4 bf16")
        return wb.evaluate(model, samples).full_tensor()

    for output in run_ranks(program, 2):
        assert torch.equal(output, output[:1].expand_as(output))


class Attention(nn.Module):
    """A block that reads a mask."""

    def __init__(self):
        super().__init__()
        self.products, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        query, key, value = self.products(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        found = F.scaled_dot_product_attention(query, key, value, mask)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """Blocks that share one plain mask, which the model makes."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Attention() for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x, seen):
        mask = seen[:, None, None, :].expand(-1, 1, seen.shape[1], -1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x).mean(1)


def test_blocks_of_several_stages_share_one_plain_mask():
    generator = torch.Generator().manual_seed(1)
    x, targets = torch.randn(8, 5, 8, generator=generator), torch.arange(8) % 3
    seen = torch.arange(5) < torch.arange(8)[:, None] % 4 + 2
    torch.manual_seed(0)
    one = Masked()
    truth = F.cross_entropy(one(x, seen), targets).item()
    models = [copy.deepcopy(one) for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "blocks.0: data@0; blocks.[1-2]: data@1; head: data@1 | mb=4")
        return [wb.forward_backward(model, F.cross_entropy, (x, seen), targets).item() for _ in range(2)]

    for losses in run_ranks(program, 2):
        assert losses == pytest.approx([truth, truth], rel=1e-5)
