"""Fold the attention of one batch into rollout rows while the layers arrive."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from audit.capture.engines.settings import RAW, FoldSettings
from audit.capture.outputs.scores import Score
from audit.errors import ConfigError
from audit.methods.fusion import fuse_heads_counted
from audit.methods.rollout import add_residual, rollout_step


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
        self.targets: dict[str, Score] = {}

    def fold(self, weights: Tensor, *, sink: bool = False, residual: Tensor | None = None) -> None:
        """Take the next layer's attention.

        Parameters
        ----------
        weights : Tensor (batch, head, query, key), one more key with `sink`
        sink : bool
        residual : Tensor (batch, query), optional
            Measured weight of the identity; that of the settings without it.
        """
        fused = self.fused(weights.detach(), sink=sink)
        self.note_causal(fused)
        if self.settings.method == RAW:
            self.push(fused)
            return
        rho: float | Tensor = self.settings.residual_of(self.layer) if residual is None else residual
        if isinstance(rho, Tensor) and fused.shape[1] > rho.shape[1]:
            rho = torch.nn.functional.pad(rho, (0, 1))
        self.push(add_residual(fused, rho))

    @property
    def layer(self) -> int:
        """Return the index of the layer that comes next."""
        return len(self.rows)

    def push(self, step: Tensor) -> None:
        """Take the next layer's matrix (batch, query, key), its residual already in it."""
        if self.settings.method == RAW or self.layer <= self.settings.start_layer:
            self.matrix = step
        else:
            self.matrix = rollout_step(self.matrix, step)
        self.rows.append(self._row(self.layer))

    def note_causal(self, weights: Tensor) -> None:
        """Note which probes have a position that attends beyond itself; `weights` ends in (query, key)."""
        later = weights[..., : self.valid.shape[1]].triu(1) == 0
        self.causal &= later.flatten(1).all(dim=1)

    def fused(self, weights: Tensor, *, sink: bool = False) -> Tensor:
        """Return the heads of the next layer as one matrix, with the sink's row where there is a sink."""
        padded = not bool(self.valid.all())
        if padded:  # what pad rows hold is garbage, NaN included
            weights = torch.where(self.valid[:, None, :, None], weights, torch.zeros_like(weights))
        fused, empty = fuse_heads_counted(
            weights, head_weights=self.settings.head_weights_of(self.layer), **self.settings.fusion
        )
        self.empty_rows += empty - (~self.valid).sum(dim=1)
        return self._with_sink(fused) if sink or self.sink else fused

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

    @property
    def read_row(self) -> Tensor:
        """Return the weights of the rows that are read, with the sink's where there is a sink."""
        return torch.nn.functional.pad(self.read, (0, 1)) if self.sink else self.read

    def _row(self, layer: int) -> Tensor:
        if self.settings.method != RAW and layer < self.settings.start_layer:
            return self.read_row  # below the first layer that takes part, R is the identity
        return torch.einsum("bq,bqk->bk", self.read_row.to(self._matrix.dtype), self._matrix)

    @property
    def _matrix(self) -> Tensor:
        if self.matrix is None:
            raise ValueError("fold: expected at least one layer, got none")
        return self.matrix

    def final_row(self) -> Tensor:
        """Return the row of the whole stack, or of the layer that is asked for: (batch, position)."""
        return self.rows[self._final_layer()]

    def _final_layer(self) -> int:
        index = self.settings.layer
        if not -len(self.rows) <= index < len(self.rows):
            raise ConfigError(
                f"[method] layer = {index}, but the checkpoint has {len(self.rows)} layers; mend it"
            )
        if self.settings.start_layer >= len(self.rows):
            raise ConfigError(
                f"[method] start_layer = {self.settings.start_layer}, but the checkpoint has "
                f"{len(self.rows)} layers; mend it"
            )
        return index % len(self.rows)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return numbers that go with the maps: name to (batch,)."""
        return {"depth_collapse": self.depth_collapse(), "empty_rows": self.empty_rows}

    def depth_collapse(self) -> Tensor:
        """Return how different the rows of R still are, in bits: (batch,).

        The generalised Jensen-Shannon divergence of a probe's rows, H(mean row) − mean H(row): 0 when
        every position draws on the input alike, so that the choice of the row says nothing.
        """
        rows = self._matrix[:, : self.valid.shape[1]].to(torch.float64)
        weight = self.valid.to(torch.float64) / self.valid.sum(dim=1, keepdim=True)
        return generalized_divergence(rows, weight)


def generalized_divergence(rows: Tensor, weight: Tensor) -> Tensor:
    """Return H(weighted mean row) − weighted mean of H(row), in bits.

    Parameters
    ----------
    rows : float64 Tensor (batch, row, key)
        Distributions.
    weight : float64 Tensor (batch, row)
        Sums to 1.

    Returns
    -------
    Tensor (batch,)
        0 when all rows are alike.

    Notes
    -----
    The generalised Jensen-Shannon divergence (Lin, IEEE Trans. Information Theory 37, 1991, eq. 5.1).

    Examples
    --------
    >>> rows = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    >>> generalized_divergence(rows, torch.full((1, 2), 0.5, dtype=torch.float64)).tolist()
    [1.0]
    """
    mean = torch.einsum("bq,bqk->bk", weight, rows)
    return (_entropy(mean) - (weight * _entropy(rows)).sum(dim=1)).clamp_min(0.0) / math.log(2)


def _entropy(distribution: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(distribution).sum(dim=-1)
    return entropy
