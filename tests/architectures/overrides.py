"""What names of fields do not say: values for tiny configurations, by the `model_type` that has the field."""

from typing import Any

import torch


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
MROPE = {**ROPE, "mrope_section": [4, 2, 2]}
WINDOWS = {"window_size": 32}

OVERRIDES: dict[str, dict] = {
    "align_vision_model": {"width_coefficient": 1.0},
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "audio-spectrogram-transformer": {"max_length": 32, "frequency_stride": 8, "time_stride": 8},
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "blenderbot": {"encoder_layers": 3},
    "bros": {"dim_bbox_sinusoid_emb_2d": 64, "dim_bbox_sinusoid_emb_1d": 8, "dim_bbox_projection": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"first_k_dense_replace": 1},
    "dots3_note_text": {"per_layer_config": {"2": {"num_attention_heads": 2, "num_key_value_heads": 2}}},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4},
    "efficientnet": {"width_coefficient": 1.0, "hidden_dim": 1280},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]}},
    "exaone4_5_vision": WINDOWS,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "glmasr_encoder": {"intermediate_size": 256},
    "granite4_vision": {"image_grid_pinpoints": [[64, 64]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "hunyuan_vl_text": {"rope_parameters": MROPE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2": {"latent_query_num": 8},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10},
    "levit": {"patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "lilt": {"hidden_size": 48},
    "llava_next": {"image_grid_pinpoints": [[64, 64]]},
    "llava_next_video": {"image_grid_pinpoints": [[64, 64]]},
    "llava_onevision": {"image_grid_pinpoints": [[64, 64]]},
    "longcat_flash": {"zero_expert_num": 2},
    "lw_detr_vit": {"num_windows": 4, "num_windows_side": 2},
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 32},
    "mistral_large4_text": {"kv_source_layers": [0, 1, 2]},
    "mobilebert": {"intra_bottleneck_size": 64},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevitv2": {"image_size": 64, "width_multiplier": 0.25},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "patchtst": {"num_targets": 3},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 192},
    "pp_lcnet": {"scale": 0.25},
    "pp_lcnet_v3": {"scale": 0.25},
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_vision_encoder": WINDOWS,
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_vision": WINDOWS,
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen3_omni_moe_text": {"rope_parameters": MROPE},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [32, 32],
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "sam_hq_prompt_encoder": {"image_embedding_size": 4},
    "sam_hq_vision_model": {"num_pos_feats": 32},
    "sam_prompt_encoder": {"image_embedding_size": 4},
    "sam_vision_model": {"num_pos_feats": 32},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "slanet": {"max_text_length": 8},
    "slanext": {"max_text_length": 8},
    "step3p5": {"sliding_window": 16},
    "superpoint": {"keypoint_decoder_dim": 65},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "tipsv2_dpt": {"neck_hidden_sizes": [16] * 4},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "voxtral_encoder": {"intermediate_size": 256},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {"hybrid_layer_ids": [2], "attention_hidden_size": 128, "attention_head_dim": 32},
}

# Fields that are set on the finished configuration.
LATE: dict[str, dict] = {
    "qwen2_5_omni_thinker": {"vision_start_token_id": 140},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 140},
}


def _floats(*shape):
    return lambda source, *_: source.floats(*(size(source) if callable(size) else size for size in shape))


def _ones(*shape):
    return lambda source, *_: torch.ones(*shape, dtype=torch.long)


def _holes(source, inputs):
    mask = torch.zeros_like(inputs["input_ids"])
    mask[:, 2:10] = 1
    return mask


PAIRS = {"pixels": _floats(2, 2, 3, 64, 64)}
FORECAST = {
    "make": {
        "past_values": lambda source, inputs: list(source.floats(2, 64)),
        "freq": lambda source, inputs: torch.zeros(2, dtype=torch.long),
        "future_values": lambda source, inputs: source.floats(2, source.config.horizon_length),
    }
}
TILES = {"pixels": _floats(2, 5, 3, 32, 32), "make": {"image_sizes": lambda *_: torch.tensor([[64, 64]] * 2)}}
TEXT_ONLY = {"without": ("pixel_values", "input_features", "input_features_mask")}
PATCHES = {"pixels": _floats(32, 3, 8, 8)}
STRIPES = {"pixels": _floats(1, 3, 8, 2 * 16 * 8)}
IMAGES = {"pixels": _floats(2, 1, 3, lambda source: source.size()[0], lambda source: source.size()[1])}

CODES = {
    "make": {
        "input_ids": lambda source, inputs: source.ints(5, 60, 2 * 4, 12),
        "attention_mask": lambda source, inputs: None,
        "labels": lambda source, inputs: source.ints(5, 60, 2, 12, 4),
    }
}

# What signatures do not say: inputs of a model type. `without`: arguments not given; `pixels`: how images are made;
# `make`: arguments made in the end, from the source and what was made before.
INPUTS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"make": {"input_values": _floats(2, 32, 32)}},
    "colmodernvbert": IMAGES,
    "gemma4": TEXT_ONLY,
    "gemma4_unified": TEXT_ONLY,
    "idefics": {**IMAGES, "make": {"image_attention_mask": _ones(2, 12, 1)}},
    "kimi_k25": PATCHES,
    "minicpm_ocr": STRIPES,
    "minicpmv4_6": STRIPES,
    "minicpmv4_7": STRIPES,
    "paddleocr_vl": PATCHES,
    "fuyu": {"without": ("pixel_values",)},
    "glmasr": {"mels_first": True},
    "granite4_vision": TILES,
    "granite_speech5_ctc": {"make": {"input_features": _floats(2, 128, 128)}},
    "kosmos-2": {"make": {"image_embeds_position_mask": _holes}},
    "lightglue": PAIRS,
    "superglue": PAIRS,
    "pp_ocrv5_mobile_rec": {"size": (48, 64)},
    "reformer": {"length": 16},
    "timesfm": FORECAST,
    "timesfm2_5": FORECAST,
    "layoutlmv3": {"size": (32, 32)},
    "musicgen_decoder": CODES,
    "musicgen_melody_decoder": CODES,
    "perceiver": {"length": 128},
    "pix2struct": {"make": {"flattened_patches": lambda source, inputs: source.floats(2, 16, 2 + 8 * 8 * 3).abs()}},
    "pop2piano": {"without": ("input_features",)},
    "voxtral_realtime": {"mels_first": True},
    "wav2vec2-bert": {"make": {"input_features": _floats(2, 64, 64), "attention_mask": _ones(2, 64)}},
    "instructblip": {"num_image": 8, "make": {"qformer_input_ids": lambda source, inputs: source.ints(5, 60, 2, 6)}},
    "llava": {"without": ("image_sizes",)},
    "llava_next": TILES,
    "llava_next_video": TILES,
    "llava_onevision": TILES,
    "modernvbert": IMAGES,
    "qwen3_asr": {"frames": 200, "mels_first": True},
    "speech-encoder-decoder": {"make": {"inputs": _floats(2, 6400)}},
    "speech_to_text": {"mels_first": False},
    "ultravbert": IMAGES,
    "vilt": {"make": {"labels": lambda source, inputs: source.floats(2, source.config.num_labels).sigmoid()}},
    "vipllava": {"without": ("image_sizes",)},
    "xmod": {"make": {"lang_ids": lambda source, inputs: torch.zeros(2, dtype=torch.long)}},
}
