"""Every strategy, schedule and recovery under NCCL's rules, on a device: no stall, and the numbers of the host."""

import copy
import functools
import os
import subprocess
import threading
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.checked_device import DEVICE, Counts, counted
from tests.checked_device.counts import counts_of_thread
from tests.checked_device.nccl_launches import count_nccl_calls
from tests.transport.nccl_ranks import CPU, run_over_nccl
from tests.transport.played_nccl import Call, PlayedNccl
from tests.transport.shared_ranks import assert_all_returned
from workbench.core.options import VIRTUAL_SCHEDULES
from workbench.errors import CollectiveAborted, StrategyError
from workbench.tensors import object_collectives
from workbench.tensors.world import current
from workbench.training.pipelining import stage_ranks

_DATA = torch.Generator().manual_seed(5)
X, Y = torch.randn(16, 8, generator=_DATA), torch.randint(0, 8, (16,), generator=_DATA)
STAGES = "[0-7]: {}; [8-15]: {}@1"


def _pipeline(schedule):
    return {n: f"pipeline | mb={num_micro_batches} {schedule}" for n, num_micro_batches in ((2, 3), (4, 8), (8, 8))}


STRATEGIES = {
    "data": "*: data",
    "model": "*: model",
    "rows": "*: model:row",
    "overlap": "*: model | overlap=2",
    "zero 1": "*: data | zero=1",
    "zero 2": "*: data | zero=2",
    "zero 3": "*: data | zero=3",
    "shards": {4: "*: data | zero=3 shards=2", 8: "*: data | zero=2 shards=4"},
    "shards in stages": {8: "pipeline | 2x4x1 mb=4 interleaved zero=3 shards=2"},
    "unlike layers": "[0-7]: data; [8-15]: model:row",
    "recompute": "*: data | zero=3 recompute",
    "recompute cheap": {2: "*: data | zero=3 recompute=cheap", 4: "pipeline | 2x2x1 mb=4 1f1b recompute=attention"},
    "gpipe": _pipeline("gpipe"),
    "1f1b": _pipeline("1f1b"),
    "interleaved": _pipeline("interleaved"),
    "zero bubble": _pipeline("zero_bubble"),
    "zero_bubble_v": _pipeline("zero_bubble_v"),
    "dualpipe_v": _pipeline("dualpipe_v"),
    "mixed": {
        4: f"{STAGES.format('data', 'data')} | 2x2x1 mb=4 zero=2",
        8: f"{STAGES.format('model', 'model')} | 2x2x2 mb=4 1f1b zero=1",
    },
    "zero 3 in stages": {4: "pipeline | 2x2x1 mb=4 interleaved zero=3", 8: "pipeline | 2x4x1 mb=4 interleaved zero=3"},
    "hybrid": {4: "hybrid | mb=4", 8: "hybrid | mb=4"},
    "unlike stages": {
        4: f"{STAGES.format('data', 'model')} | 2x2x1 mb=4 1f1b",
        8: "[0-7]: model; [8-15]: data@1 | 2x2x2 mb=4 1f1b",
    },
}


def deep_mlp(num_layers=8):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(num_layers) for layer in (nn.Linear(8, 8), nn.Tanh())))


def train(model, num_steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        losses.append(wb.forward_backward(model, F.cross_entropy, X, Y).item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses


@functools.cache
def plain_losses(num_layers):
    """Losses of plain torch on the host."""
    model = deep_mlp(num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def device_of(num_ranks):
    """The device, for whose kernels many ranks take too long: their garbage is that of the played NCCL only."""
    return DEVICE if num_ranks == 2 else CPU


def run_training(strategy, num_ranks, num_layers=8):
    model = deep_mlp(num_layers)
    return run_over_nccl(
        lambda rank: train(wb.parallelize(copy.deepcopy(model), strategy)),
        num_ranks,
        device=device_of(num_ranks),
    )


def assert_trains(name, num_ranks):
    strategy = STRATEGIES[name]
    text = strategy if isinstance(strategy, str) else strategy[num_ranks]
    num_layers = 2 * num_ranks if name in VIRTUAL_SCHEDULES else 8
    for losses in assert_all_returned(run_training(text, num_ranks, num_layers)):
        assert losses == pytest.approx(plain_losses(num_layers), rel=1e-4)


CASES = [(name, n) for n in (2, 4, 8) for name, text in STRATEGIES.items() if isinstance(text, str) or n in text]


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_training_never_stalls_and_equals_the_host(name, num_ranks):
    assert_trains(name, num_ranks)


@pytest.mark.parametrize(("name", "num_overlaps"), [("data", 1), ("zero 2", 1), ("zero 3", 6), ("overlap", 2)])
def test_exchanges_of_a_step_overlap_with_its_products(name, num_overlaps, monkeypatch):
    wait, start = Call.wait, PlayedNccl.call
    started, overlaps = {}, ([], [])

    def num_products():
        return sum(
            number for kind, number in (counts_of_thread() or [Counts()])[0].launches.items() if kind.endswith("mm")
        )

    def started_call(self, *args):
        call = start(self, *args)
        started[call] = num_products()
        return call

    def wait_for(call):
        overlaps[call.rank].append(num_products() - started[call])
        wait(call)

    monkeypatch.setattr(PlayedNccl, "call", started_call)
    monkeypatch.setattr(Call, "wait", wait_for)
    built = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))

    def program(rank):
        with counted():
            model = wb.parallelize(copy.deepcopy(built), STRATEGIES[name])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                overlaps[rank].clear()
                optimizer.zero_grad()
                model(torch.ones(4, 300)).square().mean().backward()
                optimizer.step()

    assert_all_returned(run_over_nccl(program, device=DEVICE))
    for own in overlaps:
        assert sum(overlap > 0 for overlap in own) >= num_overlaps, overlaps


def _skips_wait(*kinds):
    """Of tensors. Garbage among the objects that ranks gather before they train ends in any error."""
    wait, gather, thread = Call.wait, object_collectives._gather_bytes, threading.local()

    def gather_objects(*arguments):
        thread.gathers_objects = True
        try:
            return gather(*arguments)
        finally:
            thread.gathers_objects = False

    def wait_or_not(call):
        if call.parts[0].kind not in kinds or getattr(thread, "gathers_objects", False):
            wait(call)

    return {(Call, "wait"): wait_or_not, (object_collectives, "_gather_bytes"): gather_objects}


def _waits_for_sends():
    isend = PlayedNccl.isend

    def isend_and_wait(self, *args, **options):
        call = isend(self, *args, **options)
        call.wait()
        return call

    return {(PlayedNccl, "isend"): isend_and_wait}


PLANTED = {
    "a receive is not waited for": ("gpipe", 2, _skips_wait("send", "receive")),
    "a batch is not waited for": ("unlike layers", 2, _skips_wait("send", "receive")),
    "a gathering is not waited for": ("zero 3", 2, _skips_wait("all-gather")),
    "a sum of shards is not waited for": ("zero 2", 2, _skips_wait("reduce-scatter")),
    "a sum is not waited for": ("data", 2, _skips_wait("sum")),
    "a send is waited for": ("1f1b", 2, _waits_for_sends()),
    "both directions of a pair share a communicator": (
        "1f1b",
        4,
        {(PlayedNccl, "new_group"): lambda *args, **options: None},
    ),
    "a V has no channels": ("zero_bubble_v", 4, {(stage_ranks, "open_channels"): lambda *args: {}}),
    "another V has no channels": ("dualpipe_v", 4, {(stage_ranks, "open_channels"): lambda *args: {}}),
}


QUICK = {"a receive is not waited for", "a sum is not waited for", "a send is waited for"}
QUICK |= {"both directions of a pair share a communicator"}


@pytest.mark.parametrize("mistake", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in PLANTED])
def test_mistakes_are_found(mistake, monkeypatch):
    name, num_ranks, replaced = PLANTED[mistake]
    for place, function in replaced.items():
        monkeypatch.setattr(*place, function)
    # Where calls of one communicator meet in another order, a rank may see it before the played NCCL finds the stall
    with pytest.raises((AssertionError, CollectiveAborted)):
        assert_trains(name, num_ranks)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=3", "pipeline | mb=8 1f1b"])
def test_ranks_train_again_after_an_interrupt_or_the_loss_of_a_rank(strategy, is_lost, num_ranks):
    assert_they_train_again(strategy, is_lost, num_ranks, num_forwards=2)


def test_ranks_notice_a_lost_one_while_another_waits_in_the_first_call_on_a_communicator():
    assert_they_train_again("pipeline | mb=8 1f1b", True, 4, num_forwards=3)


def assert_they_train_again(strategy, is_lost, num_ranks, num_forwards):
    """After rank 1 has stopped in its ``num_forwards``-th forward, of which the first look at a model makes one."""
    built, worlds = deep_mlp(), [None] * num_ranks
    with subprocess.Popen(["sleep", "60"]) as process:

        def interrupted(rank):
            worlds[rank] = current()
            model, calls = copy.deepcopy(built), SimpleQueue()  # which the first look at a model cannot put back

            def stop(*_):
                calls.put(1)
                if rank == 1 and calls.qsize() == num_forwards:
                    process.kill()
                    process.wait()
                    raise SystemExit if is_lost else KeyboardInterrupt

            model[2 * 8 // num_ranks].register_forward_hook(stop)  # of rank 1's stage
            return train(wb.parallelize(model, strategy), num_steps=3)

        pids = [os.getpid()] * num_ranks
        pids[1] = process.pid if is_lost else pids[0]
        found = run_over_nccl(interrupted, num_ranks, device=device_of(num_ranks), pids=pids, finds_stalls=False)
    reasons = ["rank 1 gave up: KeyboardInterrupt"]
    if is_lost:  # the thread that plays the lost process leaves the world besides; either may be seen first
        reasons = [f"process {process.pid} of rank 1 has ended", "rank 1 has left the world"]
    assert isinstance(found.pop(1), SystemExit if is_lost else KeyboardInterrupt)
    for error in found:
        assert isinstance(error, CollectiveAborted) and any(reason in str(error) for reason in reasons), found
    if is_lost:
        worlds[1] = None  # another process takes its place

    def again(rank):
        return train(wb.parallelize(copy.deepcopy(built), strategy))

    for losses in assert_all_returned(run_over_nccl(again, num_ranks, device=device_of(num_ranks), worlds=worlds)):
        assert losses == pytest.approx(plain_losses(8), rel=1e-4)


class Tied(nn.Module):
    """Embedding and head share a weight."""

    def __init__(self, num_ranks):
        super().__init__()
        layers = (nn.Linear(8, 8) for _ in range(4 * num_ranks))
        self.embedding, self.inner = nn.Embedding(8, 8), nn.Sequential(*layers)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.inner(self.embedding(words)))


class Skipping(Tied):
    """The last layer reads what the first one makes, and shares nothing with it."""

    def __init__(self, num_ranks):
        super().__init__(num_ranks)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def forward(self, words):
        first = self.embedding(words)
        return self.head(self.inner(first) + first)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v"])
def test_tied_weights_on_distant_stages(schedule, num_ranks):
    built = Tied(num_ranks)
    expected = F.cross_entropy(built(Y), Y)
    gradient = torch.autograd.grad(expected, built.head.weight)[0]

    def program(rank):
        model = wb.parallelize(copy.deepcopy(built), f"pipeline | mb=4 {schedule}")
        losses = [wb.forward_backward(model, F.cross_entropy, Y, Y).item() for _ in range(2)]
        return losses, (model.head.weight.grad.to_local() if rank == 0 else None)

    found = run_over_nccl(program, num_ranks)
    assert_all_returned(found)
    assert [losses for losses, _ in found] == [pytest.approx([expected.item()] * 2)] * num_ranks
    torch.testing.assert_close(found[0][1], 2 * gradient)


def test_other_tensors_go_between_neighbours_only():
    built = Skipping(2)

    def program(rank):
        model = wb.parallelize(copy.deepcopy(built), "pipeline | mb=4 interleaved")
        return wb.forward_backward(model, F.cross_entropy, Y, Y).item()

    found = run_over_nccl(program)
    assert isinstance(found[0], StrategyError), found
    assert "a tensor goes between stages 0 and 3, past 2 others" in str(found[0])


BOXINGS = {
    "sum": ("P", "B", torch.float32, {"cat": 1, "all_reduce": 1}),
    "sum of 16 bits": ("P", "B", torch.bfloat16, {"copy_": 2, "all_reduce": 1}),
    "rows": ("S(0)", "B", torch.float32, {"all_gather_into_tensor": 1}),
    "columns": ("S(1)", "B", torch.float32, {"all_gather_into_tensor": 1, "workbench::move_blocks": 1}),
}
"""Layouts, dtype, and what a boxing launches."""


@pytest.mark.parametrize("name", BOXINGS)
def test_launches_of_a_boxing(name, monkeypatch):
    count_nccl_calls(monkeypatch)
    source, target, dtype, launches = BOXINGS[name]

    def program(rank):
        places = wb.placement.all(DEVICE.type)
        x = wb.to_global(torch.ones(4, 6, dtype=dtype, device=DEVICE), placement=places, sbp=source)
        with counted() as counts:
            boxed = x.to_global(sbp=target)
        return dict(counts.launches), boxed.to_local().cpu()

    value = 2 if source == "P" else 1
    for counts, boxed in assert_all_returned(run_over_nccl(program, device=DEVICE)):
        assert counts == launches
        assert (boxed == value).all()


def test_two_ranks_on_one_device_are_refused():
    with pytest.raises(RuntimeError, match="Duplicate GPU detected: 3 ranks on 2 devices"):
        PlayedNccl(["gpu 0", "gpu 1", "gpu 0"])


def _extrema(x):
    return x.amax(0), x.amin(0), x.max(), x.min(), x.norm(torch.inf, 0), x.aminmax(dim=0)[0], x.max(0)[0]


@pytest.mark.parametrize("row", [0, 3])
def test_extrema_over_a_split_dim_show_a_nan(row):
    values = torch.randn(4, 3, generator=_DATA)
    values[row, 1] = torch.nan
    expected = _extrema(values)

    def program(rank):
        x = wb.tensor(values, placement=wb.placement.all(), sbp="S(0)")
        return [value.full_tensor() for value in _extrema(x)]

    for found in assert_all_returned(run_over_nccl(program)):
        for value, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(value, truth, equal_nan=True)
