"""The folders of sessions, where they cannot be used."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

from workbench.errors import SessionError
from workbench.session.processes import folder
from workbench.session.protocol import SavedCheckpoint


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("open", r"mode 0700.*0755.*Run `chmod 700 \S+`, or set WORKBENCH_SESSIONS to a folder of your own"),
        ("file", r"must be a folder of user.*Remove it, or set WORKBENCH_SESSIONS"),
        ("link", r"must be a folder of user.*Remove it, or set WORKBENCH_SESSIONS"),
        ("file/in it", r"file/in it cannot be made: Not a directory.*Set WORKBENCH_SESSIONS to a folder of your own"),
        ("x" * 300, r"cannot be made: File name too long.*Set WORKBENCH_SESSIONS to a folder of your own"),
    ],
)
def test_it_is_refused_with_a_fix(place: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    monkeypatch.setenv(folder.BASE_VARIABLE, str(tmp_path / place))
    with pytest.raises(SessionError, match=words):
        folder.base_folder()


def test_without_a_place_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(folder.BASE_VARIABLE, raising=False)
    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    with pytest.raises(SessionError, match=r"cannot be made: No such file.*Set WORKBENCH_SESSIONS"):
        folder.base_folder()
    full = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")
    monkeypatch.setattr(folder.tempfile, "gettempdir", Mock(side_effect=full))
    with pytest.raises(SessionError, match=r"cannot be made: No usable temporary directory.*Set WORKBENCH_SESSIONS"):
        folder.base_folder()


def test_no_session_begins_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try left a folder, which nobody removed, and ended in an error that named no folder."""
    monkeypatch.setenv(folder.BASE_VARIABLE, str(tmp_path / "sessions"))
    full = OSError(errno.ENOSPC, "No space left on device")
    for where, name in [(folder.Path, "write_text"), (folder.tempfile, "mkdtemp")]:
        monkeypatch.setattr(where, name, Mock(side_effect=full))
        with pytest.raises(SessionError, match=r"in \S+/sessions cannot be made: No space left.*on a disk with room"):
            folder.SessionFolder.create()
    assert not any((tmp_path / "sessions").iterdir())


def test_a_checkpoint_is_saved_though_its_name_finds_a_full_disk(tmp_path: Path) -> None:
    """Rank 0 failed before it began to save, and the other ranks waited for it."""
    made, saved = folder.SessionFolder(tmp_path), [SavedCheckpoint(f"/data/{number}", {}) for number in range(2)]
    names = tmp_path / "checkpoints"
    names.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="recover will not find the checkpoint /data/0: .*No space left on device"):
        made.add_checkpoint(saved[0])
    names.unlink()
    made.add_checkpoint(saved[0])
    with names.open("a") as file:
        file.write('\n{"path": "/da')  # a disk that gets full takes a part
    made.add_checkpoint(saved[1])
    assert made.checkpoints() == saved
    made.remove()
    made.add_checkpoint(saved[0])
    assert made.checkpoints() == []
