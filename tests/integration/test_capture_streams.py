"""Encoder-decoders, two towers and sound: streams against rollouts of the attentions that models return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from audit.capture import capture
from audit.capture.inputs.decoding import with_decoder_steps
from audit.capture.inputs.sound import encode_sound
from audit.capture.inputs.texts import encode_texts
from audit.capture.inputs.windows import probe_windows
from audit.capture.pairs.method_pass import decoder_row
from audit.errors import CheckpointError, ConfigError, ProbeError
from audit.methods import encoder_decoder_rollout
from audit.records import CaptureSettings, Checkpoint, Method, Probe
from tests.integration.tiny_models import (
    build,
    checkpoint,
    image_probes,
    image_processor,
    text_checkpoint,
    text_probes,
    word_tokenizer,
)

SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 3, "num_heads": 4},
    ),
    "bart": ("BartForConditionalGeneration", {"bos_token_id": 2, "decoder_start_token_id": 3}),
    "marian": ("MarianMTModel", {"decoder_start_token_id": 0}),
    "mbart": ("MBartForConditionalGeneration", {"decoder_start_token_id": 3, "forced_eos_token_id": None}),
}
SIZES = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37}  # fmt: skip


def seq2seq(family: str, attention: str = "eager", **more: Any) -> Checkpoint:
    tokenizer = word_tokenizer()
    architecture, own = SEQ2SEQ[family]
    ids = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0, "vocab_size": len(tokenizer)}
    changes = {**ids, **({} if family == "t5" else SIZES), **own, **more}
    return checkpoint(build(architecture, attention=attention, **changes), tokenizer)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_streams_equal_the_rollout_of_returned_attentions(family: str) -> None:
    subject, probes = seq2seq(family), text_probes()
    items = encode_texts(subject, probes, CaptureSettings())
    for item, captured in zip(items, capture(subject, probes, method=Method(row="decoder:2")), strict=True):
        full = with_decoder_steps(subject, item, "decoder:2")
        with torch.no_grad():
            out = subject.model(**full.tensors, output_attentions=True)
        source, prefix = encoder_decoder_rollout(
            *[
                [a.double() for a in x]
                for x in (out.encoder_attentions, out.decoder_attentions, out.cross_attentions)
            ]
        )
        first, second = captured.maps
        assert (first.stream, second.stream) == ("source", "prefix")
        np.testing.assert_allclose(first.weights, source[0, 2] / source[0, 2].sum(), atol=1e-6)
        np.testing.assert_allclose(second.weights, prefix[0, 2] / prefix[0, 2].sum(), atol=1e-6)
        assert abs(first.share + second.share - 1) < 1e-5
        assert abs(first.share - float(source[0, 2].sum())) < 1e-5
        assert first.positions.starts is not None
        assert not first.positions.causal
        assert second.positions.causal
        assert first.weights.max() > 1.05 * first.weights.min()


def test_streams_under_sdpa_equal_eager() -> None:
    for family in ("bart", "t5"):
        eager, fused = seq2seq(family), seq2seq(family, "sdpa")
        for a, b in zip(capture(eager, text_probes()), capture(fused, text_probes()), strict=True):
            for one, other in zip(a.maps, b.maps, strict=True):
                np.testing.assert_allclose(one.weights, other.weights, atol=1e-5)


def test_decoder_rows_are_the_steps_that_predict_each_token() -> None:
    assert decoder_row("mean", 4, "p").tolist() == [0.25] * 4
    with pytest.raises(ProbeError, match="has 2 decoder rows"):
        decoder_row("decoder:2", 2, "p")
    with pytest.raises(ConfigError, match=r"use auto, mean, last or decoder:<i>"):
        decoder_row("cls", 2, "p")


def test_step_beyond_the_generated_end_is_refused_with_the_probe() -> None:
    subject = seq2seq("bart")
    subject.model.generation_config.forced_bos_token_id = 3
    subject.model.generation_config.eos_token_id = 3
    with pytest.raises(ProbeError, match="t-0: the checkpoint generates"):
        list(capture(subject, text_probes(), method=Method(row="decoder:5")))


def whisper() -> Checkpoint:
    """Return a tiny Whisper with its feature extractor, but no tokenizer."""
    sizes = {**SIZES, "max_source_positions": 50, "max_target_positions": 32, "num_mel_bins": 16,
             "vocab_size": 40, "pad_token_id": 0, "decoder_start_token_id": 5, "eos_token_id": 3,
             "bos_token_id": 3}  # fmt: skip
    model = build("WhisperForConditionalGeneration", **sizes)
    model.generation_config.forced_decoder_ids = None
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return checkpoint(model, extractor)


@pytest.mark.parametrize(
    "name", ["raw_attention", "per_head_rollout", "gradient_rollout", "norms", "alti", "attention_flow"]
)
def test_methods_read_what_a_generated_token_of_whisper_heard(name: str) -> None:
    sound = Probe("a", audio=noise(8000), sampling_rate=16000)
    (found,) = capture(whisper(), [sound], method=Method(name, row="decoder:1"), target=7)
    source, prefix = found.maps
    assert (source.positions.kind, len(source.weights), len(prefix.weights)) == ("frame", 50, 2)
    assert source.weights.sum() == pytest.approx(1, abs=1e-5)


def test_whisper_generates_no_further_than_its_decoder_has_positions() -> None:
    subject, sound = whisper(), Probe("a", audio=noise(8000), sampling_rate=16000)
    subject.model.generation_config.eos_token_id = None  # it never ends by itself
    (whole,) = capture(subject, [sound])
    (last,) = capture(subject, [sound], method=Method(row="decoder:31"))
    assert len(whole.maps[1].weights) == len(last.maps[1].weights) == 32
    with pytest.raises(
        ConfigError, match=r"'decoder:32' is beyond the 32 positions .* use decoder:0 to decod"
    ):
        list(capture(subject, [sound], method=Method(row="decoder:32")))


def test_whisper_frames_are_seconds() -> None:
    subject = whisper()
    sounds = [Probe(f"a-{i}", audio=noise(8000 + 1600 * i), sampling_rate=16000) for i in range(3)]
    for sound, captured in zip(sounds, capture(subject, sounds, method=Method(row="decoder:1")), strict=True):
        source, prefix = captured.maps
        assert source.positions.kind == "frame"
        assert len(source.weights) == 50
        assert source.positions.times is not None
        np.testing.assert_allclose(source.positions.times[3], [0.06, 0.08], atol=1e-6)
        content = ~source.positions.special
        assert source.positions.times[content].max() == pytest.approx(len(sound.audio) / 16000)  # type: ignore[arg-type]
        assert len(prefix.weights) == 2


def noise(samples: int) -> NDArray[np.float32]:
    return np.random.default_rng(samples).standard_normal(samples).astype(np.float32)


@pytest.mark.parametrize("architecture", ["Wav2Vec2ForSequenceClassification", "HubertForCTC", "WavLMModel"])
def test_waveform_encoders_read_the_mean_frame(architecture: str) -> None:
    conv = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    model = build(
        architecture, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, vocab_size=40, **conv
    )
    extractor = transformers.Wav2Vec2FeatureExtractor()
    subject = checkpoint(model, extractor)
    sounds = [Probe(f"a-{i}", audio=noise(400 + 80 * i), sampling_rate=16000) for i in range(3)]
    for sound, captured in zip(sounds, capture(subject, sounds), strict=True):
        found, item = captured.maps[0], encode_sound(subject, sound)
        with torch.no_grad():
            attentions = model(**item.tensors, output_attentions=True).attentions
        n, R = len(item), np.eye(len(item))
        for attention in attentions:
            R = (0.5 * attention[0].double().mean(0).numpy() + 0.5 * np.eye(n)) @ R
        np.testing.assert_allclose(found.weights, R.mean(axis=0), atol=1e-6)
        assert found.positions.times is not None
        np.testing.assert_allclose(found.positions.times[1], [20 / 16000, 40 / 16000], atol=1e-7)
        assert found.positions.times[-1, 1] == pytest.approx(len(sound.audio) / 16000)  # type: ignore[arg-type]


def test_sound_of_another_rate_is_resampled_and_long_sound_refused() -> None:
    model = build(
        "ASTModel", num_mel_bins=32, max_length=64, patch_size=16, time_stride=16, frequency_stride=16
    )
    extractor = transformers.ASTFeatureExtractor(num_mel_bins=32, max_length=64)
    subject = checkpoint(model, extractor)
    captured = next(capture(subject, [Probe("a", audio=noise(4000), sampling_rate=8000)]))
    positions = captured.maps[0].positions
    assert len(positions) == 2 + 2 * 4
    assert positions.special.tolist() == [True] * 2 + [False] * 8
    with pytest.raises(ProbeError, match=r"lasts 1\.00 s, but the checkpoint hears at most 0\.64 s"):
        list(capture(subject, [Probe("long", audio=noise(16000), sampling_rate=16000)]))


def clip(attention: str = "eager") -> Checkpoint:
    tokenizer = word_tokenizer()
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37,
            "vocab_size": len(tokenizer), "eos_token_id": 3, "bos_token_id": 2,
            "max_position_embeddings": 64}  # fmt: skip
    vision = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 37,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    model = build("CLIPModel", attention=attention, text_config=text, vision_config=vision)
    processor = transformers.CLIPProcessor(image_processor(), tokenizer)
    return checkpoint(model, processor)


def pair_probes() -> list[Probe]:
    texts = text_probes()
    return [
        Probe(f"p-{i}", text=t.text, image=p.image)
        for i, (t, p) in enumerate(zip(texts, image_probes(), strict=False))
    ]


def test_both_towers_of_clip_are_read_where_the_similarity_reads_them() -> None:
    subject = clip()
    (window,) = probe_windows(subject, pair_probes(), CaptureSettings())
    for item, captured in zip(window, capture(subject, pair_probes()), strict=True):
        maps = {one.stream: one for one in captured.maps}
        with torch.no_grad():
            out = subject.model(**item.tensors, output_attentions=True)
        for name, result, row in (
            ("text", out.text_model_output, len(item) - 1),
            ("image", out.vision_model_output, 0),
        ):
            R = np.eye(len(maps[name].weights))
            for attention in result.attentions:
                R = (0.5 * attention[0].double().mean(0).numpy() + 0.5 * np.eye(len(R))) @ R
            np.testing.assert_allclose(maps[name].weights, R[row], atol=1e-6)
        assert maps["image"].positions.grid == (4, 4)
        assert maps["text"].positions.causal


def test_image_with_text_is_refused_where_no_processor_takes_both() -> None:
    with pytest.raises(CheckpointError, match="has no processor for images with text"):
        list(capture(text_checkpoint("bert"), pair_probes()))


def test_captions_draw_on_the_patches_of_the_image() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
    encoder = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    decoder = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=64, is_decoder=True,
        add_cross_attention=True,
        bos_token_id=2, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 3
    torch.manual_seed(0)
    model = transformers.VisionEncoderDecoderModel(config)
    model.generation_config.decoder_start_token_id = 2
    subject = checkpoint(model, image_processor())
    for captured in capture(subject, image_probes(3), method=Method(row="decoder:1")):
        source, prefix = captured.maps
        assert (source.stream, source.positions.grid, len(source.weights)) == ("source", (4, 4), 17)
        assert len(prefix.weights) == 2
        assert source.positions.boxes is not None
        assert abs(source.share + prefix.share - 1) < 1e-5
