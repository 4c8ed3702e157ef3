"""Tiny random checkpoints that take sound, and sounds for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from audit.records import Checkpoint, Probe
from tests.integration.tiny_models import LABELS, build, checkpoint, word_tokenizer

RATE = 16000
STEP = 20
"""Samples from one frame of the waveform to the next."""
_WAVES: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 6),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "classifier_proj_size": 16,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", _WAVES),
    "hubert": (
        "HubertForSequenceClassification",
        {**_WAVES, "feat_extract_norm": "layer", "conv_bias": True, "do_stable_layer_norm": True},
    ),
    "wavlm": ("WavLMForSequenceClassification", _WAVES),
    "ast": (
        "ASTForAudioClassification",
        {"num_mel_bins": 20, "max_length": 40, "patch_size": 8, "time_stride": 5, "frequency_stride": 6,
         "num_hidden_layers": 2},
    ),
}  # fmt: skip
SOUND_FAMILIES = tuple(_FAMILIES)


def sound_checkpoint(family: str) -> Checkpoint:
    """Return a tiny classifier of sounds of a family."""
    architecture, own = _FAMILIES[family]
    extractor = (
        transformers.ASTFeatureExtractor(num_mel_bins=20, max_length=40)
        if family == "ast"
        else transformers.Wav2Vec2FeatureExtractor()
    )
    attention = "eager" if family == "wavlm" else "sdpa"
    model = build(architecture, attention=attention, **own, **LABELS)
    with torch.no_grad():  # as after training: silence is not 0 after the first layer
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return checkpoint(model, extractor)


def whisper(*, attention: str = "eager") -> Checkpoint:
    """Return a tiny Whisper: one second of sound, 50 frames."""
    tokenizer = word_tokenizer()
    sizes = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37,
             "max_source_positions": 50, "max_target_positions": 32, "num_mel_bins": 16,
             "vocab_size": len(tokenizer), "pad_token_id": 0, "decoder_start_token_id": 5, "eos_token_id": 3,
             "bos_token_id": 3}  # fmt: skip
    model = build("WhisperForConditionalGeneration", attention=attention, **sizes)
    model.generation_config.forced_decoder_ids = None
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return checkpoint(model, transformers.WhisperProcessor(extractor, tokenizer))


def noise(samples: int, seed: int | None = None) -> NDArray[np.float32]:
    """Return noise of so many samples; another seed or length gives other noise."""
    rng = np.random.default_rng(samples if seed is None else seed)
    return 0.1 * rng.standard_normal(samples).astype(np.float32)


def sound_probes(family: str, count: int = 3) -> list[Probe]:
    """Return sounds of different lengths: some 20 frames of a waveform, or some tenths of a second."""
    lengths = {"ast": (3200, 960), "whisper": (8000, 1600)}
    start, more = lengths.get(family, (210, 3 * STEP))
    return [
        Probe(f"s-{i}", audio=noise(start + more * i), sampling_rate=RATE, label=LABELS["id2label"][i % 3])
        for i in range(count)
    ]
