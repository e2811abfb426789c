"""Simulated ranks: messages that are not what their receiver expects, and turns."""

import threading
import time

import pytest
import torch

from tests.timeouts import WAIT_TIMEOUT_S
from workbench.errors import CollectiveAborted
from workbench.tensors.world import current
from workbench.testing import run_ranks


@pytest.mark.parametrize(
    "sent",
    [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int32), torch.ones(1)],
    ids=["float64", "int32", "one element"],
)
def test_a_message_of_another_dtype_or_size_is_neither_cast_nor_broadcast(sent):
    def program(rank):
        exchange = ([(1, sent)], []) if rank == 0 else ([], [(0, torch.empty(3))])
        current().transport.exchange(*exchange, 0, "rows")

    with pytest.raises(CollectiveAborted) as caught:
        run_ranks(program, 2)
    assert "ranks diverged: rank 1 called rows and expects 12 bytes of torch.float32" in str(caught.value)
    assert f"while rank 0 called rows and sent {sent.nbytes} of {sent.dtype}" in str(caught.value)


def test_a_sum_has_terms_of_one_dtype():
    def program(rank):
        term = torch.ones(3, dtype=torch.bfloat16 if rank else torch.float32)
        current().transport.all_reduce(term, [0, 1], "sum", 0, "a sum")

    with pytest.raises(CollectiveAborted, match=r"ranks diverged: .*a sum .*torch\.(bfloat16|float32)"):
        run_ranks(program, 2)


def test_a_rank_that_computes_for_long_has_its_turn_to_the_end():
    """So that ranks which draw from the one generator of the process draw one after the other."""
    events = []

    def program(rank):
        events.append(rank)
        until_s = time.thread_time() + 0.2
        while time.thread_time() < until_s:
            pass
        events.append(rank)

    run_ranks(program, 3)
    assert events[::2] == events[1::2]


def test_ranks_that_wait_for_each_other_outside_of_exchanges_go_on():
    meet = threading.Barrier(3)
    assert sorted(run_ranks(lambda rank: meet.wait(WAIT_TIMEOUT_S), 3)) == [0, 1, 2]
