"""A rank that executes commands from its standard input and answers each line with one line of JSON.

``join <store> <timeout>``, ``leave``, ``gather`` (over all ranks), ``files``, ``set_timeout <timeout>``.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import time

import torch

from workbench.tensors import world


def join(store: str, timeout_s: str) -> str:
    return world.init(init_method=f"file://{store}", timeout_s=float(timeout_s)).transport_name


def gather() -> list[int]:
    return [int(part) for part in world.current().transport.all_gather(torch.tensor(world.rank()), "the test's gather")]


def files() -> list[str]:
    """The shared memory that this process has mapped."""
    gc.collect()
    with open("/proc/self/maps") as file:
        return [line for line in file if "memfd" in line or "/dev/shm" in line]


def set_timeout(timeout_s: str) -> None:
    world.current().transport.waiter.timeout_s = float(timeout_s)


def leave() -> None:
    world.shutdown()


COMMANDS = {"join": join, "gather": gather, "files": files, "set_timeout": set_timeout, "leave": leave}


def main() -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        started = time.perf_counter()
        try:
            answer = {"result": COMMANDS[name](*arguments)}
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - part of the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({**answer, "time_s": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs that a shell has put in the background
    main()
