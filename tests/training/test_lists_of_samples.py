"""Batches with a list of dicts, one per sample, as labels of detection are."""

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from tests.pipeline.test_steps import whole
from workbench.errors import RunError
from workbench.testing import run_ranks


class Detector(nn.Module):
    """Says one box per image; its loss compares it with every box of the image's label."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, pixels, labels):
        boxes = self.head(self.backbone(pixels).relu())
        losses = [(box - label["boxes"]).abs().mean() for box, label in zip(boxes.unbind(), labels, strict=True)]
        return {"loss": torch.stack(losses).mean(), "boxes": boxes}


def batch():
    draw = torch.Generator().manual_seed(0)
    labels = [{"boxes": torch.rand(n, 4, generator=draw), "classes": torch.zeros(n)} for n in (2, 1, 4, 3)]
    return {"pixels": torch.randn(4, 6, generator=draw), "labels": labels}


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | mb=2", "*: data; head: data@1 | mb=2 1f1b"])
def test_each_sample_keeps_its_label(strategy):
    torch.manual_seed(0)
    model = Detector()
    one = copy.deepcopy(model)
    loss = one(**batch())["loss"]
    loss.backward()

    def program():
        spread = wb.parallelize(copy.deepcopy(model), strategy)
        found = wb.forward_backward(spread, inputs=batch())
        return found.item(), [whole(p.grad) for p in spread.parameters()]

    for found, grads in run_ranks(program, 2):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for grad, parameter in zip(grads, one.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


def test_a_list_of_another_length_is_refused():
    model = Detector()

    def program():
        given = batch()
        short = {**given, "labels": given["labels"][:3]}
        wb.forward_backward(wb.parallelize(copy.deepcopy(model), "*: data | mb=2"), inputs=short)

    with pytest.raises(RunError, match=r"list of 3 dicts and tensors of 4 samples"):
        run_ranks(program, 2)
