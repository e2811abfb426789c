"""A fix is a button where the panel can make it, and text where only the user can."""

from __future__ import annotations

import pytest

from tests.ui.models import MLP
from workbench.ui.controls import _hints
from workbench.ui.strategy.fixes import apply_fix, can_apply
from workbench.ui.strategy.state import PanelState


@pytest.mark.parametrize(("option", "num_ranks"), [("sequence", 2), ("zero=1", 1), ("gpipe", 2), ("zero_bubble_v", 1)])
def test_an_option_without_effect_is_left_out_by_its_button(option: str, num_ranks: int):
    state = PanelState(MLP, num_ranks, f"*: data | {option}")
    [hint] = state.hints
    assert f'data-fix="leave {option} out"' in _hints(state)
    assert apply_fix(state, hint.fix)
    assert state.text == "*: data" and state.hints == [] and state.can_run


@pytest.mark.parametrize("number", [0, 1])
def test_every_fix_of_an_overlap_in_8_bits_can_be_made(number: int):
    state = PanelState(MLP, 2, "*: model:row | overlap=2 fp8")
    [mistake] = state.mistakes
    assert mistake.fixes == ("leave overlap out", "use bf16")
    assert apply_fix(state, mistake.fixes[number]) and state.can_run


def test_what_only_begins_like_a_fix_is_text():
    for fix in (
        "write 'model' rows over a model degree of 2",
        "use recompute=4 or less, or recompute, which is all",
        "put layers on stage 1 with '@1', or write 'pipeline | 2x1x1', which cuts the model",
    ):
        state = PanelState(MLP, 2)
        assert not can_apply(fix) and not apply_fix(state, fix) and state.text == "*: data"
