"""Turn probes into model inputs that know where each of their positions comes from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from audit.capture.inputs.cells import Cells
from audit.capture.inputs.pictures import Picture, measured_picture
from audit.capture.inputs.positions import (
    extra_tokens,
    image_geometry,
    patch_positions,
)
from audit.errors import CaptureError, CheckpointError, ProbeError
from audit.media import load_image
from audit.records import Checkpoint, Positions, Probe


@dataclass(frozen=True)
class Encoded:
    """One probe as the model takes it: tensors with a batch axis of 1, and its positions.

    `second` holds the positions of the second stream: the decoder's own tokens, or the second tower.
    `picture` places the pixels of an image in one sequence with text, `cells` the numbers of a sound.
    """

    probe: Probe
    tensors: Mapping[str, Tensor]
    positions: Positions
    truncated: bool = False
    second: Positions | None = None
    picture: Picture | None = None
    cells: Cells | None = None

    def __len__(self) -> int:
        return len(self.positions)


def core_model(model: nn.Module) -> Any:
    """Return the transformers model inside a compiled or PEFT wrapper, or `model` itself."""
    get_base = getattr(uncompiled(model), "get_base_model", None)
    return uncompiled(get_base() if callable(get_base) else model)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside what `torch.compile` returns, or `model` itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def accepted_arguments(model: nn.Module) -> frozenset[str]:
    """Return the names that the model's forward method takes explicitly."""
    return frozenset(inspect.signature(core_model(model).forward).parameters)


def processor_part(checkpoint: Checkpoint, part: str, *, mark: str, probes: str) -> Any:
    """Return one part of a checkpoint's processor, or all of it where it is that part alone.

    Parameters
    ----------
    checkpoint : Checkpoint
    part : "image_processor" or "feature_extractor"
    mark : str
        Attribute by which the part alone is known.
    probes : str
        What needs it, for the error.

    Raises
    ------
    CheckpointError
        When the processor has no such part.
    """
    processor = checkpoint.processor
    found = getattr(processor, part, None) or (processor if hasattr(processor, mark) else None)
    if found is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.info.ref} has no {part.replace('_', ' ')} but the probes are {probes}; "
            "save its preprocessor_config.json beside it"
        )
    return found


def image_processor(checkpoint: Checkpoint) -> Any:
    """Return the image processor of a checkpoint; raise CheckpointError where it has none."""
    return processor_part(checkpoint, "image_processor", mark="image_mean", probes="images")


def encode_image(checkpoint: Checkpoint, probe: Probe, *, windows: bool = False) -> Encoded:
    """Process one image and place its patches in the stored image; with `windows`, by measuring.

    Raises
    ------
    ProbeError
        When the image is missing or unreadable.
    CaptureError
        When the patches cannot be placed.
    """
    if probe.image is None:
        raise ProbeError(
            f"probe {probe.id} has no image but the checkpoint takes images; mend the probe file"
        )
    processor, model = image_processor(checkpoint), core_model(checkpoint.model)
    pixels = load_image(probe.image)
    stored = (pixels.shape[0], pixels.shape[1])
    if getattr(model.config, "num_channels", 3) == 1:
        pixels = pixels.mean(axis=2, keepdims=True).round().astype(np.uint8)
    processed = processor(pixels, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
    if windows:

        def process(image: NDArray[np.uint8]) -> NDArray[np.float64]:
            found = processor(image, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
            return np.asarray(found.double())

        picture = measured_picture("pixel_values", process, stored)
        patches = int(np.prod(patch_grid(model.config, processed.shape[-2:])))
        several = Positions("patch", np.zeros(patches, np.bool_))
        return Encoded(probe, {"pixel_values": processed}, several, picture=picture)
    size = (processed.shape[-2], processed.shape[-1])
    geometry = image_geometry(processor, stored, size)
    positions = patch_positions(geometry, patch_grid(model.config, size), *extra_tokens(model))
    return Encoded(probe, {"pixel_values": processed}, positions)


def patch_grid(config: Any, size: tuple[int, int]) -> tuple[int, int]:
    """Return (rows, columns) of the patches of a processed image, from the config's patch size.

    Raises
    ------
    CaptureError
        When the config has no patch size.
    """
    patch = patch_size(config)
    if patch is None:
        raise CaptureError(
            f"{type(config).__name__} has no patch_size; patches cannot be placed in the image"
        )
    return size[0] // patch[0], size[1] // patch[1]


def patch_size(config: Any) -> tuple[int, int] | None:
    """Return (height, width) in pixels of the patches of a model's image part, None where it has none."""
    # Models with two towers and captioners keep the image part's config inside theirs.
    parts = [getattr(config, name, None) for name in ("vision_config", "encoder")]
    patch = next((p for part in (*parts, config) if (p := getattr(part, "patch_size", None))), None)
    if patch is None:
        return None
    height, width = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    return int(height), int(width)
