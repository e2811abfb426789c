"""Blocks in Triton's interpreter, or compiled on a GPU, against the reference: strides, dtypes, empty shapes."""

import random

import pytest
import torch

from workbench.kernels.blocks import move_blocks, move_blocks_reference, pack, slice_region
from workbench.kernels.launch import identity_element

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]


def values(shape, dtype, generator):
    """Low precision gets small integers: the interpreter rounds to bfloat16 towards zero, a GPU to the nearest."""
    numbers = torch.randn(shape, generator=generator) * 20
    if dtype.itemsize < 4:
        numbers = numbers.round() if dtype.is_floating_point else numbers.abs()
    return numbers.to(dtype)


def view_of(shape, dtype, generator, chance, device):
    """A tensor of ``shape`` with strides of every kind: slices of larger ones, transposed, reversed order of dims."""
    padded = values([size + chance.randrange(3) for size in shape], dtype, generator).to(device)
    if chance.random() < 0.5 and len(shape) > 1:
        order = list(range(len(shape)))
        chance.shuffle(order)
        inverse = [order.index(dim) for dim in range(len(shape))]
        padded = padded.permute(order).contiguous().permute(inverse)
    return slice_region(padded, [(padded.shape[dim] - size, padded.shape[dim]) for dim, size in enumerate(shape)])


@pytest.mark.parametrize("reduction", ["none", "sum", "max", "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_any_strides_equal_the_reference(reduction, dtype, device):
    generator, chance = torch.Generator().manual_seed(0), random.Random(str(dtype) + reduction)
    shapes = [(5,), (3, 4), (2, 3, 5), (2, 1, 3, 2), (0, 4), (), (1, 1), (2, 2, 2, 2, 2)]
    counts = [1 if reduction == "none" else chance.randrange(4) for _ in shapes]
    targets = [view_of(shape, dtype, generator, chance, device) for shape in shapes]
    expected = [target.clone() for target in targets]
    sources = [
        view_of(shape, dtype, generator, chance, device)
        for shape, count in zip(shapes, counts, strict=True)
        for _ in range(count)
    ]
    move_blocks_reference(expected, sources, counts, reduction)
    move_blocks(targets, sources, counts, reduction)
    for found, wanted in zip(targets, expected, strict=True):
        assert torch.equal(found, wanted)


def test_bool_and_complex_blocks_are_copied(device):
    for dtype in (torch.bool, torch.complex64):
        source = (torch.randn(3, 4) > 0).to(dtype).to(device)
        target = torch.zeros(4, 3, dtype=dtype, device=device)
        move_blocks([target], [source.t()], [1], "none")
        assert torch.equal(target, source.t())


def test_packed_slices_are_contiguous_and_go_back_to_their_places(device):
    x = torch.randn(5, 7, 3).to(device)
    regions = [((0, 5), (start, stop), (0, 3)) for start, stop in [(0, 3), (3, 3), (3, 7)]]
    pieces = pack([slice_region(x, region) for region in regions])
    assert all(piece.is_contiguous() for piece in pieces)
    assert pieces[2].tolist() == x[:, 3:].tolist()
    out = torch.empty(7, 3, 5).to(device).permute(2, 0, 1)
    move_blocks([slice_region(out, region) for region in regions], pieces, [1] * 3, "none")
    assert torch.equal(out, x)


def test_terms_of_low_precision_are_rounded_once(device):
    terms = [torch.full((3,), value, dtype=torch.bfloat16, device=device) for value in (256.0, 1.0, 1.0, 2.0)]
    out = torch.empty(3, dtype=torch.bfloat16, device=device)
    move_blocks([out], terms, [4], "sum")
    assert out.tolist() == [260.0] * 3  # one by one each would be lost: 256 + 1 is 256 in bfloat16


def test_a_maximum_propagates_nan_as_torch_does(device):
    terms = [torch.tensor([1.0, torch.nan, 3.0], device=device), torch.tensor([torch.nan, 2.0, 1.0], device=device)]
    out = torch.empty(3, device=device)
    move_blocks([out], terms, [2], "max")
    assert out.isnan().tolist() == [True, True, False]


def test_identity_elements():
    assert identity_element(torch.float32, "max") == -torch.inf and identity_element(torch.int8, "min") == 127
    assert identity_element(torch.bool, "min") is True and identity_element(torch.int64, "sum") == 0


def test_a_move_between_the_same_addresses_finds_its_table(device):
    from workbench.kernels import blocks_triton

    source, target = torch.randn(6, 4, device=device), torch.empty(4, 6, device=device)
    blocks_triton._launches.cache_clear()
    for moved in (source.t(), source.t(), source.view(4, 6)):
        source += 1
        move_blocks([target], [moved], [1], "none")
        assert torch.equal(target, moved)
    found = blocks_triton._launches.cache_info()
    assert (found.hits, found.misses) == (1, 2)
