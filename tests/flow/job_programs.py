"""Runs programs with job functions on simulated ranks: fewer steps, smaller batches, digits made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from tests.flow.running import run, source_of
from workbench.flow import config, data, mnist_util, scope
from workbench.flow.jobs.function import JobFunction
from workbench.tensors.world import current
from workbench.testing import run_ranks

BATCH_SIZE = 12
NUM_STEPS = 3


def made_up_digits(batch_size: int, *args: Any) -> Any:
    """A few batches in the form of ``load_data``; the same in every call."""
    rng = np.random.default_rng(0)
    images = rng.random((NUM_STEPS, batch_size, 1, 28, 28), dtype=np.float32) * (rng.random((28, 28)) < 0.2)
    labels = rng.integers(0, 10, (NUM_STEPS, batch_size), dtype=np.int32)
    return (images.astype(np.float32), labels), (images[:1].astype(np.float32), labels[:1])


@contextmanager
def changed(on_one_device: bool) -> Iterator[dict[int, list[Any]]]:
    """The surroundings of a program; gives the results of its job calls by rank.

    On one device, numbers of devices and scopes mean nothing.
    """
    calls: dict[int, list[Any]] = {}
    plain_call = JobFunction.__call__

    def call(self: JobFunction, *args: Any) -> Any:
        result = plain_call(self, *args)
        calls.setdefault(current().rank, []).append(result)
        return result

    patches = [
        mock.patch.object(JobFunction, "__call__", call),
        mock.patch.object(data, "load_mnist", made_up_digits),
        mock.patch.object(mnist_util, "load_data", made_up_digits),
    ]
    if on_one_device:
        patches += [
            mock.patch.object(config, "gpu_device_num"),
            mock.patch.object(scope.placement, "__enter__"),
            mock.patch.object(scope.placement, "__exit__", return_value=None),
        ]
    try:
        for patch in patches:
            patch.start()
        yield calls
    finally:
        for patch in patches:
            patch.stop()
        config.reset()


def losses_of(name: str, num_ranks: int, **values: str) -> list[Any]:
    """What the job calls of a program have returned, the same on every rank."""
    source = source_of(name, **{"BATCH_SIZE": str(BATCH_SIZE)} | values).replace("range(50)", "range(1)")
    source = source.replace("range(3)", "range(1)")
    with changed(on_one_device=num_ranks == 1) as calls:
        run_ranks(lambda rank: run(source), num_ranks)
    for rank in range(1, num_ranks):
        for ours, others in zip(calls[0], calls[rank], strict=True):
            np.testing.assert_array_equal(ours, others)
    return calls[0]
