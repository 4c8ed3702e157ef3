"""Folds of the methods that need more than one rollout matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from audit.capture.engines.fold import BatchFold, generalized_divergence
from audit.capture.engines.settings import FoldSettings
from audit.errors import CaptureError, ConfigError
from audit.methods.flow import attention_flow, flow_bound, normalized_flow, saturated_share


class PerHeadFold(BatchFold):
    """Rows of the rollout of each head over the merged heads below (or over its own, `same_head`)."""

    def fold(self, weights: Tensor, *, sink: bool = False, residual: Tensor | None = None) -> None:
        """Take the next layer's attention; see :meth:`BatchFold.fold`."""
        below, layer = self.matrix, self.layer
        super().fold(weights, sink=sink, residual=residual)
        rows = self._head_rows(weights.detach(), layer)
        if self.settings.same_head:
            self._heads = self._same_head(weights.detach(), layer)
            rows = torch.einsum("bq,bhqk->bhk", self.read_row.to(self._heads.dtype), self._heads)
        elif below is not None:
            below = torch.nn.functional.pad(below, (0, rows.shape[2] - below.shape[2]) * 2)
            rows = rows.to(below.dtype) @ below
        self.head_rows = [*getattr(self, "head_rows", []), rows]
        self.rows[layer] = chosen_head(rows, self.settings)

    def _head_rows(self, weights: Tensor, layer: int) -> Tensor:
        """Return the row of Ã of each head: (batch, head, key)."""
        rho, dtype = self.settings.residual_of(layer), torch.promote_types(weights.dtype, torch.float32)
        read = self.read.to(dtype)
        rows = torch.einsum("bq,bhqk->bhk", read, weights.to(dtype)) * (1 - rho)
        rows[..., : read.shape[1]] += rho * read[:, None]
        return rows

    def _same_head(self, weights: Tensor, layer: int) -> Tensor:
        if self.sink:
            raise CaptureError("[method] same_head = true does not go with learned sinks; leave it out")
        rho, dtype = self.settings.residual_of(layer), torch.promote_types(weights.dtype, torch.float32)
        mixed = weights.to(dtype) * (1 - rho)
        mixed.diagonal(dim1=-2, dim2=-1).add_(rho)
        if layer == 0:
            return mixed
        if mixed.shape[1] != self._heads.shape[1]:
            raise CaptureError("[method] same_head = true needs the same number of heads in every layer")
        return mixed @ self._heads

    def diagnostics(self) -> dict[str, Tensor]:
        """Add ``head_disagreement``: the divergence of the heads' maps at the layer read, in bits."""
        rows = self.head_rows[self._final_layer()].to(torch.float64)
        return {**super().diagnostics(), "head_disagreement": head_disagreement(rows)}


def chosen_head(rows: Tensor, settings: FoldSettings) -> Tensor:
    """Return the row of the head that the settings name, else the mean: (batch, key) of (batch, head, key).

    Raises
    ------
    ConfigError
        When the layer has no such head.
    """
    head = settings.head
    if head is None:
        return rows.mean(dim=1)
    if head >= rows.shape[1]:
        raise ConfigError(f"[method] head = {head}, but the layer has {rows.shape[1]} heads; mend it")
    return rows[:, head]


def head_disagreement(rows: Tensor) -> Tensor:
    """Return the divergence of the heads' maps (batch, head, key) in bits, each head alike: (batch,)."""
    return generalized_divergence(rows, rows.new_full(rows.shape[:2], 1 / rows.shape[1]))


class FlowFold(BatchFold):
    """Attention flow: keeps the fused matrix of every layer, since a flow passes through all of them."""

    def fold(self, weights: Tensor, *, sink: bool = False, residual: Tensor | None = None) -> None:  # noqa: ARG002
        """Take the next layer's attention; see :meth:`BatchFold.fold`."""
        fused = self.fused(weights.detach(), sink=sink)
        self.note_causal(fused)
        self._layers = [*getattr(self, "_layers", []), fused.double().cpu()]

    @property
    def layer(self) -> int:
        """Return the index of the layer that comes next."""
        return len(getattr(self, "_layers", []))

    def final_row(self) -> Tensor:
        """Return the normalised flow into the output row, mean over the rows that are read."""
        return normalized_flow(self._solved()[0][:, None])[:, 0].to(self.read.device)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return ``saturated``, the share of inputs on the flow's upper bound, beside ``empty_rows``."""
        return {"saturated": self._solved()[1], "empty_rows": self.empty_rows}

    def _solved(self) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_solution"):
            found = [self._flow(i) for i in range(len(self.read))]
            self._solution = (
                torch.stack([flow for flow, _ in found]),
                torch.stack([share for _, share in found]),
            )
        return self._solution

    def _flow(self, sample: int) -> tuple[Tensor, Tensor]:
        """Return the flow of one probe's output row (key,), and its saturated share."""
        size = self._layers[-1].shape[-1]
        layers = [_square(layer[sample], size)[None, None] for layer in self._layers]
        read = self.read_row[sample].double().cpu()
        rows = read.nonzero()[:, 0].tolist()
        residual = [self.settings.residual_of(i) for i in range(len(layers))]
        try:
            flow = attention_flow(layers, rows=rows, residual=residual, max_seconds=self.settings.max_seconds)
        except ValueError as error:
            raise CaptureError(
                f"attention_flow of a probe with {size} positions: {error}; read a single row, shorten the "
                "probes, or raise [method] max_seconds"
            ) from None
        share = saturated_share(flow, flow_bound(layers, residual=residual))
        return read[rows] @ flow[0], read[rows] @ share[0]


def _square(layer: Tensor, size: int) -> Tensor:
    """Return one probe's layer with an identity row for a sink that a later layer brought."""
    if layer.shape[-1] == size:
        return layer
    grown = torch.nn.functional.pad(layer, (0, 1, 0, 1))
    grown[-1, -1] = 1
    return grown


__all__ = ["FlowFold", "PerHeadFold"]
