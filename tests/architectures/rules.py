"""What names of fields say of their sizes: the same names mean the same in nearly all configurations."""

import re
from typing import Any


HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
LAYERS = 3  # one more than there are slots, so that units are gathered again in backward
VOCAB, POSITIONS = 160, 128
IMAGE, PATCH = 32, 8


def names(text: str) -> str:
    """A pattern for any of the names (or patterns) in `text`, which spaces part."""
    return "|".join(text.split())


# The first rule whose pattern is found in a whole name gives the value: `None` leaves the field as it is, a number is
# an upper bound, a function maps the default to the tiny value.
RULES: list[tuple[str, Any]] = [
    # No dropout: ranks and ways of training need not draw the same.
    (f".*({names('dropout pdrop drop_rate droppath drop_path layerdrop drop_prob drop_connect jitter')}).*", 0.0),
    (".*(drop_mlp|drop_conv|label_noise).*", 0.0),
    ("mask_(time|feature)_prob", 0),
    ("initializer_range|init_std", lambda v: max(v, 0.02)),
    (".*_coef(ficient)?|.*type_vocab_size|num_channels|audio_channels|channels", None),
    # Heads
    ("mamba_n_heads|mamba_num_heads|n_mamba_heads|mamba_nheads", 8),
    ("mamba_d_head|mamba_headdim|mamba_head_dim", 16),
    (names(".*(key_value|kv)(_attention)?_heads num_key_value_groups multi_query_group_num num_kv"), KV_HEADS),
    (
        names(
            ".*(attention_|_)heads num_heads n_heads? heads .*_num_heads num_heads_.* num_attention_heads_per_stage"
        ),
        lambda v: max(w for w in (1, 2, HEADS) if w <= v),
    ),
    ("((global|swa|local|v|cross|resampler|index|linear_key|linear_value|linear|attention)_)?head_dim", HEAD_DIM),
    (names("d_kv kv_channels d_head dim_head"), HEAD_DIM),
    ("qk_head_dim", 2 * HEAD_DIM),
    (".*_head_dim|attention_head_size", HEAD_DIM),
    ("rotary_dim", HEAD_DIM // 2),
    # How many
    (
        names("depths num_block_repeats layer_repeats stage_num_blocks stage_numb_of_layers blocks_per_stage")
        + "|block_repeats",
        2,
    ),
    (".*vocab(_size|ulary_size)?(_per_layer_input)?", VOCAB),
    (f".*({names('max_position_embeddings n_positions n_ctx max_seq_len context_length')})", POSITIONS),
    (f".*({names('max_sequence_length model_max_length max_position')})", POSITIONS),
    ("max_source_positions", 32),
    ("upsample_groups", HIDDEN),
    ("max_(2d_position_embeddings|target_positions)|seq_length", POSITIONS),
    (
        names("num_(experts|local_experts|routed_experts) n_routed_experts moe_num_experts expert_capacity n_experts"),
        4,
    ),
    ("num_moe_experts", 4),
    (".*(experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts)", 2),
    ("n_group|num_expert_group", 2),
    ("topk_group", 1),
    (names("n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers"), 1),
    (".*_rank|.*lora_dim", 16),
    (names("(shared_)?image_size img_size pretrain_image_size max_image_size crop_size train_size"), IMAGE),
    ("input_size|resolution", IMAGE),
    ("(vision_)?patch_size|(max_)?patch_length", PATCH),
    ("(num_)?(mel_bins|n_mels)|n_mel_bins|feature_size|input_feat_per_channel", 32),
    (names("sliding_window(_size)? attention_chunk_size attention_window(_size)? local_attention(_window_len)?"), 16),
    ("window_size|window", 2),
    (names("num_queries num_object_queries num_query_tokens .*num_latents num_detection_tokens .*n_latents"), 8),
    ("two_stage_num_proposals", 8),
    ("num_denoising", 0),
    (".*(chunk_size|block_size)", lambda v: min(v, 16)),
    ("(.*_)?state(_size)?", 8),
    (".*num_frames|frames_per_clip|num_timesteps", 4),
    ("train_num_points|num_points", 64),
    (names("classifier_proj_size xvector_output_dim codebook_dim codevector_dim proj_codevector_dim"), 16),
    ("num_codevectors_per_group|codebook_size", 16),
    ("num_negatives", 4),
    ("num_conv_pos_embeddings", 8),
    ("num_conv_pos_embedding_groups", 4),
    # Widths
    (
        f".*({names('intermediate_size ffn_dim feedforward_dim dim_feedforward feed_forward_size mlp_dim')})(_mlp)?",
        INNER,
    ),
    (f".*({names('feed_forward_size d_ff dim_ff dff n_inner ffn_hidden_size d_inner linear_units')})", INNER),
    (names("num_feat_extract_layers num_nextn_predict_layers num_stages num_encoder_blocks num_feature_levels"), None),
    ("max_window_layers", None),
    (".*(num_|n_|encoder_|decoder_|^)(hidden_)?(num_)?(transformer_)?layers?|.*_layers|layers", LAYERS),
    ("depth|num_blocks|resampler_depth", LAYERS),
    (f"(.*_)?({names('hidden_size d_model n_embd hidden_dim embed_dim emb_dim embedding_size')})(_global)?", HIDDEN),
    (f"(.*_)?({names('hidden_sizes embed_dims embed_dim_per_stage backbone_channel_list filters')})", HIDDEN),
    (f"(.*_)?({names('dim width project_dim d_latents conv_dim proj_size dim_model projection_size')})", HIDDEN),
    (f"(.*_)?({names('pooler_output_size hidden_dimension attn_hidden bottleneck_features mlp_hidden')})", HIDDEN),
    (".*channels|.*_planes", HIDDEN),
    ("groups_width", HEAD_DIM),
]
_COMPILED = [(re.compile(pattern), value) for pattern, value in RULES]

# What some default configurations leave out although the model cannot do without.
MISSING = {
    "vocab_size": VOCAB,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "head_dim": HEAD_DIM,
    "image_token_id": VOCAB - 31,
    "image_token_index": VOCAB - 31,
    "audio_token_id": VOCAB - 32,
}


def small_value(name: str, value: Any) -> Any:
    """One field made small by the rule for its name; of a list, each item."""
    if value is None or isinstance(value, (str, bool)):
        return value
    rule = next((rule for pattern, rule in _COMPILED if pattern.fullmatch(name)), None)
    return _small(rule, value)


def _small(rule: Any, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_small(rule, item) for item in value]
    if rule is None or value is None or isinstance(value, (str, bool, dict)):
        return value
    if callable(rule):
        return rule(value)
    return type(value)(min(value, rule)) if value >= 0 else value
