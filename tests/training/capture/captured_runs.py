"""Models and steps that are trained captured and as they are."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.head(self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Gpt(nn.Module):
    def __init__(self, width=8, vocabulary=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(6, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.block(h, src_mask=mask, is_causal=True)).transpose(1, 2)


class Writes(nn.Module):
    """Writes in place to what it made, to a view of it, and to a buffer that it reads through a view."""

    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(2, 8))

    def forward(self, x):
        row = self.seen[1]
        with torch.no_grad():
            self.seen += 1
            row.mul_(0.5)
        z = self.linear(x) + 1
        left, right = z[:, :4], z[:, 4:]
        left += right
        z.mul_(row.mean() + 0.5)
        return self.head(F.relu(z, inplace=True))


MODELS = {
    "mlp": (mlp, lambda g: (torch.randn(6, 6, generator=g), torch.randint(0, 4, (6,), generator=g))),
    "cnn": (Cnn, lambda g: (torch.randn(6, 1, 5, 5, generator=g), torch.randint(0, 4, (6,), generator=g))),
    "writes": (Writes, lambda g: (torch.randn(6, 6, generator=g), torch.randint(0, 4, (6,), generator=g))),
    "gpt": (Gpt, lambda g: (torch.randint(0, 4, (4, 6), generator=g), torch.randint(0, 4, (4, 6), generator=g))),
}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw for each": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
}


def train(model_name, strategy, optimizer_name, state, batches, capture=None):
    """On one rank: losses of every step, and what is left: weights, buffers, optimizer state, gradients.

    ``capture`` makes the captured step; None to run the step as it is.
    """
    model = MODELS[model_name][0]()
    model.load_state_dict(state)
    model = wb.parallelize(model, strategy)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    run = capture(step) if capture else step
    losses = []
    for x, y in batches:
        losses.append(run(x, y).full_tensor())
        scheduler.step()
    if capture:
        assert (run.num_recordings, run.num_replays) == (1, len(batches) - 2)
    left = [value.full_tensor().detach() for value in model.state_dict().values()]
    left += [parameter.grad.full_tensor() for parameter in model.parameters()]
    left += [value for p in model.parameters() for value in optimizer.state[p].values() if value is not None]
    return losses + left


def start(model_name, num_steps):
    """Weights and batches to start with."""
    make, draw = MODELS[model_name]
    torch.manual_seed(0)
    state = make().state_dict()
    generator = torch.Generator().manual_seed(1)
    return state, [draw(generator) for _ in range(num_steps)]


def assert_captured_like_uncaptured(model_name, strategy, optimizer_name, num_steps, num_ranks=2, run=run_ranks):
    given = (model_name, strategy, optimizer_name, *start(model_name, num_steps))
    plain, captured = (run(partial(train, *given, capture), num_ranks) for capture in (None, wb.capture))
    for one, other in zip(plain, captured, strict=True):
        assert len(one) == len(other) > num_steps
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def filled(module):
    """A module with the same weights on all ranks, which as threads share torch's generator."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    return module


def assert_same(one, other):
    for values, others in zip(one, other, strict=True):
        assert len(values) == len(others) > 0
        assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


def step_of(module, optimizer, before=lambda: None, after=lambda loss: loss.detach()):
    def step(x):
        optimizer.zero_grad()
        before()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return after(loss)

    return step


def called(step, calls=3, shape=(4, 4)):
    for _ in range(calls):
        result = step(torch.ones(shape))
    return result


class Config:
    t = 1

    def __init__(self, **attributes):
        self.__dict__ |= attributes


class Trainer:
    """What a program has around a step: settings, and methods that read them."""

    def __init__(self, t):
        self.cfg, self.scale = Config(t=t), 1

    def factor(self, _):
        return self.cfg.t * self.scale

    def step(self, x):
        return x * self.factor(x)

    @torch.no_grad()
    def decorated(self, x):
        return self.step(x)

    __call__ = step
