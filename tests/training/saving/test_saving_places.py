"""A save removes nothing but checkpoints, and two saves to one path never make a mixture."""

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.errors import CheckpointError
from workbench.testing import run_ranks
from workbench.training.saving import writing


def save(path, value=1.0, num_ranks=2):
    run_ranks(lambda: wb.checkpoint.save(path, x=torch.full((3,), value)) and None, num_ranks)


def value_at(path):
    return wb.checkpoint.load(path)["x"][0].item()


@pytest.mark.parametrize("others", [["notes.txt"], ["step-00000100/.metadata"], [".metadata", "mine/notes.txt"]])
@pytest.mark.parametrize("end", ["", ".replaced"])
def test_a_directory_with_other_things_stays_as_it_is(tmp_path, others, end):
    folder = tmp_path / f"run{end}"
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("three weeks of work")
    before = sorted(tmp_path.rglob("*"))

    def program():
        with pytest.raises(
            CheckpointError, match=r"run.* has 1 entries that no checkpoint has: (notes|step-|mine).*Give a"
        ):
            wb.checkpoint.save(tmp_path / "run", async_op=True, x=torch.ones(3))

    run_ranks(program, 2)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_stays_as_it_is(tmp_path):
    (tmp_path / "run").write_text("notes")

    def program():
        with pytest.raises(CheckpointError, match=r"run is a file\. A save replaces"):
            wb.checkpoint.save(tmp_path / "run", x=torch.ones(3))

    for _ in range(2):
        run_ranks(program, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and (tmp_path / "run").read_text() == "notes"


def test_a_directory_that_gets_other_things_meanwhile_stays(tmp_path, monkeypatch):
    take_name = writing.take_name

    def too_late(folder, path):
        path.mkdir()
        (path / "notes.txt").touch()
        take_name(folder, path)

    monkeypatch.setattr(writing, "take_name", too_late)
    with pytest.raises(CheckpointError, match=r"no checkpoint has: notes\.txt"):
        wb.checkpoint.save(tmp_path / "run", x=torch.ones(3))
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "notes.txt"]


def test_checkpoints_and_empty_directories_are_replaced(tmp_path):
    """Also half of one, one of ``Checkpoints``, and one of torch."""
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 1.0)
    save(tmp_path / "run", 2.0)
    assert value_at(tmp_path / "run") == 2
    (tmp_path / "run" / ".metadata").unlink()
    (tmp_path / "run" / "__0.written.tmp").touch()
    (tmp_path / "run" / "branch").touch()
    save(tmp_path / "run", 3.0)
    assert value_at(tmp_path / "run") == 3
    (tmp_path / "dcp").mkdir()
    for name in (".metadata", "__0_0.distcp", "__12_3.distcp", "__0.metadata"):
        (tmp_path / "dcp" / name).touch()
    save(tmp_path / "dcp", 4.0)
    assert value_at(tmp_path / "dcp") == 4 and sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "run"]


def test_a_link_leads_to_the_newest_checkpoint(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "last").symlink_to(tmp_path / "disk" / "run")
    for value in (1.0, 2.0, 3.0):
        save(tmp_path / "last", value)
        assert value_at(tmp_path / "last") == value_at(tmp_path / "disk" / "run") == value
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["run"]


def test_what_killed_saves_have_left_goes(tmp_path):
    for name in ("run.incomplete", "run.0123abcd.incomplete", "run.0123abcd.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").touch()
    others = ["run.2.0123abcd.incomplete", "run.mine.incomplete"]
    for name in others:
        (tmp_path / name).mkdir()
    save(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", *others]


@pytest.mark.parametrize("slow_step", ["_write_slices", "take_name"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_of_two_saves_to_one_path_the_earlier_one_fails(tmp_path, monkeypatch, slow_step, num_ranks):
    """Whatever it was doing when the later one began, and the checkpoint is that of the later one."""
    begun, act = threading.Event(), getattr(writing, slow_step)
    later = threading.Thread(target=save, args=(tmp_path / "run", 2.0, num_ranks))

    def slow(*args):
        if threading.current_thread().name.startswith("save") or begun.is_set():
            return act(*args)
        begun.set()
        later.start()
        later.join()
        return act(*args)

    save(tmp_path / "run", 0.0, num_ranks)
    monkeypatch.setattr(writing, slow_step, slow)

    def earlier():
        with pytest.raises(CheckpointError, match=r"is gone\. Another save to the same path"):
            wb.checkpoint.save(tmp_path / "run", x=torch.full((3,), 1.0))

    run_ranks(earlier, num_ranks)
    assert value_at(tmp_path / "run") == 2 and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_removes_weights_of_exports_only(tmp_path):
    mine = ["model_best.safetensors", "model-00001.safetensors", "models.safetensors"]
    for name in [*mine, "model-00001-of-00002.safetensors", "model.safetensors.index.json"]:
        Path(tmp_path / name).touch()
    wb.checkpoint.export_safetensors(nn.Linear(2, 2), tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*mine, "model.safetensors"])


def export(path):
    wb.checkpoint.export_safetensors(nn.Linear(2, 3), path, max_shard_bytes=16)


@pytest.mark.parametrize("write", [lambda path: wb.checkpoint.save(path, x=torch.ones(3)), export])
def test_a_file_system_that_answers_late_is_asked_again(tmp_path, monkeypatch, write):
    """NFS remembers on each host that a name was not there, until a directory above is opened. The first save into a
    directory that another host had made was refused, and later ones took half a minute.
    """
    opened, scandir, is_dir, exists = set(), os.scandir, Path.is_dir, Path.exists

    def open_folder(path="."):
        opened.add(str(path))
        return scandir(path)

    def is_seen(path):
        return is_dir(path) and (wb.rank() == 0 or str(tmp_path) in opened)

    def is_there(path):
        assert not path.name.endswith((".written", ".failed"))
        return exists(path)

    def program():
        wb.barrier()
        opened.clear()
        wb.barrier()
        write(tmp_path / "runs" / "gpt")

    monkeypatch.setattr(os, "scandir", open_folder)
    monkeypatch.setattr(Path, "is_dir", is_seen)
    monkeypatch.setattr(Path, "exists", is_there)
    run_ranks(program, 2)
    monkeypatch.undo()
    assert str(tmp_path) in opened and len(list((tmp_path / "runs" / "gpt").iterdir())) > 2


def test_a_directory_that_a_rank_does_not_see_is_an_error(tmp_path, monkeypatch):
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: wb.rank() == 0 and is_dir(path))

    def program():
        for write in (lambda path: wb.checkpoint.save(path, x=torch.ones(3)), export):
            with pytest.raises(CheckpointError, match=r"rank 1 does not see .* file system that they share"):
                write(tmp_path / "run")

    run_ranks(program, 2)


def test_a_directory_that_rank_0_cannot_read_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    """The others waited until rank 0 had ended; and each of them read the directory, though rank 0 decides."""
    checkpoints = wb.checkpoint.Checkpoints(tmp_path)

    def refuse(_):
        assert wb.rank() == 0
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(wb.checkpoint.Checkpoints, "steps", refuse)

    def program():
        with pytest.raises((PermissionError, CheckpointError), match="Permission denied"):
            checkpoints.load(x=torch.ones(1))

    run_ranks(program, 2)
