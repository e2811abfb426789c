"""Digits for the examples: from files where they are, else made of scikit-learn's."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from workbench import flow
from workbench.flow import mnist_util

IMAGES = np.arange(5 * 28 * 28, dtype=np.uint8).reshape(5, 28, 28)
LABELS = np.array([3, 1, 4, 1, 5], np.uint8)


@pytest.fixture(autouse=True)
def _read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(mnist_util.VARIABLE, str(tmp_path))
    mnist_util._read_all.cache_clear()
    yield
    mnist_util._read_all.cache_clear()


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_files(folder: Path) -> None:
    (folder / "train-images-idx3-ubyte").write_bytes(idx(IMAGES))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS)))
    (folder / "t10k-images.idx3-ubyte").write_bytes(idx(IMAGES[:3]))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(LABELS[:3]))


def test_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path)
    (images, labels), (test_images, test_labels) = flow.data.load_mnist(2, 3)
    assert (images.shape, images.dtype) == ((2, 2, 1, 28, 28), np.float32)
    np.testing.assert_allclose(images.reshape(4, 28, 28), IMAGES[:4] / 255.0)
    assert (labels.tolist(), labels.dtype) == ([[3, 1], [4, 1]], np.int32)
    assert (test_images.shape, test_labels.tolist()) == ((1, 3, 1, 28, 28), [[3, 1, 4]])
    assert mnist_util.load_data(2, 3, "NHWC")[0][0].shape == (2, 2, 28, 28, 1)
    assert not capsys.readouterr().err


def test_without_files_scikit_learns_digits_take_their_place_and_that_is_said_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (images, labels), (test_images, _) = mnist_util.load_data()
    assert (images.shape, labels.shape, test_images.shape) == ((15, 100, 1, 28, 28), (15, 100), (2, 100, 1, 28, 28))
    assert 0.0 <= images.min() < images.max() <= 1.0
    assert labels[0, :5].tolist() == [0, 1, 2, 3, 4]
    mnist_util.load_data(50)
    said = capsys.readouterr().err
    assert said.count("the 1797 digits of scikit-learn are used") == 1
    assert str(tmp_path) in said and mnist_util.VARIABLE in said


def test_mistakes(tmp_path: Path) -> None:
    write_files(tmp_path)
    with pytest.raises(ValueError, match=r"batches of 6, but there are 5 digits for train\. Take 1 to 5"):
        mnist_util.load_data(6)
    with pytest.raises(ValueError, match="data_format='CHW'"):
        mnist_util.load_data(2, 2, "CHW")
    (tmp_path / "t10k-labels-idx1-ubyte").rename(tmp_path / "moved")
    mnist_util._read_all.cache_clear()
    with pytest.raises(ValueError, match="has 3 of the 4 files of MNIST; t10k-labels-idx1-ubyte is missing"):
        mnist_util.load_data(2)
    for content, words in [(idx(LABELS)[:-1], "4 bytes of elements, 5 for shape"), (b"text", "it begins with b'text'")]:
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            mnist_util.load_data(2)
