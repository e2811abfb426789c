"""More of what training programs do, with shards on a device and everything else on the host."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.checked_device import DEVICE
from tests.checked_device.test_training import X, Y, mlp, own_step, train
from tests.training import test_on_gpu
from workbench.tensors.world import current
from workbench.testing import run_ranks

IMAGES = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(2))


def assert_equal_to_the_host(program, num_ranks=2):
    """The program gives the same numbers with its shards on the device as with its shards on the host."""
    expected = run_ranks(program, num_ranks)
    found = run_ranks(program, num_ranks, device=DEVICE)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def parallel(make, strategy):
    torch.manual_seed(0)
    model = make()
    return lambda: wb.parallelize(copy.deepcopy(model), strategy)


class Words(nn.Module):
    """A small transformer with positions, a mask and dropout, all made in its forward.

    Very small: Triton's interpreter takes a tenth of a second for the attention of a head and a sample.
    """

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 4), nn.Embedding(5, 4)
        self.attention, self.norm = nn.MultiheadAttention(4, 2, 0.2, batch_first=True), nn.LayerNorm(4)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(4, 11)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        mask = torch.triu(torch.full((5, 5), float("-inf")), diagonal=1)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0] * self.scale
        return self.head(self.drop(self.norm(x)))


def cnn():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6)]
    return nn.Sequential(*layers)


def words_step(model):
    loss = F.cross_entropy(model(WORDS).flatten(0, 1), WORDS.flatten())
    loss.backward()
    return loss.detach()


def images_step(model):
    loss = F.cross_entropy(model(IMAGES), Y[:8])
    loss.backward()
    return loss.detach()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3"])
@pytest.mark.parametrize(("make", "step"), [(Words, words_step), (cnn, images_step)])
def test_models(make, step, strategy):
    build = parallel(make, strategy)
    assert_equal_to_the_host(lambda: train(build(), step, 2)[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("make", "step", "strategy", "num_ranks"), test_on_gpu.SEQUENCES_AND_EXPERTS)
def test_sequences_and_experts(make, step, strategy, num_ranks):
    [truth] = test_on_gpu.run(make, "*: data", 1, "cpu", step)
    for losses in test_on_gpu.run(make, strategy, num_ranks, DEVICE, step):
        assert losses == pytest.approx(truth, rel=1e-3)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=0.01),
    lambda p: torch.optim.Adafactor(p, lr=0.01),
    lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers(make):
    build = parallel(mlp, "*: data; 2: model")
    assert_equal_to_the_host(lambda: train(build(), own_step, 2, make)[0])


LOSSES = [
    lambda out: F.cross_entropy(out, Y, weight=torch.arange(1.0, 7)),
    lambda out: F.cross_entropy(out, Y, label_smoothing=0.1),
    lambda out: F.cross_entropy(out, F.one_hot(Y, 6).float()),
    lambda out: F.nll_loss(out.log_softmax(1), Y),
    lambda out: F.mse_loss(out, torch.ones(16, 6)),
    lambda out: F.binary_cross_entropy_with_logits(out, torch.ones(16, 6)),
    lambda out: F.multi_margin_loss(out, Y),
    lambda out: F.kl_div(out.log_softmax(1), torch.full((16, 6), 1 / 6), reduction="batchmean"),
    lambda out: (out * torch.linspace(0, 1, 6) - torch.ones(16, 1)).square().mean(),
    lambda out: torch.where(torch.ones(16, 1) > 0, out, torch.zeros(())).sum(),
    lambda out: out[torch.arange(16), Y].sum(),
    lambda out: out[Y > 2].sum(),
    lambda out: out.gather(1, Y[:, None]).sum(),
    lambda out: out.masked_fill(torch.eye(16, 6) > 0, 0.0).sum(),
    lambda out: torch.cat([out, torch.ones(16, 2)], 1).sum(),
    lambda out: out.index_select(0, torch.tensor([1, 3])).sum(),
    lambda out: (torch.ones(4, 16) @ out).sum(),
    lambda out: out.scatter(1, Y[:, None], 0.0).sum(),
    lambda out: torch.zeros(()).add(out.sum()),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data; 5: model:row"])
def test_plain_operands_come_to_the_device(strategy):
    build = parallel(mlp, strategy)

    def program():
        model = build()
        for parameter in model.parameters():
            parameter.requires_grad_()
        found = []
        for loss_of in LOSSES:
            model.zero_grad()
            loss = loss_of(model(X))
            loss.backward()
            found += [loss.item(), model[0].weight.grad.full_tensor().cpu()]
        return found

    assert_equal_to_the_host(program)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=2", "pipeline | mb=2"])
def test_clipping_evaluation_and_sums_of_losses(strategy):
    build = parallel(mlp, strategy)

    def program():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        total = torch.zeros(())
        for _ in range(2):
            optimizer.zero_grad()
            total += wb.forward_backward(model, F.cross_entropy, X, Y)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return total.item(), wb.evaluate(model, X).full_tensor().cpu()

    assert_equal_to_the_host(program)


def test_a_loader_copies_the_ranks_own_rows():
    build = parallel(mlp, "*: data")

    def program():
        model = build()
        losses = []
        for inputs, targets in wb.GlobalDataLoader((X, Y), batch_size=5, module=model, shuffle=True):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
        return losses

    assert_equal_to_the_host(program)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["*: data; 2: model", "*: data | zero=3"])
def test_a_saved_run_goes_on(strategy, tmp_path):
    build = parallel(mlp, strategy)

    def program():
        model, again = build(), build()
        optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, again))
        own_step(model)
        optimizer.step()
        folder = tmp_path / "saved"
        wb.checkpoint.save(folder, model=model, optimizer=optimizer)
        wb.checkpoint.load(folder, model=again, optimizer=other)
        return [own_step(again).item(), own_step(model).item()]

    assert_equal_to_the_host(program)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_mixed_precision(word):
    build = parallel(mlp, f"*: data; 2: model | {word}")

    def program():
        model = build()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**4)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X).float(), Y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    expected = run_ranks(program)
    for losses in run_ranks(program, device=DEVICE):
        assert losses == pytest.approx(expected[0], rel=5e-2) and losses[-1] < losses[0]


@pytest.mark.slow
def test_a_captured_step():
    build = parallel(mlp, "*: data")

    def program():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        captured = wb.capture(step)
        return [captured(X, Y).item() for _ in range(5)]

    assert_equal_to_the_host(program)


@pytest.mark.slow
def test_generated_text():
    from tests.models.test_generate import GREEDY, SAMPLED, make_model, prompts

    model = make_model("gpt2")

    def program():
        parallel_model = wb.parallelize(copy.deepcopy(model), "*: data")
        wb.manual_seed(3)
        texts = []
        for options in (GREEDY, SAMPLED):
            given = {name: value.to(current().device) for name, value in prompts().items()}  # as in plain torch
            words = parallel_model.generate(**given, max_new_tokens=4, pad_token_id=0, **options)
            texts.append(getattr(words, "full_tensor", lambda words=words: words)().cpu())
        return texts

    assert_equal_to_the_host(program)
