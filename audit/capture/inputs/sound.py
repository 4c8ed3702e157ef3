"""Turn sound into model inputs whose frames know their seconds and their share of the input.

What belongs to a frame is an exact part of what the model takes (:mod:`audit.capture.inputs.cells`): as many
samples of the waveform as the convolutions' strides make (wav2vec2 and its kin), as many columns of the
spectrogram as there are for each frame (two, for Whisper), or the cells nearest to a patch's centre (the
audio spectrogram transformer, whose patches overlap). A frame also reads beyond its share.

A frame is removed by silence: what the checkpoint's own feature extractor puts where there is no sound, so
that every model has met it. For a waveform that is 0 (which is the sound's mean where it is normalised), for
Whisper's spectrogram its floor, at most eight decades under the sound's loudest cell, and for the audio
spectrogram transformer a 0 before normalisation, with which its training also masks.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.inputs.cells import Cells, column_cells, patch_cells, wave_cells
from audit.capture.inputs.encoded import Encoded, core_model, processor_part
from audit.errors import CaptureError, ProbeError
from audit.media import check_samples, load_audio
from audit.records import Checkpoint, Positions, Probe

# Seconds from one column of the audio spectrogram transformer's spectrogram to the next.
HOP = 0.01
WINDOW = 0.025
"""Seconds that one column of it reads; its extractor takes shorter sounds for padding, or fails."""
LEARNED = 2
"""Positions that the audio spectrogram transformer learns, before its patches."""


def sound_processor(checkpoint: Checkpoint) -> Any:
    """Return the feature extractor of a checkpoint; raise CheckpointError where it has none."""
    return processor_part(checkpoint, "feature_extractor", mark="sampling_rate", probes="sound")


def encode_sound(checkpoint: Checkpoint, probe: Probe) -> Encoded:
    """Process one sound and place its frames in seconds.

    Sound of another sampling rate than the checkpoint's is resampled.

    Parameters
    ----------
    checkpoint : Checkpoint
        wav2vec2 and its kin (frames of the waveform), Whisper (frames of the spectrogram) or the audio
        spectrogram transformer (patches of frequency × time).
    probe : Probe

    Raises
    ------
    ProbeError
        When the sound is missing, unreadable, too short, or has NaN or infinite samples.
    CaptureError
        When the frames cannot be placed.
    """
    processor, core = sound_processor(checkpoint), core_model(checkpoint.model)
    samples = _samples(probe, int(processor.sampling_rate))
    seconds = len(samples) / processor.sampling_rate
    config = core.config
    patches = hasattr(config, "frequency_stride") and hasattr(config, "time_stride")
    if patches and seconds < WINDOW:
        raise _too_short(probe.id, len(samples))
    features = _features(processor, samples, probe.id)
    if patches:
        _refuse_long(probe, seconds, config.max_length * HOP)
        positions, cells = _spectrogram_patches(config, seconds), _patch_cells(config, processor)
    elif hasattr(config, "max_source_positions") and hasattr(processor, "hop_length"):
        steps = features["input_features"].shape[-1]
        _refuse_long(probe, seconds, steps * processor.hop_length / processor.sampling_rate)
        positions = _padded_frames(config, processor, steps, seconds)
        cells = _column_cells(processor, samples, features["input_features"], len(positions))
    elif hasattr(config, "conv_stride") and "input_values" in features:
        positions = _wave_frames(config, len(samples), int(processor.sampling_rate), probe.id)
        step = int(np.prod(config.conv_stride))
        cells = wave_cells(len(samples), step, len(positions), float(processor.padding_value))
    else:
        raise CaptureError(
            f"{type(core).__name__}: its frames cannot be placed in seconds; sound is supported for "
            "wav2vec2 and its kin, Whisper and the audio spectrogram transformer"
        )
    return Encoded(probe, features, positions, cells=cells)


def _features(processor: Any, samples: NDArray[np.float32], probe_id: str) -> dict[str, Any]:
    """Return what the feature extractor makes of a sound; refuse one that it takes only when longer."""
    rate = int(processor.sampling_rate)
    try:
        found = processor(samples, sampling_rate=rate, return_tensors="pt")
    except (ValueError, IndexError, RuntimeError, AssertionError):
        if len(samples) >= rate:
            raise
        processor(np.pad(samples, (0, rate)), sampling_rate=rate, return_tensors="pt")  # else its own error
        raise _too_short(probe_id, len(samples)) from None
    return {key: found[key] for key in ("input_features", "input_values") if key in found}


def _too_short(probe_id: str, samples: int) -> ProbeError:
    return ProbeError(f"probe {probe_id} is too short ({samples} samples) to give one frame; remove it")


def _samples(probe: Probe, rate: int) -> NDArray[np.float32]:
    if probe.audio is None:
        raise ProbeError(f"probe {probe.id} has no sound but the checkpoint takes sound; mend the probe file")
    if isinstance(probe.audio, str):
        samples, own = load_audio(probe.audio)
    else:
        samples = check_samples(probe.audio, f"probe {probe.id}: audio")
        own = probe.sampling_rate or rate
    if own == rate:
        return samples
    from scipy.signal import resample_poly

    shared = gcd(own, rate)
    resampled: NDArray[np.float32] = resample_poly(samples, rate // shared, own // shared).astype(np.float32)
    return resampled


def _refuse_long(probe: Probe, seconds: float, limit: float) -> None:
    if seconds > limit + 1e-6:
        raise ProbeError(
            f"probe {probe.id} lasts {seconds:.2f} s, but the checkpoint hears at most {limit:.2f} s; cut it"
        )


def _frames(starts: NDArray[np.float64], width: float, seconds: float) -> NDArray[np.float32]:
    times = np.stack([starts, starts + width], axis=1)
    return np.clip(times, 0.0, seconds).astype(np.float32)


def _wave_frames(config: Any, samples: int, rate: int, probe_id: str) -> Positions:
    """Frames of a stack of convolutions: each starts one product of strides after the last."""
    count, step = samples, 1
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        count, step = (count - kernel) // stride + 1, step * stride
    if count < 1:
        raise _too_short(probe_id, samples)
    times = _frames(np.arange(count) * step / rate, step / rate, samples / rate)
    times[-1, 1] = samples / rate
    return Positions("frame", np.zeros(count, np.bool_), times=times)


def _padded_frames(config: Any, processor: Any, steps: int, seconds: float) -> Positions:
    """Frames of a spectrogram of fixed length; those after the end of the sound are special."""
    count = int(config.max_source_positions)
    width = steps / count * processor.hop_length / processor.sampling_rate
    starts = np.arange(count) * width
    return Positions("frame", starts >= seconds, times=_frames(starts, width, seconds))


def _spectrogram_patches(config: Any, seconds: float) -> Positions:
    """Two learned tokens, then patches of frequency × time, row by row."""
    rows = (config.num_mel_bins - config.patch_size) // config.frequency_stride + 1
    columns = (config.max_length - config.patch_size) // config.time_stride + 1
    starts = np.tile(np.arange(columns) * config.time_stride * HOP, rows)
    times = np.concatenate(
        [np.zeros((LEARNED, 2), np.float32), _frames(starts, config.patch_size * HOP, seconds)]
    )
    special = np.concatenate([[True] * LEARNED, starts >= seconds])
    return Positions("frame", special, times=times)


def _patch_cells(config: Any, processor: Any) -> Cells:
    size, strides = (config.max_length, config.num_mel_bins), (config.time_stride, config.frequency_stride)
    padding = np.zeros(1, np.float32)
    silence = float((processor.normalize(padding) if processor.do_normalize else padding)[0])
    return patch_cells(size, int(config.patch_size), strides, LEARNED, silence)


def _column_cells(processor: Any, samples: NDArray[np.float32], features: Tensor, count: int) -> Cells:
    """Return cells whose silence is the one beside this sound, whose loudest cell sets the floor.

    Where the sound fills the spectrogram, it is processed again with silence behind it.
    """
    _, bands, steps = features.shape
    end = (steps - 1) * processor.hop_length - processor.n_fft // 2
    if len(samples) > end:
        longer = processor.n_samples + 2 * processor.n_fft
        again = processor(samples, sampling_rate=processor.sampling_rate, max_length=longer)
        features = torch.as_tensor(np.asarray(again["input_features"]))
    return column_cells(bands, steps, count, features[:, :, -1:].clone())
