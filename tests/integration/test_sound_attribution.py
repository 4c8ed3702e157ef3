"""Attributions of sound: shares of frames, sums, and what the logit loses, against slow references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from audit.capture import capture, occlude
from audit.capture.attributions.attribution import _integrated_gradients, _occlusion
from audit.capture.attributions.occlusion import occluded
from audit.capture.attributions.question import Question, differentiable
from audit.capture.inputs.cells import cells_of
from audit.capture.inputs.decoding import with_decoder_steps
from audit.capture.inputs.encoded import Encoded
from audit.capture.inputs.sound import encode_sound
from audit.capture.outputs.scores import Score
from audit.errors import CaptureError, ProbeError
from audit.records import Checkpoint, Method, Probe, Region
from audit.regions import region_weights
from tests.integration.tiny_models import build, checkpoint
from tests.integration.tiny_sound import (
    RATE,
    SOUND_FAMILIES,
    STEP,
    noise,
    sound_checkpoint,
    sound_probes,
    whisper,
)

TARGET = 1
SEVEN = {
    "input_x_gradient": {},
    "integrated_gradients": {},
    "occlusion": {},
    "shap": {"samples": 2},
    "lime": {"samples": 30},
    "grad_cam": {},
    "lrp": {},
}


def asked(subject: Checkpoint, probe: Probe) -> Question:
    """What an attribution asks about the logit TARGET of one sound."""
    item = encode_sound(subject, probe)
    read = torch.full((1, len(item)), 1 / len(item))
    return Question(subject, [item], {probe.id: Score.single("positive", TARGET)}, read, 512)


def logit(subject: Checkpoint, tensors: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(subject.model(**tensors).logits[0, TARGET])


def by_hand(subject: Checkpoint, item: Encoded, positions: list[int]) -> dict[str, Tensor]:
    """The input without some positions: samples or cells written over one by one."""
    (name,) = item.tensors
    changed = item.tensors[name].clone()
    extractor, config = subject.processor, subject.model.config
    for position in positions:
        if name == "input_values" and changed.dim() == 2:
            end = changed.shape[1] if position == len(item) - 1 else (position + 1) * STEP
            changed[0, position * STEP : end] = 0.0
            continue
        silence = (0 - extractor.mean) / (2 * extractor.std)
        columns = (config.max_length - config.patch_size) // config.time_stride + 1
        rows = (config.num_mel_bins - config.patch_size) // config.frequency_stride + 1
        row, column = divmod(position - 2, columns)
        for time in range(config.max_length):
            for band in range(config.num_mel_bins):
                place = [nearest(band, config.patch_size, config.frequency_stride, rows)]
                place += [nearest(time, config.patch_size, config.time_stride, columns)]
                if place == [row, column]:
                    changed[0, time, band] = silence
    return {name: changed}


def nearest(at: int, patch: int, stride: int, count: int) -> int | None:
    """Which of the patches that read a number has the nearest centre, the first of two."""
    reading = [k for k in range(count) if k * stride <= at < k * stride + patch]
    return min(reading, key=lambda k: abs(at - k * stride - (patch - 1) / 2), default=None)


# --- shares -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*SOUND_FAMILIES, "whisper"])
def test_every_frame_has_a_share_of_the_input_and_removed_frames_are_silence(family: str) -> None:
    subject = whisper() if family == "whisper" else sound_checkpoint(family)
    for probe in sound_probes(family):
        item = encode_sound(subject, probe)
        cells = cells_of(item)
        assert cells is not None
        (name,) = item.tensors
        assert (cells.name, cells.owner.shape) == (name, tuple(item.tensors[name].shape[1:]))
        content = np.flatnonzero(~item.positions.special)
        assert set(content) <= set(cells.owner.flatten().tolist())
        gone = occluded(item, np.ones(len(item)), None).tensors[name]
        own = torch.from_numpy(np.isin(cells.owner, content))
        assert torch.equal(gone[0][own], cells.empty.expand_as(gone)[0][own])
        assert torch.equal(gone[0][~own], item.tensors[name][0][~own])


def test_silence_is_what_the_feature_extractor_puts_where_there_is_no_sound() -> None:
    """Of what is shorter than the model's window, the padding; a full window has the floor of its own."""
    subject, seconds = whisper(), [Probe(f"w-{n}", audio=noise(n), sampling_rate=RATE) for n in (8000, 16000)]
    for probe in seconds:
        cells = cells_of(encode_sound(subject, probe))
        assert cells is not None
        mel = encode_sound(subject, probe).tensors["input_features"]
        # transformers: log10 of at least 1e-10, at most 8 under the loudest, plus 4, over 4.
        floor = max((-10 + 4) / 4, float(mel.max()) - 2)
        np.testing.assert_allclose(cells.empty.flatten(), [floor] * 16, atol=1e-6)
    short = encode_sound(subject, seconds[0]).tensors["input_features"]
    assert float(short[0, 0, -1]) == pytest.approx(float(short.min()))
    ast = sound_checkpoint("ast")
    item = encode_sound(ast, Probe("a", audio=noise(3200), sampling_rate=RATE))
    cells = cells_of(item)
    assert cells is not None
    assert float(cells.empty) == pytest.approx(float(item.tensors["input_values"][0, -1, 0]))


# --- against slow references ------------------------------------------------------------------


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_occlusion_is_what_the_logit_loses_without_the_samples_of_a_frame(family: str) -> None:
    subject, probe = sound_checkpoint(family), sound_probes(family)[1]
    question = asked(subject, probe)
    (item,) = question.batch
    intact, expected = logit(subject, dict(item.tensors)), np.zeros(len(item))
    for place in np.flatnonzero(~item.positions.special):
        expected[place] = abs(logit(subject, by_hand(subject, item, [place])) - intact)
    with torch.no_grad():
        found = _occlusion(question)
    assert expected.max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_gradients_of_frames_are_those_of_finite_differences(family: str) -> None:
    """The slope along one frame's part of the input, which is the sum of input × gradient over it."""
    subject, probe = sound_checkpoint(family), sound_probes(family)[0]
    subject.model.double()
    inputs, _, forward, others = differentiable(asked(subject, probe))
    item = encode_sound(subject, probe)
    cells = cells_of(item)
    assert cells is not None
    (gradient,) = torch.autograd.grad(forward(inputs, *others).sum(), inputs)
    summed, step = cells.summed(inputs.detach() * gradient, len(item)), 1e-6
    expected = []
    for place in range(len(item)):
        part = torch.from_numpy(cells.owner == place) * inputs.detach()
        ends = [float(forward(inputs.detach() + sign * step * part, *others).detach()) for sign in (1, -1)]
        expected.append((ends[0] - ends[1]) / (2 * step))
    np.testing.assert_allclose(summed, expected, atol=1e-6)
    subject = sound_checkpoint(family)
    (found,) = capture(subject, [probe], method=Method("input_x_gradient"), target=TARGET)
    sizes = np.abs(expected)
    np.testing.assert_allclose(found.maps[0].weights, sizes / sizes.sum(), atol=2e-4)


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_integrated_gradients_add_up_to_the_difference_to_silence(family: str) -> None:
    subject, probe = sound_checkpoint(family), sound_probes(family)[0]
    subject.model.double()
    question = asked(subject, probe)
    (item,) = question.batch
    with torch.no_grad():
        found, error = _integrated_gradients(question, 512)
        inputs, baseline, forward, others = differentiable(question)
        difference = float(forward(inputs, *others).detach() - forward(baseline, *others).detach())
    content = [int(i) for i in np.flatnonzero(~item.positions.special)]
    without = {name: t.double() for name, t in by_hand(subject, item, content).items()}
    intact = {name: t.double() for name, t in item.tensors.items()}
    assert difference == pytest.approx(logit(subject, intact) - logit(subject, without), abs=1e-6)
    assert error < 1e-3
    assert found[torch.from_numpy(item.positions.special)].sum() == 0
    assert float(found.sum()) >= abs(difference) * (1 - 1e-2)


@pytest.mark.parametrize("family", SOUND_FAMILIES)
def test_relevance_is_conserved_through_convolutions_and_group_norms(family: str) -> None:
    subject = sound_checkpoint(family)
    for found in capture(subject, sound_probes(family), method=Method("lrp"), target=TARGET):
        assert found.maps[0].diagnostics["conservation_error"] < 1e-5
        assert found.maps[0].weights.max() > 1.1 * found.maps[0].weights.mean()


def test_group_norm_holds_its_spread_and_keeps_its_value() -> None:
    from audit.capture.attributions.relevance import conserving

    torch.manual_seed(0)
    norm = torch.nn.GroupNorm(2, 4).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(4))
        norm.bias.copy_(torch.randn(4))
    given = torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True)
    ahead = torch.randn(1, 4, 6, dtype=torch.float64)
    with conserving(norm):
        value = norm(given)
        (gradient,) = torch.autograd.grad((value * ahead).sum(), given)
    torch.testing.assert_close(value, norm(given))
    expected = torch.zeros_like(given)
    for group in (slice(0, 2), slice(2, 4)):
        x = given.detach()[:, group]
        spread = (x.var(unbiased=False) + norm.eps).sqrt()
        back = ahead[:, group] * norm.weight.detach()[group, None] / spread
        expected[:, group] = back - back.mean()
    torch.testing.assert_close(gradient, expected)


# --- Whisper ----------------------------------------------------------------------------------


def stepped(subject: Checkpoint, probe: Probe) -> Encoded:
    return with_decoder_steps(subject, encode_sound(subject, probe), "decoder:1")


def test_occlusion_of_whisper_removes_two_columns_of_the_spectrogram_for_each_frame() -> None:
    subject, (probe,) = whisper(), sound_probes("whisper", 1)
    token = subject.processor.tokenizer.convert_tokens_to_ids("film")
    item = stepped(subject, probe)
    mel = item.tensors["input_features"]

    def value(features: Tensor) -> float:
        with torch.no_grad():
            out = subject.model(**{**item.tensors, "input_features": features})
        return float(out.logits[0, 1, token])

    method = Method("occlusion", "decoder:1")
    (found,) = capture(subject, [probe], method=method, target="film")
    source, prefix = found.maps
    moved = np.zeros(50)
    for place in np.flatnonzero(~source.positions.special):
        changed = mel.clone()
        changed[0, :, 2 * place : 2 * place + 2] = mel[0, 0, -1]
        moved[place] = abs(value(changed) - value(mel))
    assert 0 < source.positions.special.sum() < 50
    np.testing.assert_allclose(source.weights, moved / moved.sum(), atol=1e-4)
    assert (source.stream, prefix.stream, prefix.positions.kind) == ("source", "prefix", "token")


@pytest.mark.parametrize("name", ["input_x_gradient", "integrated_gradients", "shap", "lime"])
def test_attributions_of_whisper_explain_a_token_by_what_was_heard(name: str) -> None:
    subject, probes = whisper(), sound_probes("whisper", 2)
    for found in capture(subject, probes, method=Method(name, "decoder:1", SEVEN[name]), target="film"):
        source, prefix = found.maps
        assert (source.positions.kind, len(source.weights), len(prefix.weights)) == ("frame", 50, 2)
        assert source.weights.sum() == pytest.approx(1, abs=1e-5)
        if name != "input_x_gradient":  # it has no baseline, so padding may count
            assert source.weights[source.positions.special].sum() == 0
        assert source.diagnostics.get("completeness_error", 0) < 0.05


def test_frames_that_have_no_place_in_seconds_are_refused_by_the_model() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "vocab_size": 40,
             "input_feat_per_channel": 20, "conv_channels": 32, "bos_token_id": 3, "eos_token_id": 3,
             "pad_token_id": 0, "decoder_start_token_id": 5}  # fmt: skip
    model = build("Speech2TextForConditionalGeneration", **sizes)
    extractor = transformers.Speech2TextFeatureExtractor(feature_size=20, num_mel_bins=20)
    with pytest.raises(CaptureError, match=r"Speech2Text.*: its frames cannot be placed"):
        encode_sound(checkpoint(model, extractor), sound_probes("whisper", 1)[0])


@pytest.mark.parametrize("samples", [1, 160, 399])
def test_a_sound_shorter_than_a_column_of_the_spectrogram_is_refused(samples: int) -> None:
    with pytest.raises(ProbeError, match=rf"too short \({samples} samples\) to give one frame; remove it"):
        encode_sound(sound_checkpoint("ast"), Probe("a", audio=noise(samples), sampling_rate=RATE))
    encode_sound(sound_checkpoint("ast"), Probe("a", audio=noise(400), sampling_rate=RATE))


def test_samples_that_are_no_numbers_are_the_probe_s_fault_not_the_checkpoint_s() -> None:
    samples = np.full(800, np.nan, np.float32)
    with pytest.raises(ProbeError, match="probe a: audio holds NaN or infinite samples"):
        encode_sound(sound_checkpoint("wav2vec2"), Probe("a", audio=samples, sampling_rate=RATE))


# --- batches and regions ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["wav2vec2", "ast"])
@pytest.mark.parametrize("name", SEVEN)
def test_a_sound_has_the_same_map_alone_as_among_others(family: str, name: str) -> None:
    subject, probes = sound_checkpoint(family), sound_probes(family)
    method = Method(name, params=SEVEN[name])
    together = [one.maps[0].weights for one in capture(subject, probes, method=method, target=TARGET)]
    for probe, found in zip(probes[::-1], together[::-1], strict=True):
        (alone,) = capture(subject, [probe], method=method, target=TARGET)
        np.testing.assert_allclose(alone.maps[0].weights, found, atol=1e-4)
        assert found.sum() == pytest.approx(1, abs=1e-5)


def weights_of(item: Encoded, spans: list[list[float]]) -> NDArray[np.float64]:
    region = Region("word", "annotated", {"annotated": "word"})
    probe = Probe("p", audio=np.zeros(1, np.float32), sampling_rate=RATE, regions={"word": spans})
    return region_weights(region, item.positions, probe)


@pytest.mark.parametrize("family", ["wav2vec2", "hubert"])
def test_a_region_in_seconds_is_removed_from_the_waveform(family: str) -> None:
    subject, probe = sound_checkpoint(family), sound_probes(family)[2]
    item = encode_sound(subject, probe)
    start, end = 3 * STEP, 6 * STEP + STEP // 2  # half of frame 6 is mixed with silence by half
    weights = weights_of(item, [[start / RATE, end / RATE]])
    assert weights.round(4).tolist() == [0, 0, 0, 1, 1, 1, 0.5] + [0] * (len(item) - 7)
    (found,) = occlude(subject, [probe], [weights], targets="positive")
    changed = item.tensors["input_values"].clone()
    changed[0, start : 6 * STEP] = 0
    changed[0, 6 * STEP : 7 * STEP] *= 0.5
    assert found.occlusion == "silence"
    assert found.intact == pytest.approx(logit(subject, dict(item.tensors)), abs=1e-5)
    assert found.occluded == pytest.approx(logit(subject, {"input_values": changed}), abs=1e-5)
    (blurred,) = occlude(subject, [probe], [weights], targets="positive", fill="blur")
    assert blurred == found  # a sound has no blur


def test_a_region_in_seconds_takes_every_band_of_its_patches() -> None:
    subject, probe = sound_checkpoint("ast"), sound_probes("ast")[2]
    item = encode_sound(subject, probe)
    weights = weights_of(item, [[0.05, 0.13]])  # patches of 8 columns, one each 5: the second is inside
    times: Any = item.positions.times
    inside = (times[:, 0] >= 0.05 - 1e-6) & (times[:, 1] <= 0.13 + 1e-6) & ~item.positions.special
    assert inside.sum() == 3  # one for each row of bands
    np.testing.assert_allclose(weights[inside], 1, atol=1e-4)
    (found,) = occlude(subject, [probe], [np.where(inside, 1.0, 0.0)], targets="positive")
    expected = logit(subject, by_hand(subject, item, np.flatnonzero(inside).tolist()))
    assert found.occluded == pytest.approx(expected, abs=1e-5)
