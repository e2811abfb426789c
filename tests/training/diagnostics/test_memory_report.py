"""What the memory report says against bytes that are counted here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import workbench as wb
from tests.processes import run_processes
from workbench.tensors.world import current
from workbench.testing import run_ranks

FLOAT = 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.fc(self.embed(ids))))


WEIGHTS = Tied().state_dict()
EMBED, FC, BIAS, NORM = 10 * 6 * FLOAT, 36 * FLOAT, 6 * FLOAT, 12 * FLOAT
BUFFERS = 12 * FLOAT + 8  # mean, variance, and how many batches there were


def trained(strategy):
    model = Tied()
    model.load_state_dict(WEIGHTS)
    wb.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.arange(6)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "expected"),
    [
        ("*: data", 2, [EMBED + FC + BIAS + NORM] * 2),  # the tied weight once
        ("*: data; fc: model", 2, [EMBED + FC // 2 + BIAS // 2 + NORM] * 2),
        ("embed: data@0; fc: data@1; norm: data@1; head: data@1", 2, [EMBED, FC + BIAS + NORM]),
    ],
)
def test_parameters_gradients_and_state_by_rank(strategy, num_ranks, expected):
    rows = run_ranks(lambda: wb.debug.memory_report(*trained(strategy)).to_dict(), num_ranks)
    assert all(row == rows[0] for row in rows), "every rank knows the whole table"
    held = rows[0]
    for rank, size in enumerate(expected):
        assert held[rank]["parameters"] == size
        assert held[rank]["optimizer"] == size, "one momentum per element"
        assert held[rank]["total"] == sum(bytes_ for kind, bytes_ in held[rank].items() if kind != "total")
    assert sum(row["buffers"] for row in held.values()) == BUFFERS * (num_ranks if "@" not in strategy else 1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_is_seen(zero):
    model_bytes = 4 * 64 * 64 * FLOAT

    def program():
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
        model.load_state_dict(state)
        wb.parallelize(model, f"*: data | 1x4x1 zero={zero}")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            if zero == 2:
                before_step = wb.debug.memory_report(model, optimizer)[wb.rank()]["gradients"]
            optimizer.step()
        held = wb.debug.memory_report(model, optimizer)[wb.rank()]
        assert held["optimizer"] == model_bytes / 4
        assert held["parameters"] == (model_bytes / 4 if zero == 3 else model_bytes)
        if zero == 2:
            assert before_step == model_bytes / 4

    state = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)]).state_dict()
    run_ranks(program, 4)


def test_activations_are_counted_at_their_largest():
    """Two forwards are alive at the same time, or one after the other."""

    def program():
        x = torch.ones(8, 4)
        model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        model.load_state_dict(state)
        wb.parallelize(model, "*: data")
        one = 4 * 4 * FLOAT  # a tensor of this rank's four rows

        def forward():
            return model(wb.to_global(x, wb.placement("cpu", ranks=[0, 1]), "B", broadcast_from=0).requires_grad_())

        with wb.debug.memory_report(model) as report:
            for _ in range(2):
                forward().sum().backward()
        once = report[wb.rank()]["activations"]
        with wb.debug.memory_report(model) as report:
            kept = [forward(), forward()]
            kept[0].sum().backward()
        del kept
        assert once % one == 0 and 2 * one <= once <= 4 * one
        assert report[wb.rank()]["activations"] == 2 * once
        return True

    state = nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).state_dict()
    assert run_ranks(program, 2) == [True, True]


class Around(torch.optim.Optimizer):
    """It steps another one, of the same groups."""

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, Around])
def test_state_in_lists_beside_parameters_and_of_optimizers_within_is_counted(kind):
    model = nn.Linear(6, 4)
    optimizer = kind(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    newest = torch.zeros(4, 6)
    optimizer.state[model.weight]["newest"] = [newest, {"sums": (torch.zeros(4, 6), None, newest)}]
    optimizer.state["step"], optimizer.state["norms"] = 3, {"all": torch.zeros(5)}
    momentum = 28 * FLOAT if kind is Around else 0
    assert wb.debug.memory_report(model, optimizer)[0]["optimizer"] == momentum + (2 * 24 + 5) * FLOAT


def test_it_prints_a_table_and_one_rank_is_enough():
    model = nn.Linear(250, 4, bias=False)
    text = str(wb.debug.memory_report(model))
    assert [line.split() for line in text.splitlines()] == [
        ["rank", "parameters", "gradients", "optimizer", "buffers", "transport", "total"],
        ["0", "4.00", "kB", "0", "B", "0", "B", "0", "B", "0", "B", "4.00", "kB"],
    ]
    with pytest.raises(TypeError, match=r"memory_report\(Tensor\)"):
        wb.debug.memory_report(torch.ones(1))


def shared_memory_of_a_rank():
    before = wb.debug.memory_report()[wb.rank()]["transport"]
    x = wb.ones(512, 256, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.split(0))
    whole = x.to_global(sbp=wb.sbp.broadcast)
    after = wb.debug.memory_report()[wb.rank()]["transport"]
    return current().transport_name, before, after, whole.to_local().nbytes


@pytest.mark.procs
def test_shared_memory_counts_without_the_tensors_in_it():
    for name, before, after, lent in run_processes(shared_memory_of_a_rank, 2):
        assert name == "shared" and before >= 2**20
        assert before - after in (0, lent) or after > before
