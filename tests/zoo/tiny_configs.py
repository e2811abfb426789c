"""Small configurations of every type of ``transformers``: the default one with its sizes replaced by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

WIDTH, WORDS, HEADS, LAYERS, PIXELS, PATCH, LENGTH = 32, 96, 4, 2, 32, 8, 8

# The first pattern that the whole name of a field matches gives its value. A list of numbers gets the value at every
# position; "halves" doubles from one position to the next, as widths of stages do.
SIZES: tuple[tuple[str, int | str], ...] = (
    (r"(.*_)?(kv|key_value)_heads|num_kv_heads|num_key_value_heads|n_head_kv|num_kv_heads_.*", 2),
    (
        r"(.*_)?(num_(attention_)?heads|n_heads?|attention_heads|num_v_heads|index_n_heads)|num_attention_heads_.*",
        HEADS,
    ),
    (r"linear_num_(key|value)_heads", 2),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|num_decoder_layers|depth)", LAYERS),
    (r"num_(encoder|decoder|hidden|adapter|text|vision|mtp)_?(blocks|layers)|layers|num_blocks", LAYERS),
    (r"(.*_)?(head_dim|d_kv|head_size|v_head_dim|attention_head_size|kv_channels)|d_head|qk_(rope|nope)_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"rotary_(emb_)?dim", 8),
    (r"(q|kv|o)_lora_rank|.*_lora_rank|(time|decay|gate|value)_low_rank.*", 16),
    (
        r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff|n_inner|ffn_size|d_inner|feed_forward_.*size)",
        48,
    ),
    (r"moe_(intermediate|ffn).*size|shared_expert_intermediate_size|intermediate_size_mlp|dim_feedforward", 48),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts|num_local_experts", 4),
    (r"num_experts_per_tok(en)?|num_experts_per_token|top_?k(_experts)?|moe_topk?|moe_k|experts_per_token", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"n(um)?_shared_experts?|num_shared_experts", 1),
    (r"vocab_size(_per_layer_input)?|.*_vocab_size(?<!type_vocab_size)", WORDS),
    (r"codebook_size", 64),
    (r"type_vocab_size", 2),
    (r"(max_(position_embeddings|sequence_length|seq_len|seqlen|context_length)|n_positions|n_ctx|context_length)", 64),
    (r"max_(source|target|2d|length).*|block_size|seq_length|max_window_layers|.*max_position_embeddings", 64),
    (r"(sliding_window|attention_window|local_attention|attention_chunk_size|chunk_size|index_topk)", 8),
    (r"(image_size|pretrain_image_size|input_image_size|encoder_image_size)", PIXELS),
    (r"patch_size", PATCH),
    (r"temporal_patch_size|spatial_merge_size", 2),
    (r"window_size", 4),
    (r"num_mel_bins|feature_size|num_mels", 16),
    (r"num_queries", 6),
    (r"depths|stage_num_blocks|num_blocks_per_stage|blocks", 1),
    (
        r"hidden_sizes|embed_dims?|neck_hidden_sizes|channels|encoder_hidden_sizes|num_filters|stage_out_channels",
        "halves",
    ),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_(size|dim)|hidden_dim|projection_dim|out_dim)", WIDTH),
    (r"(dim|model_dim|d_embed|projector_hidden_size|conv_dim|out_hidden_size|emb_dim|width|hidden_channels)", WIDTH),
)
_PATTERNS = tuple((re.compile(pattern), value) for pattern, value in SIZES)
_IDS = ("pad", "bos", "eos", "decoder_start")
_KEPT = ("chunk_size_feed_forward", "num_channels", "hop_length", "num_frames")


def tiny(config_class: Any, **given: Any) -> Any:
    """A small configuration of this class, for training in 64 bits.

    Args:
        given: fields that replace what names alone give; ``text_config={...}`` for those of a part, and
            ``backbone_config={"model_type": ...}`` for a part that there is not by default.
    """
    config = config_class(**_small_fields(config_class(), given))
    for part in all_parts(config):
        part.use_cache = False
        if getattr(part, "is_encoder_decoder", False) and getattr(part, "decoder_start_token_id", None) is None:
            part.decoder_start_token_id = _IDS.index("decoder_start")
            part.pad_token_id = getattr(part, "pad_token_id", None) or 0
        part._experts_implementation = "batched_mm"  # the default has no 64 bits
        for name, number in (("pad_token_id", 0), ("eos_token_id", 2)):
            if vars(part).get(name, number) is None:
                setattr(part, name, number)
    return config


def _small_fields(default: Any, given: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    special = _token_ids(default)
    values = default.to_dict()
    for name, value in values.items():
        part = vars(default).get(name)
        if _is_part(part):
            fields[name] = _small_fields(part, given.get(name, {}))
            fields[name]["model_type"] = part.model_type
        elif (kinds := _kinds_of_layers(default, value)) is not None:
            fields[name] = kinds
        elif name in special:
            fields[name] = special[name]
        elif (small := _small(name, value)) is not None:
            has_all_heads = name.endswith(("kv_heads", "key_value_heads")) and value == values.get(
                "num_attention_heads"
            )
            fields[name] = HEADS if has_all_heads else small
        elif re.fullmatch(
            r".*(dropout|drop|dropout_rate|drop_rate|pdrop|drop_prob|drop_path_rate|layerdrop|prob)", name
        ):
            fields[name] = type(value)(0) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if "depths" in fields and "patch_size" in fields:  # each stage halves the image
        fields["patch_size"] = 4
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, dict) and "model_type" in value:
            fields[name] = _part_of_type(**value)
        elif not _is_part(vars(default).get(name)):
            fields[name] = value
    return fields


def _is_part(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _part_of_type(model_type: str, **given: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return tiny(CONFIG_MAPPING[model_type], **given)


def _kinds_of_layers(default: Any, value: Any) -> list[str] | None:
    """Of a list with the kind of each layer: as many as there are small layers, of two kinds if it has two."""
    if not isinstance(value, list | tuple) or len(value) <= LAYERS or not all(isinstance(v, str) for v in value):
        return None
    if len(value) != getattr(default, "num_hidden_layers", None):
        return None
    other = next((kind for kind in value if kind != value[0]), value[0])
    return [value[0], other]


def _small(name: str, value: Any) -> Any:
    """The small value of a field; None if it keeps its own."""
    numbers = isinstance(value, list | tuple) and value and all(type(v) is int for v in value)
    if (type(value) is not int and not numbers) or name in _KEPT:
        return None
    for pattern, small in _PATTERNS:
        if pattern.fullmatch(name):
            if small == "halves":
                return [WIDTH // 2 * 2**i for i in range(len(value))] if numbers else WIDTH
            return [small] * len(value) if numbers else small
    return None


def _token_ids(default: Any) -> dict[str, int]:
    """Ids of special words, which must lie in the small vocabulary; a name has one number wherever it stands."""
    names = sorted(n for n, v in default.to_dict().items() if _is_token_id(n) and type(v) is int)
    ids = {}
    for name in names:
        start = name.removesuffix("_id").removesuffix("_token").removesuffix("_index").removesuffix("_token")
        ids[name] = _IDS.index(start) if start in _IDS else special_id(start)
    return ids


def special_id(start: str) -> int:
    """The number of a special word such as ``image``, the same in every part of a model."""
    return WORDS - 1 - sum(map(ord, start)) % 40


def _is_token_id(name: str) -> bool:
    return bool(re.fullmatch(r"(?!.*per_token).*(_token_id|_token_index|_token|_start_id|_end_id)", name))


def all_parts(config: Any) -> Iterator[Any]:
    """The configuration and those inside it."""
    yield config
    for part in vars(config).values():
        if _is_part(part):
            yield from all_parts(part)


def field(config: Any, names: tuple[str, ...], default: Any, kind: type | tuple[type, ...] = int) -> Any:
    """The first of the fields that a part of the configuration has, looked for from outside."""
    found = (vars(part).get(name) for part in all_parts(config) for name in names)
    return next((value for value in found if isinstance(value, kind) and not isinstance(value, bool)), default)
