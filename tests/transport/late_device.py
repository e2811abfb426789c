"""A device for ``ipc`` without a GPU: its memory is files that processes share, its work is done late, on a thread.

It checks what CUDA leaves undefined: to free memory that a process has open, or to open freed memory, is an error;
freed memory holds rubbish; copies into device memory run some time after they were submitted.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import threading
import time
import weakref
from collections import deque

import torch

from workbench.errors import WorldError
from workbench.kernels import blocks
from workbench.transport.ipc import connect as ipc_connect
from workbench.transport.ipc.device import DeviceMemory
from workbench.transport.messaging.shared_memory import SharedMemory

HEAD_BYTES = 4096
"""Bytes before the memory: a handle names a whole allocation, as in CUDA."""
HANDLE = struct.Struct("<qqqq")
LONGEST_DELAY_S = 1e-3
IDLE_S = 0.02
VARIABLE = "WORKBENCH_TEST_LATE_DEVICE"
mistakes: list[str] = []
_numbers = itertools.count()


class Behaviour:
    """Faults of the devices of a process, set by a test.

    Attributes:
        refuses: function of pid and file: whether memory of other processes cannot be opened; None: never.
        shares_memory, shares_events: whether the system exports them.
        garbles: whether opened memory reads as other bytes.
    """

    def __init__(self):
        self.refuses, self.shares_memory, self.shares_events, self.garbles = None, True, True, False
        self.opens_events, self.room = True, None


class LateDevice:
    torch_device = torch.device("cpu")

    def __init__(self, device=None, behaviour=None):
        self.behaviour = behaviour or Behaviour()
        self.own, self.opened, self.pinned = {}, {}, {}
        self.events = SharedMemory.create(4096, "events")
        weakref.finalize(self, self.events.close)
        self.num_events = 0
        self.identity = os.getpid() << 16 | next(_numbers)
        self._first_slot = random.SystemRandom().randrange(1, 500)
        self._chance = random.Random(self._first_slot)
        self._jobs, self._changed, self._is_busy, self._thread = deque(), threading.Condition(), False, None

    def _slot_in(self, words, wanted):
        """The slot of a word in the head of an allocation; each device starts its search elsewhere."""
        slots = (1 + (self._first_slot + step) % 499 for step in range(499))
        return next((slot for slot in slots if words[slot] == wanted), None)

    def allocate(self, num_bytes, what):
        if self.behaviour.room is not None and num_bytes > self.behaviour.room:
            raise WorldError(f"{what}: {num_bytes} bytes are wanted, {self.behaviour.room} are free")
        shared = SharedMemory.create(HEAD_BYTES + num_bytes, what)
        address = shared.address + HEAD_BYTES
        self.own[address] = shared
        return DeviceMemory(address, shared.tensor(HEAD_BYTES, (num_bytes,), torch.uint8))

    def export(self, memory):
        if not self.behaviour.shares_memory:
            raise WorldError("this device does not share its memory")
        return HANDLE.pack(os.getpid(), self.own[memory.address].file, memory.data.numel(), HEAD_BYTES)

    def free(self, memory):
        self.synchronize()
        shared = self.own.pop(memory.address)
        words = shared.data.cast("q")
        users = [words[slot] for slot in range(1, 500) if words[slot] and lives(words[slot] >> 16)]
        if users:
            mistakes.append(f"memory of {memory.data.numel()} bytes was freed while processes {users} had it open")
        words[0] = 1
        memory.data.fill_(0xEE)
        shared.close()

    def open(self, handle, num_bytes):
        pid, file, size, offset = HANDLE.unpack(handle)
        if self.behaviour.refuses is not None and self.behaviour.refuses(pid, file):
            raise WorldError("no peer access")
        assert size == num_bytes
        shared = SharedMemory.open(pid, file, offset + size)
        words = shared.data.cast("q")
        if words[0]:
            mistakes.append("memory was opened that has been freed")
        if self._slot_in(words, self.identity) is not None:
            mistakes.append("memory was opened twice")
        words[self._slot_in(words, 0)] = self.identity
        data = shared.tensor(offset, (size,), torch.uint8)
        address = shared.address + offset
        self.opened[address] = shared
        return DeviceMemory(address, data ^ 1 if self.behaviour.garbles else data)

    def close(self, memory):
        words = self.opened.pop(memory.address).data.cast("q")
        words[self._slot_in(words, self.identity)] = 0

    def make_event(self):
        self.num_events += 1
        return LateEvent(self, self.events, self.num_events - 1)

    def open_event(self, handle):
        pid, file, size, number = HANDLE.unpack(handle)
        if not self.behaviour.opens_events:
            raise WorldError("events of other processes cannot be opened")
        return LateEvent(self, SharedMemory.open(pid, file, size), number)

    def copy(self, targets, sources, counts, reduction):
        targets, sources, counts = list(targets), [source.detach() for source in sources], list(counts)
        is_inside = [self._is_own(target) for target in targets]
        if any(is_inside):  # the current values of an ordinary tensor are copied
            sources = [source if self._is_own(source) else source.clone() for source in sources]
        self.later(lambda: blocks.move_blocks_reference(targets, sources, counts, reduction))
        if not all(is_inside):  # torch reads a CPU tensor at once
            self.synchronize()

    def pin(self, address, num_bytes):
        self.pinned[address] = num_bytes

    def unpin(self, address):
        del self.pinned[address]

    def synchronize(self):
        with self._changed:
            assert self._changed.wait_for(lambda: not self._jobs and not self._is_busy, 20)

    def later(self, job):
        """Run ``job`` after all earlier work."""
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self):
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._jobs, IDLE_S):
                    self._thread = None
                    return
                job, self._is_busy = self._jobs.popleft(), True
            time.sleep(self._chance.random() ** 4 * LONGEST_DELAY_S)
            job()
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _is_own(self, tensor):
        """Whether a tensor lies in memory of the device, or in pinned memory of the host."""
        start = tensor.data_ptr()
        places = [(shared.address, shared.size) for shared in self.own.values()] + list(self.pinned.items())
        return any(address <= start < address + size for address, size in places)


class LateEvent:
    def __init__(self, device, shared, number):
        self.device, self.shared, self.number = device, shared, number
        self.words = shared.data.cast("q")

    def record(self):
        self.words[2 * self.number] += 1
        count = self.words[2 * self.number]

        def reach():
            self.words[2 * self.number + 1] = count

        self.device.later(reach)

    def is_done(self):
        return self.words[2 * self.number + 1] >= self.words[2 * self.number]

    def export(self):
        if not self.device.behaviour.shares_events:
            raise WorldError("this device does not share its events")
        return HANDLE.pack(os.getpid(), self.shared.file, self.shared.size, self.number)


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def register(behaviour=None):
    """Let CPU ranks of this process use this device."""
    ipc_connect.DEVICE_TYPES["cpu"] = lambda device: LateDevice(device, behaviour)


def register_if_asked():
    """Register in a process of a test that starts several processes."""
    if VARIABLE in os.environ:
        register()
