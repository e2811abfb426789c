"""Ranks started by torchrun, Open MPI and Slurm: their numbers and their rendezvous."""

import os
import socket

import pytest
import torch
from torch.distributed.rendezvous import rendezvous

import workbench as wb
from workbench.errors import WorldError
from workbench.tensors import world
from workbench.transport import launchers


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.setattr(world, "_process_world", None)  # that of a test before
    for name in (*os.environ, "RANK"):
        if name.startswith(("OMPI_", "PMI", "MPI_", "SLURM_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
        ):
            monkeypatch.delenv(name, raising=False)


def as_mpirun(monkeypatch, rank, size, local_rank, local_size, folder):
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    for name, value in values.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(folder))


def test_without_a_launcher_a_process_is_alone():
    assert (launchers.launcher_value("rank", 0), launchers.launcher_value("world_size", 1)) == (0, 1)
    assert launchers.default_init_method() == "env://"


def test_a_wrong_number_and_a_wrong_address_are_named(monkeypatch):
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(WorldError, match=r"variable RANK is 'x'.*whole number.*torchrun"):
        wb.init()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(WorldError, match=r"rank 0 of 2 .*MASTER_PORT=\(not set\)\).*--master-port 29501"):
        wb.init(0, 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WorldError, match=rf"rank 0 of 2 has no rendezvous at {place}: .*--master-port"):
            wb.init(0, 2, init_method=place)


def test_a_process_group_of_the_users_is_named():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(WorldError, match=r"already \(gloo, 1 ranks\).*Leave init_process_group out"):
            wb.init(0, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_a_process_group_of_several_makes_no_world_of_one():
    """Processes of mp.spawn, without a launcher, trained each a model of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        for call in (wb.init, wb.rank):
            with pytest.raises(WorldError, match=r"already \(fake, 2 ranks\).*wb.init\(rank, world_size, init_method="):
                call()
    finally:
        torch.distributed.destroy_process_group()


def test_a_process_group_of_several_does_not_come_after_a_world_of_one():
    """Each of these processes trained a model of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    wb.init()
    try:
        with pytest.raises(WorldError, match=r"init_process_group: 2 ranks.*wb\.init\(\) has made a world of 1 before"):
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        assert not torch.distributed.is_initialized()
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    finally:
        wb.shutdown()
    assert not torch.distributed.is_initialized(), "it ends with the world"


@pytest.mark.parametrize(("rank", "size"), [(1, None), (None, 0), (2, 2), (-1, 1)])
def test_a_rank_outside_the_world_is_refused(monkeypatch, rank, size):
    """Of processes with RANK alone, each was a world of one."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        if value is not None:
            monkeypatch.setenv(name, str(value))
    with pytest.raises(
        WorldError, match=rf"rank={rank or 0}, world_size={1 if size is None else size}.*RANK and WORLD"
    ):
        wb.init()


def test_a_launcher_of_one_process_gives_a_process_group_too(monkeypatch):
    wb.init()
    assert not torch.distributed.is_initialized()
    wb.shutdown()
    monkeypatch.setenv("WORLD_SIZE", "1")
    for _ in range(2):
        wb.init()
        torch.distributed.barrier()
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
        wb.shutdown()
        assert not torch.distributed.is_initialized()


def test_open_mpi_sets_rank_and_local_rank(monkeypatch, tmp_path):
    as_mpirun(monkeypatch, 3, 4, 1, 2, tmp_path)
    assert [launchers.launcher_value(what, -1) for what in ("rank", "world_size", "local_rank")] == [3, 4, 1]


def test_mpich_and_intel_mpi_set_other_variables(monkeypatch):
    """Each rank was a world of its own, and trained alone."""
    for name, value in {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}.items():
        monkeypatch.setenv(name, str(value))
    names = ("rank", "world_size", "local_rank", "local_world_size")
    assert [launchers.launcher_value(what, -1) for what in names] == [3, 4, 1, 2]
    with pytest.raises(WorldError, match=r"rank 3 of 4 has no rendezvous at env:// \(MASTER_ADDR=\(not set\)"):
        wb.init()


def test_ranks_of_one_host_meet_in_the_jobs_folder(monkeypatch, tmp_path):
    folder = tmp_path / "my job@1"
    folder.mkdir()
    as_mpirun(monkeypatch, 0, 2, 0, 2, folder)
    store, _, _ = next(rendezvous(launchers.default_init_method(), 0, 2))
    assert store.path == str(folder / "workbench-rendezvous")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert launchers.default_init_method() == "env://"


def test_ranks_of_several_hosts_need_an_address(monkeypatch, tmp_path):
    as_mpirun(monkeypatch, 0, 4, 0, 2, tmp_path)
    with pytest.raises(WorldError, match=r"4 ranks, 2 of them on this host.*-x MASTER_ADDR"):
        launchers.default_init_method()


def as_srun(monkeypatch, rank, node, local_rank, sizes="2(x2),1", num_tasks=5):
    values = {"PROCID": rank, "NODEID": node, "LOCALID": local_rank}
    values |= {"STEP_NUM_TASKS": num_tasks, "STEP_TASKS_PER_NODE": sizes}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_slurm_sets_rank_local_rank_and_the_ranks_of_each_host(monkeypatch):
    as_srun(monkeypatch, 3, 1, 1)
    names = ("rank", "world_size", "local_rank", "local_world_size")
    assert [launchers.launcher_value(what, -1) for what in names] == [3, 5, 1, 2]
    as_srun(monkeypatch, 4, 2, 0)
    assert launchers.launcher_value("local_world_size", -1) == 1
    with pytest.raises(WorldError, match=r"srun has started 5 ranks, 1 of them on this host.*export MASTER_ADDR"):
        launchers.default_init_method()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert launchers.default_init_method() == "env://"


def test_a_batch_file_without_srun_is_one_rank(monkeypatch):
    """Slurm numbers the batch file's own process, too, and tells it how many tasks srun may start."""
    for name, value in {"PROCID": 0, "LOCALID": 0, "NODEID": 0, "NTASKS": 16, "TASKS_PER_NODE": "8(x2)"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert [launchers.launcher_value(what, 1) for what in ("rank", "world_size", "local_world_size")] == [0, 1, 1]
