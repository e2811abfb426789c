"""Runs a small program on one device and on simulated ranks, and compares everything it returns."""

import cmath
import warnings

import torch
from torch.utils._pytree import tree_flatten, tree_map

import workbench as wb
from workbench.tensors.dispatch.dispatcher import FallbackWarning
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor
from workbench.testing import run_ranks

_generator = torch.Generator().manual_seed(0)
SHAPES = {"a": (5, 3), "b": (5, 3), "w": (3, 4), "v": (3,), "s": (), "c": (5, 8)}
DATA = {name: torch.randn(s, dtype=torch.float64, generator=_generator) for name, s in SHAPES.items()}
LAYOUTS = [
    (2, [0, 1], ["S(0)", "B"]),
    (2, [1, 0], ["S(1)", "S(0)"]),
    (3, [0, 1], ["B", "S(0)"]),  # rank 2 holds placeholders only
    (3, [2, 0], ["S(0)", "S(1)"]),
    (4, [[0, 1], [2, 3]], [("S(0)", "B"), ("B", "S(1)")]),
]
PARTIAL = [(2, [0, 1], ["P", "B"]), (3, [0, 1], ["S(1)", "P"]), (4, [[0, 1], [2, 3]], [("P", "S(0)"), ("B", "P")])]
"""Layouts with partial sums, which parameters do not have."""


class Maker:
    """``make("a")``: the tensor of that name, plain on one device, else global; layouts are dealt out in turn."""

    def __init__(self, placement=None, layouts=()):
        self.placement, self.layouts, self.num_made = placement, layouts, 0

    def __call__(self, name, grad=True):
        tensor = DATA[name].clone()
        if self.placement is not None:
            layout = self.layouts[self.num_made % len(self.layouts)]
            self.num_made += 1
            entries = [layout] if isinstance(layout, str) else layout
            sbp = [e if not e.startswith("S") or int(e[2]) < tensor.dim() else "B" for e in entries]
            placement = wb.placement("cpu", ranks=self.placement)
            with torch.no_grad():
                tensor = wb.tensor(tensor, placement=placement, sbp=["B"] * len(sbp)).to_global(sbp=sbp)
        return tensor.requires_grad_() if grad else tensor


class Layer(torch.nn.Module):
    """A layer whose weight is ``make("w")``."""

    def __init__(self, make):
        super().__init__()
        self.weight = torch.nn.Parameter(make("w", False))

    def forward(self, x):
        return (x @ self.weight).tanh()


def logical(result):
    """The result with logical values in place of global tensors; all ranks call it."""
    return tree_map(lambda leaf: value_on_all_ranks(leaf) if isinstance(leaf, GlobalTensor) else leaf, result)


def assert_same(found, expected, where):
    """Equal structure, tensors and floats to 1e-7, everything else exactly."""
    leaves, structure = tree_flatten(found)
    wanted, wanted_structure = tree_flatten(expected)
    assert structure == wanted_structure, where
    for number, (leaf, want) in enumerate(zip(leaves, wanted, strict=True)):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(
                leaf, want.detach(), rtol=1e-7, atol=1e-9, msg=lambda m, n=number: f"{where}, item {n}: {m}"
            )
        elif isinstance(want, (float, complex)):
            assert cmath.isclose(leaf, want, rel_tol=1e-7, abs_tol=1e-9), (where, number, leaf, want)
        else:
            assert leaf == want, (where, number)


def assert_as_one_device(program, layouts=LAYOUTS):
    """``program(make)`` gives the same on one device and on every rank under every one of ``layouts``."""
    expected = logical(program(Maker()))
    for num_ranks, placement, sbps in layouts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            found = run_ranks(lambda p=placement, s=sbps: logical(program(Maker(p, s))), num_ranks)
        for rank, result in enumerate(found):
            assert_same(result, expected, f"{program.__name__}, {sbps} on {placement}, rank {rank}")
