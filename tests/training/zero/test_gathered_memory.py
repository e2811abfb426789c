"""zero=3: what is here of parameters at any time, under autocast and after a call that ended early."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import workbench as wb
from tests.training.block_models import WIDTH, Chain, freeze, grads_of, loss_of, made, on_two, value
from workbench.tensors.boxing.bucketed import BoxingWork
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.world import current
from workbench.testing import run_ranks


class Meter:
    """How many units of rank 0 have whole parameters, now and at most: of storages that are alive."""

    def __init__(self, monkeypatch):
        self.works, self.most = [], 0
        finish = BoxingWork.finish

        def finished(work):
            wholes = finish(work)
            if current().rank == 0 and work.exchanges[0].gathered:
                with local_torch():
                    self.works.append([StorageWeakRef(whole.untyped_storage()) for whole in wholes])
                self.most = max(self.most, self.now())
            return wholes

        monkeypatch.setattr(BoxingWork, "finish", finished)

    def now(self):
        return sum(not all(whole.expired() for whole in work) for work in self.works)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("options", "prepare"), [("", None), ("bf16", None), ("recompute", None), ("", freeze)])
def test_two_units_at_most_are_here(monkeypatch, options, prepare):
    meter = Meter(monkeypatch)

    def program(model):
        if prepare is not None:
            prepare(model)
        for _ in range(2):
            loss = loss_of(model)
            between = meter.now() if wb.rank() == 0 else 0
            loss.backward()
            assert between == 0
        left = meter.now() if wb.rank() == 0 else 0
        return left, float(loss)

    (left, _), _ = on_two(program, options=options, precision=torch.float32)
    assert len(meter.works) > 20
    assert meter.most <= 2 and left == 0


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_keep_no_whole_parameters(monkeypatch, kind):
    """torch's own list of their weights has the shards after a call, and a captured step leaves nothing behind."""
    meter = Meter(monkeypatch)
    layers = [kind(4, 4, batch_first=True) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())

    def program(rank):
        layer = wb.parallelize(layers[rank], "*: data | zero=3")

        def step(x):
            layer(x)[0].sum().backward()

        step(torch.ones(2, 3, 4))
        wb.barrier()
        left, captured = meter.now(), wb.capture(step)
        for _ in range(3):
            captured(torch.ones(2, 3, 4))
        return left, captured.num_replays

    assert run_ranks(program, 2) == [(0, 1)] * 2
    assert len(meter.works) > 0


def kept_shapes(model):
    """Shapes of all that autograd saves in forward; those of 16-bit numbers, and others."""
    kept = {True: set(), False: set()}

    def pack(tensor):
        with local_torch():
            kept[tensor.dtype == torch.bfloat16].add(tuple(sorted(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    loss.backward()
    return kept[True], kept[False]


def test_no_copies_of_weights_are_kept_under_autocast():
    weights = {(WIDTH, 9), (WIDTH, 11)}
    half, single = on_two(kept_shapes, options="bf16", precision=torch.float32)[0]
    assert half and not weights & (half | single)
    models = [made(Chain).float() for _ in range(2)]
    half, _ = run_ranks(lambda rank: kept_shapes(wb.parallelize(models[rank], "*: data | 1x2x1 bf16")), 2)[0]
    assert weights <= half


class Mixed(nn.Module):
    """What autocast casts: convolutions, attention of torch, linear layers; and a norm, which it does not."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.free = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))

    def forward(self, x):
        x = self.norm(self.conv(x).transpose(1, 2))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        return (x @ self.free).float().square().mean()


@pytest.mark.parametrize("recompute", ["", pytest.param("recompute", marks=pytest.mark.slow)])
def test_autocast_gives_the_gradients_that_it_gives_without_shards(recompute):
    torch.manual_seed(0)
    models, x = [Mixed() for _ in range(4)], torch.randn(6, 4, 5)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())

    def program(rank, options):
        model = wb.parallelize(models.pop(), f"*: data | 1x2x1 bf16 {options}")
        model(x).backward()
        return [value(p.grad) for p in model.parameters()]

    plain = run_ranks(lambda rank: program(rank, ""), 2)[0]
    sharded = run_ranks(lambda rank: program(rank, f"zero=3 {recompute}"), 2)[0]
    for ours, theirs in zip(sharded, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


class Failing(Chain):
    error = None

    def order(self):
        yield from self.blocks[:2]
        if self.error is not None:
            raise self.error
        yield from self.blocks[2:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interruption"])
@pytest.mark.parametrize("where", ["between blocks", "inside a block"])
def test_a_forward_that_ends_early_leaves_shards(error, where):
    kind = type(error)

    def fail(*args):
        raise error

    def program(model):
        model.eval()  # dropout would draw anew
        if kind is ValueError:  # an interruption finds ranks anywhere: what was sent ahead stays unread
            loss_of(model).backward()
            model.zero_grad()
        handle = None
        if where == "between blocks":
            model.error = error
        else:
            handle = model.blocks[2].down.register_forward_pre_hook(fail)
        with pytest.raises(kind):
            loss_of(model)
        is_cast = torch.is_autocast_enabled("cpu")
        model.error = None
        if handle is not None:
            handle.remove()
        stand = all(isinstance(p, nn.Parameter) for p in model.parameters())
        loss_of(model).backward()
        return stand and not is_cast, [value(p.grad) for p in model.parameters()]

    stand, grads = on_two(program, Failing, "bf16", torch.float32)[0]
    assert stand
    truth = on_two(lambda m: (loss_of(m.eval()).backward(), grads_of(m))[1], Chain, "bf16", torch.float32)[0]
    for ours, theirs in zip(grads, truth, strict=True):
        torch.testing.assert_close(ours, theirs)


class Written(nn.Module):
    """Saves a result, and may write to it."""

    def __init__(self, writes):
        super().__init__()
        self.up, self.down, self.writes = nn.Linear(8, 8), nn.Linear(8, 8), writes
        self.seen = None

    def forward(self, x):
        hidden = torch.sigmoid(self.up(x))
        with local_torch():
            self.seen = weakref.ref(hidden.untyped_storage())
        result = self.down(hidden)
        return x + result + (hidden.mul_(2) if self.writes else hidden)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | 1x2x1 zero=3", "*: data | 1x2x1 zero=3 bf16"])
def test_activations_of_a_graph_that_is_dropped_are_freed(strategy):
    torch.manual_seed(0)
    built = [nn.Sequential(Written(False), Written(False)) for _ in range(2)]
    built[1].load_state_dict(built[0].state_dict())

    def program(rank):
        model = wb.parallelize(built[rank], strategy)
        model(torch.ones(4, 8))
        return [block.seen for block in model]

    seen = run_ranks(program, 2)
    gc.collect()
    assert not any(storage() is not None for of_rank in seen for storage in of_rank)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | 1x2x1 zero=3"])
def test_a_write_to_what_is_saved_is_an_error_as_on_one_device(strategy):
    torch.manual_seed(0)
    built = [nn.Sequential(Written(True), Written(True)) for _ in range(2)]
    built[1].load_state_dict(built[0].state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(lambda rank: wb.parallelize(built[rank], strategy)(torch.ones(4, 8)).sum().backward(), 2)
