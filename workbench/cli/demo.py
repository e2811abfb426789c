"""Train a small network on handwritten digits under four strategies and check each against one device.

The data are scikit-learn's 1797 images of 8x8 pixels, the network a perceptron with four layers, the strategies data,
model, pipeline and hybrid (the first layers data parallel, the last ones model parallel). Exits with 1 if a strategy's
losses or final weights differ from those of one device.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from workbench.cli import results

if TYPE_CHECKING:
    import torch

IMAGE_SIZE, NUM_CLASSES = 64, 10
_LARGEST_PIXEL = 16


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Handwritten digits: images (1797, 64) with values from 0 to 1, and their classes (1797,)."""
    import torch
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / _LARGEST_PIXEL, torch.tensor(classes)


def make_mlp() -> torch.nn.Module:
    """A perceptron 64-256-256-128-10 with ReLU; its layers are ``fc1``, ``fc2``, ``fc3`` and ``head``."""
    from collections import OrderedDict

    from torch import nn

    return nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(IMAGE_SIZE, 256),
            relu1=nn.ReLU(),
            fc2=nn.Linear(256, 256),
            relu2=nn.ReLU(),
            fc3=nn.Linear(256, 128),
            relu3=nn.ReLU(),
            head=nn.Linear(128, NUM_CLASSES),
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench demo``."""
    results.add_run_arguments(parser, batch_size=128)
    results.add_output_arguments(parser, report="out/report.html")


def run(args: argparse.Namespace) -> int:
    """Compare the four strategies; the exit code is 0 if all equal one device."""
    from torch.nn.functional import cross_entropy

    results.require("demo", "sklearn")
    job = results.Job(make_mlp, digits(), cross_entropy)
    return results.compare_and_present(job, results.STRATEGIES, args)
