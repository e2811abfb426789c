"""Zero bubble keeps weights' gradients back and loses nothing; 1F1B's memory follows the stages, not the batch."""

import copy
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.models.zoo import WORDS
from tests.models.zoo import make as make_transformer
from tests.training.models import make
from workbench.testing import run_ranks
from workbench.training.pipelining.split_backward import WeightGradients

LINEAR = "0: data; 2: data; 4: data@1; 6: data@1 | 2x1x1 mb={} {}"


def grads_of(models, strategy, batch, loss_fn=F.cross_entropy):
    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        wb.forward_backward(model, loss_fn, *batch)
        everywhere = wb.placement.all("cpu")
        return [
            None if p.grad is None else p.grad.to_global(placement=everywhere, sbp="B").full_tensor()
            for p in model.parameters()
        ]

    return run_ranks(program, 2)[0]


def linear_batch(size=8):
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(0)), torch.arange(size) % 10


def next_word(output, targets):
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def test_gradients_of_a_split_backward_are_those_of_one_backward_bit_for_bit():
    models = [make("mlp") for _ in range(4)]
    whole = grads_of(models[:2], LINEAR.format(4, "1f1b"), linear_batch())
    split = grads_of(models[2:], LINEAR.format(4, "zero_bubble"), linear_batch())
    assert all(torch.equal(a, b) for a, b in zip(split, whole, strict=True))


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_first_half_leaves_every_parameter_of_a_later_stage_to_the_second(kind, monkeypatch):
    """Parameters whose gradients the second half does not add have none: nothing was computed early."""
    monkeypatch.setattr(WeightGradients, "accumulate", lambda self: None)
    models = [make_transformer(kind) for _ in range(2)]
    layers = [name for name, part in models[0].named_modules() if any(True for _ in part.parameters(recurse=False))]
    rows = "; ".join(f"{name}: data@{int(i >= len(layers) // 2)}" for i, name in enumerate(layers))
    words = torch.randint(3, WORDS, (4, 5), generator=torch.Generator().manual_seed(0))

    def program(rank):
        model = wb.parallelize(models[rank], f"{rows} | 2x1x1 mb=2 zero_bubble")
        wb.forward_backward(model, next_word, words, words)
        return [name for name, p in model.named_parameters() if not p.is_placeholder and p.grad is not None]

    assert run_ranks(program, 2)[1] == []


def most_saved_bytes(models, strategy, num_micro_batches):
    """By rank: the most bytes that autograd keeps at once of tensors that are no parameters."""
    batch, most = linear_batch(4 * num_micro_batches), [0, 0]
    lock = threading.Lock()

    def program(rank):
        model = wb.parallelize(models[rank], strategy.format(num_micro_batches))
        parameters = {p.data_ptr() for p in model.parameters()}
        live: dict[int, tuple[int, int]] = {}

        def release(pointer):
            with lock:
                count, size = live[pointer]
                live[pointer] = (count - 1, size)
                if count == 1:
                    del live[pointer]

        class Kept:
            def __init__(self, tensor):
                self.tensor = tensor
                pointer = tensor.untyped_storage().data_ptr()
                with lock:
                    count, _ = live.get(pointer, (0, 0))
                    live[pointer] = (count + 1, 0 if pointer in parameters else tensor.numel() * tensor.element_size())
                    most[rank] = max(most[rank], sum(size for _, size in live.values()))
                weakref.finalize(self, release, pointer)

        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            wb.forward_backward(model, F.cross_entropy, *batch)

    run_ranks(program, 2)
    return most


def test_saved_bytes_of_1f1b_follow_the_stages_and_those_of_gpipe_the_micro_batches():
    one = make("mlp")
    few, many = (
        most_saved_bytes([copy.deepcopy(one) for _ in range(2)], LINEAR.format("{}", "1f1b"), n) for n in (4, 16)
    )
    all_of_them = most_saved_bytes([copy.deepcopy(one) for _ in range(2)], LINEAR.format("{}", "gpipe"), 16)
    for rank in range(2):
        assert many[rank] <= 1.1 * few[rank]
    assert all_of_them[0] > 4 * many[0]
