"""Every declared signature of every rule that the case tables reach, by brute force; and what is not declared."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.core.sbp import broadcast, partial_max, partial_sum, split
from workbench.errors import LayoutError
from workbench.tensors.dispatch.registry import RULES, Resolution
from workbench.tensors.proof.cut import cut, mismatch
from workbench.tensors.proof.examples import collect
from workbench.tensors.proof.search import prove_examples

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("cases*.py"))
MAX_COMBINATIONS = 32

P_OF_FACTORS = "a rule does not see that this operand is finite; P times infinity is nan where a term is zero"
NOT_DECLARED = {
    ("P", "mul div linalg_solve trapezoid fft_rfft fft_rfft2 fft_rfftn"): P_OF_FACTORS,
    ("P", "layer_norm rms_norm group_norm embedding embedding_bag"): "weights are B or S, never P",
    ("P", "where masked_scatter complex max_unpool2d"): "two partial operands meet only in sums",
    ("P", "product_by_expert"): "its operand comes from a layer, which boxes its sum",
    ("P", "to double float"): "a sum is cheaper to box before it is widened",
    ("P", "int"): "integers that a program counts with are whole nearly always, so nobody pays for their sum",
    ("P", "index_add"): "linear only for these numbers: the tensor that gets the terms is zero here",
    ("P", "add remainder ne clamp_min"): "linear only for these numbers: a bound or a divisor that is never reached",
    ("S", "max_pool2d avg_pool2d pixel_shuffle pixel_unshuffle"): "right only where the cut falls between two windows",
}
"""(what kind of layout the operands have, functions): why the signature is not declared."""


def reason_for(finding):
    kind = "P" if any(entry == partial_sum for entry in finding.inputs) else "S"
    return next(
        (why for (k, names), why in NOT_DECLARED.items() if k == kind and finding.function in names.split()), None
    )


@pytest.mark.sampled(24)
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("table", TABLES)
def test_every_declared_signature_is_right_and_what_is_missing_has_a_reason(table, turn):
    examples = {}
    for case in importlib.import_module(f"tests.tensors.dispatch.{table}").CASES:
        for example in collect(case.function, case.operands()):
            examples.setdefault(str(example), example)
    proof = prove_examples(list(examples.values())[turn::2], max_combinations=MAX_COMBINATIONS)
    assert not proof.wrong, f"\n{proof}"
    assert proof.num_checked > proof.num_calls
    unexplained = [str(finding) for finding in proof.missing if reason_for(finding) is None]
    assert not unexplained, "\n".join(unexplained)


def _with_rule(monkeypatch, equation, localize=None):
    def declare(name):
        monkeypatch.setitem(RULES, name, lambda call: Resolution(equation, localize))

    return declare


def test_a_wrong_rule_is_found(monkeypatch):
    _with_rule(monkeypatch, "ab -> ab")("cumsum")
    proof = wb.debug.prove(lambda x: x.cumsum(0), torch.randn(5, 4))
    assert not proof and {finding.signature for finding in proof.wrong} == {"S(0) -> S(0)"}
    assert {finding.num_ranks for finding in proof.wrong} == {2, 3}
    text = str(proof)
    assert "cumsum(float32 (5, 4), 0) as S(0) -> S(0) on 2 ranks: rank 1 gives" in text and "one device" in text


def test_a_rule_that_is_linear_in_name_only_is_found(monkeypatch):
    _with_rule(monkeypatch, "+... -> ...")("relu")
    (wrong, *_) = wb.debug.prove(F.relu, torch.randn(5, 4)).wrong
    assert wrong.signature == "P -> P" and "the terms together give" in wrong.problem


def test_a_wrong_gradient_is_found(monkeypatch):
    _with_rule(monkeypatch, "ab -> ab", lambda *_: lambda x: x.detach().square() + 0 * x)("square")
    (wrong, *_) = wb.debug.prove(torch.square, torch.randn(5, 4)).wrong
    assert "gradient of operand 0" in wrong.problem


def test_a_local_function_that_raises_on_an_empty_shard_is_found(monkeypatch):
    _with_rule(monkeypatch, "aB -> a", lambda *_: lambda x, dim: x.max(0)[0].new_ones(len(x)) * x.sum(1))("sum")
    proof = wb.debug.prove(lambda x: x.sum(1), torch.randn(2, 4), num_ranks=(3,))
    assert any("raises IndexError" in finding.problem for finding in proof.wrong)


def test_a_missing_signature_is_found_and_dominated_ones_are_not(monkeypatch):
    _with_rule(monkeypatch, "AB, AB -> AB")("add")
    proof = wb.debug.prove(torch.add, torch.randn(5, 4), torch.randn(5, 4))
    assert proof and {finding.signature for finding in proof.missing} == {
        "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "P, P -> P",
    }  # fmt: skip


def test_what_only_looks_right_is_not_missing():
    assert wb.debug.prove(torch.mul, torch.rand(5, 4), torch.rand(5, 4)).missing == []  # P times what may be infinite
    assert wb.debug.prove(lambda x: x + 1e-7, torch.randn(5, 4)).missing == []
    assert wb.debug.prove(torch.isnan, torch.randn(5, 4)).missing == []


def test_what_cannot_be_judged_is_said():
    for function in (torch.nonzero, torch.nn.functional.one_hot):
        proof = wb.debug.prove(function, torch.tensor([0, 1, 2]))
        assert proof.num_calls == 0 and "depends on data" in proof.skipped[0]


def test_a_users_rule_is_proved_on_request():
    with pytest.raises(LayoutError) as caught:

        @wb.register_rule("b d, d -> b d", prove=[torch.randn(5, 4), torch.randn(4)])
        def scores(x, weight):
            return torch.softmax(x, -1) * weight

    message = str(caught.value)
    for part in ("'b d, d -> b d'", "S(1), S(0) -> S(1)", "float32 (5, 4), float32 (4,)", "rank 0 gives", "one device",
                 "capitals"):  # fmt: skip
        assert part in message, message

    @wb.register_rule("b D, D -> b D", prove=[torch.randn(5, 4), torch.randn(4)])
    def right_scores(x, weight):
        return torch.softmax(x, -1) * weight

    proof = wb.debug.prove(right_scores, torch.randn(5, 4), torch.randn(4))
    assert proof and proof.num_calls == 1
    assert {finding.signature for finding in proof.missing} == {"B, P -> P"}  # what no equation can know


def test_the_oracle_of_shards():
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(5, 4, generator=generator)
    for entry in (split(0), split(1), broadcast, partial_sum, partial_max):
        shards = cut(full, entry, 3, generator)
        assert mismatch(shards, entry, full) is None
        shards[1] = shards[1] + (10 if entry == partial_max else 0.5)
        problem = mismatch(shards, entry, full)
        assert problem is not None and "one device" in problem
    assert "is (2, 4)" in mismatch([full[:3], full[2:]], split(0), full)
    terms = cut(full, partial_sum, 2, generator)
    assert (terms[0] - 0.6 * full).abs().min() > 1e-4  # 0.6 of the whole, and noise
    assert torch.equal(cut(full, partial_sum, 2, generator, one_holder=True)[1], full)
    integers = torch.arange(6).reshape(2, 3)
    assert mismatch(cut(integers, partial_sum, 3, generator), partial_sum, integers) is None
