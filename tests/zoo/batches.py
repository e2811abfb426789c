"""Batches of ``transformers`` models by task, and what models of a type take besides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.tiny_configs import LENGTH, PATCH, PIXELS, WORDS, field

SAMPLES = 4


def batch_for(task: str, model_type: str, model: torch.nn.Module, config: Any) -> dict[str, Any]:
    """What the task's models take, of it what this one's forward names."""
    draw = torch.Generator().manual_seed(3)
    takes = inspect.signature(model.forward).parameters
    batch = BATCHES[task](config, draw)
    if "labels" in batch and "input_ids" in batch and not field(config, ("is_encoder_decoder",), False, bool):
        batch["labels"] = batch["input_ids"].clone() if task == "SEQ_TO_SEQ_CAUSAL_LM" else batch["labels"]
    batch = {name: value for name, value in batch.items() if name in takes}
    if "bbox" in takes:
        batch["bbox"] = torch.zeros(SAMPLES, LENGTH, 4, dtype=torch.long)
    if "image_sizes" in takes:
        batch["image_sizes"] = torch.tensor([_image_size(config)] * SAMPLES)
    if "image_grid_thw" in takes:
        batch.update(_patches(config, draw))
    if model_type in EXTRAS:
        batch.update(EXTRAS[model_type](config, draw))
        batch = {name: value for name, value in batch.items() if value is not None}
    for kind in ("image", "audio"):
        if "input_ids" in batch:
            batch = _with_words_of(kind, model, config, batch)
    return batch


def _words(draw: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randint(4, WORDS - 50, size, generator=draw)


def _text(config: Any, draw: torch.Generator) -> dict[str, Any]:
    ids = _words(draw, SAMPLES, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def _seq_to_seq(config: Any, draw: torch.Generator) -> dict[str, Any]:
    sound = _sound(config, draw) if field(config, ("audio_token_id", "audio_token_index"), None) else {}
    return {"input_ids": _words(draw, SAMPLES, LENGTH), "labels": _words(draw, SAMPLES, LENGTH - 2), **sound}


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
    filled = torch.ones(SAMPLES, frames, dtype=torch.long)
    features = torch.randn(SAMPLES, bins, frames, generator=draw)
    masks = {"input_features_mask": filled, "feature_attention_mask": filled}
    return {"input_values": waves, "input_features": features, **masks}


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


def _with_words_of(kind: str, model: torch.nn.Module, config: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """As many words that stand for the image or the sound as the model makes of it, before the text."""
    word = field(config, (f"{kind}_token_id", f"{kind}_token_index"), None)
    core = model if hasattr(model, f"get_{kind}_features") else getattr(model, "model", model)
    make = getattr(core, f"get_{kind}_features", None)
    given = {} if make is None else {n: v for n, v in batch.items() if n in _names_of(make)}
    if word is None or not set(given) - {"input_ids"}:
        return batch
    features = make(**given)
    features = getattr(features, "pooler_output", features)
    tensors = features if isinstance(features, list | tuple) else [features]
    width = config.get_text_config().hidden_size
    number = sum(t.numel() for t in tensors) // width // SAMPLES
    ids = torch.cat([torch.full((SAMPLES, number), word), batch["input_ids"]], 1)
    batch = {**batch, "input_ids": ids, "labels": ids.clone()}
    kinds = {"mm_token_type_ids": (ids == word).long(), "token_type_ids": (ids == word).long()}
    return {**batch, **{name: value for name, value in kinds.items() if name in _names_of(model.forward)}}


def _names_of(function: Any) -> Any:
    """The arguments of a function, of that inside its decorators too."""
    return inspect.signature(inspect.unwrap(function)).parameters


def _masks(config: Any, draw: torch.Generator) -> dict[str, Any]:
    size = _image_size(config) if field(config, ("num_blocks",), None) else (64, 64)
    masks = [(torch.rand(2, *size, generator=draw) > 0.5).double() for _ in range(SAMPLES)]
    pixels = torch.randn(SAMPLES, 3, *size, generator=draw)
    return {"pixel_values": pixels, "mask_labels": masks, "class_labels": [_classes(draw, 2) for _ in range(SAMPLES)]}


def _pairs(config: Any, draw: torch.Generator) -> dict[str, Any]:
    ids = _words(draw, SAMPLES, LENGTH)
    ids[:, -1] = field(config, ("eos_token_id",), 2)
    return {"input_ids": ids, "pixel_values": _pixels(config, draw), "return_loss": True}


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
    "UNIVERSAL_SEGMENTATION": _masks,
    "ZERO_SHOT_IMAGE_CLASSIFICATION": _pairs,
    "AUDIO_XVECTOR": _sound_classes,
}


def _text_of(length: int, draw: torch.Generator) -> dict[str, Any]:
    ids = _words(draw, SAMPLES, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _patch_rows(config: Any, draw: torch.Generator) -> dict[str, Any]:
    side = field(config, ("patch_size",), PATCH)
    return {
        "pixel_values": torch.randn(SAMPLES, 16, 3 * side**2, generator=draw),
        "pixel_attention_mask": torch.ones(SAMPLES, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * SAMPLES),
    }


def _image_of_each(config: Any, draw: torch.Generator) -> dict[str, Any]:
    """Several images may come with each text."""
    return {"pixel_values": _pixels(config, draw).unsqueeze(1)}


def _frames(width: int) -> Callable[[Any, torch.Generator], dict[str, Any]]:
    """Sound as rows of frames, not of bins."""

    def make(config: Any, draw: torch.Generator) -> dict[str, Any]:
        features = torch.randn(SAMPLES, 64, width, generator=draw)
        mask = torch.ones(SAMPLES, 64, dtype=torch.long) if width == 16 else None
        return {"input_features": features, "input_features_mask": None, "attention_mask": mask}

    return make


def _base_and_patch(config: Any, draw: torch.Generator) -> dict[str, Any]:
    """An image as a whole and its one patch."""
    return {"pixel_values": _pixels(config, draw).unsqueeze(1).expand(-1, 2, -1, -1, -1).clone()}


EXTRAS: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {
    "audio-spectrogram-transformer": lambda config, draw: {
        "input_values": torch.randn(SAMPLES, config.max_length, config.num_mel_bins, generator=draw)
    },
    "git": lambda config, draw: {"pixel_values": _pixels(config, draw)},
    "idefics": lambda config, draw: {
        **_image_of_each(config, draw),
        "image_attention_mask": torch.ones(SAMPLES, LENGTH, 1, dtype=torch.long),
    },
    "idefics2": _image_of_each,
    "idefics3": _image_of_each,
    "smolvlm": _image_of_each,
    "imagegpt": lambda config, draw: {"pixel_values": None, "input_ids": _words(draw, SAMPLES, LENGTH)},
    "instructblip": lambda config, draw: {"qformer_input_ids": _words(draw, SAMPLES, LENGTH)},
    "instructblipvideo": lambda config, draw: {
        "qformer_input_ids": _words(draw, SAMPLES, LENGTH),
        "pixel_values": _pixels(config, draw).unsqueeze(1),
    },
    "llava": lambda config, draw: {"image_sizes": None},
    "vipllava": lambda config, draw: {"image_sizes": None},
    "lxmert": lambda config, draw: {
        "visual_feats": torch.randn(SAMPLES, 4, config.visual_feat_dim, generator=draw),
        "visual_pos": torch.rand(SAMPLES, 4, config.visual_pos_dim, generator=draw),
        "labels": _classes(draw, SAMPLES),
        "start_positions": None,
        "end_positions": None,
    },
    "visual_bert": lambda config, draw: {
        "visual_embeds": torch.randn(SAMPLES, 4, config.visual_embedding_dim, generator=draw),
        "labels": _words(draw, SAMPLES, LENGTH + 4),
        "attention_mask": torch.ones(SAMPLES, LENGTH, dtype=torch.long),
        "visual_attention_mask": torch.ones(SAMPLES, 4, dtype=torch.long),
    },
    "canary": _frames(16),
    "cohere_asr": _frames(16),
    "parakeet_ctc": _frames(16),
    "lasr_ctc": _frames(16),
    "granite_speech": _frames(160),
    "granite_speech_plus": _frames(160),
    "wav2vec2-bert": _frames(160),
    "pop2piano": _frames(32),
    "speech-encoder-decoder": lambda config, draw: {"input_features": None},
    "llava_next": _base_and_patch,
    "llava_next_video": _base_and_patch,
    "llava_onevision": _base_and_patch,
    "kosmos-2": lambda config, draw: {
        "image_embeds_position_mask": (torch.arange(LENGTH) < 4).long().expand(SAMPLES, LENGTH).clone()
    },
    "perceiver": lambda config, draw: _text_of(64, draw),
    "pix2struct": lambda config, draw: {
        "flattened_patches": torch.cat([torch.ones(SAMPLES, 6, 2), torch.randn(SAMPLES, 6, 24, generator=draw)], 2),
        "labels": _words(draw, SAMPLES, LENGTH),
    },
    "siglip2": _patch_rows,
    "lfm2_vl": _patch_rows,
    "speech_to_text": lambda config, draw: {"input_features": torch.randn(SAMPLES, 32, 16, generator=draw)},
    "molmo2": lambda config, draw: {
        "pixel_values": None,
        "mm_token_type_ids": torch.zeros(SAMPLES, LENGTH, dtype=torch.long),
    },
    "pi0": lambda config, draw: {
        "state": torch.randn(SAMPLES, config.max_state_dim, generator=draw),
        "actions": torch.randn(SAMPLES, config.chunk_size, config.max_action_dim, generator=draw),
        "noise": torch.randn(SAMPLES, config.chunk_size, config.max_action_dim, generator=draw),
        "timestep": torch.rand(SAMPLES, generator=draw),
        "pixel_values": _pixels(config, draw).unsqueeze(1),
        "pixel_attention_mask": torch.ones(SAMPLES, 1, dtype=torch.bool),
        "labels": None,
    },
    "granite_speech5_ctc": lambda config, draw: {
        "input_features": torch.randn(SAMPLES, 64, 64, generator=draw),
        "attention_mask": torch.ones(SAMPLES, 64, dtype=torch.long),
    },
    "musicgen": lambda config, draw: {"labels": _words(draw, SAMPLES, LENGTH, 1)},
    "musicgen_melody": lambda config, draw: {"labels": _words(draw, SAMPLES, LENGTH, 1)},
    "kimi_k25": lambda config, draw: {"pixel_values": torch.randn(SAMPLES * 16, 3, PATCH, PATCH, generator=draw)},
    "nemo_speechlm": lambda config, draw: {
        "input_features": torch.randn(SAMPLES, 64, 16, generator=draw),
        "input_features_mask": torch.ones(SAMPLES, 64, dtype=torch.long),
    },
    "vit_mae": lambda config, draw: {
        "pixel_values": _pixels(config, draw),
        "noise": torch.rand(SAMPLES, 16, generator=draw),
    },
}
"""What a type takes in place of its task's inputs, or beside them; None leaves one out."""
