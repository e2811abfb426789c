"""torch's own watchdog of NCCL beside that of the workbench."""

import os
from pathlib import Path

import torch

from tests.transport.nccl_ranks import rendezvous_of
from workbench.transport import selection
from workbench.transport.network import nccl_watchdog


def test_torchs_watchdog_comes_later_and_leaves_the_process_alive(monkeypatch, caplog):
    limits_s, options, environment = {}, set(), {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(
        selection.dist,
        "init_process_group",
        lambda backend, *, timeout, **others: (
            limits_s.update({backend: timeout.total_seconds()}),
            options.update(others),
        ),
    )
    selection.open_group("gloo", rendezvous_of(2), 0, 2, 30.0)
    assert environment == {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    selection.open_group("nccl", rendezvous_of(2), 0, 2, 30.0)
    assert limits_s == {"gloo": 30.0, "nccl": 300.0} and options == {"store", "rank", "world_size"}
    quick = dict([nccl_watchdog._DUMP_WAIT])
    assert environment == {"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"} | quick
    assert "TORCH_NCCL_ENABLE_MONITORING=1: a call over NCCL that hangs may end this process" in caplog.text


def test_torchs_watchdog_leaves_a_worker_of_torchrun_alive(monkeypatch, caplog):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for other, value in (("TORCH_NCCL_ENABLE_MONITORING", "0"), nccl_watchdog._DUMP_WAIT):
        monkeypatch.setenv(other, value)
    monkeypatch.setenv(name, "1")  # as torchrun does where nobody has set it
    nccl_watchdog.disarm_torch()
    assert os.environ[name] == "0" and not caplog.text
    monkeypatch.setenv(name, "3")  # the user
    nccl_watchdog.disarm_torch()
    assert os.environ[name] == "3" and f"{name}=3: a call over NCCL that hangs may end this process" in caplog.text


def test_torch_knows_the_settings():
    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    text = (folder / "ProcessGroupNCCL.hpp").read_text()
    assert "NoHandling = 0," in text
    for name in (*nccl_watchdog._TORCH_SETTINGS, nccl_watchdog._DUMP_WAIT[0]):
        assert f'"{name}"' in text
