"""Models of ``transformers`` under the preset ``pipeline``: heads that are listed first, experts that read values."""

import copy

import pytest
import torch

import workbench as wb
from tests.models.zoo import batch_for, make
from workbench.testing import run_ranks
from workbench.training.parallel import state_of


def roberta():
    import transformers as hf

    config = hf.RobertaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return hf.RobertaForMaskedLM(config).train()


def words():
    ids = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


MODELS = {
    "roberta": (roberta, words, "lm_head.decoder"),
    "bart": (lambda: make("bart"), lambda: batch_for("bart"), "lm_head"),
    "mixtral": (lambda: make("mixtral", experts="eager"), lambda: batch_for("mixtral"), "lm_head"),
}


@pytest.mark.filterwarnings("ignore::workbench.training.pipelining.running_step.ValueReadWarning")
@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize(
    "name", ["roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "bart"))]
)
def test_the_preset_pipeline_trains_as_one_device(name):
    build, batch, head = MODELS[name]
    model, inputs = build(), batch()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def program(rank):
        parallel = wb.parallelize(copies[rank], "pipeline | mb=2")
        losses = [wb.forward_backward(parallel, inputs=inputs).item() for _ in range(2)]
        stages = {layer.name: layer.stage for layer in state_of(parallel).resolved.layers}
        return losses, {n: whole(p.grad) for n, p in parallel.named_parameters()}, stages[head]

    def whole(grad):
        return None if grad is None else grad.full_tensor() / 2

    half = (len(inputs["labels"]) + 1) // 2
    parts = [{key: value[rows] for key, value in inputs.items()} for rows in (slice(half), slice(half, None))]
    losses = [model(**part).loss * len(part["labels"]) / len(inputs["labels"]) for part in parts]
    for part_loss in losses:
        part_loss.backward()
    truth = {n: p.grad for n, p in model.named_parameters()}
    for found, grads, stage in run_ranks(program, 2):
        assert found == pytest.approx([sum(losses).item()] * 2, rel=1e-5) and stage == 1
        for key, grad in truth.items():
            if grad is not None:
                torch.testing.assert_close(grads[key], grad, rtol=1e-3, atol=1e-5)
