"""Read images, features of images, and sounds from disk; the one place that decodes them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from audit.errors import ProbeError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff"})


def load_image(source: str | bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the pixels of an image as RGB, as they are stored (no rotation by metadata).

    Grey images of 16 bits are scaled to 8: round(value / 257), so that white stays white.

    Parameters
    ----------
    source : str, bytes, or uint8 array (height, width) or (height, width, channel)
        Path of an image file, its content, or pixels (grey, RGB or RGBA).

    Returns
    -------
    uint8 array (height, width, 3)

    Raises
    ------
    ProbeError
        When the file is missing or is not an image, its numbers have no defined range, or the array is not
        one of pixels.
    """
    from PIL import Image

    if isinstance(source, np.ndarray):
        return _pixels(source)
    name = source if isinstance(source, str) else "in the probe file"
    try:
        with Image.open(source if isinstance(source, str) else io.BytesIO(source)) as image:
            return np.asarray(_eight_bits(image, name).convert("RGB"))
    except FileNotFoundError:
        raise ProbeError(f"image {name} does not exist; mend the path in the probe file") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ProbeError(f"image {name} cannot be decoded ({_one_line(error)}); replace the file") from None


def _eight_bits(image: Any, name: str) -> Any:
    """Return an image whose numbers reach from 0 to 255; Pillow clips all others when it converts them."""
    from PIL import Image

    if image.mode.startswith("I;16"):  # each byte order has its own mode
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in {"I", "F"}:
        raise ProbeError(
            f"image {name} has pixels of 32 bits (mode {image.mode}), for which no range from black to white "
            "is defined; scale it to 8 or 16 bits and save it as PNG"
        )
    return image


def _pixels(array: NDArray[Any]) -> NDArray[np.uint8]:
    from PIL import Image

    grey_or_colour = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in {3, 4})
    if array.dtype != np.uint8 or not grey_or_colour or not array.size:
        raise ProbeError(
            f"image array must be uint8 (height, width) or (height, width, 3 or 4), got {array.dtype} "
            f"{array.shape}; convert it"
        )
    return np.asarray(Image.fromarray(array).convert("RGB"))


def load_mask(path: str) -> NDArray[np.float32]:
    """Return a region mask as weights in [0, 1], float32 (height, width).

    Raises
    ------
    ProbeError
        When the file is missing or is not an image.
    """
    grey: NDArray[Any] = load_image(path).mean(axis=2)
    return (grey / 255.0).astype(np.float32)


def image_size(source: str | NDArray[np.uint8]) -> tuple[int, int]:
    """Return (height, width) of an image without decoding its pixels.

    Raises
    ------
    ProbeError
        When the file is missing or is not an image.
    """
    from PIL import Image

    if not isinstance(source, str):
        return source.shape[0], source.shape[1]
    try:
        with Image.open(source) as image:
            return image.height, image.width
    except OSError:
        height, width, _ = load_image(source).shape  # raises with the reason
        return height, width


def save_image(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write pixels as a PNG file, which loses nothing."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def load_features(source: str | Mapping[str, Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the features and boxes of what a detector found in an image.

    Parameters
    ----------
    source : str, or mapping of ``features`` and ``boxes`` to arrays
        Path of an ``.npz`` file of these two arrays.

    Returns
    -------
    features : float32 array (region, dim)
    boxes : float32 array (region, 4)
        Left, top, right, bottom, as fractions of the width and height of the image.

    Raises
    ------
    ProbeError
        When the file is missing or lacks an array, or the arrays are not of these shapes, not finite, or no
        boxes.
    """
    name = source if isinstance(source, str) else "in the probe file"
    arrays = _feature_arrays(source) if isinstance(source, str) else source
    missing = [key for key in ("features", "boxes") if key not in arrays]
    if missing:
        raise ProbeError(f"features {name} lack the array {missing[0]!r}; {_SAVE_FEATURES}")
    features, boxes = (_finite(key, arrays[key], name) for key in ("features", "boxes"))
    if features.ndim != 2 or not features.size or boxes.shape != (len(features), 4):
        raise ProbeError(
            f"features {name}: expected features (region, dim) and boxes (region, 4), got {features.shape} "
            f"and {boxes.shape}; mend the file"
        )
    if not ((boxes >= 0) & (boxes <= 1)).all():
        raise ProbeError(
            f"features {name}: boxes reach from {boxes.min():g} to {boxes.max():g}, expected fractions in "
            "[0, 1]; divide them by the image's width and height"
        )
    if not (boxes[:, :2] < boxes[:, 2:]).all():
        raise ProbeError(f"features {name}: boxes must be left, top, right, bottom; mend their order")
    return features, boxes


_SAVE_FEATURES = "write it with numpy.savez(path, features=…, boxes=…)"


def _feature_arrays(path: str) -> Mapping[str, Any]:
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            with found:
                return {key: found[key] for key in found.files}
    except FileNotFoundError:
        raise ProbeError(f"features {path} do not exist; mend the path in the probe file") from None
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        why = _one_line(error)
        raise ProbeError(f"features {path} cannot be read ({why}); {_SAVE_FEATURES}") from None
    raise ProbeError(f"features {path} hold a single array; {_SAVE_FEATURES}")


def _finite(key: str, values: Any, name: str) -> NDArray[np.float32]:
    try:
        given = np.asarray(values)
    except ValueError:  # lists of unequal lengths
        given = np.asarray(None)
    if given.dtype.kind not in "fiu":
        raise ProbeError(f"features {name}: {key} must be one array of numbers; mend the file")
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(given, dtype=np.float32)
    if not np.isfinite(found).all():
        raise ProbeError(
            f"features {name}: {key} hold NaN or infinite numbers; run the detector again, or remove the "
            "probe"
        )
    return found


def save_features(path: Path, features: NDArray[np.float32], boxes: NDArray[np.float32]) -> None:
    """Write features and boxes as an ``.npz`` file, which loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, features=features, boxes=boxes)


def load_audio(source: str | bytes) -> tuple[NDArray[np.float32], int]:
    """Return a sound as one channel and its sampling rate.

    Parameters
    ----------
    source : str or bytes
        Path of a sound file, or its content. WAV needs nothing else installed; other formats need
        the package ``soundfile``.

    Returns
    -------
    samples : float32 array (samples,)
        In [-1, 1]; channels are averaged.
    sampling_rate : int
        In Hz.

    Raises
    ------
    ProbeError
        When the file is missing, cannot be decoded, is empty, or holds NaN or infinite samples.
    """
    name = source if isinstance(source, str) else "in the probe file"
    try:
        data = Path(source).read_bytes() if isinstance(source, str) else source
    except OSError as error:
        reason = (
            "does not exist" if isinstance(error, FileNotFoundError) else f"is unreadable ({error.strerror})"
        )
        raise ProbeError(f"audio {name} {reason}; mend the path in the probe file") from None
    samples, rate = _decode_wav(data, name) if data[:4] == b"RIFF" else _decode_other(data, name)
    return check_samples(samples, f"audio {name}"), rate


def check_samples(samples: NDArray[Any], name: str) -> NDArray[Any]:
    """Return the samples of a sound as they are.

    Parameters
    ----------
    samples : array (samples,)
    name : str
        What to call them in the message.

    Raises
    ------
    ProbeError
        When they are not one channel of finite numbers, or none.
    """
    if samples.ndim != 1 or samples.dtype.kind not in "fiu":
        raise ProbeError(
            f"{name} must be one channel of numbers, (samples,), got {samples.dtype} {samples.shape}; "
            "average its channels"
        )
    if not len(samples):
        raise ProbeError(f"{name} has no samples; replace it, or remove the probe")
    if not np.isfinite(samples).all():
        raise ProbeError(f"{name} holds NaN or infinite samples; record it again, or remove the probe")
    return samples


def _decode_wav(data: bytes, name: str) -> tuple[NDArray[np.float32], int]:
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # unknown chunks carry no sound
            rate, samples = wavfile.read(io.BytesIO(data))
    except (ValueError, EOFError, OSError) as error:
        raise ProbeError(f"audio {name} cannot be decoded ({_one_line(error)}); replace the file") from None
    return _to_unit(samples), int(rate)


def _to_unit(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Return integer or float samples (samples,) or (samples, channel) as float32 in [-1, 1]."""
    if samples.dtype == np.uint8:
        unit = (samples.astype(np.float32) - 128) / 128
    elif np.issubdtype(samples.dtype, np.integer):
        unit = samples / float(-np.iinfo(samples.dtype).min)
    else:
        unit = samples
    return np.asarray(unit if unit.ndim == 1 else unit.mean(axis=1), dtype=np.float32)


def _decode_other(data: bytes, name: str) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile
    except ImportError:
        raise ProbeError(
            f"audio {name} is not a WAV file and soundfile is not installed; pip install soundfile, "
            "or convert it to WAV"
        ) from None
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    except (RuntimeError, OSError) as error:
        raise ProbeError(f"audio {name} cannot be decoded ({_one_line(error)}); replace the file") from None
    return _to_unit(samples), int(rate)


def save_audio(path: Path, samples: NDArray[np.float32], sampling_rate: int) -> None:
    """Write one channel as a float32 WAV file, which loses nothing."""
    from scipy.io import wavfile

    path.parent.mkdir(parents=True, exist_ok=True)
    wavfile.write(path, sampling_rate, np.asarray(samples, dtype=np.float32))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
