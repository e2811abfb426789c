"""A sharded checkpoint against torch.distributed.checkpoint's own, of the same training, on the same two processes.

    python -m benchmarks.saving

A GPT of about 9 M parameters with AdamW under zero=1: 36 MB of weights and 72 MB of state, of which every rank writes
half. torch saves the same state dictionary of the same global tensors (they tell it which slices they are) into a
directory beside. Both end when all is on the disk: ``wb.checkpoint.save`` waits for it, and torch is given a writer
that does,
too. What ``wb.checkpoint.save`` does besides is in its time: checksums, the agreement of all ranks, the last rename.
Then the same
for loading (torch compares no checksums), and the time for which an asynchronous save stops the training.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import async_save as torch_async_save
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from benchmarks.harness import interleave, launch_or_work, medians, together
from benchmarks.reporting import Comparison, Target, publish, side_by_side, table
from workbench.tensors.world import current
from workbench.training.saving.flat import name_of
from workbench.training.saving.parts import collect
from workbench.units import format_seconds

NUM_PROCESSES, WIDTH, NUM_WORDS, LENGTH = 2, 256, 4096, 64
SAVE, LOAD, RETURN, STALL = Target(1.0), Target(1.2), Target(1.0), Target(0.5)
_SAVE, _LOAD, _STALL = "wb.checkpoint.save", "wb.checkpoint.load", "wb.checkpoint.save(async_op=True) returns"
_TORCH_SAVE, _TORCH_LOAD, _TORCH_STALL = "dcp.save", "dcp.load", "dcp.async_save returns"


class Training:
    """A GPT, AdamW and a directory for each of the two."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        torch.manual_seed(0)
        self.model = wb.parallelize(GPT(WIDTH, num_blocks, NUM_WORDS, LENGTH), "*: data | zero=1")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.folder = folder
        self.pending: list[Callable[[], object]] = []
        words = torch.randint(NUM_WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        next_word_loss(self.model(words[:, :-1]), words[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def parts(self) -> dict[str, Any]:
        """As ``wb.checkpoint.save`` takes them."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state(self) -> dict[str, Any]:
        """As torch.distributed.checkpoint takes them: the same tensors under the same names."""
        leaves, _ = collect(self.parts, current())
        return {name_of(path): value for path, value in leaves.items()}

    def num_bytes(self) -> int:
        """Of all tensors, whole."""
        return sum(v.numel() * v.element_size() for v in self.state().values() if isinstance(v, torch.Tensor))

    def save(self) -> None:
        """Ours."""
        wb.checkpoint.save(self.folder / "ours", **self.parts)

    def load(self) -> None:
        """Ours."""
        wb.checkpoint.load(self.folder / "ours", **self.parts)

    def torch_save(self) -> None:
        """torch's."""
        torch_save(self.state(), storage_writer=FileSystemWriter(self.folder / "theirs", sync_files=True))

    def torch_load(self) -> None:
        """torch's."""
        torch_load(self.state(), storage_reader=FileSystemReader(self.folder / "theirs"))

    def start(self) -> None:
        """Ours, in the background."""
        self.pending.append(wb.checkpoint.save(self.folder / "ours", async_op=True, **self.parts).wait)

    def torch_start(self) -> None:
        """torch's, in the background."""
        writer = FileSystemWriter(self.folder / "theirs", sync_files=True)
        under_way: Any = torch_async_save(self.state(), storage_writer=writer)
        self.pending.append(under_way.result)

    def finish(self, action: Callable[[], object]) -> None:
        """Wait for what is in the background."""
        while self.pending:
            self.pending.pop()()


def work(rounds: int, blocks: int) -> None:
    """What each of the processes runs; the first one prints."""
    wb.init()
    place = [tempfile.mkdtemp(prefix="workbench-saving-") if wb.rank() == 0 else ""]
    torch.distributed.broadcast_object_list(place)
    folder = Path(place[0])
    training = Training(folder, blocks)
    groups: list[dict[str, Callable[[], object]]] = [
        {_SAVE: training.save, _TORCH_SAVE: training.torch_save},
        {_LOAD: training.load, _TORCH_LOAD: training.torch_load},
        {_STALL: training.start, _TORCH_STALL: training.torch_start},
    ]
    time_s: dict[str, float] = {}
    for group in groups:
        time_s |= medians(interleave(group, rounds, 1, around=together, before=training.finish))
        training.finish(training.save)
    num_bytes = training.num_bytes()
    torch.distributed.barrier()
    if wb.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        rows = [[name, f"{time * 1e3:.0f}", f"{num_bytes / time / 1e6:.0f}"] for name, time in time_s.items()]
        judged = [
            side_by_side(ours, time_s[ours], theirs, time_s[theirs], target)
            for ours, theirs, target in [
                (_SAVE, _TORCH_SAVE, SAVE),
                (_LOAD, _TORCH_LOAD, LOAD),
                (_STALL, _TORCH_STALL, RETURN),
            ]
        ]
        stall = time_s[_STALL]
        judged.append(Comparison(f"{_STALL} / {_SAVE}", stall / time_s[_SAVE], STALL, format_seconds(stall)))
        body = (
            f"{num_bytes / 1e6:.0f} MB of weights and AdamW's state on {NUM_PROCESSES} processes, on the disk "
            f"at the end; medians of {rounds} rounds.\n\n{table(['', 'ms', 'MB/s'], rows)}"
        )
        publish("saving", "Checkpoints against torch.distributed.checkpoint", body, judged)
    torch.distributed.barrier()


if __name__ == "__main__":
    sys.exit(launch_or_work("benchmarks.saving", __doc__, [NUM_PROCESSES], work, rounds=11, blocks=9))
