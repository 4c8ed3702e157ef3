"""Which change of a logit counts as none: models round the same input otherwise in batches of other sizes."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = 8
"""How often one value may be rounded at the size of the logit: batches of other sizes round otherwise."""


def rounding(dtype: torch.dtype, *logits: float) -> float:
    """Return the largest change of a logit that counts as none.

    8 · eps · max(1, size of the largest logit); in half precision 1 · eps · the same, since its sums are kept
    in float32 and the logit is rounded once.

    Parameters
    ----------
    dtype : torch.dtype
        In which the model computes.
    *logits : float
        That the change is taken between.

    Examples
    --------
    >>> rounding(torch.float32, 0.5) == 8 * 2.0**-23, rounding(torch.bfloat16, 3.0, -4.0) == 4 * 2.0**-7
    (True, True)
    """
    often = ROUNDINGS if dtype in (torch.float32, torch.float64) else 1
    return often * float(torch.finfo(dtype).eps) * max(1.0, *map(abs, logits))


def above(changes: Tensor, least: float) -> Tensor:
    """Return changes of a logit, with 0 in the place of those that are no larger than `least`."""
    return torch.where(changes.abs() > least, changes, 0.0)
