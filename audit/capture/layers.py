"""Find the attention layers of a model and decide how each is captured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from audit.capture.interface import KERNELS, interface_function, involved_configs, original_name
from audit.errors import CaptureError

_NO_ATTENTION = re.compile(
    r"Mamba\w*Mixer|FourierTransform|DeltaNet|LinearAttention|LightningAttention|Rwkv\w*Attention|RecurrentBlock"
    r"|ShortConv|Hyena|xLSTM\w*Layer|mLSTM|sLSTM|Retention|StateSpace|TimeMixer"
)
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module: where it sits, what it attends to, how its weights are seen."""

    path: str
    module: nn.Module
    kind: Literal["self", "cross"]
    mechanism: Literal["interface", "hook"]


@dataclass(frozen=True)
class CapturePlan:
    """All attention layers of a model, in order, and the configs to switch for a capture."""

    layers: tuple[AttentionLayer, ...]
    configs: tuple[Any, ...]

    def modules(self, mechanism: str | None = None) -> Mapping[str, nn.Module]:
        """Return path and module of the layers that are captured by `mechanism` (None = all)."""
        return {x.path: x.module for x in self.layers if mechanism in (None, x.mechanism)}

    @property
    def has_hooks(self) -> bool:
        """Return whether any layer needs the model to be asked for its attentions."""
        return any(layer.mechanism == "hook" for layer in self.layers)


def plan_capture(model: nn.Module) -> CapturePlan:
    """Walk `model` and choose, for each attention layer by itself, how to see its weights.

    Layers on the attention interface are seen through it; the others through a forward hook, which
    needs the eager implementation.

    Raises
    ------
    CaptureError
        For models with layers that mix positions without attention, without any attention, with
        several stacks or cross-attention (not supported yet), or under a kernel that cannot be seen.
    """
    _refuse_mixers(model)
    layers = tuple(_attention_layers(model))
    name = type(model).__name__
    if not layers:
        raise CaptureError(f"{name} has no attention layers; attention rollout does not apply to it")
    _refuse_several_stacks(name, model, layers)
    for layer in layers:
        _check_implementation(layer, model)
    paths = [layer.path for layer in layers if layer.mechanism == "interface"]
    return CapturePlan(layers, tuple(involved_configs(model, paths)))


def _attention_layers(model: nn.Module) -> list[AttentionLayer]:
    modules = dict(model.named_modules())
    found: dict[str, Literal["interface", "hook"]] = {}
    for path, module in modules.items():
        if interface_function(type(module)) is not None:
            found[path] = "interface"
    for path, module in modules.items():
        named = "attention" in type(module).__name__.lower() and any(True for _ in module.children())
        inside = any(_below(path, other) for other in found if found[other] == "interface")
        if named and path not in found and not inside and not _has_attention_below(path, modules):
            found[path] = "hook"
    return [
        AttentionLayer(path, modules[path], "cross" if _CROSS.search(path) else "self", found[path])
        for path in modules
        if path in found
    ]


def _below(path: str, ancestor: str) -> bool:
    return path.startswith(f"{ancestor}.") if ancestor else bool(path)


def _has_attention_below(path: str, modules: Mapping[str, nn.Module]) -> bool:
    return any(
        _below(other, path)
        and (
            interface_function(type(module)) is not None
            or ("attention" in type(module).__name__.lower() and any(True for _ in module.children()))
        )
        for other, module in modules.items()
    )


def _refuse_mixers(model: nn.Module) -> None:
    mixers = [
        (p, type(m).__name__) for p, m in model.named_modules() if _NO_ATTENTION.search(type(m).__name__)
    ]
    if mixers:
        first = ", ".join(f"{path} ({cls})" for path, cls in mixers[:3])
        more = f" and {len(mixers) - 3} more" if len(mixers) > 3 else ""
        raise CaptureError(
            f"{type(model).__name__} mixes positions without softmax attention in {first}{more}; "
            "no exact rollout exists for it, audit a model whose every layer has attention"
        )


def _refuse_several_stacks(name: str, model: nn.Module, layers: tuple[AttentionLayer, ...]) -> None:
    cross = [layer.path for layer in layers if layer.kind == "cross"]
    if cross or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        where = cross[0] if cross else layers[-1].path
        raise CaptureError(
            f"{name} is an encoder-decoder or has cross-attention ({where}), which is not supported yet; "
            "audit an encoder-only or decoder-only checkpoint"
        )
    stacks = sorted({re.sub(r"\d+", "*", layer.path) for layer in layers})
    if len(stacks) > 1:
        raise CaptureError(
            f"{name} has {len(stacks)} stacks of attention layers ({', '.join(stacks[:4])}), which is not "
            "supported yet; audit a checkpoint with one stack"
        )


def _check_implementation(layer: AttentionLayer, model: nn.Module) -> None:
    config = getattr(layer.module, "config", None) or getattr(model, "config", None)
    name = original_name(getattr(config, "_attn_implementation", None)) or "eager"
    wanted = KERNELS if layer.mechanism == "interface" else ("eager",)
    if name not in wanted:
        raise CaptureError(
            f"attention layer {layer.path} ({type(layer.module).__name__}) runs under {name!r}, "
            "whose weights cannot "
            f"be seen; load the checkpoint with attention_implementation = {wanted[0]!r}"
        )


def expected_calls(model: nn.Module) -> int | None:
    """Return how many attention calls one forward pass makes according to the config, if it says."""
    config = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    return layers * getattr(config, "inner_group_num", 1) if isinstance(layers, int) else None
