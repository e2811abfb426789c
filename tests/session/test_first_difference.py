"""A comparison finds where a strategy parts from one device."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.session.simulated_session import SimulatedSession
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject


def test_a_comparison_finds_where_a_strategy_parts_from_one_device():
    data = torch.ones(16, 4), torch.arange(16) % 3
    subject = Subject.of(lambda: nn.Linear(4, 3), data, F.cross_entropy, batch_size=8, steps=2)
    with Comparison(SimulatedSession(), subject) as comparison:  # type: ignore[arg-type]
        assert comparison.first_difference("*: data").startswith("no difference beyond rounding: ")
