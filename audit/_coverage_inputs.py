"""Random inputs for a model of any type: token ids, pixels or sound features, by its forward method."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

TOKENS = 9
_FLOATS = ("inputs_embeds",)


def random_inputs(model: Any, *, seed: int = 0, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Return one random input of `model`, with a batch axis of 1.

    Parameters
    ----------
    model : model of transformers
    seed : int
        Another seed gives another input of the same shape.
    tokens : int
        Length of a token sequence.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    tensors: dict[str, Tensor] = {}
    if "input_ids" in names:
        tensors["input_ids"] = _ids(config, (1, tokens), generator)
        if "attention_mask" in names:
            tensors["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
    elif "pixel_values" in names:
        tensors["pixel_values"] = _pixels(model, generator)
    elif "input_features" in names:
        tensors["input_features"] = _features(model, generator)
    elif "input_values" in names:
        tensors["input_values"] = _samples(model, generator)
    elif "inputs_embeds" in names:
        width = next(first_value(config, "hidden_size", "d_model", "dim"), 32)
        tensors["inputs_embeds"] = torch.randn(1, tokens, width, generator=generator)
        if "attention_mask" in names:
            tensors["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
    if "pixel_values" in names and "input_ids" in names and _is_dual(model):
        tensors["pixel_values"] = _pixels(model, generator)
    if "decoder_input_ids" in names:
        tensors["decoder_input_ids"] = _ids(config, (1, tokens - 3), generator)
    return tensors


def _is_dual(model: Any) -> bool:
    return (
        hasattr(model, "get_text_features")
        and hasattr(model, "get_image_features")
        and hasattr(model.config, "projection_dim")
    )


def _ids(config: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return ids that mean nothing special to the model."""
    size = min(first_value(config, "vocab_size"), default=64)
    reserved = {
        v
        for part in config_parts(config)
        for k, v in vars(part).items()
        if "token" in k and isinstance(v, int)
    }
    free = torch.tensor([i for i in range(3, size) if i not in reserved][:64])
    return free[torch.randint(len(free), shape, generator=generator)]


def _pixels(model: Any, generator: torch.Generator) -> Tensor:
    config = model.config
    vision = next((p for p in config_parts(config) if hasattr(p, "image_size")), config)
    size = getattr(vision, "image_size", 32) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    frames = getattr(vision, "num_frames", None)
    shape = (1, channels, height, width) if frames is None else (1, frames, channels, height, width)
    return torch.randn(shape, generator=generator)


def _features(model: Any, generator: torch.Generator) -> Tensor:
    config = model.config
    bins = next(first_value(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels"), 16)
    frames = next(first_value(config, "max_source_positions"), 32)
    if "hisper" in type(model).__name__:
        return torch.randn(1, bins, 2 * frames, generator=generator)
    return torch.randn(1, 64, bins, generator=generator)


def _samples(model: Any, generator: torch.Generator) -> Tensor:
    config = model.config
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return torch.randn(1, config.max_length, config.num_mel_bins, generator=generator)
    return torch.randn(1, 6400, generator=generator)


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
