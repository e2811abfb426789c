"""Batch norm over the logical batch: numbers of one device in every layout, and one exchange each way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.tensors.world import current
from workbench.testing import run_ranks

SHAPES = {"1d": (7, 5), "1d long": (7, 5, 6), "2d": (7, 5, 4, 3), "3d": (7, 5, 2, 3, 2), "few": (2, 5, 3, 2)}
LINE, GRID = [0, 1, 2], [[0, 1], [2, 3]]
LAYOUTS = [
    (LINE, ["S(0)"]),
    ([2, 0], ["S(0)"]),  # rank 1 is outside
    (LINE, ["S(1)"]),
    (LINE, ["B"]),
    (LINE, ["P"]),
    (GRID, ["S(0)", "S(0)"]),
    (GRID, ["S(0)", "S(1)"]),
    (GRID, ["B", "S(0)"]),
    (GRID, ["S(0)", "P"]),
]
WITH_PIXELS = [(LINE, ["S(2)"]), (GRID, ["S(0)", "S(2)"])]
TIGHT = {"rtol": 1e-11, "atol": 1e-12}
CPU = torch.device("cpu")


def draw(*shape, offset=0.0):
    """Numbers whose channels have other means and spreads."""
    full = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    channels = torch.arange(1.0, 1 + shape[1]).reshape([-1] + [1] * (len(shape) - 2))
    return full * channels + channels + offset


def placement_of(ranks):
    """Ranks on this world's device."""
    return wb.placement(current().device.type, ranks=ranks)


def placed(full, ranks, sbp):
    """A plain tensor that all ranks hold, as a global one that learns."""
    whole = wb.to_global(full, placement=placement_of(ranks), sbp=["B"] * len(sbp))
    return whole.to_global(sbp=sbp).detach().requires_grad_()


def everywhere(tensor, ranks, num_axes):
    """A weight or a running statistic."""
    return wb.to_global(tensor.clone(), placement=placement_of(ranks), sbp=["B"] * num_axes)


def assert_same(ours, theirs, **tolerance):
    """Compare logical values, also on ranks outside the placement."""
    whole = ours.detach().to_global(placement=placement_of(list(range(wb.world_size()))), sbp="B")
    torch.testing.assert_close(whole.to_local().cpu(), theirs.detach(), **tolerance)


def norm_of(shape, affine=True, momentum=0.1, tracks=True):
    """A plain module that has seen a batch."""
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    generator = torch.Generator().manual_seed(0)  # simulated ranks share the default one
    module = kinds[len(shape)](shape[1], affine=affine, momentum=momentum, track_running_stats=tracks).double()
    if affine:
        nn.init.normal_(module.weight, generator=generator)
        nn.init.normal_(module.bias, generator=generator)
    return module


def step(module, x):
    """Output, and gradients of input and parameters."""
    y = module(x)
    (y.sin() * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    return [y.detach(), x.grad, *[parameter.grad for parameter in module.parameters()]]


def as_global(module, ranks, num_axes):
    """The module with its tensors on all ranks."""
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(everywhere(parameter.detach(), ranks, num_axes)))
    for name, buffer in list(module.named_buffers()):
        setattr(module, name, everywhere(buffer, ranks, num_axes))
    return module


def assert_as_one_device(shape, ranks, sbp, device=CPU, **options):
    full, alone = draw(*shape), norm_of(shape, **options)
    expected = step(alone, full.clone().requires_grad_())
    expected += list(alone.buffers())
    alone.eval()
    frozen = alone(full).detach()

    def program():
        module = as_global(norm_of(shape, **options), ranks, len(sbp))
        found = [*step(module, placed(full, ranks, sbp)), *module.buffers()]
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs, **TIGHT)
        module.eval()
        assert_same(module(placed(full, ranks, sbp)), frozen, **TIGHT)

    run_ranks(program, 4 if ranks is GRID else 3, device=device)


def test_synchronized_norms_take_the_whole_batch(monkeypatch):
    """In a process group, torch's own would exchange what ranks hold of it, and does so on GPUs only."""
    shape = SHAPES["2d"]
    expected = step(norm_of(shape), draw(*shape).requires_grad_())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def program():
        module = as_global(nn.SyncBatchNorm.convert_sync_batchnorm(norm_of(shape)), LINE, 1)
        for ours, theirs in zip(step(module, placed(draw(*shape), LINE, ["S(0)"])), expected, strict=True):
            assert_same(ours, theirs, **TIGHT)

    run_ranks(program, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "sbp"), LAYOUTS)
@pytest.mark.parametrize("kind", ["1d", "2d", "few"])
def test_every_layout_gives_the_numbers_of_one_device(kind, ranks, sbp):
    """Uneven shards, and (of 2 samples on 3 or 4 ranks) empty ones."""
    assert_as_one_device(SHAPES[kind], ranks, sbp)


@pytest.mark.parametrize(("ranks", "sbp"), WITH_PIXELS)
@pytest.mark.parametrize("kind", ["1d long", "2d", "3d"])
def test_split_pixels_give_the_numbers_of_one_device(kind, ranks, sbp):
    assert_as_one_device(SHAPES[kind], ranks, sbp)


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "P"])
@pytest.mark.parametrize("options", [{"affine": False}, {"momentum": None}, {"momentum": 1.0}, {"tracks": False}])
def test_every_option_gives_the_numbers_of_one_device(options, sbp):
    assert_as_one_device(SHAPES["2d"], LINE, [sbp], **options)


def test_images_with_channels_last_give_the_numbers_of_one_device():
    shape = SHAPES["2d"]
    full, alone = draw(*shape).to(memory_format=torch.channels_last), norm_of(shape)
    expected = step(alone, full.clone().requires_grad_())

    def program():
        x = placed(full, LINE, ["S(0)"])
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        for ours, theirs in zip(step(as_global(norm_of(shape), LINE, 1), x), expected, strict=True):
            assert_same(ours, theirs, **TIGHT)

    run_ranks(program, 3)


# Layout, and exchanges forward and backward.
EXCHANGES = [
    (LINE, ["S(0)"], 1, 1),
    (LINE, ["S(2)"], 1, 1),
    (GRID, ["S(0)", "S(0)"], 1, 1),
    (GRID, ["S(0)", "S(1)"], 1, 1),
    (LINE, ["S(1)"], 0, 0),
    (LINE, ["B"], 0, 0),
]


@pytest.mark.parametrize(("ranks", "sbp", "forward", "backward"), EXCHANGES)
def test_one_exchange_each_way(ranks, sbp, forward, backward):
    shape = (8, 4, 4, 2)
    full, num_ranks = draw(*shape).float(), 4 if ranks is GRID else 3

    def program():
        module = as_global(norm_of(shape, tracks=False).float(), ranks, len(sbp))
        x = placed(full, ranks, sbp)
        with wb.debug.trace() as there:
            y = module(x)
        with wb.debug.trace() as back:
            y.sum().backward()
        moved = [[record for record in trace.records if record.wire_bytes] for trace in (there, back)]
        assert [len(records) for records in moved] == [forward, backward], moved
        assert {record.direction for record in moved[0]} <= {"forward"}
        assert {record.direction for record in moved[1]} <= {"backward"}

    run_ranks(program, num_ranks)


def test_an_input_without_gradient_exchanges_nothing_backward():
    full = draw(6, 4)

    def program():
        module = as_global(norm_of((6, 4)), LINE, 1)
        y = module(placed(full, LINE, ["S(0)"]).detach())
        with wb.debug.trace() as back:
            y.sum().backward()
        assert not any(record.wire_bytes for record in back.records)
        return module.weight.grad.full_tensor()

    alone = norm_of((6, 4))
    alone(full).sum().backward()
    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, alone.weight.grad, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide_weights", [False, True])
def test_halves_are_no_less_exact_than_on_one_device(dtype, wide_weights):
    shape = (48, 3, 5, 5)
    full = draw(*shape, offset=8.0).to(dtype)

    def steps_of(module, x):
        module = module.to(torch.float32 if wide_weights else dtype)
        return [each.double() for each in step(module, x)]

    exact = step(norm_of(shape), full.double().requires_grad_())
    alone = steps_of(norm_of(shape), full.clone().requires_grad_())

    def program():
        module = norm_of(shape).to(torch.float32 if wide_weights else dtype)
        found = step(as_global(module, LINE, 1), placed(full, LINE, ["S(0)"]))
        return [each.full_tensor().double() for each in found]

    eps = torch.finfo(dtype).eps
    for number, (ours, theirs, truth) in enumerate(zip(run_ranks(program, 3)[0], alone, exact, strict=True)):
        errors = [float((each - truth).abs().max()) for each in (ours, theirs)]
        num_roundings = 1 if number < 2 else 3  # a parameter's gradient is rounded as a term on each of three ranks
        assert errors[0] <= max(2 * errors[1], num_roundings * eps * float(truth.abs().max())), (number, errors)


def test_statistics_far_from_zero_are_no_less_exact_than_on_one_device():
    full = draw(301, 3, offset=1e4).float()
    exact = F.batch_norm(full.double(), None, None, training=True)
    alone = (F.batch_norm(full, None, None, training=True) - exact).abs().max()

    def program():
        y = F.batch_norm(placed(full, LINE, ["S(0)"]), None, None, training=True)
        return y.full_tensor().detach()

    assert (run_ranks(program, 3)[0] - exact).abs().max() <= 2 * alone


@pytest.mark.parametrize(
    ("ranks", "sbp"), [(LINE, ["S(0)"]), ([2, 0], ["S(0)"]), (LINE, ["S(1)"]), (GRID, ["S(0)", "B"])]
)
def test_gradients_of_gradients(ranks, sbp):
    shape = (5, 4, 3)
    full = draw(*shape)

    def penalty(module, x):
        (grad,) = torch.autograd.grad(module(x).sin().square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [x.grad, module.weight.grad]

    expected = penalty(norm_of(shape), full.clone().requires_grad_())

    def program():
        module = as_global(norm_of(shape), ranks, len(sbp))
        for ours, theirs in zip(penalty(module, placed(full, ranks, sbp)), expected, strict=True):
            assert_same(ours, theirs, rtol=1e-9, atol=1e-10)

    run_ranks(program, 4 if ranks is GRID else 3)


def test_a_wrong_count_would_be_seen(monkeypatch):
    """The comparison sees a gradient that was averaged over the shard in place of the batch."""
    from workbench.tensors.rules.norms import batch_norm

    right = batch_norm.input_gradient

    def wrong(*args):
        return right(*args[:-1], args[-1]._replace(total=args[-1].total // 3))

    monkeypatch.setattr(batch_norm, "input_gradient", wrong)
    with pytest.raises(AssertionError):
        assert_as_one_device(SHAPES["1d"], LINE, ["S(0)"])


def test_one_value_per_channel_is_refused():
    def program():
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            F.batch_norm(placed(draw(1, 3), LINE, ["S(0)"]), None, None, training=True)

    run_ranks(program, 3)


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("sbp", ["S(0)", "B", "P"])
def test_a_plain_input_moves_global_statistics(norm, sbp):
    x = draw(6, 4, 5)

    def move(mean, variance, weight=None):
        norm(x, mean, variance, weight, None, True, 0.3)
        return mean, variance

    zeros, ones = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    def program():
        start = wb.zeros(4, placement=placement_of(LINE), sbp=sbp, dtype=torch.float64)
        moved = [t.full_tensor() for t in (*move(start.clone(), start + 1), *move(zeros.clone(), start + 1)[1:])]
        return moved, move(zeros.clone(), ones.clone(), start + 1)

    mean, variance = move(zeros.clone(), ones.clone())
    for moved, plain in run_ranks(program, 3):
        torch.testing.assert_close(moved, [mean, variance, variance], **TIGHT)
        torch.testing.assert_close(plain, (mean, variance), **TIGHT)


NORMS = {
    "training": lambda x, w: F.batch_norm(x, None, None, w, w, training=True),
    "frozen": lambda x, w: F.batch_norm(x, w.detach() * 0, w.detach() * 0 + 2, w, w),
    "instance": lambda x, w: F.instance_norm(x, weight=w, bias=w),
}
AS_TOKENS = {
    "input": lambda x: x,
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "channels last": lambda x: x.permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("after", AS_TOKENS.values(), ids=AS_TOKENS)
@pytest.mark.parametrize("before", [False, True], ids=["from pixels", "from tokens"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_shards_of_one_sample_whose_channels_lie_together(norm, before, after):
    """torch's kernels for CPUs are wrong in backward for one sample in two orders; on one device there are several."""
    start, factors, weight = draw(3, 4, 2, 5), draw(3, 40).view(3, 4, 2, 5), draw(1, 4)[0]

    def trained(x, w, factor):
        x, w = x.requires_grad_(), w.requires_grad_()
        y = x.flatten(2).transpose(1, 2).sin().transpose(1, 2).view(x.shape) if before else x.sin()
        y = after(norm(y, w))
        (y * after(factor).contiguous()).sum().backward()
        return x.grad, w.grad

    def program():
        ours = trained(placed(start, LINE, ["S(0)"]), everywhere(weight, LINE, 1), placed(factors, LINE, ["S(0)"]))
        return [grad.full_tensor() for grad in ours]

    theirs = trained(start.clone(), weight.clone(), factors)
    for ours in run_ranks(program, 3):
        torch.testing.assert_close(ours, list(theirs), **TIGHT)
