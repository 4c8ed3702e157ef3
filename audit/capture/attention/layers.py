"""Find the attention layers of a model and decide how each is captured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from audit.capture.attention.families import attends_both_ways
from audit.capture.attention.interface import KERNELS, interface_function, involved_configs, original_name
from audit.errors import CaptureError

_NO_ATTENTION = re.compile(
    r"Mamba\w*Mixer|FourierTransform|DeltaNet|LinearAttention|LightningAttention|Rwkv\w*Attention|RecurrentBlock"
    r"|ShortConv|LSHSelfAttention|Hyena|xLSTM\w*Layer|mLSTM|sLSTM|Retention|StateSpace|TimeMixer"
)
_SUMMARIES = re.compile(r"TransientGlobalAttention|GlobalLocalAttention")
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


Wiring = Literal["single", "encoder-decoder", "towers", "co-attention", "joined"]


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module: where it sits, what it attends to, how its weights are seen.

    `stack` is the path of the list of blocks that it belongs to, empty outside any list; `block` its
    place in that list.
    """

    path: str
    module: nn.Module
    kind: Literal["self", "cross"]
    mechanism: Literal["interface", "hook"]
    stack: str = ""
    block: str = ""


@dataclass(frozen=True)
class CapturePlan:
    """All attention layers of a model, in order, and the configs to switch for a capture.

    `narrowed` says that layers which do not run for the inputs at hand were left out. `wiring` says how
    the stacks are joined: one alone, an encoder that a decoder attends to, two towers that do not see
    each other, two streams that attend to each other (``co-attention``), or (``joined``) stacks in the order
    in which they run, the last one's input made of what the others give. `alone` says that the model takes
    one probe at a time, since it joins several to one long sequence. `pieces` holds the paths of the layers
    that attend within pieces of their positions, one call for each.
    """

    layers: tuple[AttentionLayer, ...]
    configs: tuple[Any, ...]
    narrowed: bool = False
    wiring: Wiring = "single"
    alone: bool = False
    pieces: frozenset[str] = frozenset()

    def modules(self, mechanism: str | None = None) -> Mapping[str, nn.Module]:
        """Return path and module of the layers that are captured by `mechanism` (None = all)."""
        return {x.path: x.module for x in self.layers if mechanism in (None, x.mechanism)}

    @property
    def has_hooks(self) -> bool:
        """Return whether any layer needs the model to be asked for its attentions."""
        return any(layer.mechanism == "hook" for layer in self.layers)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Return the lists of blocks with attention, each once, in the order of the model."""
        return tuple(dict.fromkeys(layer.stack for layer in self.layers))


def plan_capture(model: nn.Module) -> CapturePlan:
    """Walk `model` and choose, for each attention layer by itself, how to see its weights.

    Layers on the attention interface are seen through it; the others through a forward hook, which
    needs the eager implementation.

    Raises
    ------
    CaptureError
        For models with layers that mix positions without attention, or without any attention.
    """
    _refuse_mixers(model)
    layers = tuple(_attention_layers(model))
    name = type(model).__name__
    if not layers:
        raise CaptureError(f"{name} has no attention layers; attention rollout does not apply to it")
    return _plan(model, layers)


def _plan(
    model: nn.Module, layers: tuple[AttentionLayer, ...], *, narrowed: bool = False, wiring: Wiring = "single"
) -> CapturePlan:
    paths = [layer.path for layer in layers if layer.mechanism == "interface"]
    return CapturePlan(layers, tuple(involved_configs(model, paths)), narrowed, wiring)


def narrow_plan(
    model: nn.Module, plan: CapturePlan, called: Sequence[str], *, joined: bool = False
) -> CapturePlan:
    """Keep the layers that ran for the inputs at hand, and refuse what has no exact rollout.

    A stack that did not run at all (the vision part of a model that was given text) is left out, and so
    is an attention module outside the lists of blocks that ran after all of them: it pools the output.

    Parameters
    ----------
    model : nn.Module
    plan : CapturePlan
    called : sequence of str
        Paths of the layers that ran, in the order of their first call.
    joined : bool
        Whether the inputs are an image with text that are read in one sequence.

    Raises
    ------
    CaptureError
        For a stack that ran in part, blocks with several attention layers, a kernel that cannot be seen,
        or stacks that are joined in another way than an encoder and a decoder or two towers.
    """
    order = {path: i for i, path in enumerate(called)}
    ran = [layer for layer in plan.layers if layer.path in order]
    _refuse_partial_stacks(plan, ran)
    layers = tuple(layer for layer in ran if layer.stack or not _pools(layer, ran, order))
    for layer in layers:
        _check_implementation(layer, model)
    name = type(model).__name__
    if any(attends_both_ways(layer.module) for layer in layers):
        return _plan(model, layers, narrowed=True, wiring="co-attention")
    _refuse_crowded_blocks(name, layers)
    if joined:
        modules = dict(model.named_modules())
        inner = [_in_nearest_list(layer, modules) for layer in layers]
        layers = tuple(sorted(inner, key=lambda layer: order[layer.path]))
        return _plan(model, layers, narrowed=len(layers) < len(plan.layers), wiring="joined")
    wiring = _wiring(name, sorted(layers, key=lambda layer: order[layer.path]))
    return _plan(model, layers, narrowed=len(layers) < len(plan.layers), wiring=wiring)


def _refuse_partial_stacks(plan: CapturePlan, ran: Sequence[AttentionLayer]) -> None:
    """Refuse stacks that ran in part; cross-attention without an encoder may rest as a whole."""
    paths = {layer.path for layer in ran}
    active = {(layer.stack, kind) for layer in ran for kind in {"self", layer.kind}}
    for layer in plan.layers:
        if layer.path not in paths and layer.stack and (layer.stack, layer.kind) in active:
            raise CaptureError(f"attention layer {layer.path} never ran; this architecture is not supported")


def _pools(layer: AttentionLayer, ran: Sequence[AttentionLayer], order: Mapping[str, int]) -> bool:
    """Tell whether an attention module outside the lists of blocks ran after all blocks of its part."""
    blocks, part, near = [other for other in ran if other.stack], layer.path, list[AttentionLayer]()
    while part and not near:
        part = part.rpartition(".")[0]
        near = [other for other in blocks if _below(other.stack, part)]
    return bool(near) and order[layer.path] > max(order[other.path] for other in near)


def _attention_layers(model: nn.Module) -> list[AttentionLayer]:
    modules = dict(model.named_modules())
    found: dict[str, Literal["interface", "hook"]] = {}
    for path, module in modules.items():
        if interface_function(type(module)) is not None:
            found[path] = "interface"
    for path, module in modules.items():
        inside = any(_below(path, other) for other in found if found[other] == "interface")
        candidate = _named_attention(module) and path not in found and not inside
        if candidate and not _has_attention_below(path, modules):
            found[path] = "hook"
    return [
        AttentionLayer(
            path,
            modules[path],
            "cross" if _CROSS.search(path) else "self",
            found[path],
            *_place(path, modules),
        )
        for path in modules
        if path in found
    ]


def _named_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()  # "…AttentionOutput" is what follows one
    return "attention" in name and not name.endswith("output") and any(True for _ in module.children())


def _place(path: str, modules: Mapping[str, nn.Module]) -> tuple[str, str]:
    """Return the outermost list of blocks around `path` and the place in it."""
    parts = path.split(".")
    for cut in range(1, len(parts)):
        above = ".".join(parts[:cut])
        if isinstance(modules[above], (nn.ModuleList, nn.Sequential)) and parts[cut].isdigit():
            return above, parts[cut]
    return "", ""


def _in_nearest_list(layer: AttentionLayer, modules: Mapping[str, nn.Module]) -> AttentionLayer:
    """Return a layer in the innermost list of blocks around it: stages have their own."""
    parts = layer.path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        above = ".".join(parts[:cut])
        if isinstance(modules[above], nn.ModuleList) and parts[cut].isdigit():
            return replace(layer, stack=above, block=parts[cut])
    return layer


def _below(path: str, ancestor: str) -> bool:
    return path.startswith(f"{ancestor}.") if ancestor else bool(path)


def _has_attention_below(path: str, modules: Mapping[str, nn.Module]) -> bool:
    return any(
        _below(other, path) and (interface_function(type(module)) is not None or _named_attention(module))
        for other, module in modules.items()
    )


def _refuse_mixers(model: nn.Module) -> None:
    _refuse(model, _NO_ATTENTION, "mixes positions without softmax attention", "has attention")
    what = "attends to global tokens that are no positions of the input"
    _refuse(model, _SUMMARIES, what, "attends to its positions alone")


def _refuse(model: nn.Module, pattern: re.Pattern[str], what: str, wanted: str) -> None:
    found = [(p, type(m).__name__) for p, m in model.named_modules() if pattern.search(type(m).__name__)]
    if found:
        first = ", ".join(f"{path} ({cls})" for path, cls in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise CaptureError(
            f"{type(model).__name__} {what} in {first}{more}; "
            f"no exact rollout exists for it, audit a model whose every layer {wanted}"
        )


def _wiring(name: str, ran: Sequence[AttentionLayer]) -> Wiring:
    """Decide how the stacks are joined, from their layers in the order in which they ran."""
    stacks = list(dict.fromkeys(layer.stack for layer in ran))
    crossed = {layer.stack for layer in ran if layer.kind == "cross"}
    if not crossed and len(stacks) == 1:
        return "single"
    if not crossed and len(stacks) == 2:
        return "towers"
    in_order = [layer.stack for layer in ran] == sorted((x.stack for x in ran), key=stacks.index)
    if len(stacks) == 2 and crossed == {stacks[1]} and in_order:
        return "encoder-decoder"
    if crossed and len(stacks) == 1:
        first = next(layer.path for layer in ran if layer.kind == "cross")
        raise CaptureError(
            f"{name} attends to something else ({first}) that is not the output of an encoder with "
            "attention; no exact rollout exists for it"
        )
    raise CaptureError(
        f"{name} has {len(stacks)} stacks of attention layers ({', '.join(stacks[:4])}) that are "
        "neither an encoder and a decoder nor two towers; audit a checkpoint of one of these kinds"
    )


def _refuse_crowded_blocks(name: str, layers: Sequence[AttentionLayer]) -> None:
    blocks: dict[tuple[str, str, str], str] = {}
    for layer in layers:
        other = blocks.setdefault((layer.stack, layer.block, layer.kind), layer.path)
        if other != layer.path and re.sub(r"\d+", "*", other) != re.sub(r"\d+", "*", layer.path):
            raise CaptureError(
                f"{name} has two attention layers in one block ({other}, {layer.path}), whose order is not "
                "known; no exact rollout exists for it"
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
