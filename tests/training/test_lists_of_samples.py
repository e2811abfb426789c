"""Batches with a list with an entry per sample: dicts, as labels of detection are, or tensors, as masks are."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

import workbench as wb
from tests.pipeline.test_steps import whole
from workbench.errors import RunError
from workbench.testing import run_ranks
from workbench.training.batches import Batch
from workbench.training.datasets import take


class Detector(nn.Module):
    """Says one box per image; its loss compares it with every box of the image's label."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, pixels, labels):
        boxes = self.head(self.backbone(pixels).relu())
        of_images = [label["boxes"] if isinstance(label, dict) else label for label in labels]
        losses = [(box - label).abs().mean() for box, label in zip(boxes.unbind(), of_images, strict=True)]
        return {"loss": torch.stack(losses).mean(), "boxes": boxes}


def batch(num_boxes=(2, 1, 4, 3), as_tensors=False):
    draw = torch.Generator().manual_seed(0)
    labels = [{"boxes": torch.rand(n, 4, generator=draw), "classes": torch.zeros(n)} for n in num_boxes]
    labels = [label["boxes"] for label in labels] if as_tensors else labels
    return {"pixels": torch.randn(4, 6, generator=draw), "labels": labels}


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | mb=2", "*: data; head: data@1 | mb=2 1f1b"])
@pytest.mark.parametrize("labels", [{}, {"as_tensors": True}, {"as_tensors": True, "num_boxes": (1, 1, 1, 1)}])
def test_each_sample_keeps_its_label(strategy, labels):
    torch.manual_seed(0)
    model = Detector()
    one = copy.deepcopy(model)
    loss = one(**batch(**labels))["loss"]
    loss.backward()

    def program():
        spread = wb.parallelize(copy.deepcopy(model), strategy)
        found = wb.forward_backward(spread, inputs=batch(**labels))
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


def test_a_list_of_tensors_is_cut_by_entries_or_by_rows():
    """By its number of tensors; a tuple always by rows, and what may be either is refused."""
    pixels, two = torch.ones(4, 3), [torch.ones(4), torch.zeros(4)]
    parts = Batch({"pixels": pixels, "views": two}).cut(2)
    assert [len(part.inputs["views"]) for part in parts] == [2, 2]
    assert [len(view) for part in parts for view in part.inputs["views"]] == [2, 2, 2, 2]
    four = [torch.ones(4) for _ in range(4)]
    assert len(Batch({"pixels": pixels, "views": tuple(four)}).cut(2)[0].inputs["views"]) == 4
    assert Batch([pixels, *four[:3]]).cut(2)[0].inputs[3].shape == (2,)
    with pytest.raises(RunError, match=r"4 samples and a list of 4 tensors of 4 rows each.*Give a tuple"):
        Batch({"pixels": pixels, "views": four}).cut(2)
    assert len(Batch({"pixels": pixels, "views": four}).cut(1)[0].inputs["views"]) == 4


class Pairs(nn.Module):
    """Scores of each image with each caption, by its length; its loss wants each with its own."""

    def __init__(self):
        super().__init__()
        self.images, self.texts = nn.Linear(6, 4), nn.Embedding(9, 4)

    def forward(self, pixels, captions):
        lengths = torch.tensor([len(caption) for caption in captions])
        return F.cross_entropy(self.images(pixels) @ self.texts(lengths).T, torch.arange(len(pixels)))


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_each_sample_keeps_its_caption(kind, num_micro_batches):
    torch.manual_seed(0)
    model, pixels, captions = Pairs(), torch.randn(4, 6), ["a cat", "a dog", "an owl", "a"]
    size = 4 // num_micro_batches
    parts = [model(pixels[i : i + size], captions[i : i + size]).item() for i in range(0, 4, size)]

    def program():
        spread = wb.parallelize(copy.deepcopy(model), f"*: data | mb={num_micro_batches}")
        return wb.forward_backward(spread, inputs={"pixels": pixels, "captions": kind(captions)}).item()

    assert run_ranks(program, 2) == [pytest.approx(sum(parts) / len(parts), rel=1e-5)] * 2


class OfImages(nn.Module):
    """Takes a list of images and a list of labels, as detectors of torchvision do."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, images, labels):
        boxes = self.head(self.backbone(torch.stack(images)).relu().mean((2, 3)))
        losses = [(box - label["boxes"]).abs().mean() for box, label in zip(boxes.unbind(), labels, strict=True)]
        return {"boxes": torch.stack(losses).mean(), "size": boxes.square().mean()}


class Boxes(nn.Module):
    """As many boxes for each image as its first number says, scores of two heads, and names."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))

    def forward(self, pixels):
        heads = [{"scores": head(pixels)} for head in self.heads]
        images = zip(heads[0]["scores"].unbind(), pixels[:, 0].tolist(), strict=True)
        return {"heads": heads, "images": [{"boxes": scores.repeat(int(count), 1)} for scores, count in images]}


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (4, 4, 4, 4), (3, 1, 1), (1, 2)])
@pytest.mark.parametrize("strategy", ["*: data", "*: data | mb=2"])
def test_an_evaluation_gives_each_image_its_boxes(strategy, counts):
    """Also the same number of them for all images: boxes of images of different micro-batches were joined."""
    torch.manual_seed(0)
    model, pixels = Boxes(), torch.randn(len(counts), 6)
    pixels[:, 0] = torch.tensor(counts)
    if counts[:2] == (2, 2):
        pixels[0, 0] = 3
    expected = model(pixels)

    def program():
        found = wb.evaluate(wb.parallelize(copy.deepcopy(model), strategy), pixels)
        return [[whole(leaf) for leaf in tree_leaves(found[name])] for name in expected]

    for found in run_ranks(program, 2):
        for ours, name in zip(found, expected, strict=True):
            theirs = tree_leaves(expected[name])
            assert len(ours) == len(theirs) and all(a.allclose(b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("strategy", ["*: data", "*: data | mb=2", "*: data; head: data@1 | mb=2 1f1b"])
@pytest.mark.parametrize("num_samples", [3, 4])
def test_images_and_labels_may_be_lists_alone(strategy, num_samples):
    """Also as many images as they have channels."""
    torch.manual_seed(0)
    model, draw = OfImages(), torch.Generator().manual_seed(0)
    labels = batch((2, 1, 4, 3)[:num_samples])["labels"][:num_samples]
    images = list(torch.rand(num_samples, 3, 4, 5, generator=draw))
    loss_fn = lambda output, targets: sum(output.values())  # noqa: E731
    one = copy.deepcopy(model)
    loss = loss_fn(one(images, labels), None)
    loss.backward()

    def program():
        spread = wb.parallelize(copy.deepcopy(model), strategy)
        found = wb.forward_backward(spread, loss_fn, (images, labels), None)
        return found.item(), [whole(p.grad) for p in spread.parameters()]

    for found, grads in run_ranks(program, 2):
        assert found == pytest.approx(loss.item(), rel=1e-5)
        for grad, parameter in zip(grads, one.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


class Pair(NamedTuple):
    x: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["samples", "arrays"])
def test_a_batch_of_named_tuples_is_one(kind, num_ranks):
    arrays = Pair(torch.arange(5.0), torch.arange(5))
    data = arrays if kind == "arrays" else [Pair(*row) for row in zip(*arrays, strict=True)]

    def program():
        batches = list(wb.GlobalDataLoader(data, 2))  # of the last sample rank 1 has no part
        assert {type(batch) for batch in batches} == {Pair}
        return [batch.label.full_tensor().tolist() for batch in batches]

    assert run_ranks(program, num_ranks)[-1] == [[0, 1], [2, 3], [4]]
    assert type(Batch.of(take(data, torch.arange(2)), None).inputs) is Pair


class OfPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 3), nn.Linear(3, 2)

    def forward(self, packed):
        return self.head(self.rnn(packed)[1][-1])


@pytest.mark.parametrize("lengths", [[6], [3, 1]])
def test_packed_sequences_are_no_batch(lengths):
    """One sequence was cut along its steps into micro-batches, as if they were samples."""
    packed, targets = pack_sequence([torch.rand(length, 4) for length in lengths]), torch.zeros(len(lengths)).long()
    made = OfPacked()

    def program():
        model = wb.parallelize(copy.deepcopy(made), "*: data | mb=2")
        for call in (
            lambda: wb.forward_backward(model, F.cross_entropy, (packed,), targets),
            lambda: wb.forward_backward(model, F.cross_entropy, packed, targets),
            lambda: wb.evaluate(model, {"packed": packed}),
        ):
            with pytest.raises(RunError, match=rf"PackedSequence of {sum(lengths)} rows.*pack_padded_sequence"):
                call()

    run_ranks(program, 2)
