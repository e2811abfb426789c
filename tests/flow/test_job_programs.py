"""The job functions of the documents, as they are typed there: their losses are those of one device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.flow.job_programs import BATCH_SIZE, losses_of, made_up_digits
from workbench import flow
from workbench.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*older spelling:DeprecationWarning")


def assert_equal_losses(actual: list, expected: list) -> None:
    assert len(actual) == len(expected) > 1
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def mlp_of_torch() -> list[np.ndarray]:
    """The MLP of the document in plain torch, from the same initial weights."""
    parameters = initial_values(
        {"hidden-weight": (512, 784), "hidden-bias": (512,), "output-weight": (10, 512), "output-bias": (10,)}
    )
    w0, b0, w1, b1 = (parameter.requires_grad_() for parameter in parameters)
    losses = []
    (images, labels), _ = made_up_digits(BATCH_SIZE)
    for x, y in zip(torch.from_numpy(images), torch.from_numpy(labels).long(), strict=True):
        logits = F.linear(F.linear(x.flatten(1), w0, b0).relu(), w1, b1)
        loss = F.cross_entropy(logits, y, reduction="none")
        loss.mean().backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.detach().numpy())
    return losses


def initial_values(shapes: dict[str, tuple[int, ...]]) -> list[torch.Tensor]:
    @flow.global_function()
    def job() -> flow.typing.Numpy:
        made = {
            name: flow.truncated_normal(0.1) if name.endswith("weight") else flow.zeros_initializer() for name in shapes
        }
        return {name: flow.get_variable(name, shape, initializer=made[name]) for name, shape in shapes.items()}

    (values,) = run_ranks(lambda rank: job(), 1)
    return [torch.from_numpy(values[name]) for name in shapes]


def test_hybrid_mlp_has_the_losses_of_plain_torch() -> None:
    assert_equal_losses(losses_of("hybrid_mlp", 2), mlp_of_torch())


def test_consistent_and_mirrored_lenet_have_the_losses_of_one_device() -> None:
    one_device = losses_of("consistent_lenet", 1)
    assert_equal_losses(losses_of("consistent_lenet", 2), one_device)
    mirrored = losses_of("mirrored_lenet", 2)
    assert [len(loss) for loss in mirrored] == [2] * len(mirrored)
    assert_equal_losses([np.concatenate(loss) for loss in mirrored], one_device)


def test_relay_lenet_has_the_losses_of_one_device() -> None:
    assert_equal_losses(losses_of("relay_lenet", 2), losses_of("relay_lenet", 1))


def test_the_comparison_sees_another_loss() -> None:
    losses = [np.ones(3, np.float32)] * 2
    with pytest.raises(AssertionError):
        assert_equal_losses(losses, [losses[0], losses[1] * 1.001])
    with pytest.raises(AssertionError):
        assert_equal_losses(losses, losses[:1])
