"""What the training tests share."""

import pytest
import torch


@pytest.fixture
def in_64_bits(monkeypatch):
    """Where models of ``transformers`` ask for 32 bits (norms, softmax), they get 64: else sums differ by 1e-7."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
