"""What is decoded, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from audit.errors import ProbeError
from audit.media import check_samples, load_audio, load_image, load_mask, save_audio
from audit.probes import as_probes

GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)


@pytest.mark.parametrize(("suffix", "kind"), [("png", "<u2"), ("tiff", "<u2"), ("tiff", ">u2")])
def test_sixteen_bits_of_grey_are_the_eight_they_stand_for(tmp_path: Path, suffix: str, kind: str) -> None:
    path = str(tmp_path / f"a.{suffix}")
    Image.fromarray((GREY.astype(np.uint16) * 257).astype(kind)).save(path)
    np.testing.assert_array_equal(load_image(path), np.repeat(GREY[:, :, None], 3, axis=2))
    np.testing.assert_array_equal(load_mask(path), (GREY / 255).astype(np.float32))


def test_sixteen_bits_are_rounded_to_the_nearest_of_eight(tmp_path: Path) -> None:
    path = str(tmp_path / "a.png")
    Image.fromarray(np.array([[128, 129, 385, 386, 65406, 65407]], np.uint16)).save(path)
    assert load_image(path)[0, :, 0].tolist() == [0, 1, 1, 2, 254, 255]


@pytest.mark.parametrize(("kind", "mode"), [("i4", "I"), ("f4", "F")])
def test_pixels_without_a_range_are_refused(tmp_path: Path, kind: str, mode: str) -> None:
    path = str(tmp_path / "a.tiff")
    Image.fromarray(GREY.astype(kind)).save(path)
    with pytest.raises(ProbeError, match=rf"mode {mode}\), for which no range .* is defined; scale it"):
        load_image(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_sound_with_numbers_that_are_none_is_refused(tmp_path: Path, value: float) -> None:
    samples = np.zeros(8, np.float32)
    samples[3] = value
    save_audio(tmp_path / "a.wav", samples, 8000)
    with pytest.raises(ProbeError, match=r"a\.wav holds NaN or infinite samples; record it again"):
        load_audio(str(tmp_path / "a.wav"))
    with pytest.raises(ProbeError, match="NaN or infinite samples"):
        as_probes([{"id": "a", "audio": samples, "sampling_rate": 8000}])


@pytest.mark.parametrize(
    ("samples", "why"),
    [(np.zeros((2, 8)), r"\(samples,\), got float64 \(2, 8\)"), (np.zeros(0), "has no samples")],
)
def test_arrays_that_are_no_sound_are_refused(samples: np.ndarray, why: str) -> None:
    with pytest.raises(ProbeError, match=why):
        check_samples(samples, "audio")
