"""The world of this process, or of this thread for simulated ranks: rank, world size, device and transport."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from workbench.errors import WorldError
from workbench.tensors import default_generator
from workbench.tensors import patch_table as patches
from workbench.tensors.execution_context import ExecutionContext
from workbench.transport import own_gpu, selection
from workbench.transport.base import Transport
from workbench.transport.closed import ClosedTransport
from workbench.transport.held_interrupt import HeldInterrupt
from workbench.transport.launchers import default_init_method, launcher_value
from workbench.transport.rendezvous import Rendezvous, join_rendezvous
from workbench.transport.threads import ThreadHub, ThreadTransport
from workbench.transport.traffic import Traffic
from workbench.units import format_ranks

DEFAULT_TIMEOUT_S = 300.0
_HELD_AT_MOST_S = 5.0
"""How long an interrupt waits for ranks that connect to one another; it takes some milliseconds."""
_MAKE_ANEW = "Make it anew on the ranks that are left, or load a checkpoint."


class World:
    """The ranks that run one SPMD program, seen from one of them.

    Its transport changes when the world is rebuilt, closed, or recorded; a rebuilt one may also have more ranks than
    before, or fewer. ``context`` holds the state of the program that runs in it, and settings of context managers.

    Attributes:
        rank: this rank's number.
        world_size: the number of ranks.
        device: the device of this rank's shards.
        transport: sends tensors to other ranks.
        traffic: the count of exchanges and bytes that this rank has sent, and its clock.
        generation: the number of worlds before this one at the same rendezvous; ``rebuild`` counts it.
        num_rebuilds: how often this world was rebuilt; exchanges begun before a rebuild are void.
        context: the state of the program that runs in this world.
        specs: the interned layouts with shapes (see ``specs``).
        plans: the cached plan for a function and its arguments (see ``dispatch.planning``).
        on_plan: called with (function, args, kwargs) for every call that needs a new plan.
        rank_of: where several stages of a rank have numbers of their own, the rank of each number; else None.
        casts: in a dry run, adds autocast's casts to a local function, given the function's name; else None.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, transport: Transport) -> None:
        self.rank, self.world_size, self.device, self.transport = rank, world_size, device, transport
        self.traffic = Traffic(device)
        self.generation = self.num_rebuilds = 0
        self.context = ExecutionContext()
        self.specs: dict[Any, Any] = {}
        self.plans: dict[Any, Any] = {}
        self.rank_of: Sequence[int] | None = None
        self.on_plan: Callable[[Any, Any, Any], None] | None = None
        self.casts: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None

    @property
    def autocast_type(self) -> str:
        """The device type whose autocast applies; on metadata, the CPU's."""
        return "cpu" if self.device.type == "meta" else self.device.type

    @property
    def transport_name(self) -> str:
        """Short name of the transport: ``shared``, ``ipc``, ``mixed``, ``gloo``, ``nccl`` or ``threads``."""
        return self.transport.name

    @property
    def transport_groups(self) -> tuple[str, ...]:
        """The transport of each group of ranks, with the reason: ``ranks [0, 1]: shared (one host, alpha)``."""
        return tuple(map(str, self.transport.groups))

    def forget_decisions(self) -> None:
        """Drop plans that depend on a transport and its cost: ranks that have joined since would plan otherwise. So do
        targets, whose ranks may be gone.
        """
        self.plans.clear()
        for spec in self.specs.values():
            spec.exchanges.clear()
            spec.targets.clear()

    def rejoin(self, world_size: int, transport: Transport) -> None:
        """Exchange by a new transport, with as many ranks as before, more, or fewer."""
        self.forget_decisions()
        if world_size < self.world_size:
            self._disconnect_tensors(world_size)
        self.transport, self.world_size = transport, world_size
        self.num_rebuilds += 1
        self.context.forget_progress()

    def _disconnect_tensors(self, world_size: int) -> None:
        """Let tensors on ranks that are gone keep their shards, and exchange no more."""
        gone = {key: spec for key, spec in self.specs.items() if max(spec.layout.placement) >= world_size}
        lost = format_ranks(tuple(range(world_size, self.world_size)))
        reason = f"this tensor lies also on ranks that were given back ({lost})"
        former = World(self.rank, self.world_size, self.device, ClosedTransport(self.transport, reason, _MAKE_ANEW))
        for key, spec in gone.items():
            former.specs[key] = self.specs.pop(key)
            spec.world, spec.plans = former, former.plans

    def abort(self, reason: str) -> None:
        """End the main thread's waits with ``CollectiveAborted``; may be called from any thread."""
        self.transport.abort(reason)

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, world_size={self.world_size}, device={self.device}, "
            f"transport={self.transport_name})"
        )


_process_world: World | None = None
_left_world: World | None = None
_joined_by: dict[str, Any] = {}
thread_world = threading.local()
_at_rebuild: list[Callable[[], None]] = []
_at_shutdown: list[Callable[[World], None]] = []


def current() -> World:
    """The world of this thread or process; a process without a launcher is a world of one rank.

    Raises:
        WorldError: a launcher has set RANK but ``wb.init()`` was not called.
    """
    world = joined()
    if world is not None:
        return world
    if launcher_value("world_size", 1) > 1:
        raise WorldError(
            f"rank {launcher_value('rank', 0)} of {launcher_value('world_size', 1)} has not joined the world yet. Call "
            f"wb.init() first."
        )
    return init(0, 1)


def joined() -> World | None:
    """The world of this thread or process; None where there is none yet."""
    world: World | None = getattr(thread_world, "world", None) or _process_world
    return world


def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    init_method: str | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    generation: int | None = None,
) -> World:
    """Join the world: rank and size from the launcher's environment (torchrun, srun, mpirun), or from the arguments.

    Args:
        rank, world_size: default: RANK and WORLD_SIZE, or those of Slurm, Open MPI or MPICH; else a world of one rank.
        init_method: rendezvous of torch.distributed, e.g. ``"file:///path"``. Default: that of the launcher (``env://``).
        backend: ``"gloo"`` or ``"nccl"``, also between GPUs of one host. Default: nccl for GPUs, gloo for CPUs.
        device: the device of shards. Default: of several ranks, each takes the GPU of its number on its host if all
            have one to themselves, whatever ``torch.cuda.set_device`` has set; else the CPU. ``"cuda"``: the one of
            ``torch.cuda.set_device``, or that of the rank's number, which ranks share where there are fewer.
        timeout_s: seconds that a rank waits for the others.
        generation: number of the world under ``init_method``, which serves several, one after the other; default how
            many this process has joined. A process that takes the place of a dead rank names it (``rebuild``).

    CPU ranks of one host exchange tensors through shared memory, ranks that share a GPU through CUDA IPC, others
    through torch.distributed, also in a world of several hosts; the environment variable WORKBENCH_TRANSPORT
    (``shared``, ``ipc``, ``mixed``, ``gloo``, ``nccl``) decides otherwise, and WORKBENCH_HOST names this rank's host in
    place of the system.

    Returns:
        The world; calling again returns the same one.

    Raises:
        WorldError: the process already belongs to another world, or has called ``init_process_group``, the rank is none
            of the world's, or some ranks did not join in time, or have no device of the others' type.

    A script with ``wb.init()`` at its head runs under ``torchrun --nproc-per-node 2 script.py``, where the calls of
    torch.distributed work too; without a launcher there is no process group.
    """
    global _process_world, _joined_by
    rank = launcher_value("rank", 0) if rank is None else rank
    world_size = launcher_value("world_size", 1) if world_size is None else world_size
    asked = f"init(rank={rank}, world_size={world_size})"
    if _process_world is not None:
        if (_process_world.rank, _process_world.world_size) == (rank, world_size):
            return _process_world
        known = f"rank {_process_world.rank} of {_process_world.world_size}"
        raise WorldError(f"{asked}: this process is {known} already. Call wb.shutdown() first.")
    if not 0 <= rank < world_size:
        raise WorldError(
            f"{asked}: the ranks of such a world are 0 to {world_size - 1}. A launcher sets RANK and WORLD_SIZE: start "
            "with torchrun, or give both numbers, wb.init(rank, world_size)."
        )
    if dist.is_initialized() and max(world_size, num_ranks := dist.get_world_size()) > 1:
        raise WorldError(
            f"{asked}: this process has a default process group of torch.distributed already ({dist.get_backend()}, "
            f"{num_ranks} ranks). wb.init() makes it. Leave init_process_group out, and without a launcher call "
            "wb.init(rank, world_size, init_method=...) in its place. Or call dist.destroy_process_group() first."
        )
    is_free = device is None
    chosen = own_gpu.choose(device, rank, world_size)
    transport: Transport
    requested = selection.requested_transport(chosen, backend)
    with HeldInterrupt(at_most_s=_HELD_AT_MOST_S) as interrupt:
        if world_size > 1:
            place, known_as = init_method or default_init_method(), selection.device_name(chosen)
            facts = known_as, requested, is_free
            rendezvous = join_rendezvous(place, rank, world_size, generation, timeout_s, *facts, interrupt)
            rendezvous, chosen = own_gpu.settle(rendezvous, rank, chosen, timeout_s)
            selection.requested_transport(chosen, backend)  # NCCL is for GPUs
            transport = _join(rendezvous, rank, world_size, backend, chosen, timeout_s)
            generation = rendezvous.generation
            run_backward_in_calling_thread(chosen)
        else:
            chosen = own_gpu.use(chosen)
            transport = ThreadTransport(ThreadHub(1), 0, chosen)
            if launcher_value("world_size", 0) and not dist.is_initialized():  # its script may call torch.distributed
                selection.open_group(backend or selection.select_backend(chosen, ()), None, rank, world_size, timeout_s)
        if dist.is_initialized():
            atexit.unregister(shutdown)
            atexit.register(shutdown)  # gloo's threads must end before the interpreter does
        _process_world = _rejoined(rank, world_size, chosen, transport) or World(rank, world_size, chosen, transport)
        _process_world.generation = generation or 0
        patches.install()
        _joined_by = {"init_method": init_method, "backend": backend, "timeout_s": timeout_s}
    return _process_world


def rebuild(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    init_method: str | None = None,
    generation: int | None = None,
    device: str | torch.device | None = None,
    reason: str = "it rebuilds the world",
) -> World:
    """Replace a broken world by a new one in place: tensors and modules of this process stay usable. All ranks call it.

    After an exchange has failed (a rank died, was interrupted, or ran another program), the world cannot be used. Every
    remaining rank calls ``rebuild``. A process that takes the place of a dead one calls it too, with its rank, the size
    of the world and the generation, and starts without tensors.

    Args:
        rank, world_size, device: default: those of this process's present or last world. Tensors of this process stay
            usable in a world of another size if it has all their ranks.
        init_method: the rendezvous. Default: the same as before. It must be another one if the process that
            served it (rank 0 under ``env://`` without torchrun, and ``tcp://``) is gone.
        generation: default one more than this process's last one at that place.
        reason: the text of the error on ranks that still wait for this one.

    ``wb.rebuild(rank=2, world_size=4, init_method=place, generation=1)`` is what a replacement of rank 2 calls, while
    the others call ``wb.rebuild()``.

    Raises:
        WorldError: no rank is given and this process was in no world, or some ranks did not join in time.
    """
    known = _process_world or _left_world
    if known is None and (rank is None or world_size is None):
        raise WorldError(
            f"rebuild(rank={rank}, world_size={world_size}): this process was in no world yet, so it needs both "
            "numbers. Give rank=, world_size= and init_method=, or call wb.init()."
        )
    if _process_world is not None:
        _process_world.abort(reason)
    shutdown()
    is_same = known is not None and (rank, world_size) in ((None, None), (known.rank, known.world_size))
    if known is not None and is_same:
        rank, world_size, device = known.rank, known.world_size, device or known.device
    joined_by = dict(_joined_by)
    joined_by["init_method"] = init_method or joined_by.get("init_method")
    return init(rank, world_size, device=device, generation=generation, **joined_by)


def _join(
    rendezvous: Rendezvous, rank: int, world_size: int, backend: str | None, device: torch.device, timeout_s: float
) -> Transport:
    """Connect to the other ranks at the rendezvous."""
    transport, why_not = selection.select_for_devices(rendezvous, rank, device, timeout_s)
    backend = backend or ("gloo" if transport is not None else selection.select_backend(device, rendezvous.members))
    try:
        selection.open_group(backend, rendezvous, rank, world_size, timeout_s)
        if transport is None:
            transport = selection.connect_distributed(rendezvous, rank, world_size, backend, device, timeout_s)
            selection.set_reason(transport, world_size, why_not)
        _share_random_state(rank, transport, device)
        return transport
    except BaseException:
        if transport is not None:
            transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


def _rejoined(rank: int, world_size: int, device: torch.device, transport: Transport) -> World | None:
    """Give the former world the new transport, so that its tensors and modules stay usable."""
    left = _left_world
    if left is None or (left.rank, left.device) != (rank, device):
        return None
    left.rejoin(world_size, transport)
    for forget in _at_rebuild:
        forget()
    return left


def at_rebuild(forget: Callable[[], None]) -> None:
    """Register a function that every rank calls when it joins a new world with the tensors of an old one."""
    _at_rebuild.append(forget)


def at_shutdown(end: Callable[[World], None]) -> None:
    """Register a function that every rank calls with its world before it leaves it."""
    _at_shutdown.append(end)


def finish(world: World) -> None:
    """End what belongs to a world that this rank is about to leave. All its ranks call it."""
    for end in _at_shutdown:
        end(world)


def _share_random_state(rank: int, transport: Transport, device: torch.device) -> None:
    """Give ranks the same random states, of the CPU and of the ranks' devices. torch seeds every process differently,
    but the ranks' models and the keys of their random tensors must agree.

    In a new world all ranks get the states of rank 0. In a rebuilt one, ranks get those of the first rank of the former
    world that has the same seed (``default_generator.source_of``): programs may seed each rank differently.
    """
    was_there = torch.tensor([_left_world is not None], dtype=torch.uint8)
    found = [
        [each.cpu() for each in transport.all_gather(torch.cat([state, was_there]).to(device), "init()")]
        for state in default_generator.states(device)
    ]
    known = {each: state[:-1] for each, state in enumerate(found[0]) if state[-1]}
    source = default_generator.source_of(rank, known or {0: found[0][0][:-1]})
    default_generator.set_states([states[source][:-1] for states in found], device)


def shutdown() -> None:
    """Leave the world and give back its sockets, as in ``wb.init(); ...; wb.shutdown()``; safe to call twice."""
    global _process_world, _left_world
    if _process_world is None:
        return
    finish(_process_world)
    with HeldInterrupt(at_most_s=_HELD_AT_MOST_S):
        _process_world.transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.autograd.set_multithreading_enabled(True)
        patches.remove()
        _process_world, _left_world = None, _process_world


def run_backward_in_calling_thread(device: torch.device) -> None:
    """Let the thread that calls a backward run it, also for GPUs. Autograd would use a thread per GPU, and the caller
    would wait in C++, where no SIGINT reaches it and errors have no line of the user's code.
    """
    if device.type != "cpu":
        torch.autograd.set_multithreading_enabled(False)


def rank() -> int:
    """This rank's number in its world, counted from 0.

    >>> wb.rank()
    0
    """
    return current().rank


def world_size() -> int:
    """The number of ranks in the world.

    >>> wb.world_size()
    2
    """
    return current().world_size


def barrier() -> None:
    """Return when all ranks of the world have called it; the wait can be interrupted.

    Raises:
        CollectiveAborted: a rank has died, timed out, or runs another program.

    >>> wb.testing.run_ranks(lambda rank: wb.barrier(), num_ranks=2)
    [None, None]
    """
    world = current()
    world.transport.all_gather(torch.zeros(1, device=world.device), "barrier()")
