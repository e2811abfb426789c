"""Recomputation per block by strategy: the numbers of one device, dropout and statistics of batch norm alike."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import workbench as wb
from tests.models import zoo
from tests.training.models import batch_for, make
from tests.training.programs import training_equals_one_device
from workbench.errors import StrategyError
from workbench.testing import run_ranks
from workbench.training.diagnostics.memory import ActivationMeter

STRATEGIES = [
    ("*: data | 1x2x1", 2),
    ("*: data | 1x3x1 zero=3", 3),
    ("*: model | 1x2x2", 4),
]


CASES = [(kind, *s) for kind in ("mlp", "cnn", "encoder", "attention", "dropping") for s in STRATEGIES]


@pytest.mark.parametrize(
    ("kind", "strategy", "num_ranks"),
    [("dropping", *STRATEGIES[1]), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_training_equals_one_device(kind, strategy, num_ranks):
    text = f"{strategy} recompute"
    for losses, weights in run_ranks(lambda: training_equals_one_device(kind, text, num_ranks), num_ranks):
        assert losses < 1e-5 and weights < 1e-5


STAGES = "0: data; 1: data; 2: data; 3: data@1; 4: data@1"


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("*: data | 1x2x1 mb=3 zero=2 recompute", 2),
        pytest.param(f"{STAGES} | 2x1x1 mb=2 1f1b recompute", 2, marks=pytest.mark.slow),
        pytest.param("*: data | 1x1x1 recompute", 1, marks=pytest.mark.slow),
        pytest.param("*: data | 1x3x1 mb=2 zero=3 recompute", 3, marks=pytest.mark.slow),
        pytest.param("*: model | 1x1x2 recompute", 2, marks=pytest.mark.slow),
        pytest.param(f"{STAGES} | 2x2x1 mb=3 gpipe zero=1 recompute", 4, marks=pytest.mark.slow),
    ],
)
def test_a_block_runs_again_from_the_buffers_of_its_first_run(strategy, num_ranks):
    for losses, weights in run_ranks(lambda: training_equals_one_device("remembering", strategy, num_ranks), num_ranks):
        assert losses < 1e-5 and weights < 1e-5


def test_buffers_may_be_made_in_inference_mode():
    """A first evaluation does so where a forward caches what it computes."""

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", None)

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(4.0)
            return self.linear(x) + self.table

    one = nn.Sequential(Caching(), Caching())

    def program():
        model = wb.parallelize(copy.deepcopy(one), "*: data | recompute")
        with torch.inference_mode():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        return model[0].linear.weight.grad is not None

    assert all(run_ranks(program, 2))


class Block(nn.Module):
    """Two layers with dropout and a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, scale=1.0):
        return x + self.drop(self.b(F.gelu(self.a(self.norm(x))))) * scale


class Tower(nn.Module):
    """Blocks between an embedding and the head tied to it."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x.mean(1))


def towers(count):
    torch.manual_seed(0)
    model = Tower()
    return [model, *(copy.deepcopy(model) for _ in range(count - 1))]


PIPELINE = "tok: data; blocks.[2-3]: data@1; head: data@1 | 2x1x1 mb=2 1f1b"


SPLIT = "blocks.*.a: model:column; blocks.*.b: model:row; tok: data; head: data | 1x1x2"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "strategy", ["*: data | zero=3", PIPELINE, *(pytest.param(s, marks=pytest.mark.slow) for s in ("*: data", SPLIT))]
)
def test_a_tower_with_dropout_saves_less_and_gives_the_same_gradients(strategy):
    ids = torch.arange(60).reshape(6, 10) % 10
    targets = torch.arange(6)

    def gradients(rank, model, text):
        model = wb.parallelize(model, text)
        wb.manual_seed(5)
        meter = ActivationMeter(model)
        with meter.measure():
            loss = F.cross_entropy(model(ids), targets)
        loss.backward()
        everywhere = wb.placement.all("cpu")
        return meter.size_bytes, [
            p.grad.to_global(placement=everywhere, sbp="B").to_local() for p in model.parameters()
        ]

    models = towers(4)
    joint = " " if "|" in strategy else " | "
    kept = run_ranks(lambda rank: gradients(rank, models[rank], strategy), 2)
    again = run_ranks(lambda rank: gradients(rank, models[2 + rank], f"{strategy}{joint}recompute"), 2)
    for (size, grads), (fewer, ours) in zip(kept, again, strict=True):
        assert fewer < 0.5 * size
        torch.testing.assert_close(ours, grads, rtol=1e-5, atol=1e-7)


def test_copies_undoing_and_evaluation():
    models = towers(2)
    ids = torch.arange(60).reshape(6, 10) % 10

    def program(rank):
        model = wb.parallelize(models[rank], "*: data | recompute").eval()
        copied = copy.deepcopy(model).blocks[0]
        assert copied._compiled_call_impl.block is copied
        with torch.no_grad():
            first = model(ids).full_tensor()
        wb.parallelize(model, "*: data")
        assert model.blocks[0]._compiled_call_impl is None
        with torch.no_grad():
            torch.testing.assert_close(model(ids).full_tensor(), first)

    run_ranks(program, 2)


def test_nothing_of_a_step_outlives_it():
    """What a checkpoint keeps are the inputs of blocks: kept from step to step they would fill the memory."""
    model, (inputs, targets) = make("mlp"), batch_for("mlp")

    def count():
        gc.collect()
        return sum(type(thing) is torch.utils.checkpoint._CheckpointFrame for thing in gc.get_objects())

    def program():
        parallel, kept = wb.parallelize(model, "*: data | 1x1x1 recompute"), []
        for _ in range(2):
            loss = F.cross_entropy(parallel(inputs), targets)
            kept.append(count())
            loss.backward()
            del loss
            kept.append(count())
        return kept

    before = count()
    assert [kept - before for kept in run_ranks(program, 1)[0]] == [4, 0, 4, 0]


def grads_of(model, strategy, **batch):
    """Gradients of a step of a model of transformers, and how many checkpoints outlive two steps."""

    def program():
        parallel = wb.parallelize(copy.deepcopy(model), strategy)
        for _ in range(2):
            parallel.zero_grad()
            parallel(**batch).loss.backward()
        gc.collect()
        frames = sum(type(thing) is torch.utils.checkpoint._CheckpointFrame for thing in gc.get_objects())
        return [p.grad.full_tensor() for p in parallel.parameters()], frames

    return run_ranks(program, 1)[0]


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "t5"))])
def test_empty_caches_of_transformers_are_left_out(name):
    model, batch = zoo.make(name, "sdpa"), zoo.batch_for(name)
    (grads, before), (found, after) = (
        grads_of(model, "*: data", **batch),
        grads_of(model, "*: data | recompute", **batch),
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, found, strict=True))
    assert after == before


def test_a_cache_that_holds_words_is_refused():
    model = zoo.make("gpt2", "sdpa")
    words = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        cached = zoo.cache_argument(model, model(words, use_cache=True).past_key_values)
    with pytest.raises(StrategyError, match=r"GPT2Block was given 1 cache .*\(DynamicCache\).*use_cache=False"):
        run_ranks(lambda: wb.parallelize(model, "*: data | recompute")(words, **cached), 1)


class Caching(nn.Module):
    """A decoder that hands a cache to its blocks, which compute keys and values once."""

    class Cache:
        def __init__(self):
            self.is_updated = {}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        cache = self.Cache()
        for block in self.blocks:
            block(x, cache)


def test_a_cache_that_a_block_fills_is_refused():
    def program():
        wb.parallelize(Caching(), "*: data | recompute")(torch.ones(2, 8))

    with pytest.raises(StrategyError, match=r"Block was given 1 cache .*\(Cache\).*use_cache=False"):
        run_ranks(program, 1)


class CachedLayer(Block):
    def forward(self, x, cache=None):
        return super().forward(
            x if cache is None else cache.update(x[:, None, None], x[:, None, None], 0)[0].mean((1, 2))
        )


class TwoTowers(nn.Module):
    """The second tower attends to what the first one has left in a cache, as vision-language-action models do."""

    def __init__(self):
        super().__init__()
        self.eyes, self.hands = (nn.ModuleList(CachedLayer() for _ in range(2)) for _ in range(2))

    def forward(self, x):
        cache = pytest.importorskip("transformers").DynamicCache()
        for block in (*self.eyes, *self.hands):
            x = block(x, cache=cache)
        return x


def test_a_cache_between_two_lists_of_blocks_is_refused():
    with pytest.raises(StrategyError, match=r"blocks of hands read 1 cache .*\(DynamicCache\) that the blocks of eyes"):
        run_ranks(lambda: wb.parallelize(TwoTowers(), "*: data | recompute")(torch.ones(2, 16)), 1)


class Popping(Block):
    """Takes a tensor from a list of its caller's, as the upper half of a U-Net does."""

    def forward(self, x, skips):
        return super().forward(x) + skips.pop()


class WithSkips(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Popping() for _ in range(2))

    def forward(self, x):
        skips = [x, x]
        for block in self.blocks:
            x = block(x, skips)
        return x


def test_a_list_that_a_block_changes_is_refused():
    def program():
        model = wb.parallelize(copy.deepcopy(one), "*: data | recompute")
        model(torch.ones(2, 16)).sum().backward()

    one = WithSkips()
    with pytest.raises(StrategyError, match=r"with 1 arguments in place of 2: a list or dict .*skips\.pop"):
        run_ranks(program, 2)


def test_what_a_stage_has_received_is_not_sent_again_through_hooks():
    """A block's input that comes back as a new tensor has the boxing of its first run."""
    made = [make("mlp") for _ in range(4)]

    def program(rank, models, around):
        model = wb.parallelize(models[rank], "0: data; 2: data@1; 4: data@1 | 2x1x1 mb=2 1f1b recompute")
        with wb.debug.trace() as traced, around:
            wb.forward_backward(model, F.cross_entropy, *batch_for("mlp"))
        return traced.by_function

    plain = run_ranks(lambda rank: program(rank, made[:2], nullcontext()), 2)
    through = lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # noqa: E731
    hooked = run_ranks(lambda rank: program(rank, made[2:], through()), 2)
    assert plain[0]["2"].wire_bytes > 0 and hooked == plain


class Scaled(nn.Module):
    """A block that is a layer too: it has a parameter of its own, so its hook boxes all that it gets."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x, table):
        return x + self.fc(x) * self.scale * table


class SharedTable(nn.Module):
    """Its blocks take a tensor of the root, which outlives a micro-batch. ``own``: in checkpoints of its own."""

    def __init__(self, learns, own):
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(Scaled() for _ in range(4)), nn.Linear(8, 3)
        table = torch.linspace(0.5, 1.5, 8)
        self.register_parameter("table", nn.Parameter(table)) if learns else self.register_buffer("table", table)
        self.own = own

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, self.table, use_reentrant=False) if self.own else block(x, self.table)
        return self.head(x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    ("options", "own"),
    [
        ("1f1b recompute", False),
        ("1f1b recompute", True),
        ("zero_bubble", True),
        ("zero_bubble_v recompute offload=activations", True),
        ("dualpipe_v recompute", False),
    ],
)
def test_blocks_that_run_again_take_the_roots_tensors_as_their_micro_batch_had_them(options, own, learns):
    """Other micro-batches run between the two runs, others on each rank. At the end no boxing is kept."""
    torch.manual_seed(0)
    one = SharedTable(learns, own)
    x, classes = torch.randn(6, 8), torch.arange(6) % 3
    F.cross_entropy(one(x), classes).backward()
    models = [copy.deepcopy(one) for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], f"pipeline | 2x1x1 mb=3 {options}")
        for _ in range(2):
            model.zero_grad()
            wb.forward_backward(model, F.cross_entropy, x, classes)
        assert model.table._boxings is None
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    torch.testing.assert_close(run_ranks(program, 2)[0], [parameter.grad for parameter in one.parameters()])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_function_that_gets_a_plain_tensor_draws_alike_on_one_rank(use_reentrant):
    layer = nn.Linear(4, 4, dtype=torch.float64)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()

    def program():
        module = wb.parallelize(copy.deepcopy(layer), "data")
        out = checkpoint(lambda x: F.dropout(module(x), 0.5), x, use_reentrant=use_reentrant)
        out.square().sum().backward()
        return module.weight.grad.full_tensor(), module.bias.grad.full_tensor()

    torch.testing.assert_close(run_ranks(program, 1)[0], run_ranks(program, 2)[0])
