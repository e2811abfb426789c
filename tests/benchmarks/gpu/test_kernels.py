"""Kernels are timed without a GPU, from start to end; no time is judged here."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import reporting
from benchmarks.gpu import kernels
from benchmarks.gpu.place import Finding, Place

CPU = Place("cpu")


def test_the_actions_move_what_they_say() -> None:
    actions = kernels.moves(4 * 128 * 128, "cpu")
    copy = actions["plain copy"][0]
    assert isinstance(copy, partial)
    out, (source,) = copy.func.__self__, copy.args  # type: ignore[attr-defined]
    for name in ("plain copy", "pull of 4 slices", "unpack by columns"):
        out.zero_()
        actions[name][0]()
        assert out.equal(source) and actions[name][1] == 2 * source.nbytes
    assert torch.cat(actions["pack by columns"][0](), 1).equal(source)  # type: ignore[arg-type]


def test_both_losses_have_one_gradient() -> None:
    theirs, ours = (action() for action in kernels.losses(8, 100, "cpu").values())
    torch.testing.assert_close(ours, theirs)


def test_dropout_keeps_as_much_as_torchs() -> None:
    theirs, ours = (action() for action in kernels.dropouts(2**16, "cpu").values())
    for kept in (theirs, ours):
        assert isinstance(kept, torch.Tensor)
        assert 0.88 < float((kept != 0).float().mean()) < 0.92


def test_all_of_it_is_timed() -> None:
    *rows, slowest = kernels.bandwidth(CPU)
    names = " ".join(row.what for row in rows if isinstance(row, Finding))
    assert all(name in names for name in ("pull of 4 slices", "pull and sum of 4", "pack by columns", "unpack by"))
    assert isinstance(slowest, reporting.Comparison)
    assert slowest.target == reporting.Target(0.85, at_least=True) and slowest.value > 0
    (loss,), (dropout,) = kernels.loss(CPU), kernels.dropout(CPU)
    assert isinstance(loss, reporting.Comparison) and isinstance(dropout, reporting.Comparison)
    assert loss.target == reporting.Target(1.5, at_least=True) and dropout.target == reporting.Target(1.1)
