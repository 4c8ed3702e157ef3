"""What a method explains: a weighted sum of one probe's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Difference(NamedTuple):
    """Two classes (or tokens) whose logits are subtracted: the first speaks for, the second against."""

    wanted: str | int
    other: str | int


@dataclass(frozen=True)
class Score:
    """A weighted sum of logits; `entries` are (index, weight) into the logits of one probe.

    Examples
    --------
    >>> Score("Yes − No", ((1, 1.0), (0, -1.0))).of(torch.tensor([[0.5, 2.0]])).tolist()
    [1.5]
    """

    name: str
    entries: tuple[tuple[int, float], ...]

    @classmethod
    def single(cls, name: str, index: int) -> Score:
        """Return the score that is one logit."""
        return cls(name, ((index, 1.0),))

    @classmethod
    def mean(cls, name: str, indices: Sequence[int]) -> Score:
        """Return the mean of several logits: each label of a probe with several."""
        return cls(name, tuple((index, 1.0 / len(indices)) for index in indices))

    @classmethod
    def difference(cls, names: tuple[str, str], indices: tuple[int, int]) -> Score:
        """Return the logit difference of two classes."""
        return cls(f"{names[0]} − {names[1]}", ((indices[0], 1.0), (indices[1], -1.0)))

    def of(self, logits: Tensor) -> Tensor:
        """Return the score of each row of logits: (row, logit) to (row,)."""
        index = torch.tensor([index for index, _ in self.entries], device=logits.device)
        weights = torch.tensor([w for _, w in self.entries], device=logits.device, dtype=logits.dtype)
        return (logits[:, index] * weights).sum(dim=1)

    def size(self, logits: Tensor) -> Tensor:
        """Return the sum of the sizes of the parts, which rounding is in proportion to: (row,)."""
        return replace(self, entries=tuple((i, abs(weight)) for i, weight in self.entries)).of(logits.abs())


def is_pair(target: Any) -> bool:
    """Return whether a target is two names, whose logit difference is meant."""
    return isinstance(target, (list, tuple)) and len(target) == 2 and all(isinstance(t, str) for t in target)
