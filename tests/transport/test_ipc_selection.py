"""Selection of ``ipc`` or of another transport, and the calls to a simulated CUDA driver."""

import contextlib
import ctypes

import pytest
import torch

from tests.transport import late_device
from tests.transport.shared_ranks import assert_all_returned, run_on_threads
from workbench.errors import WorldError
from workbench.transport import selection
from workbench.transport.ipc import connect as ipc_connect
from workbench.transport.ipc import cuda
from workbench.transport.ipc.device import DeviceMemory
from workbench.transport.rendezvous import Member, Rendezvous

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def member(device="cuda A", requested="auto", host="alpha boot", namespace=1):
    return Member(host, 1, namespace, device, requested)


@pytest.mark.parametrize(
    ("members", "why_not"),
    [
        ([member(), member()], ""),
        ([member(), member("cuda B"), member()], ""),
        ([member(), member("cuda B")], "every rank has a GPU of its own"),
        ([member(requested="ipc"), member("cuda B")], ""),
        ([member(), member(host="beta boot")], "not all ranks are on one host"),
        ([member(), member(namespace=2)], "in one process namespace"),
        ([member(), member("cpu")], "the ranks work on cpu, cuda"),
        ([member("cpu"), member("cpu")], "the ranks work on cpu"),
        ([member(), member(requested="nccl")], "a rank requests nccl"),
        ([member(requested="gloo"), member(requested="ipc")], "a rank requests gloo"),
    ],
)
def test_ranks_that_share_a_gpu_use_ipc_unless_a_rank_requests_another_transport(members, why_not, monkeypatch):
    monkeypatch.setattr(selection.dist, "is_nccl_available", lambda: True)
    found = selection._why_not_devices(tuple(members))
    assert why_not in found and bool(why_not) == bool(found)
    monkeypatch.setattr(selection.dist, "is_nccl_available", lambda: False)
    assert selection._why_not_devices(tuple(members)) == found.replace("every rank has a GPU of its own", "")


def test_nccl_needs_one_gpu_per_rank(monkeypatch):
    monkeypatch.setattr(selection.dist, "is_nccl_available", lambda: True)
    assert selection.select_backend(GPU, (member("cuda A"), member("cuda B"))) == "nccl"
    assert (
        selection.select_backend(GPU, (member("cuda A"), member("cuda A"))) == "gloo"
    )  # NCCL refuses two ranks on one
    assert selection.select_backend(GPU, (member("cuda A"), member("cuda A", host="beta"))) == "nccl"
    assert selection.select_backend(GPU, (member("cuda A"), member("cuda B", requested="gloo"))) == "gloo"
    assert selection.select_backend(CPU, (member("cpu"), member("cpu"))) == "gloo"


def test_the_requested_transport(monkeypatch):
    assert selection.requested_transport(GPU, None) == "auto" and selection.requested_transport(GPU, "nccl") == "nccl"
    monkeypatch.setenv(selection.VARIABLE, "ipc")
    assert selection.requested_transport(GPU, "nccl") == "ipc"
    monkeypatch.setenv(selection.VARIABLE, "nccl")
    with pytest.raises(WorldError, match=r"WORKBENCH_TRANSPORT=nccl: it is for GPUs, and this rank works on cpu"):
        selection.requested_transport(CPU, None)
    monkeypatch.delenv(selection.VARIABLE)
    with pytest.raises(WorldError, match=r'init\(backend="nccl"\): it is for GPUs, and this rank works on cpu'):
        selection.requested_transport(CPU, "nccl")
    with pytest.raises(WorldError, match=r"init\(backend='cpu:gloo,cuda:nccl'\): it is \"gloo\" or \"nccl\""):
        selection.requested_transport(GPU, "cpu:gloo,cuda:nccl")


def choose(members, behaviour=None, **maker):
    """For each rank of such a world: the names of its transport and its groups, or the reason against ``ipc``."""
    from torch.distributed import HashStore

    store = HashStore()

    def program(rank):
        rendezvous = Rendezvous(store, 0, tuple(members))
        found, why_not = selection.select_for_devices(rendezvous, rank, CPU, 10.0)
        if found is None:
            return why_not
        found.close()
        return str(found.groups[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ipc_connect.DEVICE_TYPES, "cpu", lambda device: late_device.LateDevice(device, behaviour))
        return run_on_threads(program, len(members))


def test_groups_name_the_transport_or_the_reason_against_ipc():
    two = [member("cpu", "ipc"), member("cpu", "auto")]
    assert assert_all_returned(choose(two)) == ["ranks [0, 1]: ipc (one host, alpha)"] * 2
    refusing = late_device.Behaviour()
    refusing.refuses = lambda pid, file: True
    for text in assert_all_returned(choose(two, refusing)):
        assert "0 -> 1 through memory of the host: no peer access" in text and "1 -> 0" in text
    refusing.room = 10
    for text in assert_all_returned(choose([member("cpu")] * 2, refusing)):
        assert "rank 0: rank 0 joins the world" in text and "rank 1" in text
    for error in choose(two, refusing):
        assert isinstance(error, WorldError)
        assert "WORKBENCH_TRANSPORT=ipc: the 2 ranks cannot use it (rank 0" in str(error)
        assert "It needs GPU ranks of one Linux host" in str(error) and "Unset WORKBENCH_TRANSPORT" in str(error)


class Driver:
    """A simulated driver with one allocation at 4096, of at most 100 bytes."""

    def __init__(self):
        self.calls = []

    def cuMemAlloc_v2(self, address, num_bytes):  # noqa: N802
        self.calls.append(("alloc", num_bytes.value))
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = 4096
        return 0 if num_bytes.value <= 100 else 2

    def cuIpcGetMemHandle(self, handle, address):  # noqa: N802
        ctypes.memmove(handle, bytes(range(64)), 64)
        return 0 if address.value == 4096 else 1

    def cuIpcOpenMemHandle_v2(self, address, handle, flags):  # noqa: N802
        self.calls.append(("open", bytes(handle), flags))
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = 8192
        return 0 if bytes(handle)[0] == 0 else 201

    def cuMemHostRegister_v2(self, address, num_bytes, flags):  # noqa: N802
        self.calls.append(("pin", address.value, num_bytes.value, flags.value))
        return {4096: 0, 8192: 712}.get(address.value, 1)

    def cuMemHostUnregister(self, address):  # noqa: N802
        self.calls.append(("unpin", address.value))
        return 0

    def cuGetErrorName(self, code, name):  # noqa: N802
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = f"CUDA_ERROR_{code}".encode()
        return 0


@pytest.fixture
def device(monkeypatch):
    found = cuda.CudaDevice.__new__(cuda.CudaDevice)
    found.torch_device, found._last, found._last_stream, found._driver = GPU, None, None, Driver()
    monkeypatch.setattr(cuda.CudaDevice, "_current", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(
        cuda.CudaDevice, "_memory", lambda self, address, size: DeviceMemory(address, torch.empty(size))
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found._driver.calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50, 1000))
    return found


def test_the_driver_gets_whole_handles(device):
    memory = device.allocate(100, "test")
    handle = device.export(memory)
    assert handle == bytes(range(64)) and memory.address == 4096
    assert device.open(handle, 100).address == 8192
    assert device._driver.calls == [("alloc", 100), ("open", handle, 1)]  # 1: enable peer access where it is needed
    with pytest.raises(WorldError, match="cuda:0: cuIpcOpenMemHandle returns CUDA_ERROR_201"):
        device.open(b"\x01" * 64, 100)
    with pytest.raises(WorldError, match="cuIpcGetMemHandle returns CUDA_ERROR_1"):
        device.export(memory._replace(address=1))


def test_the_driver_pins_host_memory_and_its_errors_do_not_reach_torch(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("the runtime remembers its last error"))
    device.pin(4096, 10)
    device.pin(8192, 20)  # pinned already
    device.unpin(4096)
    assert device._driver.calls == [("pin", 4096, 10, 1), ("pin", 8192, 20, 1), ("unpin", 4096)]  # 1: for all contexts
    with pytest.raises(WorldError, match="10 B of shared memory cannot be pinned: CUDA_ERROR_1"):
        device.pin(1, 10)


def test_too_little_device_memory_is_an_error_with_both_sizes_after_torch_has_emptied_its_cache(device):
    with pytest.raises(WorldError, match=r"rank 0: 101 B on cuda:0 are wanted, 50 B are free \(CUDA_ERROR_2\)"):
        device.allocate(101, "rank 0")
    assert device._driver.calls == [("alloc", 101), "empty_cache", ("alloc", 101)]


def test_events_on_another_stream_are_ordered_after_earlier_ones(device, monkeypatch):
    log, current = [], []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event.name}")

    class Event:
        def __init__(self, name):
            self.name = name

        def record(self, stream):
            log.append(f"{self.name} on {stream.name}")

    a, b = Stream("a"), Stream("b")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    one, two = (cuda.CudaEvent(device, Event(name)) for name in ("one", "two"))
    for stream, event in ((a, one), (a, two), (b, one), (b, two), (a, one)):
        current.append(stream)
        event.record()
    assert log == ["one on a", "two on a", "b waits for two", "one on b", "two on b", "a waits for two", "one on a"]
