"""Random inputs for a model of any type: token ids, pixels or sound features, by its forward method."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 24  # more than a sliding window of the tiny configs holds


def random_inputs(model: Any, *, seed: int = 0, tokens: int = TOKENS) -> Iterator[dict[str, Tensor]]:
    """Yield random inputs of `model`, with a batch axis of 1: first the plainest that its method takes.

    Parameters
    ----------
    model : model of transformers
    seed : int
        Another seed gives another input of the same shapes.
    tokens : int
        Length of a token sequence, cut where the model has fewer positions.
    """
    names = set(inspect.signature(model.forward).parameters)
    tokens = min([tokens, *first_value(model.config, "max_position_embeddings")])
    draw = torch.Generator().manual_seed(1000 + seed)
    pictures = [name for name in ("pixel_values", "pixel_values_videos") if name in names]
    if "input_ids" in names:
        text = _text(model.config, names, tokens, draw)
        yield text
        if "visual_feats" in names:  # regions of an image, as features with their boxes
            width = next(first_value(model.config, "visual_feat_dim"), 32)
            regions = {"visual_feats": (1, 9, width), "visual_pos": (1, 9, 4)}
            yield {**text, **{name: torch.rand(shape, generator=draw) for name, shape in regions.items()}}
        for name in pictures:
            yield {**text, name: _pixels(model, draw, video="video" in name)}
    if "grid_thw" in names or "image_grid_thw" in names:
        yield from _packed(model, names, draw)
    for name in pictures:
        yield {name: _pixels(model, draw, video="video" in name)}
    if "spatial_shapes" in names:
        yield from _patches(model, names, tokens, draw)
    if "input_features" in names:
        yield from _sound(model, names, tokens, draw)
    if "input_values" in names:
        for wave in _waves(model, draw):
            yield wave
            if "decoder_input_ids" in names:
                yield {**wave, "decoder_input_ids": _ids(model.config, (1, tokens - 3), draw)}
    if "inputs_embeds" in names and "input_ids" not in names:
        width = next(first_value(model.config, "hidden_size", "d_model", "dim"), 32)
        yield {"inputs_embeds": torch.randn(1, tokens, width, generator=draw)}


def _text(config: Any, names: set[str], tokens: int, draw: torch.Generator) -> dict[str, Tensor]:
    tensors = {"input_ids": _ids(config, (1, tokens), draw)}
    if "attention_mask" in names:
        tensors["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
    if "bbox" in names:
        corners = torch.randint(0, 60, (1, tokens, 2), generator=draw)
        tensors["bbox"] = torch.cat([corners, corners + 20], dim=-1)
    if "decoder_input_ids" in names:
        books = next(first_value(config, "num_codebooks"), 1)  # MusicGen's rows of codes
        tensors["decoder_input_ids"] = _ids(config, (books, tokens - 3), draw)
    return tensors


def _ids(config: Any, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Return ids that mean nothing special to the model."""
    size = min(first_value(config, "vocab_size"), default=64)
    parts = [vars(part).items() for part in config_parts(config)]
    reserved = {v for items in parts for k, v in items if "token" in k and isinstance(v, int)}
    free = torch.tensor([i for i in range(3, size) if i not in reserved][:64])
    return free[torch.randint(len(free), shape, generator=draw)]


def _pixels(model: Any, draw: torch.Generator, *, video: bool) -> Tensor:
    vision = next(
        (p for p in config_parts(model.config) if _known(p, "image_size", "crop_size")), model.config
    )
    size = _known(vision, "image_size", "crop_size") or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _known(vision, "num_channels", "in_channels", "in_chans") or 3
    frames = _known(vision, "num_frames", "frames_per_clip")
    frames = 4 if frames is None and video else frames
    shape = (1, channels, height, width) if frames is None else (1, frames, channels, height, width)
    return torch.randn(shape, generator=draw)


def _packed(model: Any, names: set[str], draw: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Patches of one image as rows of one long sequence, as Qwen2-VL and its kin take them."""
    config = model.config
    patch = _known(config, "patch_size") or 8
    channels = _known(config, "in_channels", "num_channels", "in_chans") or 3
    width = channels * patch * patch * (_known(config, "temporal_patch_size") or 1)
    grid = "grid_thw" if "grid_thw" in names else "image_grid_thw"
    patches = next((n for n in ("hidden_states", "pixel_values") if n in names), "pixel_values")
    given = {grid: torch.tensor([[1, 4, 4]])}
    if "merge_sizes" in names:
        given["merge_sizes"] = torch.tensor([2])
    yield {patches: torch.randn(16, width, generator=draw), **given}
    yield {patches: torch.randn(16, channels, patch, patch, generator=draw), **given}


def _patches(model: Any, names: set[str], tokens: int, draw: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Patches as rows, with the shape of their grid, as SigLIP 2 takes them."""
    vision = next((p for p in config_parts(model.config) if _known(p, "patch_size")), model.config)
    width = (_known(vision, "num_channels") or 3) * vision.patch_size**2
    image = {
        "pixel_values": torch.randn(1, 16, width, generator=draw),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]]),
    }
    yield {**_text(model.config, names, tokens, draw), **image} if "input_ids" in names else image


def _sound(model: Any, names: set[str], tokens: int, draw: torch.Generator) -> Iterator[dict[str, Tensor]]:
    config = model.config
    bins = next(first_value(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels"), 16)
    width = next(first_value(config, "input_dim", "feature_projection_input_dim", "hidden_size"), bins)
    steps = 2 * next(first_value(config, "max_source_positions"), 32)
    first = any(isinstance(m, nn.Conv1d) and m.in_channels == bins for m in model.modules())
    shapes = [(1, bins, steps), (1, 64, bins), (1, 64, width)] if first else [(1, 64, bins), (1, 64, width)]
    for shape in shapes:
        tensors = {"input_features": torch.randn(shape, generator=draw)}
        if "decoder_input_ids" in names:
            tensors["decoder_input_ids"] = _ids(config, (1, tokens - 3), draw)
        yield tensors
        if "input_features_mask" in names:
            yield {**tensors, "input_features_mask": torch.ones(1, 64, dtype=torch.long)}


def _waves(model: Any, draw: torch.Generator) -> Iterator[dict[str, Tensor]]:
    config = model.config
    if _known(config, "num_mel_bins") and _known(config, "max_length"):
        yield {"input_values": torch.randn(1, config.max_length, config.num_mel_bins, generator=draw)}
    yield {"input_values": torch.randn(1, 1600, generator=draw)}
    yield {"input_values": torch.randn(1, 1, 3200, generator=draw)}


def _known(config: Any, *keys: str) -> Any:
    return next((v for key in keys if (v := getattr(config, key, None)) is not None), None)


def config_parts(config: Any) -> Iterator[Any]:
    """Yield a config and the configs inside it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from config_parts(value)


def first_value(config: Any, *keys: str) -> Iterator[int]:
    """Yield the positive integers that `config` or its parts have under `keys`."""
    for part in config_parts(config):
        for key in keys:
            value = vars(part).get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                yield value
