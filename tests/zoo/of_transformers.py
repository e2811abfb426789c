"""Models of ``transformers`` by type: a class for a task that they have, a small configuration, a batch with labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.zoo.batches import SAMPLES, batch_for
from tests.zoo.model import Model
from tests.zoo.tiny_configs import all_parts, tiny
from tests.zoo.type_fields import FIELDS

# In this order: the first task that a type has is the one that it is trained for.
TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "CTC",
    "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "IMAGE_TEXT_TO_TEXT",
    "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "PRETRAINING", "UNIVERSAL_SEGMENTATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "AUDIO_XVECTOR",
)  # fmt: skip
AS_WELL = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION")
"""Tasks that the most used types are trained for besides."""
BESIDES = {
    "bart": "SEQ_TO_SEQ_CAUSAL_LM", "blenderbot": "SEQ_TO_SEQ_CAUSAL_LM", "clip": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "m2m_100": "SEQ_TO_SEQ_CAUSAL_LM", "marian": "SEQ_TO_SEQ_CAUSAL_LM", "mbart": "SEQ_TO_SEQ_CAUSAL_LM",
    "pegasus": "SEQ_TO_SEQ_CAUSAL_LM", "segformer": "SEMANTIC_SEGMENTATION",
    "siglip": "ZERO_SHOT_IMAGE_CLASSIFICATION", "wav2vec2": "AUDIO_CLASSIFICATION", "whisper": "SPEECH_SEQ_2_SEQ",
}  # fmt: skip
"""A task by which a type is better known than by its first one."""
MOST_USED = (
    "bert", "roberta", "distilbert", "gpt2", "llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma2",
    "gemma3_text", "phi", "phi3", "opt", "gpt_neox", "falcon", "bloom", "t5", "bart", "mbart", "electra", "deberta-v2",
    "xlm-roberta", "albert", "vit", "swin", "convnext", "whisper", "wav2vec2",
)  # fmt: skip
WITHOUT_LOSS = ("colmodernvbert", "colpali", "flava", "pp_lcnet")
"""Types whose models give no loss: their first result is trained towards one."""


def models() -> Iterator[Model]:
    """All types, each for its first task; the most used ones for classification too."""
    for task, model_type in _tasks_of_types():
        make = functools.partial(_make, task, model_type)
        name = f"{model_type}:{task.lower()}"
        if model_type in WITHOUT_LOSS:
            yield Model(name, "transformers", functools.partial(_with_targets, make), _mean_square)
        else:
            yield Model(name, "transformers", make)


def _with_targets(make: Callable[[], tuple[torch.nn.Module, Any]]) -> tuple[torch.nn.Module, Any]:
    model, batch = make()
    return model, ({name: value for name, value in batch.items() if name != "labels"}, torch.zeros(SAMPLES))


def _mean_square(output: Any, targets: torch.Tensor) -> torch.Tensor:
    tensors = output.values() if isinstance(output, dict) else output
    return (next(t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()) - 1).square().mean()


def _tasks_of_types() -> Iterator[tuple[str, str]]:
    from transformers.models.auto import modeling_auto

    names = {task: getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS}
    for model_type in sorted({t for of_task in names.values() for t in of_task}):
        tasks = [task for task in TASKS if model_type in names[task]]
        extra = [task for task in AS_WELL if task in tasks[1:]] if model_type in MOST_USED else []
        known_by = [task for task in (BESIDES.get(model_type),) if task in tasks[1:]]
        yield from ((task, model_type) for task in dict.fromkeys([tasks[0], *known_by, *extra]))


def _make(task: str, model_type: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    import transformers as hf
    from transformers.models.auto import configuration_auto, modeling_auto

    hf.logging.set_verbosity_error()
    config_class = configuration_auto.CONFIG_MAPPING[model_type]
    name = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[model_type]
    config = tiny(config_class, **FIELDS.get(model_type, {}))
    for part in all_parts(config):
        part.num_labels = 3
    model_class = getattr(hf, name if isinstance(name, str) else name[0])
    if not isinstance(config, model_class.config_class):  # a part of a model that sees or hears too
        fitting = (part for part in all_parts(config) if isinstance(part, model_class.config_class))
        config = next(fitting, config)
    model = model_class(config)
    return model, batch_for(task, model_type, model, config)
