"""Slices of any strides are copied as torch copies them, and their neighbours are untouched."""

import pytest
import torch

from workbench.transport.messaging.strided_copy import MIN_RUN_BYTES, copy_strided, packing_copy, strided_copy

WHOLE = (6, 5, 40)


def slices(dtype):
    """A cut out of a tensor, as (source, destination) of equal shapes, each a part of something larger."""
    source = torch.arange(1, 1 + 6 * 5 * 40).to(dtype).view(WHOLE)
    for cut in (
        (slice(None), slice(None), slice(None)),  # one run
        (slice(2, 5), slice(None), slice(None)),
        (slice(None), slice(1, 4), slice(None)),
        (slice(1, 5, 2), slice(2, 3), slice(None)),
        (slice(None), slice(None), slice(3, 37)),
    ):
        yield source[cut]
    yield source[0].expand(3, 5, 40)


def places(destination_shape, dtype):
    """Memory for a slice: of its own, and inside of something larger."""
    yield torch.zeros(destination_shape, dtype=dtype)
    yield torch.zeros((destination_shape[0] + 1, destination_shape[1] + 2, destination_shape[2]), dtype=dtype)[1:, 1:-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_any_slice_is_copied_and_its_neighbours_are_untouched(dtype):
    seen = set()
    for source in slices(dtype):
        for destination in places(source.shape, dtype):
            copy = strided_copy(tuple(source.shape), source.stride(), destination.stride(), dtype.itemsize)
            assert copy is not None
            seen.add(len(copy.shape))
            copy_strided(copy, source.data_ptr(), destination.data_ptr())
            assert destination.equal(source)
            base = destination if destination._base is None else destination._base
            assert base.abs().sum() == source.abs().sum()
    assert seen == {1, 2}


def test_short_runs_are_left_to_torch():
    shortest = MIN_RUN_BYTES // 4
    assert strided_copy((8, shortest), (100, 1), (shortest, 1), 4).run_dtype.itemsize == MIN_RUN_BYTES
    assert strided_copy((8, shortest - 1), (100, 1), (shortest - 1, 1), 4) is None
    assert strided_copy((3,), (1,), (1,), 1).shape == (3,)  # bytes of one run, however short
    assert strided_copy((), (), (), 8).shape == (8,)


def test_packing_copies():
    x = torch.randn(4, 3, 128)
    out = torch.empty(4, 128)
    copy_strided(packing_copy(x[:, 1]), x[:, 1].data_ptr(), out.data_ptr())
    assert out.equal(x[:, 1])
    assert packing_copy(x.transpose(0, 2)) is None
    assert packing_copy(torch.view_as_complex(torch.randn(400, 2)).conj()) is None
