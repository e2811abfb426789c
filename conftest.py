"""Examples in docstrings run as rank 0 of a simulated world of two: creation and shapes need no other rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel's module is imported


@pytest.fixture(autouse=True)
def _example_world(request: pytest.FixtureRequest) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import torch
    from torch import nn

    import workbench as wb
    from workbench.core.placement import Placement
    from workbench.runtime.transport.threads import ThreadHub, ThreadTransport
    from workbench.runtime.world import Simulated, World

    world = World(0, 2, torch.device("cpu"), ThreadTransport(ThreadHub(2), 0))
    world.generator = torch.Generator().manual_seed(0)
    namespace = request.getfixturevalue("doctest_namespace")
    namespace.update(wb=wb, torch=torch, nn=nn, Placement=Placement)
    with Simulated(world):
        yield
