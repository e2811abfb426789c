"""Models of ``transformers`` by type: a class for a task that they have, a small configuration, a batch with labels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.zoo.model import Model
from tests.zoo.tiny_configs import LENGTH, PATCH, PIXELS, WORDS, all_parts, field, tiny

SAMPLES = 4

# In this order: the first task that a type has is the one that it is trained for.
TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "CTC",
    "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "IMAGE_TEXT_TO_TEXT",
    "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "PRETRAINING",
)  # fmt: skip
AS_WELL = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION")
"""Tasks that the most used types are trained for besides."""
MOST_USED = (
    "bert", "roberta", "distilbert", "gpt2", "llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma2",
    "gemma3_text", "phi", "phi3", "opt", "gpt_neox", "falcon", "bloom", "t5", "bart", "mbart", "electra", "deberta-v2",
    "xlm-roberta", "albert", "vit", "swin", "convnext", "whisper", "wav2vec2",
)  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "granite_speech5_ctc": {"max_position_embeddings": 256},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
"""Fields of a type that names alone do not make fit each other."""


def models() -> Iterator[Model]:
    """All types, each for its first task; the most used ones for classification too."""
    for task, model_type in _tasks_of_types():
        yield Model(f"{model_type}:{task.lower()}", "transformers", functools.partial(_make, task, model_type))


def _tasks_of_types() -> Iterator[tuple[str, str]]:
    from transformers.models.auto import modeling_auto

    names = {task: getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS}
    for model_type in sorted({t for of_task in names.values() for t in of_task}):
        tasks = [task for task in TASKS if model_type in names[task]]
        extra = [task for task in AS_WELL if task in tasks[1:]] if model_type in MOST_USED else []
        yield from ((task, model_type) for task in [tasks[0], *extra])


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
    if not isinstance(config, model_class.config_class):  # the text model of one that sees or hears too
        config = config.get_text_config()
    model = model_class(config)
    return model, _batch(task, model, config)


def _batch(task: str, model: torch.nn.Module, config: Any) -> dict[str, Any]:
    """What the task's models take, of it what this one's forward names."""
    draw = torch.Generator().manual_seed(3)
    takes = inspect.signature(model.forward).parameters
    batch = {name: value for name, value in BATCHES[task](config, draw).items() if name in takes}
    if "bbox" in takes:
        batch["bbox"] = torch.zeros(SAMPLES, LENGTH, 4, dtype=torch.long)
    if "image_sizes" in takes:
        batch["image_sizes"] = torch.tensor([_image_size(config)] * SAMPLES)
    if "image_grid_thw" in takes:
        batch.update(_patches(config, draw))
    return _with_image_words(model, config, batch) if "pixel_values" in batch and "input_ids" in batch else batch


def _words(draw: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randint(4, WORDS - 50, size, generator=draw)


def _text(config: Any, draw: torch.Generator) -> dict[str, Any]:
    ids = _words(draw, SAMPLES, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def _seq_to_seq(config: Any, draw: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _words(draw, SAMPLES, LENGTH), "labels": _words(draw, SAMPLES, LENGTH - 2)}


def _classes(draw: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randint(0, 3, size, generator=draw)


def _text_classes(config: Any, draw: torch.Generator) -> dict[str, Any]:
    ids = _words(draw, SAMPLES, LENGTH)
    ids[:, -1] = field(config, ("eos_token_id",), 2)
    return {"input_ids": ids, "labels": _classes(draw, SAMPLES)}


def _word_classes(config: Any, draw: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _words(draw, SAMPLES, LENGTH), "labels": _classes(draw, SAMPLES, LENGTH)}


def _answers(config: Any, draw: torch.Generator) -> dict[str, Any]:
    places = {
        name: torch.randint(0, LENGTH, (SAMPLES,), generator=draw) for name in ("start_positions", "end_positions")
    }
    return {"input_ids": _words(draw, SAMPLES, LENGTH), **places}


def _image_size(config: Any) -> tuple[int, int]:
    size = field(config, ("image_size",), PIXELS, (int, list, tuple))
    return tuple(size)[-2:] if isinstance(size, list | tuple) else (size, size)


def _pixels(config: Any, draw: torch.Generator) -> torch.Tensor:
    channels = field(config, ("num_channels",), 3)
    return torch.randn(SAMPLES, channels, *_image_size(config), generator=draw)


def _image_classes(config: Any, draw: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _pixels(config, draw), "labels": _classes(draw, SAMPLES)}


def _video_classes(config: Any, draw: torch.Generator) -> dict[str, Any]:
    frames = field(config, ("num_frames", "frames_per_clip"), 4)
    pixels = torch.randn(SAMPLES, frames, 3, *_image_size(config), generator=draw)
    return {"pixel_values": pixels, "pixel_values_videos": pixels, "labels": _classes(draw, SAMPLES)}


def _segments(config: Any, draw: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _pixels(config, draw), "labels": _classes(draw, SAMPLES, *_image_size(config))}


def _boxes(config: Any, draw: torch.Generator) -> dict[str, Any]:
    labels = [
        {"class_labels": _classes(draw, 2), "boxes": torch.rand(2, 4, generator=draw) * 0.3 + 0.3}
        for _ in range(SAMPLES)
    ]
    return {"pixel_values": torch.randn(SAMPLES, 3, 64, 64, generator=draw), "labels": labels}


def _sound(config: Any, draw: torch.Generator) -> dict[str, Any]:
    bins, frames = field(config, ("num_mel_bins", "feature_size"), 16), 2 * field(config, ("max_source_positions",), 64)
    waves = torch.randn(SAMPLES, 1600, generator=draw)
    return {"input_values": waves, "input_features": torch.randn(SAMPLES, bins, frames, generator=draw)}


def _sound_classes(config: Any, draw: torch.Generator) -> dict[str, Any]:
    return {**_sound(config, draw), "labels": _classes(draw, SAMPLES)}


def _spoken_words(config: Any, draw: torch.Generator) -> dict[str, Any]:
    return {**_sound(config, draw), "labels": _words(draw, SAMPLES, 3)}


def _image_and_text(config: Any, draw: torch.Generator) -> dict[str, Any]:
    """The words of the image's place come first; ``_batch`` finds out how many they are."""
    ids = _words(draw, SAMPLES, LENGTH)
    return {"input_ids": ids, "pixel_values": _pixels(config, draw), "labels": ids.clone()}


def _patches(config: Any, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Of models that take patches of images of any size in one row after the other: 4 by 4 of each sample."""
    vision = config.vision_config
    side, frames = getattr(vision, "patch_size", PATCH), getattr(vision, "temporal_patch_size", 1)
    patches = torch.randn(SAMPLES * 16, 3 * frames * side**2, generator=draw)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * SAMPLES)}


def _with_image_words(model: torch.nn.Module, config: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """As many words that stand for the image as the model makes of it, before the text."""
    word = field(config, ("image_token_id", "image_token_index"), None)
    core = model if hasattr(model, "get_image_features") else getattr(model, "model", model)
    if word is None or not hasattr(core, "get_image_features"):
        return batch
    given = {name: batch[name] for name in ("pixel_values", "image_grid_thw", "image_sizes") if name in batch}
    features = core.get_image_features(**given)
    features = getattr(features, "pooler_output", features)
    tensors = features if isinstance(features, list | tuple) else [features]
    width = config.get_text_config().hidden_size
    number = sum(t.numel() for t in tensors) // width // SAMPLES
    ids = torch.cat([torch.full((SAMPLES, number), word), batch["input_ids"]], 1)
    batch = {**batch, "input_ids": ids, "labels": ids.clone()}
    kinds = {"mm_token_type_ids": (ids == word).long(), "token_type_ids": (ids == word).long()}
    takes = inspect.signature(model.forward).parameters
    return {**batch, **{name: value for name, value in kinds.items() if name in takes}}


BATCHES: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {
    "CAUSAL_LM": _text,
    "MASKED_LM": _text,
    "PRETRAINING": _text,
    "SEQ_TO_SEQ_CAUSAL_LM": _seq_to_seq,
    "SEQUENCE_CLASSIFICATION": _text_classes,
    "TOKEN_CLASSIFICATION": _word_classes,
    "QUESTION_ANSWERING": _answers,
    "IMAGE_CLASSIFICATION": _image_classes,
    "VIDEO_CLASSIFICATION": _video_classes,
    "SEMANTIC_SEGMENTATION": _segments,
    "OBJECT_DETECTION": _boxes,
    "CTC": _spoken_words,
    "SPEECH_SEQ_2_SEQ": _spoken_words,
    "AUDIO_CLASSIFICATION": _sound_classes,
    "IMAGE_TEXT_TO_TEXT": _image_and_text,
}
