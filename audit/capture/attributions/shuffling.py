"""Shuffle a model's weights from the top, to see whether a map depends on them.

The cascading randomisation of Adebayo et al. (Sanity checks for saliency maps, NeurIPS 2018, section 3.1).
Each weight tensor keeps its numbers in random order in the place of a fresh initialisation: that is the
same for every architecture, and keeps activations of the size that the layers are used to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import config_locks
from audit.capture.attention.layers import plan_capture
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.attention.threads import own_thread
from audit.capture.inputs.encoded import Encoded, core_model, encode_image
from audit.capture.inputs.sound import encode_sound
from audit.capture.inputs.texts import encode_texts
from audit.errors import ProbeError
from audit.records import CaptureSettings, Checkpoint, Probe


def cascade(
    checkpoint: Checkpoint, probe: Probe, settings: CaptureSettings, *, stages: int = 4
) -> tuple[tuple[Tensor, ...], ...]:
    """Return the weights to shuffle at each stage, each holding the ones before.

    The order is that in which a forward pass uses them last: head and last attention layer first, then
    down the attention layers, evenly cut into stages; the last stage holds every weight, embeddings
    included. A weight that serves twice (shared layers, tied embeddings) goes with its upper place.

    Parameters
    ----------
    checkpoint : Checkpoint
    probe : Probe
        What the forward pass is run on.
    settings : CaptureSettings
    stages : int
        At least 2.

    Returns
    -------
    tuple of tuple of Tensor

    Raises
    ------
    ProbeError
        When the probe is neither text, an image nor a sound.
    """
    model = checkpoint.model
    layers = {id(module) for module in plan_capture(core_model(model)).modules().values()}
    events = _calls(model, _encoded(checkpoint, probe, settings))
    starts = [i for i, module in enumerate(events) if id(module) in layers]
    wanted = max(2, min(stages, len(starts) + 1))
    cuts = [starts[-1 - round(i * (len(starts) - 1) / max(1, wanted - 2))] for i in range(wanted - 1)]
    found = [_weights(events[cut:]) for cut in cuts]
    return (*found, _unique(model.parameters()))


@contextmanager
def shuffled(model: nn.Module, weights: Sequence[Tensor], seed: int) -> Iterator[None]:
    """Put the entries of each of a model's `weights` in random order, and back on leaving.

    No other thread captures the model meanwhile.
    """
    generator = torch.Generator().manual_seed(seed)
    kept = [weight.detach().clone() for weight in weights]
    with config_locks([core_model(model).config]):
        try:
            for weight in weights:
                order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                weight.data.copy_(weight.detach().flatten()[order].reshape(weight.shape))
            yield
        finally:
            for weight, before in zip(weights, kept, strict=True):
                weight.data.copy_(before)


def _encoded(checkpoint: Checkpoint, probe: Probe, settings: CaptureSettings) -> Encoded:
    if probe.modality == "text":
        return encode_texts(checkpoint, [probe], settings)[0]
    if probe.modality == "image":
        return encode_image(checkpoint, probe)
    if probe.modality == "audio":
        return encode_sound(checkpoint, probe)
    raise ProbeError(
        f"probe {probe.id} is {probe.modality}; weights are shuffled for text, images and sound alone"
    )


def _calls(model: nn.Module, item: Encoded) -> list[nn.Module]:
    """Return the modules in the order in which a forward pass calls them."""
    events: list[nn.Module] = []

    def note(module: nn.Module, _args: Any) -> None:
        events.append(module)

    with exclusive(model), ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(own_thread(note)).remove)
        run_model(model, item.tensors)
    return events


def _weights(modules: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    return _unique(p for module in modules for p in module.parameters(recurse=False))


def _unique(weights: Any) -> tuple[Tensor, ...]:
    return tuple({id(weight): weight for weight in weights}.values())
