"""A save that cannot be written has an error: from every wait, by the next save, and at the end of the program."""

import errno
import re
import subprocess
import sys
import weakref

import pytest
import torch

import tests.warm
import workbench as wb
from workbench.errors import CheckpointError
from workbench.testing import run_ranks
from workbench.training.saving import store, writing


class FullDisk:
    """A file on a disk that is full after so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.fixture
def full_disk(monkeypatch):
    make = writing._ChecksummedFile
    monkeypatch.setattr(writing, "_ChecksummedFile", lambda file: make(FullDisk(file, 100_000)))


def test_a_full_disk_is_named_on_all_ranks(tmp_path, full_disk):
    """torch's own error is `unexpected pos 64 vs 0`."""

    def program():
        with pytest.raises((OSError, CheckpointError), match="No space left on device"):
            wb.checkpoint.save(tmp_path / "c", x=torch.ones(100_000))

    run_ranks(program, 2)


def test_an_error_of_the_system_says_what_to_do(tmp_path, full_disk):
    (tmp_path / "file").touch()
    for path in ("c", "file/c"):  # on a full disk, and where no directory can be made
        with pytest.raises(OSError, match=str(tmp_path) if path == "file/c" else "No space left") as caught:
            wb.checkpoint.save(tmp_path / path, x=torch.ones(100_000))
        (note,) = caught.value.__notes__
        assert f"{path}'): this rank cannot write there, and the checkpoint before is unchanged. Make space" in note


def test_every_wait_raises(tmp_path, full_disk):
    def program():
        saving = wb.checkpoint.save(tmp_path / "c", async_op=True, x=torch.ones(100_000))
        for _ in range(2):
            with pytest.raises((OSError, CheckpointError), match="No space left on device"):
                saving.wait()
        wb.checkpoint.save(tmp_path / "c", x=torch.ones(10))
        with pytest.raises((OSError, CheckpointError), match="No space left on device"):
            saving.wait()

    run_ranks(program, 2)


def test_a_failed_save_is_not_complete_where_an_earlier_checkpoint_is(tmp_path, full_disk):
    def program():
        saving = wb.checkpoint.save(tmp_path / "c", x=torch.ones(10))
        assert saving.is_complete and repr(saving).endswith(", complete)")
        saving = wb.checkpoint.save(tmp_path / "c", async_op=True, x=torch.zeros(100_000))
        with pytest.raises((OSError, CheckpointError), match="No space left on device"):
            saving.wait()
        assert not saving.is_complete and repr(saving).endswith(", failed)")
        assert torch.equal(wb.checkpoint.load(tmp_path / "c")["x"], torch.ones(10))

    run_ranks(program, 2)


def test_a_wait_that_was_interrupted_gave_the_save_up(tmp_path, monkeypatch):
    def interrupt(is_done):
        raise KeyboardInterrupt

    saving = wb.checkpoint.save(tmp_path / "c", async_op=True, x=torch.ones(10))
    with monkeypatch.context() as patched:
        patched.setattr(store, "_poll", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saving.wait()
    with pytest.raises(CheckpointError, match="given up: its wait was ended by KeyboardInterrupt"):
        saving.wait()


def test_the_copies_of_a_save_are_gone_when_they_are_written(tmp_path, monkeypatch):
    """They stayed in memory until the next save."""
    copies, snapshot = [], writing.snapshot

    def recorded(*args, **kwargs):
        taken = snapshot(*args, **kwargs)
        copies.extend(weakref.ref(value) for _, value in taken if isinstance(value, torch.Tensor))
        return taken

    monkeypatch.setattr(writing, "snapshot", recorded)
    saving = wb.checkpoint.save(tmp_path / "c", async_op=True, x=torch.ones(10))
    saving._thread.join()
    assert copies and all(copy() is None for copy in copies)
    assert saving.wait() == tmp_path / "c"


PROGRAM = """
import resource, signal, sys
import torch
import workbench as wb
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
saving = wb.checkpoint.save(sys.argv[1], async_op=True, x=torch.ones(100_000))
if "wait" in sys.argv:
    try:
        saving.wait()
    except OSError:
        pass
print("trained")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
@pytest.mark.parametrize("waits", [False, True])
def test_the_end_of_the_program_tells_what_nobody_has_seen(tmp_path, waits):
    command = [tests.warm.executable(), "-c", PROGRAM, str(tmp_path / "c"), *["wait"] * waits]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "trained\n"
    told = re.search(
        r"save\('.*/c'\) failed in the background: OSError: .*File too large\nThe checkpoint before", done.stderr
    )
    assert (told is None) == waits, done.stderr


@pytest.mark.parametrize(
    "parts",
    [{"a": {"b.c": 1, "b": {"c": 2}}}, {"a": [torch.ones(1)], "a.0": 2}, {"a": {"b": [{"c": 1}], "b.0": {"c": 1}}}],
)
def test_two_values_of_one_name_are_refused(tmp_path, parts):
    """The second one took the place of the first one."""

    def program():
        with pytest.raises(
            CheckpointError, match=r"2 values have the name 'a\.[bc0.]+'.*Give one of them another name"
        ):
            wb.checkpoint.save(tmp_path / "c", **parts)

    run_ranks(program, 2)
    assert not [*tmp_path.iterdir()]


def test_an_error_in_the_foreground_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    def fails(job):
        raise OSError("no space left")

    run_ranks(lambda: wb.checkpoint.save(tmp_path / "ckpt", x=torch.ones(3)) and None, 2)
    monkeypatch.setattr(store.writing.Job, "write_own", fails)

    def program():
        with pytest.raises(OSError, match="no space left"):
            wb.checkpoint.save(tmp_path / "ckpt", x=torch.zeros(3))

    run_ranks(program, 2)
    assert torch.equal(wb.checkpoint.load(tmp_path / "ckpt")["x"], torch.ones(3)), "the one before stays"


def test_an_error_on_one_rank_is_raised_on_all_by_the_next_save(tmp_path, monkeypatch):
    write_slices = writing._write_slices

    def fails_on_one(path, items):
        if path.name == "__1_0.distcp" and path.parent.name.startswith("bad"):
            raise OSError("no space left")
        return write_slices(path, items)

    monkeypatch.setattr(writing, "_write_slices", fails_on_one)

    def program():
        wb.checkpoint.save(tmp_path / "good", x=torch.ones(3), async_op=True)
        wb.checkpoint.save(tmp_path / "bad", x=torch.zeros(3), async_op=True)
        assert (tmp_path / "good" / ".metadata").is_file()
        with pytest.raises((OSError, CheckpointError), match="no space left"):
            wb.checkpoint.save(tmp_path / "next", x=torch.ones(3))
        wb.checkpoint.save(tmp_path / "next", x=torch.ones(3))

    run_ranks(program, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "next"]
