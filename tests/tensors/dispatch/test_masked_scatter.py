"""``masked_scatter`` as vision-language models call it: it sends counts and sources, never the embeddings."""

import pytest
import torch

import workbench as wb
from workbench.testing import run_ranks

GENERATOR = torch.Generator().manual_seed(0)
WORDS = torch.randint(0, 3, (5, 4), generator=GENERATOR)
EMBEDDED = torch.randn(5, 4, 6, generator=GENERATOR, dtype=torch.float64)
FEATURES = torch.randn(int((WORDS == 0).sum()), 6, generator=GENERATOR, dtype=torch.float64)
WEIGHTS = torch.randn(5, 4, 6, generator=GENERATOR, dtype=torch.float64)


def merge(words, embedded, features):
    mask = (words == 0).unsqueeze(-1).expand_as(embedded)
    return embedded.masked_scatter(mask, features)


def merge_in_place(words, embedded, features):
    merged = embedded * 1
    merged.masked_scatter_((words == 0).unsqueeze(-1), features)
    return merged


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2, 3, 4, 5], [1]], ids=str)
@pytest.mark.parametrize("function", [merge, merge_in_place])
@pytest.mark.parametrize(
    ("words_in", "embedded_in", "features_in"),
    [("S(0)", "S(0)", "B"), ("S(0)", "S(0)", "S(0)"), ("B", "S(2)", "B"), ("B", "S(1)", "S(1)"), ("B", "B", "P"),
     ("S(0)", "P", "B"), ("plain", "S(0)", "B"), ("S(1)", "S(0)", "plain")],
)  # fmt: skip
def test_values_and_gradients_are_those_of_one_device(words_in, embedded_in, features_in, function, ranks):
    leaves = [tensor.clone().requires_grad_() for tensor in (EMBEDDED, FEATURES)]
    expected = function(WORDS, *leaves)
    expected_grads = torch.autograd.grad((expected * WEIGHTS).sum(), leaves)

    def program():
        placement = wb.placement("cpu", ranks=ranks)

        def place(tensor, sbp):
            if sbp == "plain":
                return tensor.clone()
            return wb.to_global(tensor.clone(), placement=placement, sbp="B").to_global(sbp=sbp).detach()

        embedded, features = (
            place(EMBEDDED, embedded_in).requires_grad_(),
            place(FEATURES, features_in).requires_grad_(),
        )
        result = function(place(WORDS, words_in), embedded, features)
        wanted = [embedded] if features_in == "plain" else [embedded, features]
        grads = torch.autograd.grad((result * place(WEIGHTS, "B")).sum(), wanted)
        return [result.detach().full_tensor(), *(grad.full_tensor() for grad in grads)]

    for found in run_ranks(program, max(ranks) + 1):
        for ours, theirs in zip(found, [expected.detach(), *expected_grads], strict=False):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sbp", ["S(0)", "S(2)"])
def test_split_embeddings_are_not_gathered(sbp):
    def program():
        placement = wb.placement.all("cpu")
        embedded = wb.to_global(EMBEDDED.clone(), placement=placement, sbp="B").to_global(sbp=sbp)
        words = wb.to_global(WORDS.clone(), placement=placement, sbp="B").to_global(
            sbp="S(0)" if sbp == "S(0)" else "B"
        )
        features = wb.to_global(FEATURES.clone(), placement=placement, sbp="B")
        before = embedded._spec.world.traffic.sent_bytes
        result = merge(words, embedded, features)
        return str(result.sbp[0]), embedded._spec.world.traffic.sent_bytes - before

    for found, sent in run_ranks(program, 2):
        assert found == sbp and sent <= 64


def test_too_few_elements_and_other_dtypes_are_errors():
    def program(features):
        placement = wb.placement.all("cpu")
        embedded = wb.to_global(EMBEDDED.clone(), placement=placement, sbp="B").to_global(sbp="S(0)")
        words = wb.to_global(WORDS.clone(), placement=placement, sbp="B")
        return merge(words, embedded, features).full_tensor()

    with pytest.raises(RuntimeError, match=r"source has 6 elements, .*give as many"):
        run_ranks(lambda: program(FEATURES[:1].clone()))
    with pytest.raises(RuntimeError, match="source has 0 elements"):
        run_ranks(lambda: program(FEATURES[:0].clone()))
    with pytest.raises(RuntimeError, match="one dtype"):
        run_ranks(lambda: program(FEATURES.float()))


def test_a_mask_without_true_needs_no_source():
    def program():
        x = wb.ones(4, 2, placement=wb.placement.all("cpu"), sbp="S(0)")
        return x.masked_scatter(x > 1, torch.empty(0)).full_tensor()

    assert all(torch.equal(found, torch.ones(4, 2)) for found in run_ranks(program))
