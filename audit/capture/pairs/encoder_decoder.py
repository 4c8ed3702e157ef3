"""Encoder-decoders: carry decoder rows to the source and to the prefix while the layers run."""

from __future__ import annotations

import torch
from torch import Tensor

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.engines.fold import BatchFold, generalized_divergence
from audit.capture.engines.folds import chosen_head, head_disagreement
from audit.capture.engines.settings import FLOW, PER_HEAD, RAW, FoldSettings
from audit.capture.outputs.scores import Score
from audit.capture.pairs.joint import JointSteps
from audit.capture.pairs.multi import StreamRows, check_call
from audit.errors import CaptureError, ConfigError
from audit.methods.fusion import fuse_heads
from audit.methods.rollout import add_residual


class CrossFold:
    """S and D of :func:`audit.methods.encoder_decoder_rollout`, one layer at a time.

    Parameters
    ----------
    plan : CapturePlan
        Its first stack is the encoder.
    settings : FoldSettings
    valid : two bool Tensors (batch, position)
        False at pads, of source and prefix.
    read : float Tensor (batch, step)
        The output row, as weights over the decoder's rows.
    verify : bool
        Compare attention × values with every layer's own output.
    """

    def __init__(
        self,
        plan: CapturePlan,
        settings: FoldSettings,
        valid: tuple[Tensor, Tensor],
        read: Tensor,
        *,
        verify: bool = False,
    ) -> None:
        self.settings, self.valid, self.read, self.verify = settings, valid, read, verify
        self.targets: dict[str, Score] = {}
        below = FoldSettings(residual=settings.residual, fusion=settings.fusion)
        self.encoder = BatchFold(below, valid[0].float(), valid[0])
        self.causal = torch.ones(len(read), dtype=torch.bool, device=read.device)
        self.rows: list[tuple[Tensor, Tensor]] = []
        self._layers = {layer.path: layer for layer in plan.layers}
        self._encoder_stack = plan.stacks[0]
        self._state: tuple[Tensor, Tensor] | None = None
        self._open = False

    def receive(self, call: AttentionCall) -> None:
        """Take the attention of one layer of either stack."""
        layer = self._layers[call.path]
        inside = layer.stack == self._encoder_stack
        keys = self.valid[0] if layer.kind == "cross" else None
        check_call(call, self.valid[0] if inside else self.valid[1], keys, verify=self.verify)
        take = self.take_encoder if inside else self.take_cross if layer.kind == "cross" else self.take_self
        take(call.weights.detach())

    def take_encoder(self, weights: Tensor, residual: Tensor | None = None) -> None:
        """Take self-attention of the encoder (batch, head, s, s), with a measured weight of the identity."""
        self.encoder.fold(weights, residual=residual)

    def take_self(self, weights: Tensor, residual: Tensor | None = None) -> None:
        """Take self-attention of the decoder (batch, head, t, t)."""
        fused = self.fused(weights)
        self.push_self(add_residual(fused, self._share(residual)))

    def take_cross(self, weights: Tensor, residual: Tensor | None = None) -> None:
        """Take cross-attention (batch, head, t, s)."""
        kept = self._share(residual)
        fused = self.fused(weights, cross=True)
        part = 1 - (kept[..., None] if isinstance(kept, Tensor) else kept)
        self.push_cross(part * fused, kept)

    def push_self(self, step: Tensor) -> None:
        """Take a decoder layer's matrix (batch, t, t), its residual already in it."""
        self.note_causal(step)
        source, prefix = self.state()
        self._state = step.to(source.dtype) @ source, step.to(prefix.dtype) @ prefix
        self._note()
        self._open = True

    def note_causal(self, weights: Tensor) -> None:
        """Note which probes have a step that attends to a later one; `weights` ends in (query, key)."""
        self.causal &= (weights.triu(1) == 0).flatten(1).all(dim=1)

    def begin_block(self) -> None:
        """Say that what comes is of another block than what came, where not every block has both kinds."""
        self._open = False

    def leave_block(self) -> None:
        """Take a block as the identity."""
        self._note()

    def push_cross(self, part: Tensor, kept: Tensor | float) -> None:
        """Take what a cross block draws on the encoder's output (batch, t, s) and keeps of itself (batch, t).

        Both together sum to 1 in each row.
        """
        source, prefix = self.state()
        share = kept.to(source.dtype)[..., None] if isinstance(kept, Tensor) else kept
        self._state = share * source + part.to(source.dtype) @ self.top(), share * prefix
        if self._open:  # one row for each block: after its cross-attention
            self.rows.pop()
        self._note()
        self._open = False

    def fused(self, weights: Tensor, *, cross: bool = False) -> Tensor:
        """Return the heads of a decoder layer as one matrix; pads draw on nothing but themselves."""
        valid = self.valid[1]
        if not bool(valid.all()):
            weights = torch.where(valid[:, None, :, None], weights, torch.zeros_like(weights))
        return fuse_heads(weights, query_offset=None if cross else 0, **self.settings.fusion)

    def state(self) -> tuple[Tensor, Tensor]:
        """Return S (batch, t, s) and D (batch, t, t)."""
        if self._state is None:
            batch, steps = self.valid[1].shape
            top = self.top()
            own = torch.eye(steps, dtype=top.dtype, device=top.device).repeat(batch, 1, 1)
            self._state = top.new_zeros(batch, steps, top.shape[-1]), own
        return self._state

    def top(self) -> Tensor:
        """Return the rollout of the encoder."""
        if self.encoder.matrix is None:
            raise CaptureError("the decoder ran before the encoder; this architecture is not supported")
        return self.encoder.matrix

    def read_rows(self, matrix: Tensor) -> Tensor:
        """Return the output row of (batch, t, key)."""
        return torch.einsum("bq,bqk->bk", self.read.to(matrix.dtype), matrix)

    def _share(self, residual: Tensor | None) -> float | Tensor:
        return self.settings.residual_of(0) if residual is None else residual

    def _note(self) -> None:
        source, prefix = self.state()
        self.rows.append((self.read_rows(source), self.read_rows(prefix)))

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return what the output row draws on: source before prefix."""
        final, (source, prefix) = self.rows[self.final_layer()], self.state()
        collapse = [_collapse(matrix, self.valid[1]) for matrix in (source, prefix)]
        return self._streams(final, self.rows, [{"depth_collapse": one} for one in collapse])

    def final_layer(self) -> int:
        """Return the index of the decoder layer that is read, checked."""
        if not self.rows:
            raise CaptureError("the decoder gave no attention; this architecture is not supported")
        index = self.settings.layer
        if not -len(self.rows) <= index < len(self.rows):
            raise ConfigError(
                f"[method] layer = {index}, but {len(self.rows)} layers of the decoder attend to the source; "
                "mend it"
            )
        return index % len(self.rows)

    def _streams(
        self,
        final: tuple[Tensor, Tensor],
        rows: list[tuple[Tensor, Tensor]],
        diagnostics: list[dict[str, Tensor]],
    ) -> tuple[StreamRows, StreamRows]:
        return (
            StreamRows(final[0], [one for one, _ in rows], self.encoder.causal, diagnostics[0]),
            StreamRows(final[1], [one for _, one in rows], self.causal, diagnostics[1]),
        )


def _collapse(matrix: Tensor, valid: Tensor) -> Tensor:
    """Return how different the decoder rows of (batch, t, key) still are, in bits: (batch,)."""
    rows = matrix.double()
    rows = rows / rows.sum(dim=-1, keepdim=True).clamp_min(1e-300)
    weight = valid.double() / valid.sum(dim=1, keepdim=True)
    return generalized_divergence(rows, weight)


class RawCross(CrossFold):
    """Cross-attention of one decoder layer (source), and its self-attention (prefix): two distributions."""

    def take_encoder(self, weights: Tensor, residual: Tensor | None = None) -> None:  # noqa: ARG002
        """Look whether the encoder is causal; its attention is not part of the map."""
        self.encoder.note_causal(weights)

    def take_self(self, weights: Tensor, residual: Tensor | None = None) -> None:  # noqa: ARG002
        """Take self-attention of the decoder."""
        fused = self.fused(weights)
        self.note_causal(fused)
        self._own = self.read_rows(fused)

    def take_cross(self, weights: Tensor, residual: Tensor | None = None) -> None:  # noqa: ARG002
        """Take cross-attention; beside it stands the self-attention nearest below, nothing without one."""
        own = getattr(self, "_own", torch.zeros_like(self.read))
        self.rows.append((self.read_rows(self.fused(weights, cross=True)), own))

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return the rows of the layer that is read."""
        return self._streams(self.rows[self.final_layer()], self.rows, [{}, {}])


class HeadCross(CrossFold):
    """Rows of each head of the cross-attention over everything merged below it."""

    def push_self(self, step: Tensor) -> None:
        """Take a decoder layer's matrix; rows are those of cross-attention alone."""
        super().push_self(step)
        self.rows.pop()
        self._open = False

    def take_cross(self, weights: Tensor, residual: Tensor | None = None) -> None:
        """Take cross-attention."""
        kept, (source, _) = self.settings.residual_of(0), self.state()
        read = self.read.to(source.dtype)
        rows = torch.einsum("bq,bhqk->bhk", read, weights.to(source.dtype)) @ self.top()
        rows = (1 - kept) * rows + kept * self.read_rows(source)[:, None]
        super().take_cross(weights, residual)
        self.head_rows = [*getattr(self, "head_rows", []), rows]
        self.rows[-1] = chosen_head(rows, self.settings), self.rows[-1][1]

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Add ``head_disagreement`` of the heads' source maps at the layer read, in bits."""
        source, prefix = super().streams()
        rows = self.head_rows[self.final_layer()].double()
        rows = rows / rows.sum(dim=-1, keepdim=True)
        source.diagnostics = {**source.diagnostics, "head_disagreement": head_disagreement(rows)}
        return source, prefix


class FlowCross(CrossFold):
    """Attention flow from a decoder row through both stacks, down to source and prefix."""

    def __init__(
        self,
        plan: CapturePlan,
        settings: FoldSettings,
        valid: tuple[Tensor, Tensor],
        read: Tensor,
        *,
        verify: bool = False,
    ) -> None:
        super().__init__(plan, settings, valid, read, verify=verify)
        self.joint = JointSteps((valid[0].shape[1], valid[1].shape[1]))

    def take_encoder(self, weights: Tensor, residual: Tensor | None = None) -> None:  # noqa: ARG002
        """Take self-attention of the encoder."""
        self.encoder.note_causal(weights)
        fused = add_residual(self.encoder.fused(weights), self.settings.residual_of(0))
        self.joint.add(fused, first=fused)

    def push_self(self, step: Tensor) -> None:
        """Take a decoder layer's matrix."""
        self.note_causal(step)
        self.joint.add(step, second=step)

    def push_cross(self, part: Tensor, kept: Tensor | float) -> None:
        """Take a cross block."""
        own = kept * torch.eye(part.shape[1], dtype=part.dtype, device=part.device)
        self.joint.add(part, second=own.expand(len(part), -1, -1), second_first=part)

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return the flow that falls on each stream; both together sum to 1."""
        source, steps = self.joint.sizes
        read = torch.nn.functional.pad(self.read, (source, 0))
        flow, saturated = self.joint.flow(read, self.settings.max_seconds)
        flow = flow / flow.sum(dim=1, keepdim=True)
        said = {"saturated": saturated}
        return self._streams((flow[:, :source], flow[:, source : source + steps]), [], [said, said])


def cross_fold(
    plan: CapturePlan,
    settings: FoldSettings,
    valid: tuple[Tensor, Tensor],
    read: Tensor,
    *,
    verify: bool = False,
) -> CrossFold:
    """Return the fold of a method that looks at attention alone, or at a rollout of contributions."""
    kind = {RAW: RawCross, PER_HEAD: HeadCross, FLOW: FlowCross}.get(settings.method, CrossFold)
    return kind(plan, settings, valid, read, verify=verify)
