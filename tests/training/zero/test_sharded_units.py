"""zero=3: a block's parameters come in one exchange, are here while it runs, and give the numbers of one device."""

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from tests.training.block_models import (
    IDS,
    WIDTH,
    Apart,
    Chain,
    Several,
    Skipping,
    Twice,
    freeze,
    grads_of,
    loss_of,
    made,
    on_two,
    value,
)
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.strategies.state import state_of
from workbench.training.zero.sharded_units import ExecutionOrder


def freeze_blocks(model):
    for block in list(model.blocks)[1:]:
        block.requires_grad_(False)


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
    "model": (Chain, {"row": "*: data; blocks.*: model", "options": "1x2x2", "num_ranks": 4}),
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


@pytest.mark.sampled(6, start=2)
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


def test_ranks_that_were_interrupted_at_different_points_go_on_alike():
    """One rank has learnt the order of blocks in the world that broke; the other has not."""
    models = [made(Chain) for _ in range(3)]

    def program(rank, options):
        model = wb.parallelize(models.pop(), f"*: data | {options}")
        model(IDS)
        ends = [getattr(end, "__self__", None) for end in state_of(model).on_interrupt]
        found = [end for end in ends if isinstance(end, ExecutionOrder)]
        assert len(found) == ("zero=3" in options)
        for execution_order in found:
            assert len(execution_order._recorded[current()][1]) > 2
            if rank > 0:
                execution_order._recorded.clear()
        current().num_rebuilds += 1
        return train(model, steps=4)

    [truth] = run_ranks(lambda rank: program(rank, "1x1x1"), 1)
    for grads, weights in run_ranks(lambda rank: program(rank, "1x2x1 zero=3"), 2):
        assert_alike(grads, truth[0])
        assert_alike(weights, truth[1])


def test_a_backward_that_raises_leaves_nothing_for_the_next_step():
    """The block before the one that raises is under way already, under the tag that it has in the next step, too."""
    models = [made(Chain) for _ in range(3)]

    def program(rank, options):
        model = wb.parallelize(models.pop(), f"*: data | mb=2 {options}")
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
        for number in range(5):
            optimizer.zero_grad()
            handle = raising_in_backward(list(model.modules())[-2]) if number in (1, 2) else None
            try:
                losses.append(wb.forward_backward(model, loss_of_words, IDS, IDS).item())
                optimizer.step()
            except ZeroDivisionError:
                losses.append(0.0)
            if handle is not None:
                handle.remove()
        return losses, [value(p) for p in model.parameters()]

    [truth] = run_ranks(lambda rank: program(rank, "1x1x1"), 1)
    assert truth[0].count(0.0) == 2
    for losses, weights in run_ranks(lambda rank: program(rank, "1x2x1 zero=3"), 2):
        assert losses == pytest.approx(truth[0], rel=1e-9)
        assert_alike(weights, truth[1])


def test_a_program_may_end_with_a_backward_that_raises():
    def program(model):
        raising_in_backward(list(model.modules())[-2])
        with pytest.raises(ZeroDivisionError):
            loss_of(model).backward()

    on_two(program)


def test_another_model_gets_nothing_of_a_backward_that_raised():
    """Its units have the same tags, and other weights."""
    models = [made(Chain).eval() for _ in range(5)]
    for model in models[:2]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)

    def program(rank):
        failing, other = (wb.parallelize(models[rank + at], "*: data | 1x2x1 zero=3") for at in (0, 2))
        raising_in_backward(list(failing.modules())[-2])
        with pytest.raises(ZeroDivisionError):
            wb.forward_backward(failing, loss_of_words, IDS, IDS)
        wb.forward_backward(other, loss_of_words, IDS, IDS)
        return grads_of(other)

    loss_of_words(models[4](IDS), IDS).backward()
    for grads in run_ranks(program, 2):
        assert_alike(grads, grads_of(models[4]))


def loss_of_words(output, ids):
    return nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten())


def raising_in_backward(module):
    def fail(grad):
        raise ZeroDivisionError

    return module.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)


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


class TwoParts(nn.Module):
    """A body with two heads; its parts are also called directly."""

    def __init__(self):
        super().__init__()
        self.body, self.aux, self.head = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.body(x)
        return {"aux": self.aux(hidden), "head": self.head(hidden)}


def losses_of_outputs(model, kept):
    found = []
    for x in torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(2, 4, 4):
        outputs = model(x)
        kept(outputs["aux"])
        found.append(outputs.pop("head").square().mean())
        del outputs
        found[-1].backward()
    return found


def losses_of_parts(model, kept):
    """Each part has its own optimizer, which steps while the graph of the part before is still there."""
    found, optimizers = [], [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.aux, model.head)]
    for x in torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(2, 4, 6):
        for part, optimizer in zip((model.aux, model.head), optimizers, strict=True):
            loss = part(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept(loss)
            found.append(loss.detach())
    return found


@pytest.mark.parametrize("losses_of", [losses_of_outputs, losses_of_parts])
def test_backward_gathers_alike_where_one_rank_alone_keeps_graphs(losses_of):
    def program(model):
        kept = []
        losses = losses_of(model, kept.append if wb.rank() == 0 else lambda loss: None)
        return [value(each) for each in (*losses, *model.parameters())]

    model = made(TwoParts)
    truth = [value(each) for each in (*losses_of(model, lambda loss: None), *model.parameters())]
    for found in on_two(program, TwoParts):
        assert_alike(found, truth)


@pytest.mark.parametrize("keeps", [False, True])
def test_losses_of_parts_are_kept_over_steps(keeps):
    def program(model):
        kept = []
        return [value(each) for each in losses_of_parts(model, kept.append if keeps else lambda loss: None)]

    assert_alike(on_two(program, TwoParts)[0], losses_of_parts(made(TwoParts), lambda loss: None))
