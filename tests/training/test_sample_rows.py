"""Tensors of a batch whose rows are no samples: patches of images, boxes, anything that is shared."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import RunError
from workbench.testing import run_ranks
from workbench.training.batches import Batch
from workbench.training.runs.job import Job

WORDS = torch.arange(12).view(4, 3)
GRIDS = torch.tensor([[1, 2, 2], [1, 1, 2], [1, 2, 3], [1, 1, 1]])
PATCHES = torch.randn(13, 5, generator=torch.Generator().manual_seed(2)).double()
ROWS = [4, 2, 6, 1]


class Patches(nn.Module):
    """Adds to each sample the mean of its image's patches."""

    def __init__(self):
        super().__init__()
        self.patches, self.words = nn.Linear(5, 8), nn.Embedding(12, 8)
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, words, pixel_values, image_grid_thw, scale=None):
        rows = image_grid_thw.prod(1)
        places = torch.arange(len(rows)).repeat_interleave(rows)
        means = F.one_hot(places, len(rows)).double().T @ self.patches(pixel_values) / rows[:, None]
        x = self.words(words).mean(1) + means
        for layer in self.body:
            x = layer(x).tanh()
        return self.head(x) if scale is None else self.head(x) * scale.mean()


def batch_of(**more):
    return {"words": WORDS, "pixel_values": PATCHES, "image_grid_thw": GRIDS, **more}


def assert_equals_one_device(inputs, strategy, **given):
    torch.manual_seed(0)
    model = Patches().double()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def program(rank):
        parallel = wb.parallelize(copies[rank], strategy)
        loss = wb.forward_backward(parallel, F.cross_entropy, inputs, torch.arange(4), **given)
        return loss.item(), parallel.patches.weight.grad.full_tensor()

    loss = F.cross_entropy(model(**inputs), torch.arange(4))
    loss.backward()
    for found, grad in run_ranks(program, 2):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(grad, model.patches.weight.grad)


@pytest.mark.parametrize("strategy", ["pipeline | mb=2", "pipeline | mb=4 gpipe", "*: data", "*: data | mb=2"])
def test_patches_go_with_their_images(strategy):
    assert_equals_one_device(batch_of(), strategy)


def test_a_tensor_without_samples_goes_whole_where_the_call_says_so():
    scale = torch.arange(7.0).double()
    assert_equals_one_device(batch_of(scale=scale), "pipeline | mb=2", rows={"scale": None})
    with pytest.raises(RunError, match=r"scale \(7,\).*rows=\{name: \[rows of each sample\]\}, or None"):
        assert_equals_one_device(batch_of(scale=scale), "pipeline | mb=2")


def test_rows_are_cut_by_what_the_call_says():
    parts = Batch.of_arguments((WORDS, PATCHES), torch.arange(4), F.cross_entropy, {"1": ROWS}).cut(3)
    assert [tuple(len(tensor) for tensor in part.inputs) for part in parts] == [(2, 6), (1, 6), (1, 1)]
    assert torch.equal(torch.cat([part.inputs[1] for part in parts]), PATCHES)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"pixels": ROWS}, r"no tensor 'pixels', it has words, pixel_values, image_grid_thw"),
        ({"pixel_values": [6, 7]}, r"2 numbers that add up to 13, but the batch has 4 samples.*has 13 rows"),
        ({"pixel_values": [1, 1, 1, 1]}, r"4 numbers that add up to 4, .*'pixel_values': None"),
    ],
)
def test_rows_that_the_batch_does_not_have_are_refused(rows, message):
    with pytest.raises(RunError, match=message):
        Batch.of_arguments(batch_of(), torch.arange(4), F.cross_entropy, rows)


def test_inputs_whose_dim_0_is_time_are_refused_where_targets_have_samples():
    """One micro-batch cuts nothing, and targets that belong to all samples are said to."""
    words, classes = torch.ones(6, 4, 3), torch.arange(4)
    with pytest.raises(RunError, match=r"6 samples, by dim 0 of its inputs, and targets of shape \(4,\).*batch_first"):
        Batch(words, classes).cut(2)
    assert Batch(words, classes).cut(1)[0].targets is classes
    given = Batch.of_arguments(words, classes, F.cross_entropy, {"targets": None}).cut(2)
    assert [part.targets is classes for part in given] == [True, True]
    with pytest.raises(RunError, match=r"6 samples, .*targets of shape \(4,\)"):
        Job(nn.Identity, (words, classes), F.cross_entropy, None, batch_size=2, num_steps=1)


def test_a_dataclass_that_torch_does_not_know_is_refused_where_it_has_to_be_cut():
    @dataclasses.dataclass
    class Words:
        ids: torch.Tensor

    for batch in (Batch(Words(WORDS)), Batch(Words(WORDS), torch.arange(4))):
        with pytest.raises(RunError, match=r"a Words, a dataclass, of which torch finds 0 tensors. Batches are cut"):
            batch.cut(2)
    assert Batch(Words(WORDS), torch.arange(4)).cut(1)[0].inputs.ids is WORDS


def test_an_evaluation_cuts_rows_too():
    torch.manual_seed(0)
    model = Patches().double()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def program(rank):
        parallel = wb.parallelize(copies[rank], "pipeline | mb=2")
        inputs = batch_of(scale=torch.ones(7).double())
        return wb.evaluate(parallel, inputs, rows={"scale": None}).full_tensor()

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, model(**batch_of()))
