"""Selection of the transport of a world: shared memory where all ranks can use it, else torch.distributed.

All ranks take part and select the same: each rank publishes what it can use, and one refusal is enough.
"""

from __future__ import annotations

import datetime
import logging
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from workbench.errors import WorldError
from workbench.transport.base import Transport
from workbench.transport.ipc.connect import DEVICE_TYPES
from workbench.transport.ipc.connect import connect as connect_devices
from workbench.transport.messaging.connect import (
    GatherBytes,
    PageAddress,
    all_gather_json,
    make_control_page,
    open_links,
)
from workbench.transport.messaging.control_page import ControlPage
from workbench.transport.messaging.semaphores import load
from workbench.transport.messaging.shared_memory import SharedMemory
from workbench.transport.mixed import MixedTransport
from workbench.transport.network.distributed import DistributedTransport
from workbench.transport.network.gloo import GlooTransport
from workbench.transport.network.hang_detector import HangDetector
from workbench.transport.network.nccl_watchdog import disarm_torch, torch_timeout
from workbench.transport.rendezvous import Member, Rendezvous, host_name
from workbench.transport.shared.transport import FIRST_CHUNK_BYTES, SharedTransport

VARIABLE = "WORKBENCH_TRANSPORT"
NAMES = ("auto", "gloo", "shared", "mixed", "ipc", "nccl")
_log = logging.getLogger(__name__)
_has_failed = False
"""Whether the last default group of torch.distributed was left half made."""


@dataclass(frozen=True)
class _Offer:
    """What a rank publishes: the address of its control page, or the reason why it cannot share memory."""

    host: str
    pid: int
    file: int
    token: int
    refusal: str
    wanted: str


@dataclass(frozen=True)
class TransportGroup:
    """The transport between some ranks, and the reason for it."""

    ranks: tuple[int, ...]
    transport: str
    why: str

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}: {self.transport} ({self.why})"


def select_transport(other: Transport, gather: GatherBytes, rank: int, world_size: int, timeout_s: float) -> Transport:
    """Shared memory where all ranks can and may use it, inside each host if there are several hosts, else ``other``.

    All ranks call it. The environment variable WORKBENCH_TRANSPORT requests ``shared`` or ``mixed`` (an error where
    some ranks, or some ranks of one host, cannot share memory), or ``gloo``. ``groups`` of the result lists the
    transports in use, with reasons.

    Raises:
        WorldError: a rank requests shared memory, and some rank cannot use it; raised on all ranks.
    """
    shared, refusals, offers = connect(gather, rank, world_size, timeout_s)
    hosts = list(dict.fromkeys(offer.host for offer in offers))
    asked = {offer.wanted for offer in offers} & {"shared", "mixed"}
    if "shared" in asked:
        elsewhere = [peer for peer, offer in enumerate(offers) if offer.host != offers[0].host]
        refusals |= {peer: f"it runs on {offers[peer].host}, rank 0 on {offers[0].host}" for peer in elsewhere}
    if asked and refusals:
        if shared is not None:
            shared.close()
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in refusals.items())
        raise WorldError(
            f"{VARIABLE}={max(asked)}: {len(refusals)} of {world_size} ranks cannot share memory ({reasons}). It needs "
            f"CPU ranks of one Linux host that may see one another's processes. Unset {VARIABLE} to use gloo."
        )
    groups = _groups(offers, hosts, refusals, other.name)
    chosen: Transport = other
    if shared is not None and len(hosts) == 1:
        chosen = shared
    elif any(group.transport == "shared" for group in groups):
        assert isinstance(other, GlooTransport)
        with_shared = {rank for group in groups if group.transport == "shared" for rank in group.ranks}
        places = [offer.host if peer in with_shared else f"rank {peer}" for peer, offer in enumerate(offers)]
        chosen = MixedTransport(shared, other, places)
    chosen.groups = groups
    for group in groups:
        _log.info("%s", group)
    return chosen


def select_for_devices(
    rendezvous: Rendezvous, rank: int, device: torch.device, timeout_s: float
) -> tuple[Transport | None, str]:
    """The ``ipc`` transport where all ranks can use it; else None and the reason. All ranks call it.

    ``ipc`` is considered for GPUs of one host, unless a rank requests another transport, or every rank has a GPU of its
    own and NCCL can be used.

    Raises:
        WorldError: a rank requests ``ipc``, and some rank cannot use it; raised on all ranks.
    """
    members = rendezvous.members
    why_not = _why_not_devices(members)
    if not why_not:
        found = connect_devices(rendezvous.make_gather(rank, timeout_s), rank, len(members), timeout_s, device)
        if found.transport is not None:
            staged = [f"{a} -> {b} through memory of the host: {why}" for (a, b), why in sorted(found.staged.items())]
            why = "; ".join([f"one host, {members[0].host.split()[0]}", *staged])
            found.transport.groups = (TransportGroup(tuple(range(len(members))), "ipc", why),)
            _log.info("%s", found.transport.groups[0])
            return found.transport, ""
        why_not = "; ".join(f"rank {peer}: {text}" for peer, text in found.refusals.items())
    if any(member.requested == "ipc" for member in members):
        raise WorldError(
            f"{VARIABLE}=ipc: the {len(members)} ranks cannot use it ({why_not}). It needs GPU ranks of one Linux host "
            f"that may see one another's processes. Unset {VARIABLE} to use NCCL, shared memory or gloo."
        )
    return None, why_not


def _why_not_devices(members: tuple[Member, ...]) -> str:
    """The reason why ``ipc`` is not considered, the same on all ranks; empty if it is."""
    kinds = {member.device.split()[0] for member in members}
    if len({(member.host, member.namespace) for member in members}) > 1:
        return "not all ranks are on one host, in one process namespace"
    if len(kinds) > 1 or kinds.isdisjoint(DEVICE_TYPES):
        return f"the ranks work on {', '.join(sorted(kinds))}"
    requested = {member.requested for member in members}
    if requested - {"auto", "ipc"}:
        return f"a rank requests {min(requested - {'auto', 'ipc'})}"
    # NCCL's streams wait for one another; over ``ipc`` the hosts do
    is_better = kinds == {"cuda"} and dist.is_nccl_available() and not share_one_gpu(members)
    return "every rank has a GPU of its own" if is_better and "ipc" not in requested else ""


def requested_transport(device: torch.device, backend: str | None) -> str:
    """The transport that the environment, else the argument ``backend`` of ``init``, requests; ``auto`` if neither.

    Raises:
        WorldError: the environment or the argument names an unknown one, or one that does not support this device.
    """
    wanted = requested_by_environment()
    if backend not in (None, "gloo", "nccl"):
        raise WorldError(
            f'init(backend={backend!r}): it is "gloo" or "nccl". Leave it out: GPUs then have NCCL, and CPUs gloo. '
            "After wb.init(), dist.new_group(backend=...) makes a group of another one."
        )
    if "nccl" in (wanted, backend) and device.type != "cuda":
        asked = f"{VARIABLE}=nccl" if wanted == "nccl" else 'init(backend="nccl")'
        raise WorldError(
            f'{asked}: it is for GPUs, and this rank works on {device}. Use device="cuda" or leave nccl out.'
        )
    return wanted if wanted != "auto" else backend or "auto"


def select_backend(device: torch.device, members: tuple[Member, ...]) -> str:
    """The backend of torch.distributed: NCCL for GPUs, unless two ranks use one GPU, which NCCL refuses."""
    named = [member.requested for member in members if member.requested in ("gloo", "nccl")]
    if device.type != "cuda" or not dist.is_nccl_available():
        return "gloo"
    return named[0] if named else "gloo" if share_one_gpu(members) else "nccl"


def open_group(backend: str, rendezvous: Rendezvous | None, rank: int, world_size: int, timeout_s: float) -> None:
    """Make torch.distributed's default group. A rank that is alone needs no rendezvous.

    With a ``device_id`` torch would run all of NCCL's single sends on one communicator, where pipelines stall.
    """
    global _has_failed
    timeout = datetime.timedelta(seconds=timeout_s)
    if backend == "nccl":
        disarm_torch()
        timeout = torch_timeout(timeout_s)
    if _has_failed:
        # torch numbers the groups, and counts one that it could not make: the others would wait under another number.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        dist.destroy_process_group()
    _has_failed = True
    dist.init_process_group(
        backend,
        store=rendezvous.sub_store("group") if rendezvous else dist.HashStore(),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    _has_failed = False


def connect_distributed(
    rendezvous: Rendezvous, rank: int, world_size: int, backend: str, device: torch.device, timeout_s: float
) -> Transport:
    """The transport over torch.distributed's default group, or shared memory if all ranks run on CPUs."""
    if requested_by_environment() == "shared" and (backend, device.type) != ("gloo", "cpu"):
        raise WorldError(
            f"{VARIABLE}=shared: rank {rank} works on {device} over {backend}. Memory is shared "
            f'by CPU ranks only: use device="cpu", or unset {VARIABLE}.'
        )
    if backend != "gloo":
        return DistributedTransport(rank, world_size, backend, timeout_s, device, rendezvous)
    gloo = GlooTransport(rank, world_size, timeout_s, HangDetector(rendezvous, rank), device)
    if device.type != "cpu":
        return gloo
    try:
        chosen = select_transport(gloo, lambda tensor: gloo.all_gather(tensor, "init()"), rank, world_size, timeout_s)
    except BaseException:
        gloo.close()
        raise
    if isinstance(chosen, SharedTransport):
        gloo.retire()
    return chosen


def set_reason(transport: Transport, world_size: int, why_not: str) -> None:
    """Store in ``groups`` why GPU ranks do not use ``ipc``."""
    if not transport.groups and why_not:
        transport.groups = (TransportGroup(tuple(range(world_size)), transport.name, why_not),)


def share_one_gpu(members: tuple[Member, ...]) -> bool:
    """Whether two ranks use the same GPU, which NCCL refuses."""
    gpus = [(member.host, member.device) for member in members if not member.device.startswith("cpu")]
    return len(set(gpus)) < len(gpus)


def device_name(device: torch.device) -> str:
    """A device name that is valid in all processes of a host: the type, and the UUID of a GPU."""
    if device.type != "cuda":
        return device.type
    return f"cuda {torch.cuda.get_device_properties(device).uuid}"


def _groups(offers: list[_Offer], hosts: list[str], refusals: dict[int, str], other: str) -> tuple[TransportGroup, ...]:
    """The transport inside each host, then the one between hosts."""
    groups = []
    against_all = [rank for rank, offer in enumerate(offers) if offer.wanted == "gloo"]
    for host in hosts:
        ranks = tuple(rank for rank, offer in enumerate(offers) if offer.host == host)
        refused = [f"rank {rank}: {refusals[rank]}" for rank in against_all or ranks if rank in refusals]
        if len(ranks) > 1:
            groups.append(
                TransportGroup(
                    ranks, other if refused else "shared", "; ".join(refused) or f"one host, {host.split()[0]}"
                )
            )
    if len(hosts) > 1:
        groups.append(TransportGroup(tuple(range(len(offers))), other, f"between {len(hosts)} hosts"))
    return tuple(groups)


def why_not_shared() -> str:
    """The reason why ranks of this host would not share memory; empty if they would."""
    if requested_by_environment() == "gloo":
        return f"{VARIABLE}=gloo"
    made, refusal = make_control_page(0, 2, FIRST_CHUNK_BYTES)
    for memory in (made[0].memory, made[1]) if made else ():
        memory.close()
    return refusal


def requested_by_environment() -> str:
    """The transport named by the environment: ``auto``, ``gloo``, ``shared``, ``mixed``, ``ipc`` or ``nccl``.

    Raises:
        WorldError: the environment names an unknown transport.
    """
    value = os.environ.get(VARIABLE, "auto")
    if value not in NAMES:
        raise WorldError(f"{VARIABLE}={value}: there is no such transport. Use {', '.join(NAMES[1:])}, or unset it.")
    return value


def connect(
    gather: GatherBytes, rank: int, world_size: int, timeout_s: float
) -> tuple[SharedTransport | None, dict[int, str], list[_Offer]]:
    """The transport to the other ranks of this host, or None; the refusals by rank; and the offers of all ranks.

    Either all ranks of a host share memory or none does: one refusal is enough.
    """
    wanted = requested_by_environment()
    made, refusal = (
        (None, f"{VARIABLE}=gloo") if wanted == "gloo" else make_control_page(rank, world_size, FIRST_CHUNK_BYTES)
    )
    file, token = (made[0].memory.file, made[0].token) if made else (0, 0)
    offer = _Offer(host_name(), os.getpid(), file, token, refusal, wanted)
    offers = [_Offer(**fields) for fields in all_gather_json(gather, asdict(offer))]
    refusals = {peer: offer.refusal for peer, offer in enumerate(offers) if offer.refusal}
    near = {peer: offer for peer, offer in enumerate(offers) if offer.host == offers[rank].host}
    may_share = all(offer.wanted != "gloo" for offer in offers) and not refusals.keys() & near.keys()
    transport: SharedTransport | None = None
    refusal = ""
    if made and may_share and len(near) > 1:
        try:
            transport = _open_all(made, near, rank, world_size, timeout_s)
        except (OSError, WorldError) as error:
            refusal = f"cannot open the others' memory: {error}"
    verdicts = all_gather_json(gather, {"refusal": refusal})
    refusals |= {peer: verdict["refusal"] for peer, verdict in enumerate(verdicts) if verdict["refusal"]}
    if transport is not None and refusals.keys() & near.keys():
        transport.close()
        return None, refusals, offers
    if transport is None and made:
        for memory in (made[0].memory, made[1]):
            memory.close()
    return transport, refusals, offers


def _open_all(
    made: tuple[ControlPage, SharedMemory], offers: dict[int, _Offer], rank: int, world_size: int, timeout_s: float
) -> SharedTransport:
    page, first_chunk = made
    addresses = {peer: PageAddress(offer.pid, offer.file, offer.token) for peer, offer in offers.items()}
    links = open_links(page, addresses, rank, world_size)
    semaphores = load()
    assert semaphores is not None
    return SharedTransport(rank, page, links, first_chunk, semaphores, timeout_s)
