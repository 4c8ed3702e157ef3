"""Tiny random checkpoints built on the spot: real model classes of transformers, real tokenizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from audit.models.tasks import BACKBONE, task_of
from audit.records import Checkpoint, CheckpointInfo, Probe

WORDS = ["the", "film", "was", "truly", "very", "good", "bad", "dull", "fine", "and", "she"]
WORDS += ["he", "liked", "it", "a", "not", "so", "plot", "her", "his", "acting"]
TEXTS = (
    "The film was good.",
    "She liked it",
    "the plot was dull, and the acting bad!",
    "he liked the film and it was so very good and fine",
    "not bad",
    "her acting was truly fine; his plot was not so good",
)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
}


def word_tokenizer(*, unknown_mask: bool = True) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer with [CLS] and [SEP] in the manner of BERT."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] + (["[MASK]"] if unknown_mask else [])
    vocabulary = {token: i for i, token in enumerate([*specials, *WORDS, ".", ",", "!", ";"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    from tokenizers import normalizers

    core.normalizer = normalizers.Lowercase()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    extra = {"mask_token": "[MASK]"} if unknown_mask else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        **extra,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in the manner of GPT-2: no special tokens around the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<|end|>", "th", "Ġth", "Ġthe"])}
    merges = [("t", "h"), ("Ġ", "th"), ("Ġth", "e")]
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", bos_token="<|end|>")


def checkpoint(model: Any, processor: Any, *, pooling: str | None = None) -> Checkpoint:
    """Wrap a model as the record that loading gives."""
    architecture = type(model).__name__
    task = task_of(architecture, model.config.model_type)
    info = CheckpointInfo("tiny", "0" * 64, "0" * 64, "0" * 64, architecture=architecture)
    return Checkpoint(info, model.eval(), processor, task, task != BACKBONE, pooling)


def build(architecture: str, *, attention: str | None = "eager", seed: int = 0, **changes: Any) -> Any:
    """Return a random model of a class of transformers, with sharp enough attention to tell rows apart."""
    cls = getattr(transformers, architecture)
    config = cls.config_class(**{**SIZES, **changes})
    torch.manual_seed(seed)
    model = cls._from_config(config, attn_implementation=attention) if attention else cls(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(
                    torch.randn_like(parameter) * (0.4 if "embed" in name or "token" in name else 0.25)
                )
    return model.eval()


LABELS = {
    "id2label": {0: "negative", 1: "positive", 2: "neutral"},
    "label2id": {"negative": 0, "positive": 1, "neutral": 2},
}


def text_checkpoint(family: str, *, attention: str | None = "eager", **changes: Any) -> Checkpoint:
    """Return a tiny text checkpoint of a family."""
    causal = family in ("gpt2", "llama", "qwen2")
    tokenizer = byte_tokenizer() if causal else word_tokenizer()
    changes = {"vocab_size": len(tokenizer), **_TEXT[family][1], **LABELS, **changes}
    if not causal:
        changes.setdefault("pad_token_id", 0)
    if causal:
        changes.setdefault("max_position_embeddings", 128)
    return checkpoint(build(_TEXT[family][0], attention=attention, **changes), tokenizer)


_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {}),
    "roberta": ("RobertaForSequenceClassification", {"max_position_embeddings": 66, "type_vocab_size": 2}),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 37},
    ),
    "electra": ("ElectraForSequenceClassification", {"embedding_size": 16}),
    "albert": (
        "AlbertForSequenceClassification",
        {"embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 1},
    ),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification",
        {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "max_relative_positions": 16,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForSequenceClassification", {"num_key_value_heads": 2}),
}
TEXT_FAMILIES = tuple(_TEXT)

_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", {}),
    "deit": ("DeiTForImageClassification", {}),
    "deit-teacher": ("DeiTForImageClassificationWithTeacher", {}),
    "dinov2": ("Dinov2ForImageClassification", {}),
    "dinov2-registers": ("Dinov2WithRegistersForImageClassification", {"num_register_tokens": 4}),
}
VISION_FAMILIES = tuple(_VISION)


def image_processor(**changes: Any) -> Any:
    """Return an image processor that makes 32×32 images."""
    return transformers.ViTImageProcessorPil(**{"size": {"height": 32, "width": 32}, **changes})


def vision_checkpoint(
    family: str, *, attention: str = "eager", processor: Any = None, **changes: Any
) -> Checkpoint:
    """Return a tiny vision checkpoint of a family: 4×4 patches of 32×32 images."""
    architecture, own = _VISION[family]
    sizes = {"image_size": 32, "patch_size": 8, "mlp_ratio": 2}
    model = build(architecture, attention=attention, **{**sizes, **own, **LABELS, **changes})
    return checkpoint(model, processor or image_processor())


def text_probes(texts: tuple[str, ...] = TEXTS) -> list[Probe]:
    """Return text probes of different lengths, with labels."""
    return [Probe(f"t-{i}", text=text, label=("negative", "positive")[i % 2]) for i, text in enumerate(texts)]


def image_probes(count: int = 5, size: tuple[int, int] = (40, 56)) -> list[Probe]:
    """Return random images that are not square."""
    rng = np.random.default_rng(0)
    return [
        Probe(f"i-{i}", image=rng.integers(0, 256, (*size, 3), dtype=np.uint8), label=i % 3)
        for i in range(count)
    ]
