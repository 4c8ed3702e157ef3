"""Fold the attention of one batch into rollout rows while the layers arrive."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from audit.errors import ConfigError
from audit.methods.fusion import fuse_heads_counted
from audit.methods.rollout import add_residual, rollout_step
from audit.records import Method

ROLLOUT, RAW = "rollout", "raw"
_FUSION = ("head_fusion", "head_weights", "discard_ratio", "discard_below", "top_k")
_PARAMETERS = {ROLLOUT: (*_FUSION, "residual", "start_layer"), RAW: (*_FUSION, "layer")}


@dataclass(frozen=True)
class FoldSettings:
    """Parameters of ``rollout`` and ``raw``; see :func:`audit.methods.attention_rollout`."""

    method: str = ROLLOUT
    residual: float | tuple[float, ...] = 0.5
    start_layer: int = 0
    layer: int = -1
    head_weights: tuple[tuple[float, ...], ...] | None = None
    fusion: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_method(cls, method: Method) -> FoldSettings:
        """Read the parameters of `method`.

        Raises
        ------
        ConfigError
            When the method or a parameter is unknown here.
        """
        if method.name not in _PARAMETERS:
            raise ConfigError(
                f"method {method.name!r} cannot be captured, expected one of {', '.join(_PARAMETERS)}; "
                "mend [method] name"
            )
        for key in method.params:
            if key not in _PARAMETERS[method.name]:
                near = difflib.get_close_matches(key, _PARAMETERS[method.name], 1)
                hint = (
                    f"; did you mean {near[0]!r}?"
                    if near
                    else f"; remove it from [method] of {method.name!r}"
                )
                raise ConfigError(f"[method] parameter {key!r} is unknown to {method.name!r}{hint}")
        return cls._checked(method)

    @classmethod
    def _checked(cls, method: Method) -> FoldSettings:
        given = dict(method.params)
        residual = given.get("residual", 0.5)
        if isinstance(residual, str):
            raise ConfigError(
                f"[method] residual = {residual!r} is not available in a capture; give numbers in [0, 1]"
            )
        weights = given.get("head_weights")
        return cls(
            method=method.name,
            residual=tuple(residual) if isinstance(residual, (list, tuple)) else float(residual),
            start_layer=int(given.get("start_layer", 0)),
            layer=int(given.get("layer", -1)),
            head_weights=None if weights is None else tuple(tuple(map(float, row)) for row in weights),
            fusion={key: given[key] for key in _FUSION if key in given and key != "head_weights"},
        )

    def residual_of(self, layer: int) -> float:
        """Return the weight of the identity at `layer` (counted from 0)."""
        if isinstance(self.residual, float):
            return self.residual
        if layer >= len(self.residual):
            raise ConfigError(
                f"[method] residual has {len(self.residual)} values, but the checkpoint has more "
                "layers; give one for each"
            )
        return self.residual[layer]

    def head_weights_of(self, layer: int) -> tuple[float, ...] | None:
        """Return the weights of the heads of `layer`, None where heads are not weighted."""
        if self.head_weights is None:
            return None
        if layer >= len(self.head_weights):
            raise ConfigError(
                f"[method] head_weights has {len(self.head_weights)} rows, but the checkpoint has "
                "more layers; "
                "give one for each"
            )
        return self.head_weights[layer]


class BatchFold:
    """The rollout of one batch, one layer at a time; holds one (query, key) matrix per probe.

    Parameters
    ----------
    settings : FoldSettings
    read : float Tensor (batch, position)
        The output row to read, as weights over the rows; each sums to 1.
    valid : bool Tensor (batch, position)
        False at pads. Pad rows become identity rows; no valid row draws on them.
    """

    def __init__(self, settings: FoldSettings, read: Tensor, valid: Tensor) -> None:
        self.settings, self.read, self.valid = settings, read, valid
        self.matrix: Tensor | None = None
        self.rows: list[Tensor] = []
        self.empty_rows = torch.zeros(len(read), dtype=torch.int64, device=read.device)
        self.sink = False
        self.causal = torch.ones(len(read), dtype=torch.bool, device=read.device)

    def fold(self, weights: Tensor, *, sink: bool = False) -> None:
        """Take the next layer's attention.

        Parameters
        ----------
        weights : Tensor (batch, head, query, key), one more key with `sink`
        """
        layer = len(self.rows)
        fused = self._fused(weights.detach(), layer)
        if sink or self.sink:
            fused = self._with_sink(fused)
        raw = self.settings.method == RAW
        step = fused if raw else add_residual(fused, self.settings.residual_of(layer))
        if raw or layer <= self.settings.start_layer:
            self.matrix = step
        else:
            self.matrix = rollout_step(self.matrix, step)
        self.causal &= (fused.triu(1)[..., : self.valid.shape[1]] == 0).flatten(1).all(dim=1)
        self.rows.append(self._row(layer))

    def _fused(self, weights: Tensor, layer: int) -> Tensor:
        padded = not bool(self.valid.all())
        if padded:  # what pad rows hold is garbage, NaN included
            weights = torch.where(self.valid[:, None, :, None], weights, torch.zeros_like(weights))
        fused, empty = fuse_heads_counted(
            weights, head_weights=self.settings.head_weights_of(layer), **self.settings.fusion
        )
        self.empty_rows += empty - (~self.valid).sum(dim=1)
        return fused

    def _with_sink(self, fused: Tensor) -> Tensor:
        """Make the sink a position of its own, which draws on itself alone."""
        n = fused.shape[1]
        if fused.shape[2] == n:
            fused = torch.nn.functional.pad(fused, (0, 1))
        absorbing = fused.new_zeros(len(fused), 1, n + 1)
        absorbing[..., -1] = 1
        if not self.sink:
            self.sink = True
            self.rows = [torch.nn.functional.pad(row, (0, 1)) for row in self.rows]
            if self.matrix is not None:
                self.matrix = torch.nn.functional.pad(self.matrix, (0, 1, 0, 1))
                self.matrix[:, -1, -1] = 1
        return torch.cat([fused, absorbing], dim=1)

    def _row(self, layer: int) -> Tensor:
        read = torch.nn.functional.pad(self.read, (0, 1)) if self.sink else self.read
        if self.settings.method == ROLLOUT and layer < self.settings.start_layer:
            return read  # below the first layer that takes part, R is the identity
        return torch.einsum("bq,bqk->bk", read.to(self._matrix.dtype), self._matrix)

    @property
    def _matrix(self) -> Tensor:
        if self.matrix is None:
            raise ValueError("fold: expected at least one layer, got none")
        return self.matrix

    def final_row(self) -> Tensor:
        """Return the row of the whole stack, or of the layer that ``raw`` asks for: (batch, position)."""
        index = self.settings.layer if self.settings.method == RAW else -1
        if not -len(self.rows) <= index < len(self.rows):
            raise ConfigError(
                f"[method] layer = {index}, but the checkpoint has {len(self.rows)} layers; mend it"
            )
        if self.settings.start_layer >= len(self.rows) and self.settings.method == ROLLOUT:
            raise ConfigError(
                f"[method] start_layer = {self.settings.start_layer}, but the checkpoint has "
                f"{len(self.rows)} layers; mend it"
            )
        return self.rows[index]

    def depth_collapse(self) -> Tensor:
        """Return how different the rows of R still are, in bits: (batch,).

        The generalised Jensen-Shannon divergence of a probe's rows, H(mean row) − mean H(row): 0 when
        every position draws on the input alike, so that the choice of the row says nothing.
        """
        rows = self._matrix[:, : self.valid.shape[1]].to(torch.float64)
        weight = self.valid.to(torch.float64) / self.valid.sum(dim=1, keepdim=True)
        mean = torch.einsum("bq,bqk->bk", weight, rows)
        return (_entropy(mean) - (weight * _entropy(rows)).sum(dim=1)).clamp_min(0.0) / math.log(2)


def _entropy(distribution: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(distribution).sum(dim=-1)
    return entropy
