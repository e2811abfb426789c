"""The device of ranks for which nobody names one, by what launchers show them."""

import subprocess
import sys

import pytest
import torch

from tests.timeouts import PROGRAM_TIMEOUT_S
from workbench.transport import own_gpu
from workbench.transport.rendezvous import Member

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
        ([A, A, f"beta:{A}"], ["cpu", "cpu", A]),
        (["cpu", A], ["cpu", "cpu"]),
        (["cpu", f"beta:{A}"], ["cpu", A]),
    ],
)
def test_a_gpu_has_one_rank_or_the_host_works_on_its_cpu(first_choices, devices):
    assert [each.device for each in own_gpu.settled(members(first_choices))] == devices


def test_a_rank_for_which_a_device_is_named_has_it():
    named = members([A, A], is_free=False)
    assert own_gpu.settled(named) == tuple(named)
    assert [each.device for each in own_gpu.settled([*named, *members([B])])] == [A, A, "cpu"]
    on_cpu = members(["cpu"], is_free=False)  # it has stayed; the other one takes the place of a lost one
    assert [each.device for each in own_gpu.settled([*on_cpu, *members([A])])] == ["cpu", "cpu"]


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
    command = [sys.executable, "-c", PROGRAM]
    place = f"file://{tmp_path}/store"
    options = {"stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), place], **options) for rank in range(2)]
    (first, warned), (second, silent) = (rank.communicate(timeout=PROGRAM_TIMEOUT_S)[0].splitlines() for rank in ranks)
    assert first == second == "cpu 4.0"
    assert warned == ("[('init(): the 2 ranks of this host see 1 GPU, so their tensors lie on the CPU', '<string>')]")
    assert silent == "[]"
