"""Functions of torch that share their name with one of torch.nn.functional, and take other arguments."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.tensors.dispatch.arguments import parameters_of
from workbench.tensors.dispatch.registry import COMPOSITES, EXACT, HANDLERS, RULES
from workbench.testing import run_ranks

_DATA = torch.Generator().manual_seed(2)


def random(*shape):
    return torch.rand(shape, generator=_DATA, dtype=torch.float64)


IDS = torch.tensor([[1, 4], [2, 2], [0, 3]])
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
# (function of the operands, the operands; the first is split)
CALLS = {
    "embedding": (lambda ids, table: torch.embedding(table, ids, 2, False, False), (IDS, random(5, 4))),
    "embedding by frequency": (lambda ids, table: torch.embedding(table, ids, -1, True), (IDS, random(5, 4))),
    "batch_norm": (
        lambda x, w, b, m, v: torch.batch_norm(x, w, b, m, v, True, 0.3, 1e-3, False) + m + v,
        (random(6, 3), random(3), random(3), random(3), random(3)),
    ),
    "batch_norm with statistics": (
        lambda x, w, b, m, v: torch.batch_norm(x, w, b, m, v, False, 0.3, 1e-3, False),
        (random(6, 3), random(3), random(3), random(3), random(3)),
    ),
    "instance_norm": (
        lambda x, w, b, m, v: torch.instance_norm(x, w, b, m, v, True, 0.3, 1e-3, False) + (m + v)[:, None],
        (random(6, 3, 4), random(3), random(3), random(3), random(3)),
    ),
    "layer_norm": (lambda x, w, b: torch.layer_norm(x, (3,), w, b, 1e-3, False), (random(6, 3), random(3), random(3))),
    "group_norm": (lambda x, w, b: torch.group_norm(x, 2, w, b, 1e-3, False), (random(6, 4), random(4), random(4))),
    "dropout": (lambda x: torch.dropout(x, 0.5, False), (random(6, 3),)),
    "softmax": (lambda x: torch.softmax(x, 0, torch.float64), (random(6, 3),)),
    "frobenius_norm": (lambda x: torch.frobenius_norm(x, [0, 1], True), (random(6, 3),)),
    "ctc_loss": (
        lambda x, t: torch.ctc_loss(x.log_softmax(2), t, [4, 4, 4], [2, 2, 2], 0, 2, True),
        (random(4, 3, 6), IDS + 1),
    ),
    "poisson_nll_loss": (lambda x, t: torch.poisson_nll_loss(x, t, False, True, 1e-6, 0), (random(6, 3), random(6, 3))),
}
PAIRS = {
    "binary_cross_entropy_with_logits": (lambda x, t, n: torch.binary_cross_entropy_with_logits(x, t, t, x, n)),
    "kl_div": (lambda x, t, n: torch.kl_div(x, t, n, log_target=True)),
    "hinge_embedding_loss": (lambda x, t, n: torch.hinge_embedding_loss(x, SIGNS, 0.5, n)),
    "margin_ranking_loss": (lambda x, t, n: torch.margin_ranking_loss(x, t, SIGNS.expand(6, 4), 0.5, n)),
    "cosine_embedding_loss": (lambda x, t, n: torch.cosine_embedding_loss(x, t, SIGNS[:2].repeat(3), 0.5, n)),
    "triplet_margin_loss": (lambda x, t, n: torch.triplet_margin_loss(x, t, x * 0.5 + t, 0.5, 2.0, 1e-6, True, n)),
}
"""Losses of a pair; the number is the reduction."""
CALLS |= {
    f"{name} {number}": (lambda x, t, f=function, n=number: f(x, t, n), (random(6, 4), random(6, 4)))
    for name, function in PAIRS.items()
    for number in (0, 1, 2)
}


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated:UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_function_of_torch_has_its_own_arguments(name):
    function, operands = CALLS[name]
    expected = function(*(x.clone() for x in operands))

    def program():
        p = wb.placement.all()
        return function(
            *(wb.tensor(x, placement=p, sbp="B" if number else "S(0)") for number, x in enumerate(operands))
        ).full_tensor()

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected)


COMPATIBLE = {
    "dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "softmax", "log_softmax", "embedding_bag", "tanh",
}  # fmt: skip
"""Their handlers and composites read both orders."""


def test_all_pairs_with_unlike_signatures_are_known():
    """A composite is found by name: torch may have added a function that takes other arguments."""
    unlike = set()
    for name in dir(F):
        functional, of_torch = getattr(F, name), getattr(torch, name, None)
        if of_torch is None or of_torch is functional or not any(name in t for t in (COMPOSITES, HANDLERS, RULES)):
            continue
        names = [[n for n, stands, _ in p if stands] for p in parameters_of(functional)]
        others = [[n for n, stands, _ in p if stands] for p in parameters_of(of_torch)]
        if names and any(ours[: len(names[0])] != names[0][: len(ours)] for ours in others):
            unlike.add(name)
    known = {name for name in unlike if getattr(torch, name) in EXACT or getattr(F, name) in EXACT}
    assert {"embedding", "kl_div", "batch_norm"} <= known
    assert unlike - known <= COMPATIBLE
