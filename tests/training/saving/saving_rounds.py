"""A training run that saves after every step and goes on from the newest checkpoint; killed and started again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import CollectiveAborted

FEATURES, BATCH = 6, 5


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    torch.manual_seed(1)
    return model


def train(folder, strategy, num_steps, pause_s=0.0):
    """Go on for ``num_steps`` steps; the losses. What was reached is in the files ``losses`` and ``starts``."""
    model = wb.parallelize(make_model(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoints = None if folder is None else wb.checkpoint.Checkpoints(folder, keep=2)
    found = checkpoints.load(**parts) if checkpoints else None
    start, losses = found["step"] if found else 0, []
    if folder is not None:
        _append(Path(folder) / "starts", f"{start}\n")
    for step in range(start, start + num_steps):
        batch = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(BATCH, FEATURES, generator=batch), torch.randint(0, 3, (BATCH,), generator=batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if checkpoints:
            _append(Path(folder) / "losses", f"{step} {losses[-1]!r}\n")
            checkpoints.save(step + 1, async_op=step % 3 > 0, **parts)
            time.sleep(pause_s)
    return losses


def resume(folder, strategy, num_steps):
    """``train`` on a rank whose peers may be killed: then it ends with an error that says so, and returns None."""
    try:
        return train(folder, strategy, num_steps)
    except CollectiveAborted:
        return None


def _append(path, line):
    """One write, so that a kill leaves whole lines."""
    if wb.rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(handle, line.encode())
        os.close(handle)
