"""Sums of gradients in buckets: over several groups, in many small buckets, a few under way at a time."""

import pytest

from tests.training.programs import training_equals_one_device
from workbench.testing import run_ranks
from workbench.training.gradients import reduction
from workbench.transport.threads import ThreadTransport


@pytest.mark.parametrize("strategy", ["*: data | 1x2x2", "hybrid"])
def test_many_small_buckets_give_the_same_training(strategy, monkeypatch):
    under_way, most = [0], [0]
    plain_start = ThreadTransport.start_all_reduce

    def counted_start(transport, tensors, *rest):
        finish = plain_start(transport, tensors, *rest)
        if transport.rank != 0:
            return finish
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])

        def counted_finish():
            under_way[0] -= 1
            return finish()

        return counted_finish

    monkeypatch.setattr(reduction, "BUCKET_BYTES", 64)
    monkeypatch.setattr(ThreadTransport, "start_all_reduce", counted_start)
    for losses, weights in run_ranks(lambda: training_equals_one_device("mlp", strategy, 4, steps=3), 4):
        assert losses < 1e-5 and weights < 1e-5
    assert under_way == [0] and most == [4]
