"""Which processes a session starts, and on which devices."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.errors import EngineStartError, SessionError
from workbench.session.processes.folder import SessionFolder, reap_stale_sessions
from workbench.session.processes.gpus import check_device, check_num_engines, choose_gpus
from workbench.session.processes.launch import LocalProcesses
from workbench.session.processes.launch_profile import ProfileProcesses
from workbench.session.ranks import describe_ranks

Processes = LocalProcesses | ProfileProcesses


def choose_processes(
    engines: int | None, profile: str | None, device: str, keep: bool
) -> tuple[Processes, str | None, SessionFolder]:
    """The processes of a session, the device of its ranks, and its folder.

    The device is None where each host of a profile decides.

    Raises:
        SessionError: a number or a device that cannot be, or options that exclude each other.
    """
    if engines is not None:
        check_num_engines(engines, f"Session(engines={engines!r})")
    if keep and profile is not None:
        raise SessionError(
            f"Session(profile={profile!r}, keep=True): engines of a profile end with their controller, which ends "
            f"with the notebook. Leave keep out, and save checkpoints."
        )
    check_device(device)
    gpus = choose_gpus(device) if profile is None else []
    reap_stale_sessions()
    folder = SessionFolder.create()
    if profile is None:
        return LocalProcesses(folder, engines or len(gpus) or 2, gpus, keep), "cuda" if gpus else "cpu", folder
    try:
        return ProfileProcesses(profile, engines, folder), "cpu" if device == "cpu" else None, folder
    except BaseException:
        folder.remove()
        raise


def check_devices(device: str, found: Mapping[str, list[int]]) -> None:
    """Raise if the ranks of a profile are on devices of two types, or not on the GPUs that were asked for.

    Args:
        device: what was asked for.
        found: ranks by type.

    Raises:
        EngineStartError: they are.
    """
    if len(found) > 1 or (device == "cuda" and list(found) != ["cuda"]):
        where = ", ".join(f"{describe_ranks(ranks)} on {kind}" for kind, ranks in found.items())
        raise EngineStartError(
            f"Session(device={device!r}): {where}. All ranks are on one type of device, and a host has a GPU for each "
            f"of its ranks: start fewer on a host that has fewer GPUs, or use device='cpu'."
        )
