"""What some families need beside small sizes, so that a tiny config of them is a valid one."""

from __future__ import annotations

from typing import Any

_CONV: dict[str, Any] = {
    "conv_dim": (32, 32),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_WINDOWS: dict[str, Any] = {
    "image_size": 56,
    "patch_size": 4,
    "window_size": 7,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [4, 4],
}

_LAYERED_ROPE: dict[str, Any] = {
    name: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    for name in ("full_attention", "sliding_attention")
}

RECIPES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 2},
    "mobilebert": {
        "true_hidden_size": 32,
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
        "hidden_size": 32,
    },
    "lilt": {"channel_shrink_ratio": 4, "hidden_size": 48},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "reformer": {"axial_pos_embds": False},
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "bridgetower": {"text_config": {"num_attention_heads": 4}, "num_attention_heads": 4},
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "yolos": {"image_size": [32, 32], "patch_size": 8},
    **{name: dict(_WINDOWS) for name in ("swin", "swinv2", "donut-swin", "maskformer-swin", "swin2sr")},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "zamba2": {"num_hidden_layers": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 2, "num_random_blocks": 1},
    "longt5": {"local_radius": 5, "global_block_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "mistral4": {"head_dim": 16},
    "axk1": {"n_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": _LAYERED_ROPE},
    "cohere_compass": {"text_config": {"rope_parameters": _LAYERED_ROPE}},
    "neomme": {"head_dim": 16, "rope_parameters": _LAYERED_ROPE},
    "bros": {"hidden_size": 128},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6}},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|visual token 000000|>": 6}},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    **{
        name: dict(_CONV)
        for name in (
            "wav2vec2",
            "hubert",
            "wavlm",
            "unispeech",
            "unispeech-sat",
            "data2vec-audio",
            "sew",
            "sew-d",
            "speecht5",
            "wav2vec2-conformer",
        )
    },
}
