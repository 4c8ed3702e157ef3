"""Tiny random models of every type: shrink a config of transformers mechanically, then build it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from audit.coverage.recipes import RECIPES

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
    (r"qk_head_dim", 2 * HEAD),  # with and without rotation
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
    (r"num_frames|frames_per_clip", 4),
    (r"patch_size", 8),
    (r"index_topk|index_block_size", 8),  # fewer than the tokens of a probe, so that sparse layers are sparse
    (r"index_topk_blocks", 2),
    (r"attention_chunk_size", 16),
    (r"(sliding_window|attention_window|block_size|window_size|local_attention)", 16),
    (r"num_conv_pos_embeddings", 16),
    (r"num_mel_bins|feature_size|n_mels", 16),
)
_KEEP = re.compile(
    r"num_channels|in_channels|num_labels|output_hidden_size|chunk_size_feed_forward|num_feat_extract_layers"
    r"|.*feature_layer\w*|.*conv.*layers|mask_.*|out_hidden_size|num_out_layers"
)
_LISTS = {
    "image_size": 32,
    "patch_size": 8,
    "depths": 2,
    "num_heads": 4,
    "num_attention_heads": 4,
    "layers": 2,
}


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
    for key, value in vars(default).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            given[key] = tiny_config(type(value), changes.pop(key, None)).to_dict()
        elif (small := _tiny_value(key, value)) is not None:
            given[key] = small
    _settle_heads(default, given)
    _settle_ids(default, given)
    _settle_rope(default, given)
    _settle_kinds(default, given)
    return cls(**{**given, **changes})


def _tiny_value(key: str, value: Any) -> Any:
    if key in _LISTS and isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
        return [min(_LISTS[key], x) if key == "depths" else _LISTS[key] for x in value]
    if isinstance(value, bool) or not isinstance(value, int) or _KEEP.fullmatch(key) or value <= 0:
        return None
    return next((min(size, value) for pattern, size in _SIZES if re.fullmatch(pattern, key)), None)


def _settle_heads(default: Any, given: dict[str, Any]) -> None:
    """Keep as many key heads as query heads where the family has no grouped queries."""
    known = vars(default)
    heads, groups = known.get("num_attention_heads"), known.get("num_key_value_heads", HEADS)
    if heads is not None and groups in (None, heads):
        given["num_key_value_heads"] = given.get("num_attention_heads", HEADS)
    if "head_dim" in known and known["head_dim"] is None:
        given["head_dim"] = HEAD


def _settle_ids(default: Any, given: dict[str, Any]) -> None:
    size = given.get("vocab_size")
    if size is None:
        return
    for n, (key, value) in enumerate(vars(default).items()):
        if re.fullmatch(r".*token_(id|index)", key) and isinstance(value, int) and value >= size:
            given[key] = size - 1 - n % 32
    pad = getattr(default, "pad_token_id", None)
    given["pad_token_id"] = pad if isinstance(pad, int) and 0 <= pad < size else 0


def _settle_rope(default: Any, given: dict[str, Any]) -> None:
    rope = vars(default).get("rope_parameters")
    layered = isinstance(rope, dict) and all(isinstance(part, dict) for part in rope.values())
    if not layered and _mentions(type(default), "mrope_section"):
        share = (rope or {}).get("partial_rotary_factor") or 1.0
        half = int(given.get("head_dim", HEAD) * share) // 2
        sections = [half - 2 * (half // 3), half // 3, half // 3]
        given["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            **(rope or {}),
            "mrope_section": sections,
        }


def _settle_kinds(default: Any, given: dict[str, Any]) -> None:
    """Keep one layer of each kind: a hybrid must stay one, or it would look like plain attention."""
    kinds = vars(default).get("layer_types")
    if isinstance(kinds, (list, tuple)) and len(set(kinds)) > 1:
        given["layer_types"] = list(dict.fromkeys(kinds))
        given["num_hidden_layers"] = len(given["layer_types"])


def _mentions(config: type[Any], word: str) -> bool:
    """Tell whether the modelling files beside a config class mention `word`."""
    folder = Path(inspect.getfile(config)).parent
    return any(word in path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py"))


def model_class(model_type: str) -> type[Any]:
    """Return the class that AutoModel uses for `model_type`."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    name = MODEL_MAPPING_NAMES[model_type]
    found: type[Any] = getattr(transformers, name if isinstance(name, str) else name[0])
    return found


def build_model(model_type: str, *, attention: str | None = None) -> Any:
    """Return a tiny random model of `model_type` in eval mode, with attention sharp enough to differ.

    Parameters
    ----------
    model_type : str
    attention : str, optional
        Attention implementation; the model's own choice when None.

    Raises
    ------
    Exception
        Whatever transformers raises when it cannot build it.
    ValueError
        When the model stays large.
    """
    import torch

    cls = model_class(model_type)
    config = tiny_config(cls.config_class, RECIPES.get(model_type))
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"a small config still has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = cls(config) if attention is None else cls._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()
