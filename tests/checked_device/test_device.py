"""The device itself: it computes what the host computes, refuses what a GPU refuses, and counts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.checked_device import DEVICE, counted, kernels

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
    assert (counts.copies_from_host, counts.bytes_from_host, counts.waits.total()) == (1, 16, 1)


def test_what_the_host_waits_for_is_counted():
    x = torch.arange(3.0, device=DEVICE)
    calls = [
        lambda: x.sum().item(),
        lambda: bool(x[1] > 0),
        x.nonzero,
        x.cpu,
        lambda: x[x > 0],
        lambda: torch.equal(x, x),
        lambda: x.repeat_interleave(x.long()),
    ]
    for call in calls:
        with counted() as counts:
            call()
        assert counts.waits.total() == 1, (call, counts)
    with counted() as counts:
        x.to(DEVICE), x.view(3, 1), x * 2, x.sum(), torch.ones(2, device=DEVICE), x.clone()
        x.repeat_interleave(x.long(), output_size=3)
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


def test_a_copy_to_pinned_memory_is_late():
    device, places = torch.ones(3, device=DEVICE), [torch.zeros(3).pin_memory() for _ in range(2)]
    with counted() as counts:
        places[0].copy_(device, non_blocking=True)
        device.mul_(2)
        places[1].copy_(device, non_blocking=True)
    assert not counts.waits and places[0].tolist() == [1, 1, 1] and places[1].isnan().all()
    torch.checked.synchronize()
    assert places[1].tolist() == [2, 2, 2]


def test_the_host_may_not_write_to_pinned_memory_before_it_has_waited():
    pinned = torch.ones(3).pin_memory()
    with counted() as counts:
        device = pinned.to(DEVICE, non_blocking=True)
    assert not counts.waits and counts.bytes_from_host == pinned.nbytes
    assert device.tolist() == [1, 1, 1]  # waits
    pinned.fill_(2)
    device.copy_(pinned, non_blocking=True).mul_(2)
    pinned.zero_()
    with pytest.raises(AssertionError, match=r"pinned memory of shape \(3,\) was written before it was copied"):
        device.sum().item()


def test_the_host_waits_for_copies_of_pageable_memory():
    host = torch.ones(3)
    with counted() as counts:
        device = host.to(DEVICE, non_blocking=True)
        host.fill_(2)
        assert device.tolist() == [1, 1, 1]
    assert counts.waits[kernels.PAGEABLE] == 1
