"""Models of ``transformers`` on slices of the sequence: the numbers of one device."""

import pytest

from tests.models.test_transformers import assert_equals_one_device
from tests.models.training import Setup

CASES = [
    ("gpt2", "sdpa", True, "*: data | context=2", 2),
    ("gpt2", "eager", False, "*: data | context=2", 2),
    ("llama", "sdpa", True, "*: data | 1x3x1 context=3", 3),
    ("qwen2", "sdpa", False, "*: model | 1x2x2 context=2", 4),
    ("bert", "sdpa", True, "*: data | 1x4x1 context=2 zero=2", 4),
    ("bart", "sdpa", True, "*: data | context=2", 2),
    ("t5", "eager", False, "*: data | context=2", 2),
    ("mixtral", "sdpa", False, "*: data | context=2", 2),
    ("mixtral", "sdpa", False, "*: data; *: expert | 1x4x1 context=2", 4),
    ("vit", "sdpa", False, "*: data | 1x4x1 context=4", 4),
]
"""Model, how it computes attention, whether texts are padded, strategy, ranks."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "attention", "padded", "strategy", "num_ranks"), CASES)
def test_training_on_slices_of_the_sequence_equals_one_device(name, attention, padded, strategy, num_ranks):
    assert_equals_one_device(Setup(name, attention, padded=padded), strategy, num_ranks)
