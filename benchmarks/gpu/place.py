"""Where a part runs, and what it finds there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.reporting import Comparison

ROOT = Path(__file__).parents[2]


class Place(NamedTuple):
    """A device. A part works at small size where it is no GPU: it shows that it runs, and its numbers say nothing."""

    device: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def name(self) -> str:
        """The GPU's name, or "the CPU"."""
        import torch

        return torch.cuda.get_device_name(self.device) if self.is_gpu else "the CPU"

    def wait(self) -> None:
        """Wait until the device has done its work."""
        import torch

        if self.is_gpu:
            torch.cuda.synchronize(self.device)


class Finding(NamedTuple):
    """What was looked at, and what was seen."""

    what: str
    seen: str


Found = Finding | Comparison


def run_command(what: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[Found]:
    """Run ``python`` with arguments in the checkout; finds its last line.

    Raises:
        RuntimeError: it failed; with its last lines.
    """
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    print(done.stdout, done.stderr, sep="\n", flush=True)
    lines = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()
    if done.returncode:
        last = "\n".join([*lines[-15:], *done.stderr.strip().splitlines()[-15:]])
        raise RuntimeError(f"{what}: exit code {done.returncode}\n{last}")
    yield Finding(what, lines[-1])
