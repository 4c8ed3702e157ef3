"""Attention within windows (Swin and its kin) against windows that are cut and shifted here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from audit.capture import capture
from audit.errors import CaptureError
from audit.records import Checkpoint, Method
from tests.integration.test_capture_image_text import softmaxes
from tests.integration.tiny_models import LABELS, checkpoint, image_probes, image_processor

SIDE, WINDOW = 8, 4  # patches of the first stage along one side, and of a window


def swin(architecture: str = "SwinForImageClassification", **changes: Any) -> Checkpoint:
    sizes = {"image_size": 32, "patch_size": 4, "window_size": WINDOW, "embed_dim": 16, "depths": [2, 2]}
    cls = getattr(transformers, architecture)
    config = cls.config_class(**{**sizes, "num_heads": [2, 4], **LABELS, **changes})
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return checkpoint(model, image_processor())


def dense(windows: Tensor, side: int, shift: int) -> NDArray[np.float64]:
    """Return the mean head of windows (window, head, m, m) over all positions of a square."""
    places = np.roll(np.arange(side * side).reshape(side, side), (-shift, -shift), axis=(0, 1))
    cut = places.reshape(side // WINDOW, WINDOW, side // WINDOW, WINDOW).transpose(0, 2, 1, 3)
    whole = np.zeros((side * side, side * side))
    for at, window in zip(cut.reshape(-1, WINDOW * WINDOW), windows, strict=True):
        whole[np.ix_(at, at)] = window.mean(0).numpy()
    return whole


def expected_mean_row(subject: Checkpoint, pixels: Tensor) -> NDArray[np.float64]:
    with torch.no_grad(), softmaxes() as kept:
        subject.model(pixels)
    R = np.eye(SIDE * SIDE)
    for windows, shift in zip(kept[:2], (0, WINDOW // 2), strict=True):
        R = (0.5 * dense(windows, SIDE, shift) + 0.5 * np.eye(len(R))) @ R
    half = SIDE // 2
    merge = np.zeros((half * half, SIDE * SIDE))
    for row in range(SIDE):
        for column in range(SIDE):
            merge[row // 2 * half + column // 2, row * SIDE + column] = 0.25
    R = merge @ R
    for windows in kept[2:]:  # one window holds the whole stage, so it is not shifted
        R = (0.5 * windows[0].mean(0).numpy() + 0.5 * np.eye(half * half)) @ R
    row: NDArray[np.float64] = R.mean(axis=0)
    return row


@pytest.mark.parametrize("architecture", ["SwinForImageClassification", "Swinv2ForImageClassification"])
def test_windows_shifts_and_merges_equal_the_written_out_product(architecture: str) -> None:
    subject, probes = swin(architecture), image_probes(2)
    for probe, captured in zip(probes, capture(subject, probes), strict=True):
        pixels = subject.processor(probe.image, return_tensors="pt", input_data_format="channels_last")
        (one,) = captured.maps
        np.testing.assert_allclose(one.weights, expected_mean_row(subject, pixels["pixel_values"]), atol=1e-6)
        assert (one.stream, one.share, one.positions.grid) == ("input", 1.0, (SIDE, SIDE))
        assert one.diagnostics["merged_patches"] == 4
        assert one.positions.boxes is not None
        np.testing.assert_allclose(one.positions.boxes[SIDE + 2], [2 / 8, 1 / 8, 3 / 8, 2 / 8], atol=3e-3)
        assert captured.prediction.logits is not None
        assert len(captured.prediction.logits) == 3


def test_a_position_of_the_last_stage_may_be_read_alone() -> None:
    subject, probes = swin(depths=[2], num_heads=[2]), image_probes(1)
    pixels = subject.processor(probes[0].image, return_tensors="pt", input_data_format="channels_last")
    with torch.no_grad(), softmaxes() as kept:
        subject.model(**pixels)
    R = np.eye(SIDE * SIDE)
    for windows, shift in zip(kept, (0, 2), strict=True):
        R = (0.5 * dense(windows, SIDE, shift) + 0.5 * np.eye(len(R))) @ R
    (one,) = next(capture(subject, probes, method=Method(row="token:9"))).maps
    np.testing.assert_allclose(one.weights, R[9], atol=1e-6)
    assert one.diagnostics["merged_patches"] == 1


def test_windows_that_reach_beyond_the_image_are_refused() -> None:
    with pytest.raises(CaptureError, match="attends to the padding of its windows"):
        next(capture(swin(window_size=3), image_probes(1)))


def test_windows_that_are_not_shifted_back_are_refused() -> None:
    subject = swin()
    block = subject.model.swin.encoder.layers[0].blocks[1]
    shifted = block.cyclic_shift
    block.cyclic_shift = lambda states, reverse=False: states if reverse else shifted(states)
    with pytest.raises(CaptureError, match="windows that overlap or do not give each position"):
        next(capture(subject, image_probes(1)))
