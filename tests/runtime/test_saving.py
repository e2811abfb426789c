"""Checkpoints: saved under one strategy, loaded under another, on other ranks, on one device, and by plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import CheckpointError
from workbench.runtime.saving import store
from workbench.testing import assert_equal_to_one_device, run_ranks

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
        (("model", 3), ("pipeline", 2)),
        (("pipeline", 2), ("data", 4)),
        (("model", 2), ("data", 1)),
        (("data", 1), ("model", 4)),
    ],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def test_goes_on_under_another_strategy_as_if_never_stopped(tmp_path, whole, saved_by, loaded_by):
    def before():
        run = Run(saved_by[0])
        losses = run.train(0, 3)
        wb.save(tmp_path / "ckpt", step=3, best={"loss": 0.5, "of": [1, 2]}, **run.parts)
        return losses

    def after():
        run = Run(loaded_by[0], seed=1)
        run.train(0, 1)  # other weights, other optimizer state, other random numbers
        values = wb.load(tmp_path / "ckpt", **run.parts)
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
        wb.save(tmp_path / "ckpt", **run.parts)

    run_ranks(before, 2)
    for kwargs, names in (({"random_state": False}, list(Run("data").parts)), ({}, ["model", "scheduler"])):

        def after(kwargs=kwargs, names=names):
            run = Run("data", seed=1)
            run.train(0, 1)
            wb.load(tmp_path / "ckpt", **{name: run.parts[name] for name in names}, **kwargs)
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
        wb.save(tmp_path / "ckpt", model=run.model, optimizer=run.optimizer)
        return losses

    def after():
        run = run_with("pipeline")
        wb.load(tmp_path / "ckpt", model=run.model, optimizer=run.optimizer)
        return run.train(3, 5)

    losses = on(2, before) + on(2, after)
    truth = on(1, lambda: run_with("data").train(0, 5))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(truth), rtol=0, atol=1e-5)


def test_every_slice_is_written_once_and_by_its_holder(tmp_path):
    """Replicas are shared out, split weights stay with their ranks, the tied weight is there once."""

    def program():
        run = Run("model")
        run.train(0, 1)
        wb.save(tmp_path / "ckpt", model=run.model, optimizer=run.optimizer)

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
        wb.save(tmp_path / "ckpt", model=wb.parallelize(model, "*: data"))

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
        wb.save(tmp_path / "ckpt", model=model, optimizer=optimizer, step=1)
        state = optimizer.state[model[0].weight]["exp_avg"]
        return {n: p.full_tensor().detach() for n, p in model.named_parameters()}, state

    weights, first = run_ranks(program, 2)[0]
    command = [sys.executable, "-c", textwrap.dedent(PLAIN_TORCH), str(tmp_path / "ckpt"), str(tmp_path / "read.pt")]
    subprocess.run(command, check=True, timeout=100, cwd=tmp_path)
    model, optimizer, step = torch.load(tmp_path / "read.pt")
    assert step == 1 and optimizer["param_groups"][0]["lr"] == 0.25
    for name, value in weights.items():
        assert torch.equal(model[name], value), name
    assert torch.equal(optimizer["state"][0]["exp_avg"][: len(first)], first)

    def back():
        other = wb.parallelize(_sequential(), "*: data")
        wb.load(f"{tmp_path / 'read.pt'}.dcp", model=other)
        for name, value in other.named_parameters():
            assert_equal_to_one_device(value, weights[name], rtol=0, atol=0)

    run_ranks(back, 1)


def test_a_plain_module_and_layouts_of_every_kind(tmp_path):
    """No strategy at all on one side; on the other tensors under nd-splits, empty shards and size zero."""
    values = {"a": torch.randn(5, 3), "b": torch.randn(2), "c": torch.zeros(0, 4), "d": torch.tensor(2.5)}
    values["e"] = torch.randn(4, 6).to(torch.bfloat16)
    wb.save(tmp_path / "plain", tensors=dict(values))
    layouts = {"a": ("S(0)", "S(0)"), "b": ("S(0)", "B"), "c": ("S(1)", "S(1)"), "d": ("B", "B"), "e": ("S(1)", "S(0)")}

    def make(fill):
        p = wb.placement("cpu", ranks=[[3, 1], [0, 2]])
        return {
            name: wb.to_global(fill(value), wb.placement("cpu", ranks=[0, 1, 2, 3]), "B").to_global(p, layouts[name])
            for name, value in values.items()
        }

    def program():
        empty = make(torch.zeros_like)
        got = wb.load(tmp_path / "plain", tensors=empty)["tensors"]
        for name, value in got.items():
            assert torch.equal(value.full_tensor(), values[name]), name
        wb.save(tmp_path / "split", tensors=make(torch.clone))

    run_ranks(program, 4)
    again = wb.load(tmp_path / "split")["tensors"]
    assert again.keys() == values.keys() and all(torch.equal(again[name], values[name]) for name in values)


def test_terms_of_a_sum_are_refused(tmp_path):
    def program():
        x = wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.partial_sum)
        with pytest.raises(CheckpointError, match=r"P holds terms of a sum.*to_global"):
            wb.save(tmp_path / "ckpt", x=x)

    run_ranks(program, 2)


class TestAnotherModel:
    def test_everything_that_does_not_fit_is_listed_at_once_and_nothing_changes(self, tmp_path):
        wb.save(tmp_path / "ckpt", model=nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}))

        def program():
            torch.manual_seed(0)
            model = nn.ModuleDict({"a": nn.Linear(3, 5), "c": nn.Linear(4, 2, bias=False)})
            before = model["a"].bias.clone()
            with pytest.raises(CheckpointError) as caught:
                wb.load(tmp_path / "ckpt", model=model, teacher=nn.Linear(1, 1))
            assert torch.equal(model["a"].bias, before)
            return str(caught.value)

        text = on(2, program)
        for words in (
            "1 missing in the checkpoint: c.weight",
            "2 unexpected: b.weight, b.bias",
            "a.weight is (4, 3) in the checkpoint, (5, 3) in the model",
            "a.bias is (4,) in the checkpoint, (5,) in the model",
            "teacher: not in the checkpoint, which holds model",
            "Nothing was loaded",
        ):
            assert words in text, text

    def test_parts_of_a_model_load_if_not_strict(self, tmp_path):
        saved = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)})
        wb.save(tmp_path / "ckpt", model=saved)
        model = nn.ModuleDict({"a": nn.Linear(3, 4), "c": nn.Linear(4, 2)})
        wb.load(tmp_path / "ckpt", model=model, strict=False)
        assert torch.equal(model["a"].weight, saved["a"].weight)

    def test_an_optimizer_over_other_parameters(self, tmp_path):
        model = nn.Linear(2, 2)
        wb.save(tmp_path / "ckpt", model=model, optimizer=torch.optim.SGD([model.weight], 0.1))
        with pytest.raises(CheckpointError, match=r"optimizer, group 0: 1 missing in the checkpoint: bias"):
            wb.load(tmp_path / "ckpt", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        groups = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], 0.1)
        with pytest.raises(CheckpointError, match=r"1 parameter groups in the checkpoint, 2 in the optimizer"):
            wb.load(tmp_path / "ckpt", model=model, optimizer=groups)
        with pytest.raises(CheckpointError, match=r"give the module too"):
            wb.save(tmp_path / "other", optimizer=groups)

    def test_state_that_cannot_be_cut_is_refused(self, tmp_path):
        def program():
            model = wb.parallelize(_sequential_copy(), "*: model")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.state[model[0].weight]["row_norms"] = torch.ones(5, 1)
            with pytest.raises(CheckpointError, match=r"neither per element nor a scalar"):
                wb.save(tmp_path / "ckpt", model=model, optimizer=optimizer)

        run_ranks(program, 2)


_SEQUENTIAL = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))


def _sequential_copy():
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    model.load_state_dict(_SEQUENTIAL.state_dict())
    return model


class TestDamage:
    @pytest.fixture
    def saved(self, tmp_path):
        run_ranks(lambda: wb.save(tmp_path / "ckpt", model=wb.parallelize(_sequential_copy(), "*: model")), 2)
        return tmp_path / "ckpt"

    def load(self, path):
        def program():
            model = wb.parallelize(_sequential_copy(), "*: data")
            with torch.no_grad():
                model[0].weight.zero_()
            try:
                wb.load(path, model=model)
            except CheckpointError as error:
                assert not model[0].weight.full_tensor().any(), "nothing is loaded from a damaged checkpoint"
                return str(error)
            return "loaded"

        return run_ranks(program, 2)

    def test_a_whole_one_loads(self, saved):
        assert self.load(saved) == ["loaded"] * 2

    def test_a_flipped_bit(self, saved):
        path = saved / "__1_0.distcp"
        data = bytearray(path.read_bytes())
        data[data.index(b"data/0") + 100] ^= 1
        path.write_bytes(data)
        assert all("checksum" in text and "__1_0.distcp" in text for text in self.load(saved))

    def test_a_truncated_file(self, saved):
        path = saved / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:-10])
        assert all("bytes, not" in text for text in self.load(saved))

    def test_a_missing_file(self, saved):
        (saved / "__0_0.distcp").unlink()
        assert all("__0_0.distcp is missing" in text for text in self.load(saved))

    def test_a_damaged_table_of_contents(self, saved):
        (saved / ".metadata").write_bytes(b"nonsense")
        assert all("table of contents" in text for text in self.load(saved))

    def test_a_half_written_directory_is_named(self, saved):
        partly = saved.with_name("ckpt.incomplete")
        os.rename(saved, partly)
        (partly / ".metadata").unlink()
        (partly / "__0.written").touch()
        texts = self.load(saved)
        assert all("ckpt.incomplete is half-written (ranks [1] had not finished)" in text for text in texts)

    def test_no_checkpoint_at_all(self, saved):
        assert all("no such directory" in t and "ckpt" in t for t in self.load(saved.with_name("other")))
        saved.with_name("folder").mkdir()
        assert all("written last" in text for text in self.load(saved.with_name("folder")))


class TestAsynchronous:
    def test_what_is_saved_is_the_moment_of_the_call(self, tmp_path):
        def program():
            model = wb.parallelize(_sequential_copy(), "*: model")
            saving = wb.save(tmp_path / "ckpt", model=model, asynchronous=True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            saving.wait()
            assert saving.is_complete and saving.wait() == saving.path
            wb.load(tmp_path / "ckpt", model=model)
            assert_equal_to_one_device(model[0].weight, _SEQUENTIAL[0].weight, rtol=0, atol=0)

        run_ranks(program, 2)

    def test_it_completes_by_itself(self, tmp_path):
        """No rank waits: the helper threads find each other over the file system."""
        run_ranks(lambda: wb.save(tmp_path / "ckpt", x=torch.ones(3), asynchronous=True) and None, 3)
        for _ in range(400):
            if (tmp_path / "ckpt").is_dir():
                break
            time.sleep(0.01)
        assert torch.equal(wb.load(tmp_path / "ckpt")["x"], torch.ones(3))

    def test_an_error_on_one_rank_is_raised_on_all_by_the_next_save(self, tmp_path, monkeypatch):
        write_own = store.writing.Job.write_own

        def fails_on_one(job):
            if job.world.rank == 1 and job.path.name == "bad":
                (job.folder / "__1.failed").write_text("OSError: no space left")
                raise OSError("no space left")
            write_own(job)

        monkeypatch.setattr(store.writing.Job, "write_own", fails_on_one)

        def program():
            wb.save(tmp_path / "good", x=torch.ones(3), asynchronous=True)
            wb.save(tmp_path / "bad", x=torch.zeros(3), asynchronous=True)
            assert (tmp_path / "good" / ".metadata").is_file()
            with pytest.raises((OSError, CheckpointError), match="no space left"):
                wb.save(tmp_path / "next", x=torch.ones(3))
            wb.save(tmp_path / "next", x=torch.ones(3))

        run_ranks(program, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "next"]

    def test_the_same_in_the_foreground(self, tmp_path, monkeypatch):
        def fails(job):
            raise OSError("no space left")

        run_ranks(lambda: wb.save(tmp_path / "ckpt", x=torch.ones(3)) and None, 2)
        monkeypatch.setattr(store.writing.Job, "write_own", fails)

        def program():
            with pytest.raises(OSError, match="no space left"):
                wb.save(tmp_path / "ckpt", x=torch.zeros(3))

        run_ranks(program, 2)
        assert torch.equal(wb.load(tmp_path / "ckpt")["x"], torch.ones(3)), "the one before stays"


class TestCheckpoints:
    def test_the_newest_are_kept_and_left_overs_ignored_and_removed(self, tmp_path):
        def program():
            checkpoints = wb.Checkpoints(tmp_path, keep=2)
            assert checkpoints.load() is None and checkpoints.latest() is None
            for step in (1, 2, 10):
                checkpoints.save(step, asynchronous=step == 2, x=torch.full((2,), float(step)))
            assert checkpoints.latest() == 10
            return checkpoints.steps()

        assert on(2, program) == [2, 10]
        (tmp_path / "step-00000011.incomplete").mkdir()
        (tmp_path / "step-00000012").mkdir()
        checkpoints = wb.Checkpoints(tmp_path, keep=2)
        assert checkpoints.incomplete() == ["step-00000011.incomplete", "step-00000012"]
        assert checkpoints.latest() == 10 and "ignored: step-00000011.incomplete" in repr(checkpoints)
        found = checkpoints.load()
        assert found["step"] == 10 and torch.equal(found["x"], torch.full((2,), 10.0))
        checkpoints.save(13, x=torch.ones(1))
        assert checkpoints.steps() == [10, 13] and not checkpoints.incomplete()

    def test_a_writer_killed_between_two_renames_loses_nothing(self, tmp_path):
        checkpoints = wb.Checkpoints(tmp_path)
        checkpoints.save(4, x=torch.ones(1))
        os.rename(checkpoints.path(4), f"{checkpoints.path(4)}.replaced")
        assert checkpoints.latest() == 4 and checkpoints.load()["step"] == 4

    def test_keep_is_at_least_one(self, tmp_path):
        with pytest.raises(ValueError, match="keep=0"):
            wb.Checkpoints(tmp_path, keep=0)


def test_a_directory_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path):
    Path(tmp_path / "file").touch()

    def program():
        with pytest.raises((OSError, CheckpointError), match="file"):
            wb.save(tmp_path / "file" / "ckpt", x=torch.ones(1))

    run_ranks(program, 2)
