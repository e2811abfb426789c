"""What moves at the layout hooks of layers: kinds and bytes, by dry runs, which tests compare with real ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.gpt import GPT, next_word_loss
from tests.training.models import CNN
from workbench.training.costs.dry_run import dry_run


def test_a_residual_goes_to_the_next_stage_once():
    """The norm takes it as B, the sum behind attention the same: what has been sent is not sent again as S(0)."""
    words = torch.arange(40).view(4, 10)
    text = "*: model; blocks.1: model@1; norm: model@1; head: model@1 | 2x1x2"
    run = dry_run(lambda: GPT(64, 2, 50, 10), text, 4, words, words, next_word_loss)
    activation = 4 * 10 * 64 * 4
    assert run.by_kind["send"] == 2 * 2 * activation  # to each of two ranks, and its gradient back


def test_a_convolution_split_by_rows_takes_slices_of_channels():
    images = torch.ones(4, 1, 8, 8), torch.arange(4)
    run = dry_run(CNN, "*: data; conv2: model:row | 1x1x2", 2, *images, F.cross_entropy)
    assert run.by_kind["all-to-all"] == 2 * 4 * 6 * 4 * 4 * 4 // 2  # samples to channels of its input, and back
