"""zero=3: a block's parameters come in one exchange, are here while it runs, and give the numbers of one device."""

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import workbench as wb
from workbench.runtime import gathering
from workbench.runtime.tensor import local_torch
from workbench.runtime.world import current
from workbench.testing import run_ranks

WIDTH = 6


class Block(nn.Module):
    """A residual block with what a layer may have: a norm, weights, a scale of its own, dropout."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 9), nn.Linear(9, width)
        self.scale, self.drop = nn.Parameter(torch.full((width,), 0.7)), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x))))) * self.scale


class Chain(nn.Module):
    """A table, blocks and a head that is tied to the table."""

    def __init__(self, num_blocks=4):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.order():
            x = block(x)
        return self.head(self.norm(x))

    def order(self):
        return self.blocks


class Twice(Chain):
    def order(self):
        return [self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[1], self.blocks[1]]


class Skipping(Chain):
    """Another block at every call: what was sent ahead is a wrong guess, and one block has no gradient."""

    count = 0

    def order(self):
        self.count += 1
        return [block for i, block in enumerate(self.blocks) if i != self.count % 4]


class Apart(Chain):
    """Parts of a block are called, and the block never is."""

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x)))) * (block(x) if block is self.blocks[1] else 1)
        return self.head(self.norm(x))


class Several(Chain):
    """Blocks inside of a block, tuples and dicts in between."""

    def __init__(self):
        super().__init__(2)
        self.outer = nn.ModuleList(nn.ModuleDict({"a": Block(), "b": Block()}) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for pair in self.outer:
            x = pair["b"](pair["a"](x)) + self.blocks[0](x)
        return self.head(self.norm(x))


def made(kind):
    """A model in doubles with the weights of seed 0, the same on all ranks."""
    torch.manual_seed(0)
    return kind().double()


def freeze(model):
    """All that is not a norm or a scale: what an adapter leaves alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "scale" in name)


def freeze_blocks(model):
    for block in list(model.blocks)[1:]:
        block.requires_grad_(False)


IDS = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1))
CASES = {
    "blocks": (Chain, {}),
    "called twice": (Twice, {}),
    "wrong guesses": (Skipping, {"steps": 5}),
    "parts called alone": (Apart, {}),
    "nested": (Several, {}),
    "frozen weights": (Chain, {"prepare": freeze}),
    "frozen blocks": (Chain, {"prepare": freeze_blocks}),
    "accumulation": (Chain, {"parts": 2}),
    "recomputed": (Chain, {"options": "recompute"}),
    "recomputed twice": (Twice, {"options": "recompute"}),
    "model": (Chain, {"row": "blocks.*: model; *: data", "options": "1x2x2", "num_ranks": 4}),
    "uneven": (Chain, {"options": "1x4x1", "num_ranks": 4}),
}
MORE = {"recomputed twice", "uneven", "nested", "frozen blocks", "model"}


def train(model, steps=3, parts=1):
    """Gradients of the first step, and the weights in the end; gradients that are missing are None."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    first = None
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            ids = IDS[part::parts]
            (nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / parts).backward()
        if first is None:
            first = [None if p.grad is None else value(p.grad) for p in model.parameters()]
        optimizer.step()
    return first, [value(p) for p in model.parameters()]


def value(tensor):
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def truth_of(kind, prepare=None, **settings):
    model = made(kind)
    if prepare is not None:
        prepare(model)
    here = wb.parallelize(model, "*: data | 1x1x1")  # draws by logical position, as everywhere
    return train(here, **settings)


def assert_alike(found, truth):
    for ours, theirs in zip(found, truth, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in MORE else n for n in CASES])
def test_trains_like_one_device(name):
    kind, settings = CASES[name]
    settings = dict(settings)
    prepare, num_ranks = settings.get("prepare"), settings.pop("num_ranks", 2)
    row, options = settings.pop("row", "*: data"), settings.pop("options", f"1x{num_ranks}x1")
    models = [made(kind) for _ in range(num_ranks)]
    [truth] = run_ranks(lambda: truth_of(kind, **settings), 1)
    settings.pop("prepare", None)

    def program(rank):
        if prepare is not None:
            prepare(models[rank])
        return train(wb.parallelize(models[rank], f"{row} | {options} zero=3"), **settings)

    for grads, weights in run_ranks(program, num_ranks):
        assert_alike(grads, truth[0])
        assert_alike(weights, truth[1])


def on_two(program, kind=Chain, options="", precision=torch.float64):
    models = [made(kind).to(precision) for _ in range(2)]
    return run_ranks(lambda rank: program(wb.parallelize(models[rank], f"*: data | 1x2x1 zero=3 {options}")), 2)


def loss_of(model):
    return nn.functional.cross_entropy(model(IDS).flatten(0, 1).float(), IDS.flatten())


def test_a_block_is_one_exchange():
    """Of 7 units, forward gathers each; backward does so but for the table, and scatters one gradient of the tie."""

    def program(model):
        loss_of(model).backward()
        traffic = current().traffic
        traffic.reset()
        loss = loss_of(model)
        forward = traffic.num_exchanges
        loss.backward()
        return forward, traffic.num_exchanges - forward

    (forward, backward), _ = on_two(program)
    units = 4 + 3
    assert forward == units
    assert backward == (units - 1) + units


class Meter:
    """How many units of rank 0 have whole parameters, now and at most: of storages that are alive."""

    def __init__(self, monkeypatch):
        self.flights, self.most = [], 0
        finish = gathering.Flight.finish

        def finished(flight):
            wholes = finish(flight)
            if current().rank == 0:
                with local_torch():
                    self.flights.append([StorageWeakRef(whole.untyped_storage()) for whole in wholes])
                self.most = max(self.most, self.now())
            return wholes

        monkeypatch.setattr(gathering.Flight, "finish", finished)

    def now(self):
        return sum(not all(whole.expired() for whole in flight) for flight in self.flights)


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
    assert len(meter.flights) > 20
    assert meter.most <= 2 and left == 0


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


def test_no_gradient_is_computed_for_evaluation():
    def program(model):
        model.eval()
        with torch.no_grad():
            first = value(model(IDS))
        with torch.inference_mode():
            second = value(model(IDS))
        return first, second, all(isinstance(p, nn.Parameter) for p in model.parameters())

    first, second, stand = on_two(program)[0]
    model = made(Chain).eval()
    torch.testing.assert_close(first, model(IDS).detach())
    torch.testing.assert_close(second, first)
    assert stand


class Failing(Chain):
    error = None

    def order(self):
        yield from self.blocks[:2]
        if self.error is not None:
            raise self.error
        yield from self.blocks[2:]


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


def grads_of(model):
    return [value(p.grad) for p in model.parameters()]


def test_parameters_that_change_before_backward_are_an_error():
    def program(model):
        loss = loss_of(model)
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2)
        loss.backward()

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*zero=3.*Call backward before"):
        on_two(program)


def test_gradients_of_gradients():
    def second(model):
        x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).reshape(4, WIDTH)
        block = model.blocks[0].eval()
        weights = [block.up.weight, block.norm.weight]
        grads = torch.autograd.grad(block(x).square().sum(), weights, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        return grads_of(block)

    assert_alike(on_two(second)[0], second(made(Chain)))


def test_backward_through_a_kept_graph_gathers_again():
    def program(model):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return grads_of(model)

    def once(model):
        loss_of(model).backward()
        return [2 * grad for grad in grads_of(model)]

    assert_alike(on_two(program)[0], on_two(once)[0])


def test_copies_of_a_module_gather_for_themselves():
    def program(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(0.5)
        loss_of(other).backward()
        return value(loss_of(model)), grads_of(other), model.blocks[0].up.weight.grad is None

    loss, grads, untouched = on_two(program)[0]
    model = made(Chain)
    one = wb.parallelize(copy.deepcopy(model), "*: data | 1x1x1")
    torch.testing.assert_close(loss, value(loss_of(one)), atol=1.0, rtol=1.0)  # dropout draws anew
    assert untouched and all(grad.abs().sum() > 0 for grad in grads)
