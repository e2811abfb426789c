"""What is counted in one thread changes nothing of torch for others."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn
from torch.nn.modules import transformer

from workbench.training.costs.layer_costs import without_values


def settings() -> tuple[object, bool]:
    return transformer._detect_is_causal_mask, torch._C._get_mkldnn_enabled()


def test_after_two_that_count_at_the_same_time_torch_is_as_it_was() -> None:
    before = settings()
    first, second = ExitStack(), ExitStack()
    first.enter_context(without_values(nn.Identity()))
    second.enter_context(without_values(nn.Identity()))
    first.close()
    assert settings() != before
    second.close()
    assert settings() == before


def test_a_mask_with_values_is_read_meanwhile() -> None:
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    with without_values(nn.Identity()):
        assert transformer._detect_is_causal_mask(causal, None, 3)
        assert not transformer._detect_is_causal_mask(torch.zeros(3, 3), None, 3), "every position sees all"
        assert transformer._detect_is_causal_mask(torch.zeros(3, 3, device="meta"), None, 3)
