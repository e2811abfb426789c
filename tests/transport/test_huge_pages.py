"""Huge pages for shared memory: requested, never required."""

import os
import re
import resource

import pytest
import torch

from workbench.errors import WorldError
from workbench.transport.messaging import huge_pages, shared_memory
from workbench.transport.messaging.shared_memory import SharedMemory
from workbench.transport.system_calls import memory_file

SIZE = 3 * huge_pages.HUGE_PAGE_BYTES + 40960


def large_bytes(address):
    """Bytes of the mapping at this address that this process maps with huge pages."""
    with open("/proc/self/smaps", encoding="ascii") as file:
        part = file.read().split(f"\n{address:x}-")[1]
    return int(re.search(r"ShmemPmdMapped: +(\d+) kB", part)[1]) * 1024


def assert_shared(owner, peer):
    """Each reads what the other writes, at both ends."""
    for writer, reader in ((owner, peer), (peer, owner)):
        for offset in (0, owner.size - 8):
            writer.tensor(offset, (8,), torch.uint8).copy_(torch.randint(256, (8,), dtype=torch.uint8))
            assert torch.equal(reader.tensor(offset, (8,), torch.uint8), writer.tensor(offset, (8,), torch.uint8))


@pytest.mark.parametrize("size", [4096, huge_pages.HUGE_PAGE_BYTES, SIZE])
@pytest.mark.parametrize("kernel", ["this one", "one without huge pages", "a slow one"])
def test_memory_is_shared_and_reserved_whatever_pages_the_kernel_gives(size, kernel, monkeypatch):
    if kernel == "one without huge pages":
        monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 12345)
    if kernel == "a slow one":
        monkeypatch.setattr(huge_pages, "_MOST_CPU_S_PER_STEP", -1)
        monkeypatch.setattr(huge_pages, "_STEP_BYTES", huge_pages.HUGE_PAGE_BYTES)
    owner = SharedMemory.create(size, "test")
    peer = SharedMemory.open(os.getpid(), owner.file, size)
    assert size < huge_pages.HUGE_PAGE_BYTES or {m.address % huge_pages.HUGE_PAGE_BYTES for m in (owner, peer)} == {0}
    assert os.fstat(owner.file).st_blocks * 512 == os.fstat(owner.file).st_size == size
    assert_shared(owner, peer)
    owner.release_pages()
    assert os.fstat(owner.file).st_blocks == 0
    owner.reserve_pages("test")
    assert os.fstat(owner.file).st_blocks * 512 == size
    assert_shared(owner, peer)
    owner.close()


def test_a_peer_has_few_page_faults_on_huge_pages():
    owner = SharedMemory.create(SIZE, "test")
    if large_bytes(owner.address) == 0:
        pytest.skip("this kernel has no huge pages for shared memory now")
    peer = SharedMemory.open(os.getpid(), owner.file, SIZE)
    whole = peer.tensor(0, (SIZE // 4,), torch.int32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    whole.fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100  # of 1546 small pages
    assert large_bytes(peer.address) >= large_bytes(owner.address)
    owner.close()


def test_the_mapping_ends_with_the_last_tensor():
    def ranges():
        with open("/proc/self/maps", encoding="ascii") as file:
            return [line.split()[0].split("-") for line in file]

    memory = SharedMemory.create(SIZE, "test")
    memory.close()
    tensor, address = memory.tensor(4096, (7,), torch.float32).fill_(3), memory.address
    del memory
    assert tensor.tolist() == [3.0] * 7
    del tensor
    assert not any(int(start, 16) <= address < int(end, 16) for start, end in ranges())


def name_of(file):
    """What a number stands for now; empty if it is closed. Other threads may have been given the number again."""
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:
        return ""


def test_a_file_that_cannot_be_mapped_or_filled_is_an_error(monkeypatch):
    file = os.memfd_create("test")
    os.ftruncate(file, SIZE)
    readable = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        huge_pages.map_aligned(readable, SIZE)
    for number in (file, readable):
        os.close(number)

    def no_room(*args):
        raise OSError(28, "No space left on device")

    made = []
    monkeypatch.setattr(shared_memory, "memory_file", lambda: made.append(memory_file()) or made[-1])
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(WorldError, match=r"rank 3: 6\.33 MB of shared memory are wanted.*No space left"):
        SharedMemory.create(SIZE, "rank 3")
    (file,) = made
    assert "memfd:workbench" not in name_of(file)
