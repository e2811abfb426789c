"""The device of ranks for which nobody names one, by what launchers show them."""

import os
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import FileStore

from tests.timeouts import PROGRAM_TIMEOUT_S
from tests.warm import executable
from workbench.errors import WorldError
from workbench.transport import own_gpu, selection
from workbench.transport.rendezvous import HOST_VARIABLE, Member, Rendezvous

A, B = "cuda A", "cuda B"


def members(devices, is_free=True):
    """Ranks on one host, or with ``host:device`` on others."""
    places = [device.rpartition(":")[::2] for device in devices]
    return [Member(host or "alpha", 1, 1, device, is_free=is_free) for host, device in places]


@pytest.mark.parametrize(
    ("first_choices", "devices"),
    [
        ([A, B], [A, B]),
        ([A, A], ["cpu", "cpu"]),
        ([A, A, B], ["cpu", "cpu", "cpu"]),
        ([A, f"beta:{A}"], [A, A]),
        ([A, A, f"beta:{A}"], ["cpu", "cpu", "cpu"]),
        (["cpu", A], ["cpu", "cpu"]),
        ([f"beta:{A}", "cpu"], ["cpu", "cpu"]),
    ],
)
def test_each_rank_has_a_gpu_or_all_work_on_the_cpu(first_choices, devices, monkeypatch):
    after = own_gpu.settled(members(first_choices))
    assert [each.device for each in after] == devices
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert len({selection.select_backend(torch.device(each.device.split()[0]), after) for each in after}) == 1


def test_a_rank_for_which_a_device_is_named_has_it():
    named = members([A, A], is_free=False)
    assert own_gpu.settled(named) == tuple(named)
    assert [each.device for each in own_gpu.settled([*named, *members([B])])] == [A, A, B]
    on_cpu = members(["cpu"], is_free=False)  # it has stayed; the other one takes the place of a lost one
    assert [each.device for each in own_gpu.settled([*on_cpu, *members([A])])] == ["cpu", "cpu"]


def settle_all(ranks, place):
    """What settling ends with on each rank, and what was said."""
    joined = Rendezvous(FileStore(str(place / "store"), len(ranks)), 0, tuple(ranks))

    def settle(rank):
        first = torch.device(ranks[rank].device.split()[0])
        try:
            return own_gpu.settle(joined, rank, first if first.type == "cpu" else torch.device("cuda", rank), 5.0)[1]
        except WorldError as error:
            return str(error)

    with warnings.catch_warnings(record=True) as said, ThreadPoolExecutor(len(ranks)) as pool:
        warnings.simplefilter("always")
        return list(pool.map(settle, range(len(ranks)))), [str(each.message).partition(".")[0] for each in said]


def test_a_gpu_that_a_rank_cannot_use_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    def use(device):
        if device.index == 1:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return device

    monkeypatch.setattr(own_gpu, "use", use)
    first, second = settle_all([*members([A], is_free=False), *members([B])], tmp_path)[0]
    assert first == second
    assert "rank 1 of 2 cannot use cuda:1: CUDA error: out of memory. " in first


def test_ranks_on_devices_of_two_types_are_an_error_on_all_ranks(tmp_path):
    (first, *others), _ = settle_all(members([A, "cpu", B], is_free=False), tmp_path)
    assert others == [first, first]
    assert "ranks 0, 2 on cuda, rank 1 on cpu" in first
    (first, other), _ = settle_all([*members([A], is_free=False), *members([A])], tmp_path)
    assert first == other
    assert "rank 0 on cuda, rank 1 on cpu (host alpha shows 1 GPU to its 2 ranks)" in first


def test_the_warning_names_the_host_that_lacks_gpus(tmp_path):
    ends, said = settle_all(members([A, f"beta:{A}", f"beta:{A}"]), tmp_path)
    assert ends == [torch.device("cpu")] * 3
    assert said == ["init(): host beta shows 1 GPU to its 2 ranks, so all ranks work on the CPU"]
    on_cpu = members(["cpu"], is_free=False)
    assert settle_all([*on_cpu, *members([A])], tmp_path)[1] == [
        'init(): rank 0 has device="cpu", so all ranks work on the CPU'
    ]


@pytest.mark.parametrize(
    ("environment", "num_seen", "number"),
    [
        ({"LOCAL_RANK": "1"}, 2, 1),
        ({"SLURM_LOCALID": "5"}, 8, 5),
        ({"LOCAL_RANK": "1"}, 1, 0),
        ({}, 4, 2),
        ({}, 0, None),
    ],
)
def test_the_first_choice_is_the_gpu_of_the_number_on_the_host(environment, num_seen, number, monkeypatch):
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_seen)
    expected = torch.device("cpu") if number is None else torch.device("cuda", number)
    assert own_gpu.first_choice(6 if num_seen == 4 else 0) == expected


@pytest.mark.parametrize(
    ("device", "world_size", "present", "number"),
    [
        (None, 8, 0, 1),
        (None, 8, 3, 1),  # the rank's own, whatever a former world has left
        (None, 1, 3, 3),
        (None, 1, 0, 1),
        ("cuda", 8, 0, 1),  # ranks share the GPUs, not the first one
        ("cuda", 8, 3, 3),
        ("cuda:0", 8, 3, 0),
    ],
)
def test_a_gpu_without_a_number_is_the_ranks_own_or_the_present_one(device, world_size, present, number, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: present)
    assert own_gpu.choose(device, 5, world_size) == torch.device("cuda", number)


def test_a_named_cpu_is_the_device(monkeypatch):
    assert own_gpu.choose("cpu", 0, 2) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_gpu.choose(None, 0, 1) == torch.device("cpu")


PROGRAM = """
import sys, warnings
import torch
from types import SimpleNamespace
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="A")
import workbench as wb
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    world = wb.init(int(sys.argv[1]), 2, init_method=sys.argv[2])
print(world.device, wb.ones(4, placement=wb.placement(ranks=[0, 1]), sbp="P").sum().item())
print([(str(each.message).split(".")[0], each.filename) for each in seen])
"""


def test_two_ranks_that_see_the_same_gpu_say_that_they_work_on_the_cpu(tmp_path):
    command = [executable(), "-c", PROGRAM]
    place = f"file://{tmp_path}/store"
    options = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | {HOST_VARIABLE: "alpha"}}
    ranks = [subprocess.Popen([*command, str(rank), place], **options) for rank in range(2)]
    (first, warned), (second, silent) = (rank.communicate(timeout=PROGRAM_TIMEOUT_S)[0].splitlines() for rank in ranks)
    assert first == second == "cpu 4.0"
    assert warned == "[('init(): host alpha shows 1 GPU to its 2 ranks, so all ranks work on the CPU', '<string>')]"
    assert silent == "[]"
