"""What names of fields do not say: values for tiny configurations, by the `model_type` that has the field."""

from collections.abc import Callable
from typing import Any

import torch


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
MROPE = {**ROPE, "mrope_section": [4, 2, 2]}
WINDOWS = {"window_size": 32}

OVERRIDES: dict[str, dict] = {
    "align_vision_model": {"width_coefficient": 1.0},
    "audio-spectrogram-transformer": {"max_length": 32, "frequency_stride": 8, "time_stride": 8},
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "dots1": {"first_k_dense_replace": 1},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4},
    "efficientnet": {"width_coefficient": 1.0, "hidden_dim": 1280},
    "exaone4_5_vision": WINDOWS,
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3": {"mm_tokens_per_image": 4},
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "hunyuan_v1_dense": {"rope_parameters": ROPE},
    "hunyuan_v1_moe": {"rope_parameters": ROPE},
    "hunyuan_vl_text": {"rope_parameters": MROPE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10},
    "levit": {"image_size": 224},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "lilt": {"hidden_size": 48},
    "llava_next": {"image_grid_pinpoints": [[64, 64]]},
    "llava_next_video": {"image_grid_pinpoints": [[64, 64]]},
    "llava_onevision": {"image_grid_pinpoints": [[64, 64]]},
    "granite4_vision": {"image_grid_pinpoints": [[64, 64]]},
    "lw_detr_vit": {"num_windows": 4, "num_windows_side": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"rope_parameters": ROPE},
    "mobilebert": {"intra_bottleneck_size": 64, "true_hidden_size": 64},
    "mobilevitv2": {"image_size": 64},
    "qwen2_5_omni_vision_encoder": WINDOWS,
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_vision": WINDOWS,
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "tipsv2_dpt": {"neck_hidden_sizes": [16] * 4},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
}

# Fields that are set on the finished configuration.
LATE: dict[str, dict] = {}

# Configurations that are made of others.
CLASSES: dict[str, Callable] = {}


def _floats(*shape):
    return lambda source, *_: source.floats(*(size(source) if callable(size) else size for size in shape))


TILES = {"pixels": _floats(2, 5, 3, 32, 32), "make": {"image_sizes": lambda *_: torch.tensor([[64, 64]] * 2)}}
IMAGES = {"pixels": _floats(2, 1, 3, lambda source: source.size()[0], lambda source: source.size()[1])}

# What signatures do not say: inputs of a model type. `without`: arguments not given; `pixels`: how images are made;
# `make`: arguments made in the end, from the source and what was made before.
INPUTS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"make": {"input_values": _floats(2, 32, 32)}},
    "colmodernvbert": IMAGES,
    "fuyu": {"without": ("pixel_values",)},
    "glmasr": {"mels_first": True},
    "granite4_vision": TILES,
    "instructblip": {"make": {"qformer_input_ids": lambda source, inputs: source.ints(5, 60, 2, 6)}},
    "llava": {"without": ("image_sizes",)},
    "llava_next": TILES,
    "llava_next_video": TILES,
    "llava_onevision": TILES,
    "modernvbert": IMAGES,
    "qwen3_asr": {"frames": 200},
    "speech-encoder-decoder": {"make": {"inputs": _floats(2, 6400)}},
    "speech_to_text": {"mels_first": False},
    "ultravbert": IMAGES,
    "vilt": {"make": {"labels": lambda source, inputs: source.floats(2, source.config.num_labels).sigmoid()}},
    "vipllava": {"without": ("image_sizes",)},
    "xmod": {"make": {"lang_ids": lambda source, inputs: torch.zeros(2, dtype=torch.long)}},
}
