"""Worlds of several simulated hosts: shared memory inside each host, gloo between hosts, on real processes."""

import pytest
import torch

import workbench as wb
from tests.processes import Ranks, run_processes
from tests.training.programs import boxing_forward_and_backward, training_equals_one_device
from workbench.errors import WorldError
from workbench.tensors.world import current, init

pytestmark = pytest.mark.procs


def hosts(*names, **others):
    """The environment of each rank."""
    return [{"WORKBENCH_HOST": name, **others} for name in names]


def exchanges():
    assert current().transport_name == "mixed"
    boxing_forward_and_backward(4, 16)
    for numel in (1, 4001, 70_003):
        for dtype in (torch.float32, torch.bfloat16):
            sums(numel, dtype)
    own_host_only()
    return current().transport_groups


def sums(numel, dtype):
    """All ranks get the same bits, close to one device, and only the first rank of each host sends to other hosts."""
    here = current()
    for group in ([0, 1, 2, 3], [2, 0, 3], [1, 2], [0, 1]):
        tag = here.context.next_sum_tag(tuple(group))
        if here.rank not in group:
            continue
        terms = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
        sent = here.transport.sent_bytes
        total = here.transport.all_reduce(terms[here.rank], group, "sum", tag, f"sum of {numel} {dtype} over {group}")
        firsts = {min(host, key=group.index) for host in ({0, 1} & {*group}, {2, 3} & {*group}) if host}
        wide = 2 if dtype is torch.bfloat16 and len(firsts) < len(group) else 1  # half numbers travel in 32 bits
        is_sender = len(firsts) == 2 and here.rank in firsts
        assert here.transport.sent_bytes - sent == is_sender * wide * numel * dtype.itemsize
        exact = sum(terms[rank].double() for rank in group)
        torch.testing.assert_close(
            total.double(), exact, rtol=2e-2 if wide == 2 or dtype is torch.bfloat16 else 1e-5, atol=1e-2
        )
        for other in here.transport.all_gather(total, f"compare {numel}") if len(group) == 4 else ():
            assert other.equal(total)


def own_host_only():
    """Two ranks of one host read each other's memory also in a world of several hosts; nothing leaves the host."""
    sent = current().transport.sent_bytes
    x = wb.tensor(torch.arange(12.0).view(4, 3), placement=wb.placement("cpu", ranks=[2, 3]), sbp="S(0)")
    x.to_global(sbp="S(1)").to_global(sbp="B")
    assert current().transport.sent_bytes == sent and current().transport.idle_bytes > 0
    assert [current().transport.overlaps(ranks) for ranks in ([0, 1], [2, 3], [1, 2])] == [False, False, True]


def test_exchanges_of_two_hosts():
    for groups in run_processes(exchanges, 4, environment=hosts("a", "a", "b", "b")):
        assert groups == (
            "ranks [0, 1]: shared (one host, a)",
            "ranks [2, 3]: shared (one host, b)",
            "ranks [0, 1, 2, 3]: gloo (between 2 hosts)",
        )


def train():
    return max(max(training_equals_one_device("mlp", strategy, 3)) for strategy in ("data", "pipeline"))


@pytest.mark.slow
def test_training_on_two_hosts_equals_one_device():
    assert max(run_processes(train, 3, environment=hosts("a", "b", "a"))) < 1e-5


def try_to_join():
    import os

    try:
        init(init_method=os.environ["WORKBENCH_TEST_RENDEZVOUS"], timeout_s=20)
    except WorldError as error:
        return str(error)
    return (current().transport_name, *current().transport_groups)


def join(environment):
    with Ranks(try_to_join, len(environment), environment=environment, joins=False) as ranks:
        return ranks.results()


def test_the_environment_overrides_the_selection():
    assert {found[0] for found in join(hosts("a", "a", "b", WORKBENCH_TRANSPORT="gloo"))} == {"gloo"}
    for text in join(hosts("a", "a", "b", WORKBENCH_TRANSPORT="shared")):
        assert "1 of 3 ranks" in text and "rank 2: it runs on b" in text and "Unset WORKBENCH_TRANSPORT" in text
    one_refuses = [*hosts("a", "a"), *hosts("b", "b", WORKBENCH_TRANSPORT="gloo")]
    assert {found[0] for found in join(one_refuses)} == {"gloo"}
