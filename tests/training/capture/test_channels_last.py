"""Convolutions of a part with their channels last: the same numbers, in the strides that were recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.training.capture.channels_last import with_channels_last

CLONE, CONVOLUTION = torch.ops.aten.clone.default, torch.ops.aten.convolution.default


def _recorded(part: Callable[..., object], values: Sequence[torch.Tensor]) -> fx.GraphModule:
    def operators(*values: torch.Tensor) -> object:
        return part(*values)

    graph: fx.GraphModule = make_fx(operators)(*values)
    return graph


def _trained(images: torch.Tensor, first: torch.Tensor, second: torch.Tensor, head: torch.Tensor) -> object:
    """Two convolutions beside a residual, forward and backward."""
    weights = [weight.detach().requires_grad_() for weight in (first, second, head)]
    y = F.conv2d(images, weights[0], padding=1).relu_()
    z = F.relu(F.conv2d(y, weights[1], padding=1) + y)
    loss = F.linear(z.flatten(1), weights[2]).square().mean()
    return loss.detach(), z.detach(), *torch.autograd.grad(loss, weights)


def _operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, dtype=torch.float64) for size in ((4, 3, 6, 5), (8, 3, 3, 3), (8, 8, 3, 3), (2, 8 * 30))]


def test_the_numbers_and_strides_are_those_of_the_operators() -> None:
    values = _operands()
    graph = _recorded(_trained, values)
    turned = with_channels_last(graph, values)
    assert turned is not graph
    for one, other in zip(graph(*values), turned(*values), strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


def test_each_image_is_turned_once() -> None:
    values = _operands()
    turned = with_channels_last(_recorded(_trained, values), values)
    copied = [node for node in turned.graph.nodes if node.target is CLONE]
    before, after = (
        [node for node in copied if node.kwargs["memory_format"] is order]
        for order in (torch.channels_last, torch.contiguous_format)
    )
    assert len(before) == 3  # the images and two weights
    assert len(after) <= 3  # the result and the gradients of two weights


def test_values_that_are_written_to_are_left_as_they_are() -> None:
    def writes(images: torch.Tensor, weight: torch.Tensor) -> object:
        y = F.conv2d(F.conv2d(images, weight, padding=1), weight, padding=1)
        images.mul_(2)
        return y + images

    values = [torch.randn(2, 3, 4, 4), torch.randn(3, 3, 3, 3)]
    graph = _recorded(writes, values)
    assert with_channels_last(graph, values) is graph


@pytest.mark.parametrize("num_convolutions", [0, 1])
def test_few_convolutions_are_left_as_they_are(num_convolutions: int) -> None:
    def part(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(images, weight) if num_convolutions else images + 1

    values = [torch.randn(2, 3, 4, 4), torch.randn(3, 3, 3, 3)]
    graph = _recorded(part, values)
    assert with_channels_last(graph, values) is graph


def test_sequences_have_no_channels_to_turn() -> None:
    def part(words: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv1d(F.conv1d(words, weight), weight)

    values = [torch.randn(2, 3, 9), torch.randn(3, 3, 3)]
    turned = with_channels_last(_recorded(part, values), values)
    assert not [node for node in turned.graph.nodes if node.target is CLONE]
