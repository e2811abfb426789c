"""Fields of a type's small configuration that names alone do not make fit each other."""

from __future__ import annotations

from typing import Any

WIDTHS = [16, 32, 64, 128]
STAGES = ["stage1", "stage2", "stage3", "stage4"]
RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": WIDTHS, "depths": [1] * 4, "layer_type": "basic",
}  # fmt: skip
DETR = {"backbone_config": {**RESNET, "out_features": ["stage4"]}}
LEVELS = {
    "encoder_in_channels": WIDTHS[1:], "decoder_in_channels": [32] * 3, "num_denoising": 0, "encode_proj_layers": [2],
    "encoder_layers": 1,
}  # fmt: skip
HGNET = {
    "stem_channels": [3, 16, 16], "stage_in_channels": [16, 16, 32, 64], "stage_mid_channels": [16] * 4,
    "stage_out_channels": WIDTHS, "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [2] * 4, "embedding_size": 16,
    "hidden_sizes": WIDTHS, "depths": [1] * 4,
}  # fmt: skip
RT_DETR = {**LEVELS, "backbone_config": {"out_features": STAGES[1:]}}
D_FINE = {**LEVELS, "backbone_config": {**HGNET, "out_features": STAGES[1:]}}
SWIN = {"image_size": 64, "patch_size": 4, "window_size": 2, "embed_dim": 16, "num_heads": [2, 2, 4, 4]}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
SEES = {"text_config": {"rope_parameters": MROPE, "head_dim": 8}}
WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1]}
GEMMA3N = {
    "intermediate_size": 48,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": None,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}
INDEXED = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "head_dim": 8,
}  # fmt: skip
LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_rope_head_dim": 8,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
COMPASS = {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
OF_32 = {"hidden_size_global": 32}

FIELDS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 32, "time_stride": 8, "frequency_stride": 8},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bit": {"num_groups": 4},
    "bros": {"hidden_size": 64},
    "canine": {"local_transformer_stride": 4, "num_hash_buckets": 64},
    "conditional_detr": DETR,
    "dab-detr": DETR,
    "detr": DETR,
    "table-transformer": DETR,
    "deformable_detr": {"backbone_config": {**RESNET, "out_features": STAGES[1:]}},
    "d_fine": D_FINE,
    "deimv2": D_FINE,
    "pp_doclayout_v3": D_FINE,
    "hgnet_v2": HGNET,
    "rt_detr": RT_DETR,
    "rt_detr_v2": RT_DETR,
    "donut-swin": SWIN,
    "swin": SWIN,
    "qwen4_exp": {"text_config": INDEXED},
    "qwen4_exp_text": INDEXED,
    "dots3_note_text": {f"swa_{name}": value for name, value in LATENT.items()},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "esm": {"vocab_size": 96, "mask_token_id": 5, "pad_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_ctc": {"encoder_config": {"max_position_embeddings": 256}},
    "hiera": {"image_size": [64, 64], "patch_size": [7, 7], "embed_dim": 16, "depths": [1, 1, 1, 1]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32, "visual_embed": False},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 32, 48], "key_dim": [8] * 3},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "poolformer": {"num_encoder_blocks": 4, "patch_size": 4},
    "pvt": {"image_size": 64, "num_encoder_blocks": 4, "num_attention_heads": [1, 2, 2, 4]},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}, "vision_config": WINDOWS},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": MROPE}, "vision_config": WINDOWS},
    "exaone4_5": {"vision_config": WINDOWS},
    "hyperclovax_vision_v2": {"vision_config": WINDOWS},
    "glm4v": SEES,
    "glm46v": SEES,
    "glm4v_moe": SEES,
    "glm_ocr": SEES,
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
        "axial_pos_shape": [2, 4], "axial_pos_embds_dim": [16, 16], "num_buckets": 2, "hash_seed": 0,
    },
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 16},
    "upernet": {"backbone_config": {**RESNET, "out_features": STAGES},
                "auxiliary_in_channels": 64},
    "wav2vec2-bert": {"vocab_size": 96},
    "wav2vec2-conformer": {"vocab_size": 96},
    "xmod": {"default_language": "en_XX"},
    "blip-2": {"image_token_index": 90, "num_query_tokens": 4},
    "instructblip": {"image_token_index": 90, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 90, "num_query_tokens": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_config": OF_32, "decoder_config": OF_32},
    "cvt": {"depth": [1, 2, 3], "num_heads": [1, 2, 4], "embed_dim": WIDTHS[:3]},
    "florence2": {
        "vision_config": {
            "patch_size": [7, 3, 3, 3],
            "embed_dim": WIDTHS,
            "num_heads": [2, 2, 4, 4],
            "num_groups": [2, 2, 4, 4],
        }
    },
    "gemma3n": {"text_config": GEMMA3N},
    "gemma3n_text": GEMMA3N,
    "kimi_linear": {"num_experts": 4, "num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4,
                    "num_experts_per_token": 2},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "lw_detr": {"backbone_config": {"image_size": 64, "num_windows": 4}},
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_config": {"num_key_value_heads": 4}},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 24}},
    "switch_transformers": {"router_jitter_noise": 0.0},
    "textnet": {"stem_out_channels": 16, "hidden_sizes": [16, 16, 32, 32, 64], "image_size": [64, 64]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64, "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64, "attention_head_dim": 16},
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "kosmos-2": {"latent_query_num": 4},
    "lxmert": {"num_qa_labels": 3},
    "mask2former": {"feature_size": 32, "mask_feature_size": 32, "backbone_config": {**SWIN, "out_features": STAGES}},
    "qwen3_asr": {"audio_config": {"n_window": 16}},
    "timm_wrapper": {"architecture": "test_resnet"},
    "align": {"vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}},
    "mistral4": {"head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "zaya": {"num_experts_per_tok": 1},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "nemo_speechlm": {"text_config": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1}},
    "cohere_compass": {"text_config": COMPASS},
    "cohere_compass_text": COMPASS,
    "cosmos3_edge": {"text_config": {"rope_parameters": MROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}}},
    "glm5_next": {"text_config": {"index_topk": 16, "qk_rope_head_dim": 0}},
    "hy_v4_vl": {"text_config": {"rope_parameters": MROPE}},
    "neomme": {"head_dim": 16},
}  # fmt: skip
"""``{"model_type": ...}`` makes a small configuration of that type for a part that has none by default."""
