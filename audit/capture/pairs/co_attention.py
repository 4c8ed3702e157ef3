"""Two streams that attend to themselves and to each other: LXMERT, on text and image regions.

Each of its cross-modality layers attends from either stream to the other with one module, both from the
state before the layer, and then within each stream. Only here are modules known by name: what a stream is
cannot be measured. What follows from it is: the two directions of a layer do not see each other, and
positions mix through nothing else.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.engines.fold import generalized_divergence
from audit.capture.engines.folds import chosen_head, head_disagreement
from audit.capture.engines.settings import FLOW, PER_HEAD, RAW, FoldSettings
from audit.capture.outputs.scores import Score
from audit.capture.pairs.joint import JointSteps
from audit.capture.pairs.multi import StreamRows, check_call
from audit.errors import CaptureError, ConfigError
from audit.methods.fusion import fuse_heads
from audit.methods.rollout import add_residual
from audit.methods.two_stream import Stream

Step = Literal["first", "second", "first_second", "second_first"]
"""Queries and keys of a layer: within a stream, or from one to the other. The text is first."""

_SELF: tuple[tuple[str, Step], ...] = (
    ("encoder.layer.", "first"),
    ("encoder.r_layers.", "second"),
    (".lang_self_att.", "first"),
    (".visn_self_att.", "second"),
)


MEET = "x_layers"
"""The stack whose layers attend to the other stream."""


def crosses(path: str) -> bool:
    """Return whether an attention layer attends from one stream to the other."""
    return ".visual_attention." in f".{path}."


def step_of(path: str, call: int) -> Step:
    """Return what a layer of LXMERT attends to in its `call`-th call, from 0.

    Examples
    --------
    >>> step_of("lxmert.encoder.x_layers.0.visual_attention.att", 1)
    'second_first'
    """
    found = next((step for part, step in _SELF if part in f"{path}."), None)
    if found is not None:
        return found
    if not crosses(path) or call > 1:
        raise CaptureError(f"attention layer {path} is not known among two streams")
    return "second_first" if call else "first_second"


class CoFold:
    """Attention of one batch, as layers over the positions of both streams.

    Parameters
    ----------
    settings : FoldSettings
        ``rollout``, ``raw_attention`` or ``attention_flow``; ``norms`` or ``alti``, whose matrices
        :meth:`take` is given.
    valid : two bool Tensors (batch, position)
        Of text and image regions.
    read : float Tensor (batch, text position)
        The output row, as weights over the rows of the text.
    verify : bool
    """

    def __init__(
        self, settings: FoldSettings, valid: tuple[Tensor, Tensor], read: Tensor, *, verify: bool = False
    ) -> None:
        self.settings, self.valid, self.read, self.verify = settings, valid, read, verify
        self.targets: dict[str, Score] = {}
        self.joint = JointSteps((valid[0].shape[1], valid[1].shape[1]))
        self.rows: list[Tensor] = []
        self._calls = Counter[str]()
        self._waiting: tuple[Tensor, Tensor | float] | None = None
        self._matrix: Tensor | None = None
        self._raw: list[tuple[Tensor, Tensor]] = []
        self._cross: Tensor | None = None

    def receive(self, call: AttentionCall) -> None:
        """Take one call of one layer."""
        step = self.next_step(call)
        queries, keys = self.valid_of(step)
        check_call(call, queries, keys, verify=self.verify)
        self.take_weights(step, call.weights.detach())

    def next_step(self, call: AttentionCall) -> Step:
        """Return what the next call of a layer attends to."""
        step = step_of(call.path, self._calls[call.path])
        self._calls[call.path] += 1
        return step

    def valid_of(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Return a layer's valid queries, and its valid keys where they are others."""
        queries, keys = (self.valid[0 if end == "first" else 1] for end in ends_of(step))
        return queries, keys if "_" in step else None

    def take_weights(self, step: Step, weights: Tensor, residual: Tensor | None = None) -> None:
        """Take attention (batch, head, query, key), with a measured weight (batch, query) of the identity."""
        fused = self._fused(step, weights)
        kept = self.settings.residual_of(0) if residual is None else residual
        if self.settings.method == RAW:
            self._note_raw(step, fused)
        elif "_" in step:
            self.take(step, (1 - (kept if isinstance(kept, float) else kept[..., None])) * fused, kept)
        else:
            self.take(step, add_residual(fused, kept))

    def take(self, step: Step, part: Tensor, kept: Tensor | float = 0.0) -> None:
        """Take a layer's matrix (batch, query, key).

        Within a stream its residual is in it; from one to the other, `kept` (batch, query) is what each query
        keeps of its own.
        """
        if step == "first_second":
            self._waiting = part, kept
        elif step == "second_first":
            self._both(part, kept)
        else:
            self._push(part, **{step: part})

    def _fused(self, step: Step, weights: Tensor) -> Tensor:
        queries, cross = self.valid_of(step)[0], "_" in step
        if not bool(queries.all()):
            weights = torch.where(queries[:, None, :, None], weights, torch.zeros_like(weights))
        return fuse_heads(weights, query_offset=None if cross else 0, **self.settings.fusion)

    def _note_raw(self, step: Step, fused: Tensor) -> None:
        row = (
            torch.einsum("bq,bqk->bk", self.read.to(fused.dtype), fused) if step.startswith("first") else None
        )
        if step == "first_second":
            self._cross = row
        elif step == "first" and row is not None and self._cross is not None:
            self._raw.append((row, self._cross))

    def _both(self, second: Tensor, kept: Tensor | float) -> None:
        """Take both directions of a layer at once: each from the state before it."""
        if self._waiting is None:
            raise CaptureError("a layer attends from one stream alone; this architecture is not supported")
        first, first_kept = self._waiting
        own = [
            torch.diag_embed(
                torch.as_tensor(one, dtype=second.dtype, device=second.device).expand(valid.shape)
            )
            for one, valid in zip((first_kept, kept), self.valid, strict=True)
        ]
        self._push(second, first=own[0], second=own[1], first_second=first, second_first=second)
        self._waiting = None

    def _push(self, like: Tensor, **parts: Tensor) -> None:
        self.joint.add(like, **parts)
        if self.settings.method != FLOW:
            step = self.joint.steps.pop()
            self._matrix = step if self._matrix is None else step @ self._matrix.to(step.dtype)
            if "first" in parts:
                self.rows.append(torch.einsum("bq,bqk->bk", self._read_both().to(step.dtype), self._matrix))

    def _read_both(self) -> Tensor:
        return torch.nn.functional.pad(self.read, (0, self.joint.sizes[1]))

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return what the output row draws on: text and image sum to 1 together, of raw attention each."""
        text = self.joint.sizes[0]
        free = torch.zeros(len(self.read), dtype=torch.bool, device=self.read.device)
        if self.settings.method == RAW:
            own, other = self._raw[_index(self.settings.layer, len(self._raw))]
            layers = list(zip(*self._raw, strict=True))
            return StreamRows(own, layers[0], free), StreamRows(other, layers[1], free)
        if self.settings.method == FLOW:
            flow, saturated = self.joint.flow(self._read_both(), self.settings.max_seconds)
            flow, said = flow / flow.sum(dim=1, keepdim=True), {"saturated": saturated}
            return StreamRows(flow[:, :text], [], free, said), StreamRows(flow[:, text:], [], free, said)
        if self._matrix is None:
            raise CaptureError("no layer gave attention; this architecture is not supported")
        weight = torch.cat(self.valid, dim=1)[:, :text].double()
        rows = self._matrix[:, :text].double()
        said = {"depth_collapse": generalized_divergence(rows, weight / weight.sum(dim=1, keepdim=True))}
        # Where the text has not yet attended to the image, there is no map of it.
        return (
            StreamRows(self.rows[-1][:, :text], [row[:, :text] for row in self.rows], free, said),
            StreamRows(self.rows[-1][:, text:], [], free, said),
        )


class CoHeads(CoFold):
    """Rows of each head of the text's cross-attention, over everything merged below it."""

    def take_weights(self, step: Step, weights: Tensor, residual: Tensor | None = None) -> None:
        """Take attention of one layer."""
        if step == "first_second" and self._matrix is not None:
            text, kept, below = self.joint.sizes[0], self.settings.residual_of(0), self._matrix
            read = self.read.to(below.dtype)
            drawn = torch.einsum("bq,bhqk->bhk", read, weights.to(below.dtype)) @ below[:, text:]
            own = torch.einsum("bq,bqk->bk", read, below[:, :text])
            self.head_rows = [*getattr(self, "head_rows", []), (1 - kept) * drawn + kept * own[:, None]]
        super().take_weights(step, weights, residual)

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return the rows after the text's cross-attention in each layer; both streams together sum to 1."""
        heads: list[Tensor] = getattr(self, "head_rows", [])
        index, text = _index(self.settings.layer, len(heads)), self.joint.sizes[0]
        rows = [chosen_head(one, self.settings) for one in heads]
        free = torch.zeros(len(self.read), dtype=torch.bool, device=self.read.device)
        said = {"head_disagreement": head_disagreement(heads[index].double())}
        return (
            StreamRows(rows[index][:, :text], [row[:, :text] for row in rows], free, said),
            StreamRows(rows[index][:, text:], [row[:, text:] for row in rows], free, said),
        )


def co_fold(
    settings: FoldSettings, valid: tuple[Tensor, Tensor], read: Tensor, *, verify: bool = False
) -> CoFold:
    """Return the fold of a method that looks at attention alone, or at a rollout of contributions."""
    kind = CoHeads if settings.method == PER_HEAD else CoFold
    return kind(settings, valid, read, verify=verify)


def input_stacks(plan: CapturePlan) -> tuple[str, ...]:
    """Return the stacks that take one input each: all but those in which two streams meet."""
    meet = plan.wiring == "co-attention"
    return tuple(stack for stack in plan.stacks if not (meet and stack.endswith(MEET)))


def ends_of(step: Step) -> tuple[Stream, Stream]:
    """Return whose queries and whose keys a layer has.

    Examples
    --------
    >>> ends_of("second"), ends_of("second_first")
    (('second', 'second'), ('second', 'first'))
    """
    first, _, second = step.partition("_")
    query: Stream = "first" if first == "first" else "second"
    key: Stream = query if not second else "first" if second == "first" else "second"
    return query, key


def _index(layer: int, count: int) -> int:
    if not -count <= layer < count:
        raise ConfigError(f"[method] layer = {layer}, but {count} layers attend to the other stream; mend it")
    return layer % count


def co_reads(row: str, valid: Tensor) -> Tensor:
    """Return the output row over the text's positions: ``auto`` is the first, which the pooler reads.

    Raises
    ------
    ConfigError
    """
    if row not in ("auto", "cls", "mean", "last"):
        raise ConfigError(
            f"[method] row = {row!r} is none for two streams; use auto, cls, mean or last, of the text"
        )
    weights = torch.zeros(valid.shape, device=valid.device)
    if row == "mean":
        weights = valid.float()
    else:
        weights[torch.arange(len(valid)), (valid.sum(dim=1) - 1) if row == "last" else 0] = 1
    return weights / weights.sum(dim=1, keepdim=True)
