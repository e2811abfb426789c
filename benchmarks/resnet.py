"""Residual networks of convolutions in plain torch (He et al., arXiv 1512.03385), for small images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

Norm = Callable[[int], nn.Module]
"""Number of channels -> norm; ``no_norm`` leaves them out."""


def no_norm(channels: int) -> nn.Module:
    """A network without norms."""
    return nn.Identity()


class Block(nn.Module):
    """Two convolutions with norms beside a residual, which has one of its own where the shape changes."""

    def __init__(self, before: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False), norm(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), norm(channels)
        changes = stride > 1 or before != channels
        beside = [nn.Conv2d(before, channels, 1, stride, bias=False), norm(channels)] if changes else []
        self.beside = nn.Sequential(*beside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, before, height, width) -> (batch, channels, height / stride, width / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.beside(x))


class ResNet(nn.Module):
    """A convolution, blocks whose first ones halve the image, and a linear layer.

    Args:
        widths: channels of each group of blocks.
        num_blocks: in each group.
        norm: makes a norm for so many channels.
        num_classes: what the last layer tells apart.
    """

    def __init__(
        self, widths: Sequence[int], num_blocks: int, norm: Norm = nn.BatchNorm2d, num_classes: int = 10
    ) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, widths[0], 3, padding=1, bias=False), norm(widths[0])
        blocks, before = [], widths[0]
        for group, channels in enumerate(widths):
            for number in range(num_blocks):
                blocks.append(Block(before, channels, 2 if group and not number else 1, norm))
                before = channels
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(before, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, height, width) -> scores (batch, classes)."""
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        return self.head(x.mean((2, 3)))


def resnet_small(norm: Norm = nn.BatchNorm2d) -> ResNet:
    """Three blocks of 16, 32 and 64 channels: nine norms."""
    return ResNet((16, 32, 64), 1, norm)


def resnet18(norm: Norm = nn.BatchNorm2d) -> ResNet:
    """ResNet-18 with the first layer for images of 32 x 32: twenty norms."""
    return ResNet((64, 128, 256, 512), 2, norm)
