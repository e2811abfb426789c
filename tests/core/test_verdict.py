"""Verdicts on made-up distances: what counts as rounding, what does not, and which evidence is asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from workbench.core.metrics import RunRecord
from workbench.core.verdict import TOLERANCES, Case, Distance, TensorChange, Verdict

FP32 = TOLERANCES["fp32"]
UNIT = 2.0**-23


def tensor(name: str = "w", apart: float = 1e-7, change: float = 1.0, longer: float = 0.0) -> TensorChange:
    return TensorChange(name, apart, change, change * (1 + longer), 1e-7)


def case(*losses: float, tensors: tuple[TensorChange, ...] = (tensor(),)) -> Case:
    return Case(Distance(losses, tensors), FP32)


def decided(case: Case) -> Verdict:
    assert case.missing() is None
    return case.verdict()


def test_within_the_tolerance_nothing_more_is_asked():
    verdict = decided(case(0.0, 1e-7, 9e-6))
    assert verdict.equal and verdict.by == "tolerance"
    assert verdict.first_step == 0.0 and verdict.largest == 9e-6 and verdict.growth == pytest.approx(90)
    assert verdict.differences == (0.0, 1e-7, 9e-6)


@pytest.mark.parametrize(("changes", "note"), [((0.0, 1e-8), "no update"), ((0.0, 1e-3), ""), ((), "")])
def test_a_tick_says_where_there_were_no_updates_to_compare(changes: tuple[float, ...], note: str):
    """As with a learning rate that begins at 0: any other one was equal."""
    verdict = decided(case(0.0, tensors=tuple(tensor(apart=0.0, change=change) for change in changes)))
    assert verdict.equal and verdict.note == note
    assert ("no weight changed by more than its rounding" in verdict.text) is bool(note)


def test_rounding_that_grows_is_explained_by_the_noise_of_one_device():
    grown = case(1e-7, 1e-6, 1e-4, 2e-1)
    assert grown.missing() == "noise" and grown.num_steps("noise") == 5
    noisy = replace(grown, noise=Distance((0.0, 2e-6, 3e-5, 1e-3, 1e-2), (tensor(apart=1e-6),)))
    verdict = decided(noisy)
    assert verdict.equal and verdict.by == "noise" and verdict.noise == 1e-2 and verdict.largest == 2e-1
    assert verdict.text.endswith("; losses after step 3 follow from it and say no more")


def test_where_weights_have_decided_the_text_has_their_numbers():
    weights = case(1e-7, tensors=(tensor(apart=4e-3),))
    verdict = decided(replace(weights, noise=Distance((0.0, 0.0), (tensor(apart=2e-3),))))
    assert verdict.equal and verdict.by == "noise"
    assert "its weights differ by 4e-03, one device's own by 2e-03 when its rounding is perturbed" in verdict.text


def test_a_difference_beyond_the_noise_is_looked_at_in_float64():
    odd = replace(case(1e-7, 1e-3), noise=Distance((0.0, 0.0, 2e-5, 0.0), (tensor(),)))
    assert odd.missing() == "finer" and odd.num_steps("finer") == 2
    rounding = replace(odd, exact=Distance((1e-16, 1e-12), (tensor(apart=1e-15),)))
    assert decided(rounding).equal and decided(rounding).by == "float64"
    mistake = decided(replace(odd, exact=Distance((1e-16, 1e-3), (tensor(apart=1e-3),))))
    assert mistake.equal is False
    assert "the loss of step 2 differs by 1.0e-03" in mistake.text and "in float64 1e-03 is left" in mistake.text


def test_float64_excuses_no_first_step_that_is_far_beyond_the_noise():
    """The mistake may be one of the path that 32 bits take."""
    wrong = replace(case(1e-2), noise=Distance((0.0, 1e-7, 1e-7), (tensor(),)))
    assert decided(wrong).equal is False


def test_float64_excuses_runs_that_part_later_all_at_once():
    """One rounding flips a comparison, in the run and not in the sample of noise."""
    jumped = replace(case(*[1e-7] * 8, 2e-3), noise=Distance((1e-7,) * 11, (tensor(),)))
    assert jumped.missing() == "finer" and jumped.num_steps("finer") == 9
    assert decided(replace(jumped, exact=Distance((1e-16,) * 9, (tensor(apart=1e-15),)))).equal


def test_float64_excuses_a_gradient_that_one_rounding_has_flipped():
    flipped = replace(case(1e-7, tensors=(tensor(apart=1e-2),)), noise=Distance((1e-7,) * 4, (tensor(),)))
    assert flipped.missing() == "finer"
    assert decided(replace(flipped, exact=Distance((1e-16,) * 2, (tensor(apart=1e-13),)))).equal


def test_a_learning_rate_that_is_wrong_by_one_per_cent_is_seen_where_losses_cannot_show_it():
    slow = case(0.0, 1e-7, tensors=(tensor(apart=1e-2, longer=0.01),))
    assert slow.missing() == "noise"
    slow = replace(slow, noise=Distance((0.0,), (tensor(),)))
    assert decided(slow).equal is False and "differ in length by 1.0e-02" in slow.verdict().text


def test_noise_that_would_hide_such_a_learning_rate_decides_nothing():
    noisy = Distance((0.0,) * 4, (tensor(apart=0.5, longer=5e-3),))
    blunt = replace(case(1e-7, tensors=(tensor(apart=0.4, longer=4e-3),)), noise=noisy)
    assert blunt.missing() == "finer"
    assert decided(replace(blunt, exact=Distance((0.0,), (tensor(apart=1e-12),)))).equal
    assert decided(replace(blunt, exact=Distance((0.0,), (tensor(apart=1e-2),)))).equal is False


def test_noise_that_would_hide_a_tensor_that_is_wrong_by_ten_per_cent_decides_nothing():
    noisy = Distance((0.0,) * 4, (tensor(apart=0.02),))
    assert replace(case(1e-7, tensors=(tensor(apart=0.03),)), noise=noisy).missing() == "finer"


def test_float64_is_asked_only_as_far_as_noise_leaves_a_question():
    late = replace(case(*[1e-7] * 8, 2e-5), noise=Distance((1e-5,) * 11, (tensor(apart=0.02),)))
    assert late.missing() == "finer" and late.num_steps("finer") == 2


def test_a_strategy_that_was_equal_in_fp32_is_so_in_bf16_where_the_run_begins_alike():
    bf16 = TOLERANCES["bf16"]
    noise = Distance((2e-2,) * 4, (tensor(apart=0.1),))
    open_question = Case(Distance((3e-2,), (tensor(apart=0.3),)), bf16, noise)
    assert open_question.missing() == "finer"
    verdict = decided(replace(open_question, equal_in="fp32"))
    assert verdict.equal and verdict.by == "fp32" and "the same strategy in fp32 is equal" in verdict.text
    grown = Case(Distance((3e-2,) * 9, (tensor(apart=0.3),)), bf16, equal_in="fp32")
    assert grown.missing() == "noise" and grown.num_steps("noise") == 2
    far = replace(open_question, found=Distance((3.0,), (tensor(apart=0.3),)), equal_in="fp32")
    assert decided(far).equal is False


def test_a_tensor_whose_gradient_is_rounding_is_compared_with_that_rounding():
    """The bias of keys in attention: its gradient is zero in exact numbers."""
    bias = TensorChange("k.bias", 2e-9, 1e-9, 1e-9, 0.0)
    found = case(0.0, tensors=(tensor(), bias))
    assert found.missing() == "noise"
    assert decided(replace(found, noise=Distance((0.0,), (tensor(), replace(bias, apart=1e-9))))).equal


def test_a_model_that_does_not_run_in_float64_is_judged_by_its_noise():
    far = replace(case(1e-7, 1e-3), noise=Distance((0.0, 2e-5, 0.0, 0.0), (tensor(),)), no_float64="float64 failed")
    verdict = decided(far)
    assert verdict.equal is False and verdict.text.endswith("is rounding; float64 failed")


@pytest.mark.parametrize("apart", [math.inf, math.nan])
def test_missing_tensors_and_numbers_that_are_none_are_never_equal(apart: float):
    for wrong in (case(apart), case(0.0, tensors=(tensor(apart=apart),))):
        noisy = replace(wrong, noise=Distance((0.0, 0.0, 0.0), (tensor(),)))
        assert decided(noisy).equal is False


def test_float64_models_are_held_to_their_own_tolerance():
    found = Case(Distance((1e-7,), (tensor(apart=1e-7),)), TOLERANCES["float64"])
    assert found.missing() == "noise"
    assert decided(replace(found, noise=Distance((1e-15,), (tensor(apart=1e-15),)))).equal is False


@pytest.mark.parametrize(
    ("own", "change", "length"), [(math.inf, math.inf, 0.0), (math.inf, 1.0, math.inf), (1.0, math.inf, -1.0)]
)
def test_infinite_updates_are_as_long_only_as_infinite_ones(own: float, change: float, length: float):
    assert Distance((), (TensorChange("w", 0.0, change, own, 0.0), tensor("v"))).length() == length


def test_lengths_of_large_updates_do_not_overflow():
    large = Distance((), (tensor(change=1e200, longer=0.02),))
    assert large.length() == pytest.approx(0.02)
    assert large.length_by_chance() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("is_parameter", [True, False])
def test_infinities_in_other_places_are_never_equal(is_parameter: bool):
    other = TensorChange("w", math.inf, math.inf, math.inf, math.inf, is_parameter)
    verdict = replace(case(0.0, tensors=(other,)), noise=Distance((0.0,), (other,))).verdict()
    assert verdict.equal is False and "the change of 'w' in 2 steps differs by inf" in verdict.text


def test_nothing_to_compare_is_no_verdict():
    assert Case(Distance(), FP32).verdict().equal is None


def test_records_keep_their_verdict_and_older_ones_load():
    record = RunRecord("a", "*: data", 2, 8, equal=True, verdict=Verdict(True, "noise", 1e-7, text="rounding"))
    assert RunRecord.from_dict(record.to_dict()) == record
    older = {"name": "a", "strategy": "", "num_ranks": 2, "batch_size": 8, "equal": False}
    assert RunRecord.from_dict(older).verdict.equal is False
