"""Where ``offload=`` keeps what it moves: in files on a disk, where engines compute on CPUs."""

import copy
import os

import pytest
from torch import nn

import workbench as wb
from workbench.errors import StrategyError
from workbench.testing import run_ranks
from workbench.training.offload import host_memory

BUILT = nn.Linear(4, 4)


def test_a_folder_in_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(host_memory, "_file_system", lambda folder: "tmpfs" if folder != "/var/tmp" else "ext4")
    monkeypatch.setattr(host_memory, "_FOLDERS_ON_DISK", ("/var/tmp",))
    monkeypatch.setattr(os.path, "isdir", lambda folder: True)
    assert host_memory.disk_folder() == "/var/tmp"
    monkeypatch.setattr(host_memory, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(StrategyError, match=r"2 temporary folders.*TMPDIR"):
        host_memory.disk_folder()


def test_a_rank_without_a_folder_on_a_disk_is_an_error_on_all_ranks(monkeypatch):
    monkeypatch.setattr(host_memory, "_file_system", lambda folder: "tmpfs" if wb.rank() else "ext4")

    def program():
        with pytest.raises(StrategyError, match=r"temporary folders .* are in memory"):
            wb.parallelize(copy.deepcopy(BUILT), "*: data | offload=optimizer")

    run_ranks(program)


def test_a_line_says_once_where_files_lie(monkeypatch, capsys):
    monkeypatch.setattr(host_memory, "_said", set())
    for _ in range(2):
        run_ranks(lambda: wb.parallelize(copy.deepcopy(BUILT), "*: data | offload=optimizer") and None)
    assert capsys.readouterr().out.count("offload=optimizer: on CPUs in files in") == 1
