"""Which GPUs engines use, by what nvidia-smi prints.

The outputs in ``nvidia_smi`` have the form of outputs that people have published, of drivers 450 to 610.
"""

import re
from pathlib import Path

import pytest

from workbench.cli.checks import WARNING, check_gpus
from workbench.errors import SessionError
from workbench.session.processes import gpus
from workbench.session.processes.launch import rank_environment

OUTPUTS = Path(__file__).parent / "nvidia_smi"
UNREADABLE = "Unable to determine the device handle for gpu 0000:D1:00.0"
SLICES = ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that makes this a machine with some ``nvidia-smi``, torch and ``CUDA_VISIBLE_DEVICES``."""

    def make(listing=None, overview="new_driver", status=0, cuda="13.0", chosen=None):
        script = tmp_path / "nvidia-smi"
        if listing is not None:
            files = OUTPUTS / f"{listing}.list", OUTPUTS / f"{overview}.overview"
            script.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {files[0]} || cat {files[1]}\nexit {status}\n')
            script.chmod(0o755)
        found = None if listing is None else str(script)
        monkeypatch.setattr(gpus.shutil, "which", lambda name: found)  # this machine may have one itself
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(gpus, "_cuda_of_torch", lambda: cuda)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    return make


@pytest.mark.parametrize(
    ("case", "names", "why_not"),
    [
        ({}, (), ""),
        ({"listing": "eight_gpus"}, tuple("01234567"), ""),
        ({"listing": "mig"}, (*SLICES, "1"), ""),
        (
            {"listing": "mig_450"},
            ("0", *(f"MIG-GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a78/{number}/0" for number in (1, 2))),
            "",
        ),
        ({"listing": "lost_gpu"}, ("0", "2"), ""),
        ({"listing": "lost_gpu", "status": 15}, (), f"nvidia-smi: {UNREADABLE}"),
        ({"listing": "mismatch", "status": 18}, (), "nvidia-smi: Failed to initialize NVML: Driver/library version"),
        ({"listing": "no_gpu", "status": 6}, (), ""),
        (
            {"listing": "no_driver", "status": 9},
            (),
            "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate",
        ),
        (
            {"listing": "eight_gpus", "overview": "old_driver"},
            (),
            "the driver is for CUDA 11.4, and .* torch needs 13.0",
        ),
        ({"listing": "eight_gpus", "overview": "old_driver", "cuda": "11.8"}, tuple("01234567"), ""),
        ({"listing": "eight_gpus", "overview": "driver_610"}, tuple("01234567"), ""),
        (
            {"listing": "eight_gpus", "overview": "driver_610", "cuda": "14.0"},
            (),
            "the driver is for CUDA 13.3, and .* torch needs 14.0",
        ),
        ({"listing": "eight_gpus", "cuda": None}, (), "the installed torch is for CPUs only"),
        ({"listing": "eight_gpus", "chosen": "6, 7"}, ("6", "7"), ""),
        ({"listing": "eight_gpus", "chosen": "GPU-2a01b9f4-6d3c"}, ("GPU-2a01b9f4-6d3c",), ""),
        ({"listing": "mig", "chosen": SLICES[1]}, SLICES[1:], ""),
        ({"listing": "eight_gpus", "chosen": "3,-1,4"}, ("3",), ""),
        ({"listing": "eight_gpus", "chosen": ""}, (), ""),
        ({"listing": "eight_gpus", "chosen": "NoDevFiles"}, (), ""),
        ({"chosen": "0"}, ("0",), ""),
        ({"chosen": "0", "cuda": None}, (), "the installed torch is for CPUs only"),
    ],
)
def test_gpus_that_torch_can_use_are_found(machine, case, names, why_not):
    machine(**case)
    found = gpus.find_gpus()
    assert found.names == names
    if why_not:
        assert re.search(why_not, found.why_not)
    else:
        assert found.why_not == ""


@pytest.mark.parametrize(
    ("case", "words", "fix"),
    [
        ({"listing": "mismatch", "status": 18}, "NVML: Driver/library version mismatch", "restart the machine"),
        ({"listing": "lost_gpu", "status": 15}, UNREADABLE, "nvidia-smi must list"),
        ({"listing": "eight_gpus", "overview": "old_driver"}, "the driver is for CUDA 11.4", "Install torch"),
        ({"listing": "mig"}, "nvidia-smi lists 3, but torch", "Install torch"),
    ],
)
def test_doctor_says_what_is_wrong_with_the_gpus(machine, monkeypatch, case, words, fix):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine(**case)
    finding = check_gpus()
    assert finding.state == WARNING and words in finding.text and fix in finding.fix


def test_a_session_says_in_one_line_why_it_uses_the_cpu(machine, capsys):
    machine("eight_gpus", "old_driver")
    assert gpus.choose_gpus("auto") == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "work on the CPU: the driver is for CUDA 11.4" in said
    with pytest.raises(SessionError, match=r"0 GPUs found \(the driver is for CUDA 11.4"):
        gpus.choose_gpus("cuda")


def test_nothing_is_said_where_there_is_no_gpu(machine, capsys):
    machine()
    assert gpus.choose_gpus("auto") == [] and capsys.readouterr().err == ""


def test_torchs_file_says_which_cuda_it_was_built_with():
    import torch

    assert gpus._cuda_of_torch() == torch.version.cuda


def test_engines_count_gpus_as_nvidia_smi_does(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = rank_environment(1, 2, ("4", "5"))
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CUDA_DEVICE_ORDER"]) == ("5", "PCI_BUS_ID")
    assert "CUDA_DEVICE_ORDER" not in rank_environment(1, 2)


def test_numbers_that_the_user_gave_keep_their_order(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert "CUDA_DEVICE_ORDER" not in rank_environment(1, 2, ("4", "5"))
