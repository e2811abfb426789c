"""Attention on slices of a sequence, in a ring or over heads: the numbers of one device."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.tensors.dispatch.test_attention import distributed, with_gradients
from workbench.kernels import attention_blocks
from workbench.tensors.world import current
from workbench.testing import run_ranks

_DATA = torch.Generator().manual_seed(5)


def random(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=_DATA, dtype=dtype)


MASK = torch.rand(1, 1, 13, 13, generator=_DATA) > 0.4
MASK[0, 0, 2] = False  # a row that sees no key
WINDOW = torch.ones(13, 13).tril().triu(-3).bool()
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "chosen": {"attn_mask": MASK},
    "window": {"attn_mask": WINDOW, "scale": 0.3},
    "padding": {"attn_mask": random(1, 1, 1, 13)},
    "three dims": {"attn_mask": random(1, 13, 13)},
}


def hidden(value, dtype=torch.float64):
    """A causal mask of a text that is padded on the left: its first rows see nothing but a large number."""
    return torch.zeros(1, 1, 13, 13, dtype=dtype).masked_fill(~(WINDOW & (torch.arange(13) > 3)), value)


def attend(given, *operands):
    return F.scaled_dot_product_attention(*operands, **given)


def assert_all_close(found, expected, name):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text: f"{name}: {text}")


@pytest.mark.sampled(3, start=1)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_ring_gives_the_numbers_of_one_device(num_ranks):
    """Heads that no number of ranks divides, groups of heads, uneven slices, keys of another length."""
    cases = []
    for heads, groups in ((5, 5), (5, 1), (10, 5)):
        given = {"enable_gqa": True} if groups < heads else {}
        q, k, v = random(1, heads, 13, 8), random(1, groups, 13, 8), random(1, groups, 13, 8)
        calls = {**CALLS, "a bias for each head": {"attn_mask": random(heads, 13, 13)}}
        cases += [(f"{name}, {heads} heads", (q, k, v), {**given, **call}) for name, call in calls.items()]
        cases.append((f"other keys, {heads} heads", (q, k[:, :, :7], v[:, :, :7]), given))
        cases.append(
            (f"causal, other keys, {heads} heads", (q, k[:, :, :7], v[:, :, :7]), {**given, "is_causal": True})
        )
    cases.append(("values of another width", (random(1, 5, 4, 8), random(1, 5, 9, 8), random(1, 5, 9, 3)), {}))
    expected = [with_gradients(lambda *x, given=given: attend(given, *x), *operands) for _, operands, given in cases]

    def program():
        for (name, operands, given), truth in zip(cases, expected, strict=True):
            split, before = distributed(operands, ["S(2)"] * 3), current().traffic.by_kind.get("ring", 0)
            with wb.debug.trace() as trace:
                found = with_gradients(lambda *x, given=given: attend(given, *x), *split)
            assert_all_close(found, truth, name)
            sent = sum(record.sent_bytes for record in trace.records if record.kind == "ring")
            assert sent == current().traffic.by_kind.get("ring", 0) - before, name
            assert any(record.kind == "ring" for record in trace.records), name

    run_ranks(program, num_ranks)


def by_softmax(query, key, value, mask):
    scores = query @ key.mT * (query.shape[-1] ** -0.5) + mask
    return scores.softmax(-1) @ value


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_see_nothing_but_a_large_number_give_the_mean_of_all_keys(dtype):
    """Beside such a number, the log of a block's sum has no digits left. torch's flash backward loses them too."""
    operands = [random(1, 5, 13, 8, dtype=dtype) for _ in range(3)]
    masks = [hidden(value, dtype) for value in (torch.finfo(dtype).min, -1e9, -1e4)]
    masks += [masks[0][0, 0], masks[0][:, :, :1], torch.full((13, 1), -1e9, dtype=dtype), hidden(-1e9, dtype) + 1e4]
    expected = [with_gradients(lambda *x, mask=mask: by_softmax(*x, mask), *operands) for mask in masks]

    def program():
        given = distributed(operands, ["S(2)"] * 3)
        for mask, truth in zip(masks, expected, strict=True):
            found = with_gradients(lambda *x, mask=mask: attend({"attn_mask": mask}, *x), *given)
            assert_all_close(found, truth, str(mask))
        mask = hidden(torch.finfo(torch.bfloat16).min, torch.bfloat16)
        out = F.scaled_dot_product_attention(*(x.bfloat16() for x in given), attn_mask=mask).full_tensor()
        torch.testing.assert_close(out.to(dtype), expected[0][0], atol=0.03, rtol=0.03)

    run_ranks(program, 4)


def test_dropout_in_a_ring_drops_what_one_device_drops(monkeypatch):
    q, k, v = (random(1, 5, 13, 8) for _ in range(3))
    masked = {**CALLS, "hidden": {"attn_mask": hidden(-1e9)}}
    calls = {name: {**given, "dropout_p": 0.3} for name, given in masked.items()}
    found = {}

    def program():
        for name, given in calls.items():
            torch.manual_seed(4)
            result = with_gradients(lambda *x, given=given: attend(given, *x), *distributed([q, k, v], ["S(2)"] * 3))
            found.setdefault(wb.world_size(), {})[name] = result

    monkeypatch.setattr(attention_blocks, "_ROWS_BYTES", 5 * 7 * 8 * 2)  # some rows of a block at a time
    for num_ranks in (1, 2, 4):
        run_ranks(program, num_ranks)
    for name in calls:
        assert not torch.equal(found[1][name][0], attend(masked[name], q, k, v)), "nothing was dropped"
        for num_ranks in (2, 4):
            assert_all_close(found[num_ranks][name], found[1][name], f"{name} on {num_ranks} ranks")


def test_fewer_bytes_decide_between_a_ring_and_heads():
    """Over heads, queries and results move too; in a ring, keys and values pass all ranks, causal ones half of them."""

    x, mask = random(1, 8, 1024, 32, dtype=torch.float32), torch.ones(1024, 1024, dtype=torch.bool)

    def program():
        kinds = {}
        for name, groups, call in (
            ("plain", 8, {}),
            ("causal", 8, {"is_causal": True}),
            ("one head of keys", 1, {"enable_gqa": True}),
            ("five heads", 5, {}),
            ("a mask of rows", 8, {"attn_mask": mask}),
            ("padding", 8, {"attn_mask": mask[:1]}),
        ):
            heads = 5 if groups == 5 else 8
            q, k, v = distributed([x[:, :heads], x[:, :groups], x[:, :groups]], ["S(2)"] * 3)
            kinds[name] = F.scaled_dot_product_attention(q, k, v, **call).sbp
        return kinds

    two, four = run_ranks(program, 2)[0], run_ranks(program, 4)[0]
    ring, heads = ("S(2)",), ("S(1)",)
    chosen = {"plain": heads, "one head of keys": ring, "five heads": ring, "a mask of rows": ring, "padding": heads}
    assert {name: tuple(map(str, sbp)) for name, sbp in two.items()} == {**chosen, "causal": ring}
    assert {name: tuple(map(str, sbp)) for name, sbp in four.items()} == {**chosen, "causal": heads}


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_mask_learns_also_after_the_same_call_without_gradients(dropout_p):
    """A ring has no gradient of a mask. Its plan is for masks that do not learn, whichever call comes first."""
    (q, k, v), values = (random(1, 3, 8, 4) for _ in range(3)), random(8, 8)

    def gradients(num_ranks, evaluate):
        def program():
            given = distributed((q, k, v), ["S(2)"] * 3)
            mask = wb.tensor(values, placement=given[0].placement, sbp="B", requires_grad=True)

            def loss():
                wb.manual_seed(3)
                return attend({"attn_mask": mask * 1.0, "dropout_p": dropout_p}, *given).square().sum()

            if evaluate:
                with torch.no_grad():
                    loss()
            loss().backward()
            return mask.grad.full_tensor()

        return run_ranks(program, num_ranks)

    (expected,) = gradients(1, evaluate=False)
    for found in gradients(2, evaluate=True):
        torch.testing.assert_close(found, expected)


def test_a_ring_beside_other_axes_and_in_16_bits():
    q, k, v = (random(2, 4, 9, 8, dtype=torch.float32) for _ in range(3))
    expected = with_gradients(lambda *x: attend({"is_causal": True}, *x), q, k, v)

    def program():
        p = wb.placement("cpu", ranks=[[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
        given = [wb.to_global(x, placement=p, sbp="B, B, B").to_global(sbp="S(0), S(2), S(1)") for x in (q, k, v)]
        found = with_gradients(lambda *x: attend({"is_causal": True}, *x), *given)
        assert_all_close(found, expected, "three axes")
        with torch.autocast("cpu", torch.bfloat16):
            out = F.scaled_dot_product_attention(*given, is_causal=True)
            assert F.scaled_dot_product_attention(*(x.double() for x in given)).dtype == torch.float64
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.full_tensor().float(), expected[0], atol=0.03, rtol=0.03)

    run_ranks(program, 8)


def test_a_rank_holds_one_slice_of_keys_of_another_at_a_time():
    """Backward keeps the slices, not what has passed."""
    saved, x = [], random(1, 3, 64, 8)

    def program():
        q, k, v = distributed([x] * 3, ["S(2)"] * 3)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
            F.scaled_dot_product_attention(*leaves)

    run_ranks(program, 4)
    assert max(saved) == 3 * 16 * 8 * 8


def test_explicit_boxing_names_the_exchange_of_a_ring():
    x = random(1, 3, 8, 8)

    def program():
        q, k, v = distributed([x] * 3, ["S(2)"] * 3)
        with wb.debug.explicit_boxing(), pytest.raises(wb.errors.ExplicitBoxingError, match="pass the ranks"):
            F.scaled_dot_product_attention(q, k, v)

    run_ranks(program, 2)
