"""Models that switch their own attention during a pass, for good: put back, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from audit.errors import CaptureError


@contextmanager
def unswitched(model: nn.Module) -> Iterator[None]:
    """Refuse passes in which a model changes its kind of attention; everything is put back.

    BigBird goes over to full attention at the first short input, and stays with it for the long ones that
    follow, so that a map would depend on the probes before it.

    Raises
    ------
    CaptureError
    """
    parts: list[tuple[Any, str, dict[str, nn.Module | None]]] = [
        (module, module.attention_type, dict(module._modules))
        for module in model.modules()
        if hasattr(module, "set_attention_type") and isinstance(module.attention_type, str)
    ]
    try:
        yield
    finally:
        switched = [one for one in parts if one[0].attention_type != one[1]]
        for part, kind, children in switched:
            part.attention_type = kind
            part._modules.update(children)
        if switched:
            raise CaptureError(_refusal(*switched[0][:2]))


def _refusal(part: Any, kind: str) -> str:
    limit = (5 + 2 * part.config.num_random_blocks) * part.config.block_size
    return (
        f"{type(part).__name__} goes over from {kind} to full attention at a probe of {limit} tokens or "
        'fewer, for all that follow; set "attention_type": "original_full" in the config.json of the '
        "checkpoint, or audit longer probes alone"
    )
