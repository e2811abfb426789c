"""Several processes on one GPU exchange over CUDA IPC."""

import os
import signal
import time

import pytest
import torch

import workbench as wb
from tests.processes import Ranks
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.errors import CollectiveAborted
from workbench.tensors.global_tensor import spec_of, wrap
from workbench.tensors.world import current, init

pytestmark = [pytest.mark.gpu, pytest.mark.procs]
PAIRS = [("S(0)", "S(1)"), ("S(0)", "B"), ("P", "B"), ("P", "S(0)"), ("S(1)", "B"), ("B", "P")]


def join(**variables):
    os.environ.update(WORKBENCH_TRANSPORT="ipc", **variables)
    init(init_method=os.environ["WORKBENCH_TEST_RENDEZVOUS"], device="cuda:0", timeout_s=60)
    assert current().transport_name == "ipc", current().transport_groups
    return current()


def run(program, num_ranks, *arguments):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with Ranks(program, num_ranks, *arguments, environment={"TRITON_INTERPRET": "0"}, joins=False) as ranks:
        return ranks.results(timeout_s=180)


def boxings(dtype, shapes):
    """Every pair of layouts, repeatedly on changing memory; each rank gets what one device has."""
    world = join()
    placement = Placement.of("cuda", list(range(world.world_size)))
    for round_ in range(5):
        for shape in shapes:
            full = torch.arange(shape[0] * shape[1], device="cuda").view(shape).remainder(61 + round_).to(dtype)
            for source, target in PAIRS:
                before, after = Layout.of(placement, source), Layout.of(placement, target)
                local = full[tuple(slice(*bounds) for bounds in before.region(shape, world.rank))].clone()
                if source == "P" and world.rank:
                    local.zero_()
                x = wrap(local, spec_of(world, before, shape))
                y = x.to_global(sbp=target)
                with torch.no_grad():
                    local.fill_(7)  # the others have a copy, in the order of this rank's stream
                found = y.full_tensor() if target == "P" else y.to_local()
                region = (slice(None),) * 2 if target == "P" else tuple(
                    slice(*bounds) for bounds in after.region(shape, world.rank)
                )  # fmt: skip
                assert found.equal(full[region]), (source, target, shape, dtype, round_)
    return world.transport_groups


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_boxings_equal_one_device(num_ranks, dtype):
    for groups in run(boxings, num_ranks, dtype, [(5, 7), (64, 48), (1001, 515), (3000, 4096)]):
        assert len(groups) == 1 and ": ipc (one host" in groups[0]
        assert "through memory of the host" not in groups[0], groups  # device memory itself was read


def on_streams():
    """Sends from changing streams with slow work: no reader reads too early."""
    world = join()
    peers = [rank for rank in range(world.world_size) if rank != world.rank]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for round_ in range(60):
        stream = streams[round_ % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            a = torch.randn(2048, 2048, device="cuda")
            for _ in range(4):
                a = a @ a / 2048
            value = torch.full((100_000,), 1000.0 * round_ + world.rank, device="cuda") + 0 * a.sum().nan_to_num()
            outs = [torch.empty_like(value) for _ in peers]
            sends = [(peer, value) for peer in peers]
            world.transport.exchange(sends, list(zip(peers, outs, strict=True)), round_, f"round {round_}")
            for peer, out in zip(peers, outs, strict=True):
                assert out.eq(1000.0 * round_ + peer).all()
        torch.cuda.current_stream().wait_stream(stream)
    return True


def test_readers_wait_for_the_writing_stream():
    assert run(on_streams, 3) == [True] * 3


def grow_and_shrink():
    """Large messages are sent once; their memory is freed."""
    world, sizes = join(), []
    other = 1 - world.rank
    for round_ in range(3):
        big = torch.full((100_000_000,), float(10 * round_ + world.rank), device="cuda")
        out = torch.empty_like(big)
        world.transport.exchange([(other, big)], [(other, out)], round_, "big")
        assert out.eq(10.0 * round_ + other).all()
        for tag in range(700):
            world.transport.exchange([(other, big[:5])], [(other, out[:5])], tag, "small")
        sizes.append(world.transport.idle_bytes)
    return sizes


def test_memory_is_freed():
    for sizes in run(grow_and_shrink, 2):
        assert max(sizes) < 400e6


def lose_a_peer():
    world = join()
    world.transport.all_gather(torch.zeros(1, device="cuda"), "start")
    if world.rank == 1:
        torch.randn(8192, 8192, device="cuda").matmul(torch.randn(8192, 8192, device="cuda"))
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        world.transport.exchange([], [(1, torch.empty(5, device="cuda"))], 0, "a boxing")
    except CollectiveAborted as error:
        torch.cuda.synchronize()
        return str(error), time.monotonic() - started, float(torch.ones(3, device="cuda").sum())
    return "nothing happened", 0.0, 0.0


def test_the_death_of_a_peer_ends_a_wait_and_leaves_the_device_usable():
    text, waited_s, total = run(lose_a_peer, 2)[0]
    assert "rank 1 has ended" in text and waited_s < 5 and total == 3.0


def layers():
    join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).cuda()
    x = torch.randn(32, 64, device="cuda")
    truth = model(x).sum()
    placement = wb.placement("cuda", ranks=list(range(wb.world_size())))
    w = wb.tensor(model[0].weight.detach(), placement=placement, sbp="S(0)")
    hidden = torch.relu(wb.tensor(x, placement=placement, sbp="B") @ w.t() + model[0].bias.detach())
    out = hidden.to_global(sbp="B").to_local() @ model[2].weight.t() + model[2].bias
    torch.testing.assert_close(out.sum(), truth, rtol=1e-3, atol=1e-3)
    return True


def test_a_split_layer_equals_one_device():
    assert run(layers, 2) == [True, True]
