"""The device itself: it computes what the host computes, refuses what a GPU refuses, and counts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.checked_device import DEVICE, counted

MIXED = "Expected all tensors to be on the same device"


def test_a_step_of_plain_torch_gives_the_hosts_numbers_without_a_wait():
    torch.manual_seed(0)
    host = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.LayerNorm(16))
    device = copy.deepcopy(host).to(DEVICE)
    images, classes = torch.randn(5, 1, 8, 8), torch.randint(16, (5,))
    losses, launches = [], []
    for model, where in ((host, torch.device("cpu")), (device, DEVICE)):
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = images.to(where), classes.to(where)
        for _ in range(3):
            with counted() as counts:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.detach().cpu())
            launches.append(counts.launches.total())
            assert not counts.waits and not counts.copies_from_host
    torch.testing.assert_close(torch.stack(losses[:3]), torch.stack(losses[3:]))
    assert launches[:3] == [0, 0, 0] and launches[5] == launches[4] > 10


@pytest.mark.parametrize(
    "meet",
    [
        lambda device, host: device + host,
        lambda device, host: host.sum().add_(device.sum()),
        lambda device, host: device.add_(host),
        lambda device, host: torch.stack([device, host]),
        lambda device, host: F.embedding(torch.tensor([1]), device),
        lambda device, host: torch._foreach_add([device], [host]),
        lambda device, host: torch.mm(host, device),
    ],
)
def test_a_tensor_of_the_host_is_refused(meet):
    with pytest.raises(RuntimeError, match=MIXED):
        meet(torch.ones(3, 3, device=DEVICE), torch.ones(3, 3))


def test_numbers_and_indices_of_the_host_are_taken():
    x = torch.ones(3, device=DEVICE)
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2] and (torch.tensor(2) * x).device == DEVICE
    with counted() as counts:
        assert x[torch.tensor([0, 2])].shape == (2,)
    assert (counts.copies_from_host, counts.bytes_from_host, counts.pageable_bytes) == (1, 16, 16)


def test_what_the_host_waits_for_is_counted():
    x = torch.arange(3.0, device=DEVICE)
    calls = [
        lambda: x.sum().item(),
        lambda: bool(x[1] > 0),
        x.nonzero,
        x.cpu,
        lambda: x[x > 0],
        lambda: torch.equal(x, x),
    ]
    for call in calls:
        with counted() as counts:
            call()
        assert counts.waits.total() == 1, (call, counts)
    with counted() as counts:
        x.to(DEVICE), x.view(3, 1), x * 2, x.sum(), torch.ones(2, device=DEVICE), x.clone()
    assert not counts.waits


def test_views_and_writes_share_memory_and_out_grows():
    x = torch.zeros(2, 3, device=DEVICE)
    x.t()[1].add_(1)
    assert x.tolist() == [[0, 1, 0], [0, 1, 0]] and x.t().untyped_storage()._cdata == x.untyped_storage()._cdata
    out = torch.empty(0, device=DEVICE)
    assert torch.add(x, 1, out=out) is out and out.shape == (2, 3)
    assert copy.deepcopy(x).data_ptr() != x.data_ptr()


def test_its_generator_is_its_own():
    torch.manual_seed(3)
    first, of_host = torch.rand(4, device=DEVICE), torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(of_host, torch.rand(2)) and torch.equal(first, torch.rand(4, device=DEVICE))


def test_a_generator_of_the_host_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'checked' device type for generator"):
        torch.randperm(3, generator=torch.Generator(), device=DEVICE)


def test_foreach_is_one_launch():
    parts = [torch.ones(2, device=DEVICE) for _ in range(5)]
    with counted() as counts:
        torch._foreach_mul_(parts, 2.0)
    assert counts.launches.total() == 1 and parts[4].tolist() == [2, 2]
