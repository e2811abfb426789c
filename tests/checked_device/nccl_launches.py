"""Calls of a played NCCL among the launches that the checked device counts.

No ``conftest.py`` may stand in this package: pytest reads such files in every run that looks through ``tests``, also on
a GPU, where torch would take the checked device for the machine's accelerator.
"""

import pytest

from tests.checked_device.counts import count_launch, uncounted
from tests.transport.played_nccl import Call, PlayedNccl

_CALLS = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "batch_isend_irecv", "irecv", "isend", "reduce_scatter",
    "reduce_scatter_tensor",
)  # fmt: skip


def count_nccl_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of NCCL counts as one launch, of that name, and not as what plays it."""

    def played(function, name=None):
        def call(*args, **options):
            if name is not None:
                count_launch(name)
            with uncounted():
                return function(*args, **options)

        return call

    for name in _CALLS:
        monkeypatch.setattr(PlayedNccl, name, played(getattr(PlayedNccl, name), name))
    monkeypatch.setattr(PlayedNccl, "run", played(PlayedNccl.run))
    monkeypatch.setattr(Call, "wait", played(Call.wait))
