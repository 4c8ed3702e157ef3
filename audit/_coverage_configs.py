"""Tiny random models of every type: shrink a config of transformers mechanically, then build it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

LARGEST = 60_000_000  # parameters
WIDTH, HEADS, HEAD, LAYERS, VOCABULARY = 32, 4, 8, 2, 128

# The first pattern that matches a whole key decides its value.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_)?(key_value|kv)_heads|num_key_value_heads|n_head_kv|num_kv_heads|.*num_key_value_heads", 2),
    (r".*(num|n)_(attention_)?heads?|num_.*heads|n_heads?|.*attention_heads|heads|num_heads", HEADS),
    (r"num_(mem_blocks|groups|conv_pos_embedding_groups)|.*num_hidden_groups|inner_group_num", 1),
    (r"(num_hidden_|n_|num_|num_encoder_|num_decoder_|encoder_|decoder_|.*num_.*)layers?", LAYERS),
    (
        r"(encoder|decoder|num|.*hidden)_?(num_)?(hidden_)?(layers|blocks)|depth|.*num_hidden_layers|num_layers",
        2,
    ),
    (r"(attention_)?head_(dim|size)|.*_head_dim|d_kv|kv_channels|global_head_dim", HEAD),
    (r"qk_rope_head_dim|rotary_dim", HEAD),
    (r".*(kv|q|o|qk)_lora_rank|.*lora_rank|.*_rank", 16),
    (
        r"(moe_|shared_expert_|.*)?intermediate_size\w*|.*ffn_dim\w*|d_ff|ffn_hidden_size|hidden_dim|.*ffn_size",
        64,
    ),
    (
        r"(hidden|embedding|output|projection|context|d_|.*_hidden|.*embed|.*emb)_?(size|dim)s?|d_model|n_embd",
        WIDTH,
    ),
    (
        r"dim|hidden_size\w*|.*embed_dim|.*hidden_size|.*hidden_dim|emb_dim|d_inner|.*_channels|channels",
        WIDTH,
    ),
    (r"(num_|n_|n_routed_|moe_num_|.*num_)?(local_)?experts|.*n_routed_experts|.*num_experts", 4),
    (r"(num_)?experts_per_tok(en)?|moe_k|moe_top_?k|num_experts_per_tok|top_k_experts|.*experts_per_tok", 2),
    (r".*vocab_size\w*", VOCABULARY),
    (r"max_(position_embeddings|sequence_length|seq_len)|n_positions|n_ctx|seq_length|max_.*positions", 128),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"(sliding_window|attention_window|block_size|window_size|local_attention)", 16),
    (r"num_conv_pos_embeddings", 16),
    (r"num_mel_bins|feature_size|n_mels", 16),
)
_KEEP = frozenset(
    {"num_channels", "in_channels", "num_labels", "output_hidden_size", "chunk_size_feed_forward"}
)
# Derived from other keys by the config itself.
_RECOMPUTED = frozenset({"layer_types", "mlp_layer_types", "layers_block_type", "head_dim_list"})


def _tiny_value(key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or key in _KEEP or value <= 0:
        return None
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, key):
            return min(size, value)
    return None


def tiny_config(cls: type[Any], changes: Mapping[str, Any] | None = None) -> Any:
    """Return a config of `cls` with every size made small, recursively.

    Parameters
    ----------
    cls : config class of transformers
    changes : mapping, optional
        Values that win over the mechanical ones; a mapping for a part goes to that part's config.
    """
    changes = dict(changes or {})
    default = cls()
    given: dict[str, Any] = {}
    accepted = set(inspect.signature(cls.__init__).parameters) | set(vars(default))
    parts = {k: v for k, v in vars(default).items() if hasattr(v, "to_dict") and hasattr(v, "model_type")}
    for key, part in parts.items():
        own = changes.pop(key, {})
        given[key] = tiny_config(type(part), own).to_dict()
    for key, value in vars(default).items():
        small = _tiny_value(key, value)
        if small is not None and key in accepted:
            given[key] = small
    _settle_heads(default, given)
    _settle_ids(default, given)
    _settle_rope(default, given)
    return cls(**{**given, **changes})


def _settle_heads(default: Any, given: dict[str, Any]) -> None:
    """Keep as many key heads as query heads where the family has no grouped queries."""
    heads = getattr(default, "num_attention_heads", None)
    groups = getattr(default, "num_key_value_heads", None)
    if heads is not None and groups == heads:
        given["num_key_value_heads"] = given.get("num_attention_heads", HEADS)


def _settle_ids(default: Any, given: dict[str, Any]) -> None:
    size = given.get("vocab_size")
    if size is None:
        return
    for n, (key, value) in enumerate(vars(default).items()):
        if re.fullmatch(r".*token_(id|index)", key) and isinstance(value, int) and value >= size:
            given[key] = size - 1 - n % 16
    pad = getattr(default, "pad_token_id", None)
    given["pad_token_id"] = pad if isinstance(pad, int) and 0 <= pad < size else 0


def _settle_rope(default: Any, given: dict[str, Any]) -> None:
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        given["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}


def model_class(model_type: str) -> type[Any]:
    """Return the class that AutoModel uses for `model_type`."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    name = MODEL_MAPPING_NAMES[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def build_model(model_type: str) -> Any:
    """Return a tiny random model of `model_type` in eval mode, with attention sharp enough to differ.

    Raises
    ------
    Exception
        Whatever transformers raises when it cannot build it.
    ValueError
        When the model stays large.
    """
    import torch

    cls = model_class(model_type)
    config = tiny_config(cls.config_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"a small config still has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()
