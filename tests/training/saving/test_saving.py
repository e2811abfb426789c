"""Checkpoints: saved under one strategy, loaded under another, on other ranks, on one device, and by plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.processes import run_processes
from tests.timeouts import PROGRAM_TIMEOUT_S
from tests.warm import executable
from workbench.errors import CheckpointError
from workbench.testing import assert_equal_to_one_device, run_ranks
from workbench.training.saving import reading

FEATURES, CLASSES, BATCH = 6, 5, 7


class Net(nn.Module):
    """Uneven sizes, a buffer, dropout, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, FEATURES)
        self.fc1 = nn.Linear(FEATURES, 10)
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.25)
        self.fc2 = nn.Linear(10, FEATURES)
        self.head = nn.Linear(FEATURES, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.fc2(self.drop(self.norm(self.fc1(self.embed(ids))).relu())))


STRATEGIES = {
    "data": "*: data",
    "model": "embed: data; fc*: model; head: data",
    "pipeline": "embed: data@0; fc1: data@0; norm: data@0; fc2: data@1; head: data@1",
    "zero1": "*: data | 1x2x1 zero=1",
    "zero3": "*: data | 1x3x1 zero=3",
}


class Run:
    """A model with AdamW, a scheduler and a scaler, trained on batches that follow from the step."""

    def __init__(self, strategy, seed=0):
        torch.manual_seed(seed)  # before the world's ranks go on: equal weights
        self.model = MODELS[seed]()
        if strategy is not None:
            wb.parallelize(self.model, STRATEGIES.get(strategy, strategy))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=8.0)

    @property
    def parts(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def train(self, first, last):
        losses = []
        for step in range(first, last):
            ids = torch.randint(0, 9, (BATCH,), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(ids), ids.flip(0))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


def _frozen(seed):
    """Simulated ranks share torch's generator, so the weights are made once and copied."""
    torch.manual_seed(seed)
    state = Net().state_dict()

    def make():
        net = Net()
        net.load_state_dict(state)
        return net

    return make


MODELS = {seed: _frozen(seed) for seed in (0, 1)}


def on(num_ranks, fn):
    """``fn`` on so many simulated ranks; what rank 0 returns. All ranks must return the same losses."""
    results = run_ranks(fn, num_ranks)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def whole():
    """Losses of six steps without a break, on one rank."""
    return on(1, lambda: Run("data").train(0, 6))


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        (("data", 2), ("model", 3)),
        pytest.param(("model", 3), ("pipeline", 2), marks=pytest.mark.slow),
        pytest.param(("pipeline", 2), ("data", 4), marks=pytest.mark.slow),
        pytest.param(("model", 2), ("data", 1), marks=pytest.mark.slow),
        pytest.param(("data", 1), ("model", 4), marks=pytest.mark.slow),
        pytest.param(("zero3", 3), ("zero1", 2), marks=pytest.mark.slow),
        pytest.param(("zero1", 2), ("model", 2), marks=pytest.mark.slow),
    ],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def test_goes_on_under_another_strategy_as_if_never_stopped(tmp_path, whole, saved_by, loaded_by):
    def before():
        run = Run(saved_by[0])
        losses = run.train(0, 3)
        wb.checkpoint.save(tmp_path / "ckpt", step=3, best={"loss": 0.5, "of": [1, 2]}, **run.parts)
        return losses

    def after():
        run = Run(loaded_by[0], seed=1)
        run.train(0, 1)  # other weights, other optimizer state, other random numbers
        values = wb.checkpoint.load(tmp_path / "ckpt", **run.parts)
        assert values == {"step": 3, "best": {"loss": 0.5, "of": [1, 2]}}
        assert run.scaler.get_scale() == 8.0
        return run.train(values["step"], 6)

    losses = on(saved_by[1], before) + on(loaded_by[1], after)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole), rtol=0, atol=1e-5)


def test_an_oracle_of_losses_can_fail(tmp_path, whole):
    """Without the optimizer's state or the random numbers the losses are others."""

    def before():
        run = Run("data")
        run.train(0, 3)
        wb.checkpoint.save(tmp_path / "ckpt", **run.parts)

    run_ranks(before, 2)
    for kwargs, names in (({"random_state": False}, list(Run("data").parts)), ({}, ["model", "scheduler"])):

        def after(kwargs=kwargs, names=names):
            run = Run("data", seed=1)
            run.train(0, 1)
            wb.checkpoint.load(tmp_path / "ckpt", **{name: run.parts[name] for name in names}, **kwargs)
            return run.train(3, 6)

        losses = on(2, after)
        assert max(abs(a - b) for a, b in zip(losses, whole[3:], strict=True)) > 1e-4


def test_an_optimizer_that_is_not_elementwise_goes_on(tmp_path):
    """Adafactor keeps one moment per row and one per column: they are cut with the rows, or whole."""

    def run_with(strategy):
        run = Run(strategy)
        run.optimizer = torch.optim.Adafactor(run.model.parameters(), lr=0.05)
        run.scheduler = torch.optim.lr_scheduler.ConstantLR(run.optimizer)
        return run

    def before():
        run = run_with("model")
        losses = run.train(0, 3)
        wb.checkpoint.save(tmp_path / "ckpt", model=run.model, optimizer=run.optimizer)
        return losses

    def after():
        run = run_with("pipeline")
        wb.checkpoint.load(tmp_path / "ckpt", model=run.model, optimizer=run.optimizer)
        return run.train(3, 5)

    losses = on(2, before) + on(2, after)
    truth = on(1, lambda: run_with("data").train(0, 5))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(truth), rtol=0, atol=1e-5)


def test_every_slice_is_written_once_and_by_its_holder(tmp_path):
    """Replicas are shared out, split weights stay with their ranks, the tied weight is there once."""

    def program():
        run = Run("model")
        run.train(0, 1)
        wb.checkpoint.save(tmp_path / "ckpt", model=run.model, optimizer=run.optimizer)

    run_ranks(program, 4)
    manifest = json.loads((tmp_path / "ckpt" / "workbench.json").read_text())
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "ckpt").read_metadata()
    chunks = metadata.state_dict_metadata["model.fc1.weight"].chunks
    assert sorted(tuple(chunk.offsets) for chunk in chunks) == [(0, 0), (3, 0), (6, 0), (8, 0)]
    places = {
        (place.relative_path, place.offset) for index, place in metadata.storage_data.items() if "embed" in index.fqn
    }
    head = [place for index, place in metadata.storage_data.items() if index.fqn == "model.head.weight"]
    tied = {(place.relative_path, place.offset) for place in head}
    assert len(tied) == 1 and tied <= places
    assert len(manifest["checksums"]) == len({(p.relative_path, p.offset) for p in metadata.storage_data.values()})


def test_replicas_are_shared_out_evenly(tmp_path):
    state = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(8)]).state_dict()

    def program():
        model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(8)])
        model.load_state_dict(state)
        wb.checkpoint.save(tmp_path / "ckpt", model=wb.parallelize(model, "*: data"))

    run_ranks(program, 4)
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "ckpt").read_metadata()
    files = [place.relative_path for index, place in metadata.storage_data.items() if index.fqn.endswith("weight")]
    assert sorted(files) == sorted([f"__{rank}_0.distcp" for rank in range(4)] * 2)


PLAIN_TORCH = """
    import sys, warnings
    import torch, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch import nn
    warnings.simplefilter("ignore")
    folder, out = sys.argv[1:]
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    weights, state = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert not [name for name in sys.modules if name.startswith("workbench")]
    torch.save([model.state_dict(), optimizer.state_dict(), read["step"]], out)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out + ".dcp", no_dist=True)
"""


def _sequential():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 5))


@pytest.mark.procs
def test_plain_torch_reads_it_on_one_device_and_we_read_plain_torchs(tmp_path):
    made = _sequential().state_dict()

    def program():
        model = _sequential()
        model.load_state_dict(made)
        wb.parallelize(model, "*: model")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
        model(torch.ones(3, 6)).square().sum().backward()
        optimizer.step()
        wb.checkpoint.save(tmp_path / "ckpt", model=model, optimizer=optimizer, step=1)
        state = optimizer.state[model[0].weight]["exp_avg"]
        return {n: p.full_tensor().detach() for n, p in model.named_parameters()}, state

    weights, first = run_ranks(program, 2)[0]
    command = [executable(), "-c", textwrap.dedent(PLAIN_TORCH), str(tmp_path / "ckpt"), str(tmp_path / "read.pt")]
    subprocess.run(command, check=True, timeout=PROGRAM_TIMEOUT_S, cwd=tmp_path)
    model, optimizer, step = torch.load(tmp_path / "read.pt")
    assert step == 1 and optimizer["param_groups"][0]["lr"] == 0.25
    for name, value in weights.items():
        assert torch.equal(model[name], value), name
    assert torch.equal(optimizer["state"][0]["exp_avg"][: len(first)], first)

    def back():
        other = wb.parallelize(_sequential(), "*: data")
        wb.checkpoint.load(f"{tmp_path / 'read.pt'}.dcp", model=other)
        for name, value in other.named_parameters():
            assert_equal_to_one_device(value, weights[name], rtol=0, atol=0)

    run_ranks(back, 1)


def test_a_plain_module_and_layouts_of_every_kind(tmp_path):
    """No strategy at all on one side; on the other tensors under nd-splits, empty shards and size zero."""
    values = {"a": torch.randn(5, 3), "b": torch.randn(2), "c": torch.zeros(0, 4), "d": torch.tensor(2.5)}
    values["e"] = torch.randn(4, 6).to(torch.bfloat16)
    wb.checkpoint.save(tmp_path / "plain", tensors=dict(values))
    layouts = {"a": ("S(0)", "S(0)"), "b": ("S(0)", "B"), "c": ("S(1)", "S(1)"), "d": ("B", "B"), "e": ("S(1)", "S(0)")}

    def make(fill):
        p = wb.placement("cpu", ranks=[[3, 1], [0, 2]])
        return {
            name: wb.to_global(fill(value), wb.placement("cpu", ranks=[0, 1, 2, 3]), "B").to_global(p, layouts[name])
            for name, value in values.items()
        }

    def program():
        empty = make(torch.zeros_like)
        got = wb.checkpoint.load(tmp_path / "plain", tensors=empty)["tensors"]
        for name, value in got.items():
            assert torch.equal(value.full_tensor(), values[name]), name
        wb.checkpoint.save(tmp_path / "split", tensors=make(torch.clone))

    run_ranks(program, 4)
    again = wb.checkpoint.load(tmp_path / "split")["tensors"]
    assert again.keys() == values.keys() and all(torch.equal(again[name], values[name]) for name in values)


def save_with_torch(folder):
    """torch.distributed.checkpoint itself, over the process group of the world, without wb.checkpoint.save."""
    p = wb.placement("cpu", ranks=[[1, 0], [2, 3]])
    x = wb.arange(35, placement=wb.placement("cpu", ranks=[0, 1, 2, 3]), sbp="B").view(7, 5)
    split = x.to_global(placement=p, sbp=("S(0)", "S(1)"))
    placeholder = x.to_global(placement=wb.placement("cpu", ranks=[2]), sbp="B")
    torch.distributed.checkpoint.save({"x": split, "y": placeholder}, checkpoint_id=folder)
    into = wb.zeros(7, 5, dtype=x.dtype, placement=wb.placement("cpu", ranks=[3, 0]), sbp="S(0)")
    torch.distributed.checkpoint.load({"y": into}, checkpoint_id=folder)
    everywhere = wb.placement("cpu", ranks=[0, 1, 2, 3])
    return into.to_global(placement=everywhere, sbp="B").to_local().tolist()


@pytest.mark.procs
def test_torchs_own_save_and_load_take_global_tensors(tmp_path):
    expected = torch.arange(35).view(7, 5)
    assert run_processes(save_with_torch, 4, str(tmp_path / "ckpt")) == [expected.tolist()] * 4
    assert (
        torch.equal(wb.checkpoint.load(tmp_path / "ckpt", x=(x := torch.zeros(7, 5)))["x"], expected) and x.sum() == 595
    )


def test_slices_may_be_larger_than_what_the_system_reads_at_once(tmp_path, monkeypatch):
    """2 GiB; here 100 bytes."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 100), offset))
    x = torch.arange(1000.0)
    wb.checkpoint.save(tmp_path / "c", x=x)
    wb.checkpoint.load(tmp_path / "c", x=(into := torch.zeros(1000)))
    assert torch.equal(into, x)


def test_terms_of_a_sum_are_refused(tmp_path):
    def program():
        x = wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.partial_sum)
        with pytest.raises(CheckpointError, match=r"P holds terms of a sum.*to_global"):
            wb.checkpoint.save(tmp_path / "ckpt", x=x)

    run_ranks(program, 2)


@pytest.mark.parametrize("room", [1 << 28, 0])
def test_bytes_are_read_once(tmp_path, monkeypatch, room):
    """What has no room between its checksum and its place is read twice; the state of an optimizer never is."""
    read = Counter()

    def counted(method):
        def run(checkpoint, place):
            for index, other in checkpoint._places.items():
                if index.offset is not None and (other.relative_path, other.offset) == (
                    place.relative_path,
                    place.offset,
                ):
                    read[index.fqn.partition(".")[0]] += 1
                    break
            return method(checkpoint, place)

        return run

    def program():
        run = Run("data")
        run.train(0, 3)
        wb.checkpoint.save(tmp_path / "once", **run.parts)
        monkeypatch.setattr(reading.Checkpoint, "_bytes", counted(reading.Checkpoint._bytes))
        monkeypatch.setattr(reading, "KEPT_BYTES", room)
        other = Run("data", seed=1)
        wb.checkpoint.load(tmp_path / "once", **other.parts)
        return other.train(3, 6)

    assert on(1, program) == pytest.approx(on(1, lambda: Run("data").train(0, 6))[3:])
    in_model, in_state = 10, 3 * 7
    assert read == {"model": in_model if room else 2 * in_model, "optimizer": in_state, "random": read["random"]}
