"""Train two networks on handwritten digits under four strategies and check each against one device.

The data are scikit-learn's 1797 images of 8x8 pixels. The first network has two convolutions, enough work for two
processes to be faster than one. The second is a perceptron with four layers, too small for that. The strategies are
data, model, pipeline and hybrid (the first layers data parallel, the last ones model parallel). The report shows the
convolutions. Exits with 1 if a strategy's losses or final weights differ from those of one device.
"""

from __future__ import annotations

import argparse
from importlib.metadata import distribution
from typing import TYPE_CHECKING

from workbench.cli import results
from workbench.core.options import PRESETS

if TYPE_CHECKING:
    import torch

IMAGE_SIZE, NUM_CLASSES = 64, 10
_LARGEST_PIXEL = 16


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Handwritten digits: images (1797, 64) with values from 0 to 1, and their classes (1797,).

    They are read from the file that scikit-learn brings: to load scikit-learn takes two seconds, on every rank.
    """
    import numpy
    import torch

    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = numpy.loadtxt(str(file), delimiter=",", dtype=numpy.float32)
    images, classes = torch.from_numpy(rows).split([IMAGE_SIZE, 1], dim=1)
    return images / _LARGEST_PIXEL, classes.flatten().long()


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


def make_cnn() -> torch.nn.Module:
    """Two convolutions of 64 channels, ``conv1`` and ``conv2``, and two linear layers, ``fc`` and ``head``; input (n,
    64).
    """
    from collections import OrderedDict

    from torch import nn

    return nn.Sequential(
        OrderedDict(
            image=nn.Unflatten(1, (1, 8, 8)),
            conv1=nn.Conv2d(1, 64, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(64, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc=nn.Linear(64 * 16, 128),
            relu3=nn.ReLU(),
            head=nn.Linear(128, NUM_CLASSES),
        )
    )


NETWORKS = {"Two convolutions and two linear layers": make_cnn, "A perceptron of four small layers": make_mlp}
"""The networks, by the titles of their tables."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``workbench demo``."""
    results.add_run_arguments(parser, batch_size=128)
    results.add_output_arguments(parser, report="out/report.html")


def run(args: argparse.Namespace) -> int:
    """Compare the strategies on both networks; the exit code is 0 if all equal one device."""
    from torch.nn.functional import cross_entropy

    from workbench.session.cluster import Session

    results.require("demo", "sklearn")
    results.check_outputs(args)
    codes = []
    with Session(args.engines) as session:
        for title, make in NETWORKS.items():
            num_weights = sum(weights.numel() for weights in make().parameters())
            print(f"{title}, {num_weights:,} weights:", flush=True)
            job = {"model_fn": make, "dataset": digits(), "loss_fn": cross_entropy}
            codes.append(results.compare_and_present(job, PRESETS, args, session))
            args = argparse.Namespace(**{**vars(args), "out": None, "json": None})  # files show the first network
    return max(codes)
