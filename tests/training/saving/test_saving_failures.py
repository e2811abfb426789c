"""Checkpoints that do not fit, are damaged or half-written; saving in the background; directories of checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import workbench as wb
from workbench.errors import CheckpointError
from workbench.testing import assert_equal_to_one_device, run_ranks


def on(num_ranks, fn):
    """``fn`` on so many simulated ranks, which must all return the same."""
    results = run_ranks(fn, num_ranks)
    assert all(result == results[0] for result in results)
    return results[0]


_SEQUENTIAL = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))


def _sequential_copy():
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    model.load_state_dict(_SEQUENTIAL.state_dict())
    return model


class TestAnotherModel:
    def test_everything_that_does_not_fit_is_listed_at_once_and_nothing_changes(self, tmp_path):
        wb.checkpoint.save(tmp_path / "ckpt", model=nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}))

        def program():
            torch.manual_seed(0)
            model = nn.ModuleDict({"a": nn.Linear(3, 5), "c": nn.Linear(4, 2, bias=False)})
            before = model["a"].bias.clone()
            with pytest.raises(CheckpointError) as caught:
                wb.checkpoint.load(tmp_path / "ckpt", model=model, teacher=nn.Linear(1, 1))
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
        wb.checkpoint.save(tmp_path / "ckpt", model=saved)
        model = nn.ModuleDict({"a": nn.Linear(3, 4), "c": nn.Linear(4, 2)})
        wb.checkpoint.load(tmp_path / "ckpt", model=model, strict=False)
        assert torch.equal(model["a"].weight, saved["a"].weight)

    def test_tensors_without_storage_are_refused(self, tmp_path):
        wb.checkpoint.save(tmp_path / "ckpt", model=nn.Linear(3, 4))
        model = nn.Linear(3, 4, device="meta")
        with pytest.raises(CheckpointError, match=r'2 on meta; .*init="empty".*: weight, bias'):
            wb.checkpoint.load(tmp_path / "ckpt", model=model, strict=False)
        wb.checkpoint.load(tmp_path / "ckpt", model=model.to_empty(device="cpu"))

    def test_an_optimizer_over_other_parameters(self, tmp_path):
        model = nn.Linear(2, 2)
        wb.checkpoint.save(tmp_path / "ckpt", model=model, optimizer=torch.optim.SGD([model.weight], 0.1))
        with pytest.raises(CheckpointError, match=r"optimizer, group 0: 1 missing in the checkpoint: bias"):
            wb.checkpoint.load(tmp_path / "ckpt", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        groups = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], 0.1)
        with pytest.raises(CheckpointError, match=r"1 parameter groups in the checkpoint, 2 in the optimizer"):
            wb.checkpoint.load(tmp_path / "ckpt", model=model, optimizer=groups)
        with pytest.raises(CheckpointError, match=r"give the module too"):
            wb.checkpoint.save(tmp_path / "other", optimizer=groups)

    def test_state_that_cannot_be_cut_is_refused(self, tmp_path):
        def program():
            model = wb.parallelize(_sequential_copy(), "*: model")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.state[model[0].weight]["row_norms"] = torch.ones(5, 1)
            with pytest.raises(CheckpointError, match=r"neither per element nor a scalar"):
                wb.checkpoint.save(tmp_path / "ckpt", model=model, optimizer=optimizer)

        run_ranks(program, 2)


class Noam:
    """A schedule that holds its optimizer, and is none."""

    def __init__(self, optimizer):
        self.optimizer, self.num_steps = optimizer, 0

    def state_dict(self):
        return {"step": self.num_steps, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])


class TestPlainTensorsOfOneRank:
    @pytest.mark.parametrize("strategy", ["*: data | 1x2x1 zero=1", "*: model", "0: data; 2: data@1"])
    @pytest.mark.parametrize("given", [lambda o: o.state_dict(), Noam])
    def test_the_state_of_an_optimizer_without_the_optimizer_is_refused(self, tmp_path, strategy, given):
        def program():
            model = wb.parallelize(_sequential_copy(), strategy)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            model(torch.arange(24.0).view(4, 6)).square().mean().backward()
            optimizer.step()
            with pytest.raises(CheckpointError, match=r"moments\S* is a dict with global tensors.*give the object"):
                wb.checkpoint.save(tmp_path / "ckpt", model=model, moments=given(optimizer))
            wb.checkpoint.save(tmp_path / "ckpt", model=model, moments=optimizer)

        run_ranks(program, 2)

    def test_whole_on_all_ranks_it_is_saved(self, tmp_path):
        def program():
            model = wb.parallelize(_sequential_copy(), "*: data")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            model(torch.arange(24.0).view(4, 6)).square().mean().backward()
            optimizer.step()
            wb.checkpoint.save(tmp_path / "ckpt", model=model, moments=optimizer.state_dict(), noam=Noam(optimizer))
            saved = wb.checkpoint.load(tmp_path / "ckpt", model=model)["moments"]["state"]
            return [saved[n]["exp_avg"] for n in range(4)], [s["exp_avg"] for s in optimizer.state.values()]

        for found, expected in run_ranks(program, 2):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_global_tensors_deep_in_one_pickle_are_refused(self, tmp_path):
        def program():
            model = wb.parallelize(_sequential_copy(), "*: model")
            optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
            model(torch.arange(24.0).view(4, 6)).square().mean().backward()
            optimizer.step()
            with pytest.raises(CheckpointError, match=r"moments.state is a dict with global tensors.*give the object"):
                wb.checkpoint.save(tmp_path / "ckpt", model=model, moments=optimizer.state_dict())

        run_ranks(program, 2)

    @pytest.mark.parametrize("given", [lambda o: [o, o], lambda o: {"first": o}, lambda o: [StepLR(o, 2)]])
    def test_optimizers_among_other_values_are_refused(self, tmp_path, given):
        """They were pickled with copies of their parameters, and a load left those of the program as they were."""

        def program():
            model = wb.parallelize(_sequential_copy(), "*: data")
            parts = {"model": model, "all": given(torch.optim.Adam(model.parameters()))}
            with pytest.raises(CheckpointError, match=r"checkpoint: all\S* has a (Adam|StepLR) among.*part of its own"):
                wb.checkpoint.save(tmp_path / "ckpt", **parts)
            wb.checkpoint.save(tmp_path / "ckpt", model=model)

        run_ranks(program, 2)

    def test_a_module_that_each_rank_trained_by_itself_is_refused(self, tmp_path):
        def program(rank):
            model = nn.Linear(2, 2)
            with torch.no_grad():
                model.weight.fill_(rank)
                model.bias.fill_(1)
            with pytest.raises(CheckpointError, match=r"model.weight has other plain tensors on rank 0 than on rank 1"):
                wb.checkpoint.save(tmp_path / "ckpt", model=model)

        run_ranks(program, 2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
    def test_copies_that_differ_by_rounding_are_saved_with_a_warning(self, tmp_path, dtype):
        """As after many steps with atomics, or on hosts with other processors."""

        def program(rank):
            torch.manual_seed(0)
            head = nn.Linear(40, 30).to(dtype)
            same = head.weight.detach().clone()
            with torch.no_grad():
                for number, parameter in enumerate(head.parameters()):
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * rank + number))
                    parameter.mul_(1 + rank * torch.finfo(dtype).eps * noise)
            wb.checkpoint.save(tmp_path / "ckpt", head=head, values={"moments": [head.weight.detach() * 3]}, same=same)
            found = nn.Linear(40, 30).to(dtype)
            wb.checkpoint.load(tmp_path / "ckpt", head=found)
            return head.state_dict(), found.state_dict()

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            results = run_ranks(program, 2)
        texts = {text for each in said if "checkpoint" in (text := str(each.message))}
        assert len(texts) == 1 and re.search(r"head.weight differ.*rounding, as those of 2 other.*rank 0", *texts)
        (kept, _), (other, _) = results
        assert not torch.equal(kept["weight"], other["weight"])
        for _, found in results:
            assert all(torch.equal(found[name], kept[name]) for name in kept)

    @pytest.mark.parametrize("size", [1, 300, 3_000_000])
    def test_parts_of_large_states_are_not_taken_for_copies(self, tmp_path, size):
        def program(rank):
            moments = torch.randn(size, generator=torch.Generator().manual_seed(rank)).square()
            with pytest.raises(
                CheckpointError, match=r"moments has other plain tensors on rank 0 than on rank 1, by mor"
            ):
                wb.checkpoint.save(tmp_path / "ckpt", moments=moments)

        run_ranks(program, 2)

    def test_what_ranks_may_have_of_their_own_is_saved(self, tmp_path):
        """Times, losses, states of generators, running statistics, and parts that only one rank names."""

        def program(rank):
            own = torch.Generator().manual_seed(rank)
            norm = nn.BatchNorm1d(3)
            norm.running_mean.fill_(rank)
            wb.checkpoint.save(
                tmp_path / "ckpt", norm=norm, elapsed_s=rank / 2, loss=torch.tensor(rank / 2),
                generators={0: own.get_state()}, positions=torch.tensor([rank]), **{f"of_{rank}": torch.ones(3) * rank},
            )  # fmt: skip
            assert wb.checkpoint.load(tmp_path / "ckpt")["elapsed_s"] in (0.0, 0.5)

        run_ranks(program, 2)


class TestDamage:
    @pytest.fixture
    def saved(self, tmp_path):
        run_ranks(
            lambda: wb.checkpoint.save(tmp_path / "ckpt", model=wb.parallelize(_sequential_copy(), "*: model")), 2
        )
        return tmp_path / "ckpt"

    def load(self, path):
        def program():
            model = wb.parallelize(_sequential_copy(), "*: data")
            with torch.no_grad():
                model[0].weight.zero_()
            try:
                wb.checkpoint.load(path, model=model)
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

    def test_a_rank_that_may_not_read_it_says_so(self, saved, monkeypatch):
        def refuse(path):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        texts = self.load(saved)
        assert all(".metadata cannot be read: Permission denied. All ranks" in text for text in texts)

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
            saving = wb.checkpoint.save(tmp_path / "ckpt", model=model, async_op=True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            saving.wait()
            assert saving.is_complete and saving.wait() == saving.path
            wb.checkpoint.load(tmp_path / "ckpt", model=model)
            assert_equal_to_one_device(model[0].weight, _SEQUENTIAL[0].weight, rtol=0, atol=0)

        run_ranks(program, 2)

    def test_it_completes_by_itself(self, tmp_path):
        """No rank waits: the helper threads find each other over the file system."""
        run_ranks(lambda: wb.checkpoint.save(tmp_path / "ckpt", x=torch.ones(3), async_op=True) and None, 3)
        for _ in range(400):
            if (tmp_path / "ckpt").is_dir():
                break
            time.sleep(0.01)
        assert torch.equal(wb.checkpoint.load(tmp_path / "ckpt")["x"], torch.ones(3))


class TestCheckpoints:
    def test_the_newest_are_kept_and_left_overs_ignored_and_removed(self, tmp_path):
        def program():
            checkpoints = wb.checkpoint.Checkpoints(tmp_path, keep=2)
            assert checkpoints.load() is None and checkpoints.latest() is None
            for step in (1, 2, 10):
                checkpoints.save(step, async_op=step == 2, x=torch.full((2,), float(step)))
            assert checkpoints.latest() == 10
            return checkpoints.steps()

        assert on(2, program) == [2, 10]
        (tmp_path / "step-00000011.incomplete").mkdir()
        (tmp_path / "step-00000012").mkdir()
        checkpoints = wb.checkpoint.Checkpoints(tmp_path, keep=2)
        assert checkpoints.incomplete() == ["step-00000011.incomplete", "step-00000012"]
        assert checkpoints.latest() == 10 and "ignored: step-00000011.incomplete" in repr(checkpoints)
        found = checkpoints.load()
        assert found["step"] == 10 and torch.equal(found["x"], torch.full((2,), 10.0))
        checkpoints.save(13, x=torch.ones(1))
        assert checkpoints.steps() == [10, 13] and not checkpoints.incomplete()

    def test_a_run_that_went_back_is_the_newest(self, tmp_path):
        """Also where it saves a step again that is there, and after a copy that keeps no times."""

        def program():
            checkpoints = wb.checkpoint.Checkpoints(tmp_path / "run", keep=3)
            for step in (100, 200, 300):
                checkpoints.save(step, run=0)
            assert checkpoints.load(100)["run"] == 0
            kept = []
            for step in (110, 120, 200, 210):
                checkpoints.save(step, run=1, async_op=step == 120)
                assert checkpoints.latest() == step and checkpoints.load()["run"] == 1
                kept.append(checkpoints.steps())
            assert kept == [[110, 200, 300], [110, 120, 300], [110, 120, 200], [120, 200, 210]]
            checkpoints.load(120)
            checkpoints.save(121, run=2)
            return kept

        on(2, program)
        copied = tmp_path / "copied"
        shutil.copytree(tmp_path / "run", copied, copy_function=shutil.copyfile)
        for path in sorted(copied.rglob("*"), reverse=True):
            os.utime(path, (0, 0))
        checkpoints = wb.checkpoint.Checkpoints(copied)
        assert checkpoints.steps() == [121, 200, 210] and checkpoints.load()["run"] == 2
        assert "newest step 121" in repr(checkpoints)

    def test_the_oldest_may_be_one_that_a_killed_writer_has_moved(self, tmp_path):
        checkpoints = wb.checkpoint.Checkpoints(tmp_path, keep=1)
        checkpoints.save(4, x=torch.ones(1))
        os.rename(checkpoints.path(4), f"{checkpoints.path(4)}.replaced")
        checkpoints.save(5, x=torch.ones(1))
        assert checkpoints.steps() == [5] and [path.name for path in tmp_path.iterdir()] == ["step-00000005"]

    def test_a_writer_killed_between_two_renames_loses_nothing(self, tmp_path):
        checkpoints = wb.checkpoint.Checkpoints(tmp_path)
        checkpoints.save(4, x=torch.ones(1))
        os.rename(checkpoints.path(4), f"{checkpoints.path(4)}.replaced")
        assert checkpoints.latest() == 4 and checkpoints.load()["step"] == 4

    def test_keep_is_at_least_one(self, tmp_path):
        with pytest.raises(ValueError, match="keep=0"):
            wb.checkpoint.Checkpoints(tmp_path, keep=0)


def test_a_directory_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path):
    Path(tmp_path / "file").touch()

    def program():
        with pytest.raises((OSError, CheckpointError), match="file"):
            wb.checkpoint.save(tmp_path / "file" / "ckpt", x=torch.ones(1))

    run_ranks(program, 2)
