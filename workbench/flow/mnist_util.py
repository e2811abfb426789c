"""Handwritten digits in batches: ``from workbench.flow import mnist_util``, and ``flow.data.load_mnist(BATCH_SIZE)``.

It reads the four standard files of MNIST (``train-images-idx3-ubyte`` and so on, also ``.gz``) and downloads nothing.
The environment variable ``WORKBENCH_MNIST`` names their folder; the default is ``~/.cache/workbench/mnist``. Without
these files it uses the 1797 digits of scikit-learn (8 x 8), resized to 28 x 28, and says so once on standard error.
"""

from __future__ import annotations

import gzip
import os
import struct
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np

__all__ = ["Batches", "load_data", "load_mnist"]

VARIABLE = "WORKBENCH_MNIST"
Batches = tuple[np.ndarray, np.ndarray]
"""Images (batches, rows, 1, 28, 28) of float32 in [0, 1], and labels (batches, rows) of int32."""

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_NUM_TEST_DIGITS = 297


def load_data(
    train_batch_size: int = 100, test_batch_size: int = 100, data_format: str = "NCHW"
) -> tuple[Batches, Batches]:
    """The digits for training and for testing, each as images and labels by batch, without incomplete batches.

    Args:
        data_format: ``"NCHW"``, or ``"NHWC"`` for images (batches, rows, 28, 28, 1).

    Raises:
        ValueError: there are fewer digits than one batch needs, or a file is damaged.
    """
    with _reading:  # simulated ranks are threads
        found = _read_all(str(Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "workbench" / "mnist")))
    (train, train_labels), (test, test_labels) = (
        _cut(*found[part], size, part) for part, size in (("train", train_batch_size), ("test", test_batch_size))
    )
    if data_format == "NHWC":
        train, test = (np.moveaxis(images, 2, 4) for images in (train, test))
    elif data_format != "NCHW":
        raise ValueError(f"load_data(data_format={data_format!r}): known are 'NCHW' and 'NHWC'.")
    return (train, train_labels), (test, test_labels)


load_mnist = load_data
"""The name in ``flow.data``."""
_reading = threading.Lock()


@cache
def _read_all(folder: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images (n, 1, 28, 28) and labels (n,) by part."""
    names = [name for pair in _FILES.values() for name in pair]
    paths = {name: path for name in names if (path := _find(Path(folder), name)) is not None}
    missing = sorted({*names} - {*paths})
    if not missing:
        return {
            part: (
                read_idx(paths[images])[:, None] / np.float32(255),
                read_idx(paths[labels]).astype(np.int32),
            )
            for part, (images, labels) in _FILES.items()
        }
    if paths:
        raise ValueError(
            f"load_data: {folder} has {len(paths)} of the {len(names)} files of MNIST; "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Put them there, or unset {VARIABLE}."
        )
    sys.stderr.write(
        f"flow: no MNIST files in {folder} (set {VARIABLE} to their folder), so the 1797 digits of scikit-learn are "
        "used, resized from 8 x 8 to 28 x 28.\n"
    )
    return _small_digits()


def _find(folder: Path, name: str) -> Path | None:
    dotted = name.replace("-idx", ".idx")
    names = [name, f"{name}.gz", dotted, f"{dotted}.gz"]
    return next((folder / candidate for candidate in names if (folder / candidate).is_file()), None)


def read_idx(path: Path) -> np.ndarray:
    """An array from a file in IDX format, also compressed: two zero bytes, type, number of dims, sizes, elements.

    Raises:
        ValueError: the file has another format, or is shorter or longer than its header says.
    """
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != 8:
        raise ValueError(f"{path}: it begins with {content[:4]!r}, and IDX files of bytes with b'\\x00\\x00\\x08'.")
    num_dims = content[3]
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    start, size = 4 + 4 * num_dims, int(np.prod(shape))
    if len(content) != start + size:
        raise ValueError(
            f"{path}: {len(content) - start} bytes of elements, {size} for shape {shape}: it is damaged. Copy it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _small_digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's digits, the last ones for testing."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    small = torch.from_numpy(images.reshape(-1, 1, 8, 8).astype(np.float32) / 16)
    large = torch.nn.functional.interpolate(small, (28, 28), mode="bilinear", align_corners=False).numpy()
    labels, cut = labels.astype(np.int32), len(labels) - _NUM_TEST_DIGITS
    return {"train": (large[:cut], labels[:cut]), "test": (large[cut:], labels[cut:])}


def _cut(images: np.ndarray, labels: np.ndarray, size: int, part: str) -> Batches:
    number = len(labels) // size if size >= 1 else 0
    if number == 0:
        raise ValueError(
            f"load_data: batches of {size}, but there are {len(labels)} digits for {part}. Take 1 to {len(labels)}."
        )
    return tuple(array[: number * size].reshape(number, size, *array.shape[1:]) for array in (images, labels))  # type: ignore[return-value]
