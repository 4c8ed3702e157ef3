"""Embeddings in the place of what a model's table returns, however the model calls its table.

Models call it with the ids as they were given, with positions first (XLNet), or padded to a multiple of a
window or block (Longformer, LED, BigBird, Reformer). An embedding in any other place would be explained as
if it were the probe's, so that every use is followed by :func:`check_own`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.threads import own_thread
from audit.errors import CaptureError

SAME = 1e-3
"""Largest difference of a logit from the model's own in float32, as a part of the logits it is made of."""
SAME_HALF = 0.05
"""The same in half precision."""
_LEAST = 1e-2
"""Size of logits below which the difference is judged by this size: near 0 all of it is rounding."""


def placed(given: Tensor, ids: Tensor, called: Tensor, output: Tensor) -> Tensor | None:
    """Return embeddings laid out as the table was called, None where it was called for something else.

    Parameters
    ----------
    given : float Tensor (copy, position, feature)
        What takes the place of the embeddings of `ids`.
    ids : int Tensor (copy, position)
        What the model was given.
    called : int Tensor
        What the model called its table with: of the shape of `ids`, transposed, or with padding before or
        behind, which keeps the rows of `output`.
    output : float Tensor (*called, feature)

    Examples
    --------
    >>> ids, given = torch.tensor([[5, 6]]), torch.tensor([[[1.0], [2.0]]])
    >>> placed(given, ids, torch.tensor([[5, 6, 0]]), torch.zeros(1, 3, 1)).flatten().tolist()
    [1.0, 2.0, 0.0]
    """
    ids = ids.to(called.device)
    found = None
    if ids.dim() == 2 and torch.equal(called, ids.T) and not torch.equal(called, ids):
        found = given.transpose(0, 1)
    elif called.shape == ids.shape:  # perhaps with other ids at an image's places, which are not looked at
        found = given
    elif ids.dim() == called.dim() == 2 and len(called) == len(ids) and called.shape[1] > ids.shape[1]:
        length = ids.shape[1]
        if torch.equal(called[:, :length], ids):
            found = torch.cat([given, output[:, length:]], dim=1)
        elif torch.equal(called[:, -length:], ids):
            found = torch.cat([output[:, :-length], given], dim=1)
    return found if found is not None and found.shape == output.shape else None


@contextmanager
def embedded(
    table: nn.Module,
    given: Tensor,
    ids: Tensor,
    *,
    others: bool = False,
    running: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Put `given` in the place of what `table` returns for `ids`; see :func:`placed`.

    Parameters
    ----------
    others : bool
        Leave calls for something else as they are, such as for the token that stands for an image.
    running : function
        Whether calls count now.

    Raises
    ------
    CaptureError
        When the table is called for something else, or is not called at all.
    """
    calls = list[str]()
    uses = list[bool]()

    def put(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        if not running():
            return None
        called = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        known = called is not None and isinstance(output, Tensor)
        given_once = given.clone()  # some models add to their embeddings in place
        found = placed(given_once, ids, called, output) if known and called is not None else None
        calls.append(str(tuple(called.shape)) if called is not None else "no tensor")
        uses.append(found is not None)
        if found is None and not others and not _only_padding(table, called):
            raise _not_placed(calls[-1], ids)
        return found

    handle = table.register_forward_hook(own_thread(put), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if not any(uses):
        raise _not_placed(", ".join(calls) or "nothing", ids)


def _only_padding(table: nn.Module, called: Tensor | None) -> bool:
    """Return whether a table is called for padding alone, which LED embeds by itself."""
    padding = getattr(table, "padding_idx", None)
    return padding is not None and called is not None and bool((called == padding).all())


def _not_placed(called: str, ids: Tensor) -> CaptureError:
    return CaptureError(
        f"the model calls its table of embeddings with {called} for tokens of shape {tuple(ids.shape)}, so "
        "embeddings cannot be put in their place; use occlusion, shap or lime"
    )


def check_copies(probe: str, found: Tensor, copies: int) -> None:
    """Raise CaptureError unless there is one target logit for each copy of a probe."""
    if found.numel() != copies:
        raise CaptureError(
            f"probe {probe}: the model gives {found.numel()} target logits for {copies} of its inputs, so "
            "none can be explained; use occlusion, shap or lime"
        )


def check_own(probe: str, found: Tensor, own: float, size: float, dtype: torch.dtype) -> None:
    """Raise CaptureError unless the logit that is explained is the model's own.

    Parameters
    ----------
    probe : str
    found : Tensor
        The logit of one probe as a function of what was put in the place of its inputs.
    own : float
        The same logit of the model without anything in its place.
    size : float
        Sum of the sizes of the logits that the target is made of.
    dtype : torch.dtype
        That of the model.
    """
    check_copies(probe, found, 1)
    allowed = SAME if dtype in (torch.float32, torch.float64) else SAME_HALF
    value = float(found.detach())
    if not abs(value - own) <= allowed * max(abs(own), size, _LEAST):
        raise CaptureError(
            f"probe {probe}: the target logit is {value:.4g} as a function of its inputs but {own:.4g} in "
            "the model's own pass, so its gradients would explain something else; use occlusion, shap or lime"
        )
