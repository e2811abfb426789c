"""sbp entries, placements and layouts: parsing, balanced splits, clear errors."""

import numpy as np
import pytest

from tests.oracle import shard
from workbench.core import sbp
from workbench.core.layout import Layout, balanced_bounds
from workbench.core.placement import Placement
from workbench.errors import PlacementError, SbpError


@pytest.mark.parametrize("text", ["S(0)", "B", "P", "P(max)", "P(min)", "S(-1)", "S(0), B", "(S(1), P)", "B, B, S(2)"])
def test_what_prints_parses_to_the_same(text):
    entries = sbp.parse(text)
    assert sbp.parse(str(entries)) == entries


@pytest.mark.parametrize("text", ["", "X", "S", "S(0) B Q", "split(0)", "s(0)", "BP", "S(0)B", "Broadcast", "S(0),,B"])
def test_what_is_no_sbp_is_refused(text):
    with pytest.raises(SbpError, match="one of S"):
        sbp.parse(text)


def test_the_public_spellings():
    assert sbp.split(dim=0) == sbp.split(0) == sbp.Split(0)
    assert sbp.broadcast() is sbp.broadcast
    assert sbp.partial_sum() is sbp.partial_sum
    with pytest.raises(SbpError, match="not an int"):
        sbp.split("0")
    with pytest.raises(SbpError, match="Did you mean"):
        sbp.as_nd_sbp([sbp.split])


def test_dual():
    assert [sbp.dual(entry) for entry in (sbp.split(1), sbp.broadcast, sbp.partial_sum)] == [
        sbp.split(1),
        sbp.partial_sum,
        sbp.broadcast,
    ]
    with pytest.raises(SbpError, match="no gradient"):
        sbp.dual(sbp.partial_max)


@pytest.mark.parametrize(("size", "parts"), [(7, 3), (2, 4), (0, 2), (12, 5), (1, 1)])
def test_balanced_bounds_are_those_of_array_split(size, parts):
    expected = [len(part) for part in np.array_split(np.arange(size), parts)]
    assert [stop - start for start, stop in balanced_bounds(size, parts)] == expected


@pytest.mark.parametrize("text", ["S(0), S(0)", "S(0), S(1)", "B, S(1)", "S(1), B"])
@pytest.mark.parametrize("shape", [(6, 5), (3, 2), (0, 4)])
def test_local_shapes_on_a_grid(text, shape):
    layout = Layout.of(Placement.of("cpu", [[3, 0], [1, 2]]), text)
    expected = shard(np.zeros(shape), layout)
    assert {rank: layout.local_shape(shape, rank) for rank in layout.placement} == {
        r: p.shape for r, p in expected.items()
    }


def test_splits_are_applied_axis_by_axis():
    layout = Layout.of(Placement.of("cpu", [[0, 1], [2, 3]]), "S(0), S(0)")
    assert [layout.local_shape((6,), rank)[0] for rank in range(4)] == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 0], "stands 2 times"),
        ([], "0 ranks"),
        ([-1], "negative"),
        ([[0, 1], [2]], "equally long"),
        (["0"], "str"),
    ],
)
def test_bad_rank_lists(ranks, message):
    with pytest.raises(PlacementError, match=message):
        Placement.of("cpu", ranks)


def test_bad_device_type_offers_the_right_one():
    with pytest.raises(PlacementError, match='Write "cuda"'):
        Placement.of("gpu", [0])


def test_a_rank_that_does_not_exist_is_named_with_the_size_of_the_world():
    with pytest.raises(PlacementError, match="rank 5 does not exist; this world has 2 ranks"):
        Placement.of("cpu", [0, 5]).check_world(2)


def test_the_wrong_number_of_entries_shows_what_to_write():
    with pytest.raises(SbpError, match=r"1 entry .* 2 axes. Give one per axis, e.g. sbp=\"S\(0\), B\""):
        Layout.of(Placement.of("cpu", [[0, 1], [2, 3]]), "S(0)")


def test_a_split_dim_out_of_range_names_both_numbers():
    with pytest.raises(SbpError, match="splits dim 2, but the tensor has 2 dims"):
        Layout.of(Placement.of("cpu", [0, 1]), "S(2)").normalized((4, 4))
    with pytest.raises(SbpError, match="scalar cannot be split"):
        Layout.of(Placement.of("cpu", [0, 1]), "S(0)").normalized(())
    assert Layout.of(Placement.of("cpu", [0, 1]), "S(-1)").normalized((4, 4)).sbp == (sbp.split(1),)


def test_rank_order_is_meaningful():
    layout = Layout.of(Placement.of("cpu", [1, 0]), "S(0)")
    assert layout.region((4,), rank=1) == ((0, 2),)
