"""Examples in docstrings run as rank 0 of a simulated world of two, which creation and shapes do not talk to.

Those that spread a module, for which all ranks meet, run in a world of one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def _has_interpreter() -> bool:
    """To run kernels without a GPU. Triton 3.6, which torch 2.11 asks for, has one that fails in new NumPy."""
    try:
        return tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)
    except PackageNotFoundError:
        return False


if shutil.which("nvidia-smi") is None and _has_interpreter():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel's module is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--files-that-say=PATTERN``, for a part of the tests; see the Makefile."""
    parser.addoption("--files-that-say", metavar="PATTERN", help="leave out Python files that PATTERN is not found in")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without the marker that is asked for need not be imported, which is half of a collection's time."""
    pattern = config.getoption("files_that_say")
    if not pattern or collection_path.suffix != ".py":
        return None
    return None if re.search(pattern, collection_path.read_text(encoding="utf-8")) else True


@pytest.fixture(autouse=True)
def _example_world(request: pytest.FixtureRequest) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import torch
    import torch.nn.functional as F
    from torch import nn

    import workbench as wb
    from workbench import flow
    from workbench.core.placement import Placement
    from workbench.tensors.simulated import Simulated
    from workbench.tensors.world import World
    from workbench.transport.threads import ThreadHub, ThreadTransport

    sources = [example.source for example in request.node.dtest.examples]
    meets_others = any(
        name in source for source in sources for name in ("parallelize(", "partition_stages(", ".to_global(")
    )
    names_two = any("ranks=[0, 1]" in source for source in sources)  # what such an example boxes moves nothing
    num_ranks = 1 if meets_others and not names_two else 2
    world = World(0, num_ranks, torch.device("cpu"), ThreadTransport(ThreadHub(num_ranks), 0))
    world.generator = torch.Generator().manual_seed(0)
    namespace = request.getfixturevalue("doctest_namespace")
    namespace.update(wb=wb, flow=flow, torch=torch, nn=nn, F=F, Placement=Placement)
    with Simulated(world):
        yield
