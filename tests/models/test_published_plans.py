"""Tensor-parallel plans that models of ``transformers`` come with, as rows of a strategy: the numbers of one device.

Written after the tests of tensor parallelism of transformers (tests/test_tensor_parallel_mixin.py,
tests/tensor_parallel): weights lie as the plan says; losses, gradients and steps are those of one device. Generated
words and saved weights are in ``test_generate`` and ``test_trainer``. Not here: experts that a plan puts on different
ranks, weights that a plan packs in blocks, quantized weights.
"""

import pytest
from torch import nn

import workbench as wb
from tests.zoo import of_transformers
from tests.zoo.judge import Subject, judge
from workbench.testing import run_ranks

CHOICES = {
    "colwise": ("column", "S(0)"),
    "colwise_gather_output": ("column", "S(0)"),
    "rowwise": ("row", "S(1)"),
    "rowwise_split_input": ("row", "S(1)"),
    "embedding_rowwise": ("row", "S(0)"),
    "embedding_colwise": ("column", "S(1)"),
}
"""What a plan says of a layer: our choice, and how its weight lies."""
QUICK = ("qwen3",)
OTHERS = (
    "olmoe",
    "cohere",
    "llama",
    "qwen2",
    "qwen3_moe",
    "glm4",
    "glm4_moe",
    "qwen2_moe",
    "phi3",
    "gpt_neox",
    "starcoder2",
    "mixtral",
)


def subject_of(name):
    model = next(model for model in of_transformers.models() if model.name.startswith(f"{name}:"))
    return Subject.of(model)


def planned_layers(module):
    """(pattern, choice, sbp) of every entry of the plan that names layers."""
    layers = {name for name, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Embedding))}
    plan = {pattern: CHOICES[style] for pattern, style in module.tp_plan.items() if style in CHOICES}
    found = []
    for pattern, (choice, sbp) in plan.items():
        named = [name for name in layers if matches(pattern, name)]
        if named:
            found.append((pattern, choice, sbp, named))
    return found


def matches(pattern, name):
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", part) for w, part in zip(wanted, parts, strict=True))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_plan_as_rows_equals_one_device(name):
    subject = subject_of(name)
    layers = planned_layers(subject.module)
    assert len(layers) >= 4, subject.module.tp_plan
    strategy = f"*: data; {'; '.join(f'{pattern}: model:{choice}' for pattern, choice, *_ in layers)} | 1x1x2"
    found = judge(subject, strategy, 2, subject.on_one_device())
    assert found.kind == "equal" and not found.gathered, found
    models = [subject_of(name).module for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        return {n: str(model.get_submodule(n).weight.sbp[0]) for *_, names in layers for n in names}

    wanted = {n: sbp for _, _, sbp, names in layers for n in names}
    assert run_ranks(program, 2) == [wanted] * 2
