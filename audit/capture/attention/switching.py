"""Models that switch their own attention during a pass, for good: put back, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from audit.errors import CaptureError


def _switching(model: nn.Module) -> list[Any]:
    """Return the modules that say of what kind their attention is, and let it be set."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "set_attention_type") and isinstance(module.attention_type, str)
    ]


def fewest_positions(model: nn.Module) -> int:
    """Return the length from which on a model attends as its config says; 0 where any length will do."""
    return max((_limit(part) + 1 for part in _switching(model) if _is_sparse(part)), default=0)


def _is_sparse(part: Any) -> bool:
    return bool(part.attention_type == "block_sparse") and hasattr(part, "config")


def _limit(part: Any) -> int:
    """Return how many positions BigBird's blocks take: two global, three near, twice the random ones."""
    return int((5 + 2 * part.config.num_random_blocks) * part.config.block_size)


@contextmanager
def unswitched(model: nn.Module) -> Iterator[None]:
    """Refuse passes in which a model changes its kind of attention; everything is put back.

    BigBird goes over to full attention at the first short input, and stays with it for the long ones that
    follow, so that a map would depend on the probes before it.

    Raises
    ------
    CaptureError
    """
    parts = [(part, part.attention_type, dict(part._modules)) for part in _switching(model)]
    try:
        yield
    except CaptureError:  # a layer that was exchanged never ran
        if not _switched(parts):
            raise
    finally:
        switched = _switched(parts)
        for part, kind, children in switched:
            part.attention_type = kind
            part._modules.update(children)
    if switched:
        raise CaptureError(_refusal(*switched[0][:2]))


_Part = tuple[Any, str, dict[str, nn.Module | None]]


def _switched(parts: list[_Part]) -> list[_Part]:
    return [one for one in parts if one[0].attention_type != one[1]]


def _refusal(part: Any, kind: str) -> str:
    return (
        f"{type(part).__name__} goes over from {kind} to full attention at a probe of {_limit(part)} tokens "
        'or fewer, for all that follow; set "attention_type": "original_full" in the config.json of the '
        "checkpoint, or audit longer probes alone"
    )
