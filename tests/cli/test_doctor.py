"""``workbench doctor``: each check, and that what is broken is said with a way out."""

from __future__ import annotations

import argparse
import dataclasses
import socket
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from tests.session.test_make_profile import SSH
from workbench.cli import checks, doctor, host_checks
from workbench.cli.checks import BAD, GOOD, WARNING, Finding
from workbench.session.processes.host_facts import HostFacts


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(argparse.Namespace(quick=True, hosts=None)) == 0
    said = capsys.readouterr().out
    assert said.endswith("All that is needed works.\n")
    for what in ("python", "torch", "ipyparallel", "machine", "gpus", "backends", "loopback"):
        assert f" {what} " in said


@pytest.mark.slow
@pytest.mark.engines
def test_an_engine_starts() -> None:
    finding = checks.check_engine()
    assert finding.state == GOOD, finding.text


@pytest.mark.parametrize(("size", "state"), [(1, GOOD), (2, BAD)])
def test_an_engine_is_good_where_it_is_alone_in_its_world(
    monkeypatch: pytest.MonkeyPatch, size: int, state: Any
) -> None:
    from workbench.session import cluster

    played = SimpleNamespace(run=lambda code, timeout: SimpleNamespace(values=[size]))
    monkeypatch.setattr(cluster, "Session", lambda **_asked: nullcontext(played))
    assert checks.check_engine().state == state


def test_a_needed_package_that_is_missing_is_bad() -> None:
    finding = checks.check_package("no-such-package")
    assert (finding.state, finding.text) == (BAD, "not installed")
    assert finding.fix == "pip install no-such-package"


@pytest.mark.parametrize(("name", "extra", "old"), [("torch", "", "2.15.0"), ("ipywidgets", "lab", "7.8.5")])
def test_a_version_that_does_not_fit_is_a_warning(
    name: str, extra: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "version", lambda _name: old)
    finding = checks.check_package(name, extra)
    assert finding.state == WARNING and finding.text.startswith(f"{old}, but the workbench asks for {name}")
    assert finding.fix.startswith(f"pip install '{name}")


def test_windows_and_builds_without_the_gil_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.sysconfig, "get_config_var", lambda _name: 1)
    assert checks.check_python().state == WARNING and "free-threaded" in checks.check_python().text
    monkeypatch.setattr(checks, "os", SimpleNamespace(name="nt"))
    (only,) = doctor.find()
    assert only.state == BAD and "WSL 2" in only.fix


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_an_optional_package_that_is_missing_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, wanted in (("no-such-package", "no-such-package"), ("ipywidgets", "'ipywidgets")):
        monkeypatch.setattr(checks, "version", _missing)
        finding = checks.check_package(package, extra="lab")
        assert finding.state == WARNING
        assert finding.fix.startswith(f"pip install {wanted}")


def test_checks_of_missing_packages_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_module", lambda name: name != "torch")
    found = {finding.what for finding in doctor.find()}
    assert not found & {"gpus", "backends", "engine"}
    assert {"loopback", "machine"} <= found


def test_a_blocked_loopback_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> socket.socket:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(checks.socket, "create_server", refuse)
    finding = checks.check_loopback()
    assert finding.state == BAD
    assert "Operation not permitted" in finding.text
    assert "127.0.0.1" in finding.fix


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2e9, available=5e8))
    finding = checks.check_machine()
    assert finding.state == WARNING
    assert "500 MB of it free" in finding.text


def test_the_memory_of_a_container_is_what_its_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.transport.messaging import shared_memory

    monkeypatch.setattr(shared_memory, "_room_in_control_groups", lambda: [3e8])
    finding = checks.check_machine()
    assert finding.state == WARNING
    assert "300 MB of it free" in finding.text


@pytest.mark.parametrize("found", [((), "the installed torch is for CPUs only"), (("0", "1"), "")])
def test_a_gpu_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch, found: tuple[Any, str]) -> None:
    import torch

    from workbench.session.processes import gpus

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpus, "find_gpus", lambda: gpus.FoundGpus(*found))
    finding = checks.check_gpus()
    assert finding.state == WARNING
    assert "torch" in finding.text
    assert "engines run on the CPU" in finding.text


def test_an_engine_that_does_not_start_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.errors import EngineStartError
    from workbench.session import cluster

    def fail(**_kwargs: object) -> None:
        raise EngineStartError("1 of 1 engines ended")

    monkeypatch.setattr(cluster, "Session", fail)
    finding = checks.check_engine()
    assert (finding.state, finding.text) == (BAD, "1 of 1 engines ended")


def test_what_is_bad_is_named_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("torch", BAD, "not installed", "pip install it"), Finding("gpus", WARNING, "none")]
    monkeypatch.setattr(doctor, "find", lambda _quick: findings)
    assert doctor.run(argparse.Namespace(quick=False, hosts=None)) == 1
    said = capsys.readouterr().out
    assert "-> pip install it" in said
    assert said.endswith("Does not work: torch.\n")


def test_hosts_are_checked_with_a_fix_for_each_finding(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of ssh, which runs commands here; `tests/session/test_hosts.py` has real hosts."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    found = list(host_checks.find("good,nokey", quick=True, command=[str(tmp_path / "ssh")]))
    assert [each.state for each in found if each.what == "nokey"] == [BAD]
    said = {each.text: each for each in found if each.what == "good"}
    assert all(each.state == GOOD for each in said.values()), said
    assert any("connects to this machine at 127.0.0.1" in text for text in said)
    assert any("clock" in text for text in said) and any("GPU" in text for text in said)
    facts = HostFacts("a", name="a", python="2.7.1", back="refused", here="10.0.0.1", clock_s=-90.0, clock_error_s=0.1)
    found = list(host_checks._of_host(facts))
    with_fix = [each for each in found if each.fix]
    assert len(with_fix) == 4 and {each.state for each in with_fix} == {BAD, WARNING}
    assert any("its clock is 90.0 s behind" in each.text for each in found), found
    twins = [facts, dataclasses.replace(facts, host="b", gpus=("GPU 0: H100 (UUID: x)",))]
    assert "a, b all call themselves a" in next(host_checks._same_machines(twins)).text
    assert "only some hosts have GPUs" in list(host_checks._gpus(twins))[-1].text
    (broken,) = host_checks._gpus([dataclasses.replace(facts, gpu_problem="Driver/library version mismatch")])
    assert broken.state == WARNING and "nvidia-smi: Driver/library" in broken.text and "ssh a nvidia-smi" in broken.fix


def test_an_exchange_between_hosts_that_fails_names_the_host(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'RuntimeError: connect to a: refused' >&2\nexit 1\n")
    (tmp_path / "ssh").chmod(0o755)
    finding = host_checks._exchange("gloo", [HostFacts("a"), HostFacts("b")], "", [str(tmp_path / "ssh")])
    assert finding.state == BAD and "a: RuntimeError: connect to a: refused" in finding.text
    assert "GLOO_SOCKET_IFNAME" in finding.fix
