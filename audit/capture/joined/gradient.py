"""Gradient rollout of an image with text: every stack in step with one backward pass from the answer's logit.

Backward reaches the last stack first, whose row is carried down layer by layer as it comes. It goes on
through the connector into the tower; the tower's layers, without heads, wait until it has reached the first,
since what a connector reads is a product from below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from audit.capture.attention.check import check_counts
from audit.capture.attention.hooks import counted_calls, hook_capture
from audit.capture.attention.interface import AttentionCall, KernelCall, Replacing, interface_capture
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.capture.engines.gradient import _attend, _detached, _hooked
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.joined.cross import crossed_relevance
from audit.capture.joined.front import KEYS, Depth, Front
from audit.capture.joined.origins import Origins, latent_count
from audit.capture.joined.windowed import Slots, spread_windows
from audit.capture.outputs.scores import Score
from audit.capture.outputs.targets import resolve_targets, target_scores
from audit.capture.pairs.gradient import stack_leaves
from audit.errors import CaptureError
from audit.methods._arrays import normalize_rows
from audit.methods.gradient import gradient_row_step, product_step, relevance_step, weigh_by_gradient
from audit.records import Checkpoint


class _Call(NamedTuple):
    """A call of a kernel: which layer of its stack it is, and where its positions begin in the stack."""

    path: str
    stack: str
    layer: int
    start: int
    rows: int


class JoinedRelevance:
    r"""The row of R over all stacks of one probe, taken layer by layer from the last one.

    Every stack by the self rule, R ← R + ĀR from R = I (or the product form), with the gradient of the same
    logit; the connector C joins them as in rollout, so that for the row r of the last stack

    .. math:: \text{image} = r R C E, \qquad \text{text} = r R

    with E the tower's R up to what the connector reads. Where each position stands for one patch this is
    the self rule of one stack whose lower layers leave the text alone. In the relevance form the identity,
    r·C over the image and r over the text, is taken off. A stack whose blocks attend to the image goes by the
    rules of an encoder-decoder instead: see :func:`audit.capture.joined.cross.crossed_relevance`.

    Parameters
    ----------
    plan, settings, front, read, verify, slots : see :class:`audit.capture.joined.fold.JoinedFold`
    """

    def __init__(
        self,
        plan: CapturePlan,
        settings: FoldSettings,
        front: Front,
        read: Tensor,
        *,
        verify: bool = False,
        slots: Slots,
    ) -> None:
        self.plan, self.settings, self.front, self.verify, self.slots = plan, settings, front, verify, slots
        self.read = read.double()
        self.relevance = settings.form == "relevance"
        self.targets: dict[str, Score] = {}
        self.calls, self.causal = 0, True
        self.order: list[_Call] = []
        self._stack_of = {layer.path: layer.stack for layer in plan.layers}
        self._vector = torch.zeros_like(self.read) if self.relevance else self.read.clone()
        self._blocks: list[Tensor] = []
        self._weighted: dict[tuple[str, int], list[tuple[_Call, Tensor]]] = {}
        self._left: list[int] = []
        self._later = False
        self._crossed = {layer.path for layer in plan.layers if layer.kind == "cross"}
        self._last: dict[int, Tensor] = {}

    @property
    def apart(self) -> bool:
        """Return whether the relevances of image and text have no common scale."""
        return KEYS in self.front.sizes

    @property
    def entries(self) -> tuple[str, ...]:
        """Return the stacks whose inputs the gradient is taken by, so that backward passes every layer.

        Raises
        ------
        CaptureError
            When an image reaches the last stack in two ways.
        """
        first, last = self.plan.stacks[0], self.plan.stacks[-1]
        if self.apart and self.front.sources[last]:
            raise CaptureError(
                f"the image enters {last} both among its positions and by cross-attention, for which no rule "
                "of relevance is known; use the method rollout"
            )
        return (first, last) if self.apart else (first,)

    # --- what backward gives ------------------------------------------------------------------

    def note(self, path: str, rows: int = 0) -> None:
        """Note a call of the forward pass; of a layer that attends in pieces, one of `rows` positions."""
        stack, before = self._stack_of[path], self.order[-1] if self.order else None
        if before is not None and path in self.plan.pieces and before.path == path:
            self.order.append(_Call(path, stack, before.layer, before.start + before.rows, rows))
        else:
            self.order.append(_Call(path, stack, self._count(stack), 0, rows))

    def valid_of(self, path: str) -> tuple[Tensor, Tensor | None]:
        """Return the queries of a layer, and its keys where they are others: all are valid."""
        stack = self._stack_of[path]
        sequences, length = self.front.sizes[stack]
        shape = tuple(self.slots[path].shape) if path in self.slots else (sequences, length)
        shape = (1, self.order[-1].rows) if path in self.plan.pieces else shape
        valid = torch.ones(shape, dtype=torch.bool, device=self.read.device)
        if path in self._crossed:
            return valid, valid.new_ones(1, int(np.prod(self.front.sizes[KEYS])))
        if stack not in self.front.contexts:
            return valid, None
        beside = self.front.contexts[stack][1]
        return valid, torch.ones(sequences, length + beside, dtype=torch.bool, device=self.read.device)

    def start_layer(self, layer: int) -> None:  # noqa: ARG002
        """Begin a layer."""
        self._blocks = []

    def block(self, start: int, weights: Tensor, gradient: Tensor) -> None:
        """Take a block of the queries of the layer at hand: (batch, head, query of the block, key)."""
        if not self._blocks and start:
            raise CaptureError(
                "gradient rollout: a layer's blocks arrived out of order; use the method rollout"
            )
        try:
            self._blocks.append(weigh_by_gradient(weights, gradient))
        except ValueError as error:
            raise CaptureError(f"gradient rollout: {error}; load the checkpoint in float32") from None
        self._later = bool(weights.amax(dim=1).triu(1 + start).any()) or (start > 0 and self._later)

    def finish_layer(self, layer: int) -> None:
        """Take the layer's blocks together; the last stack's are folded into its row at once."""
        call = self.order[layer]
        path, stack, index = call.path, call.stack, call.layer
        weighted = torch.cat(self._blocks, dim=1).double()
        if stack != self.plan.stacks[-1]:
            self._weighted.setdefault((stack, index), []).append((call, weighted))
            return
        weighted = self._square(path, weighted)
        if self.apart:  # a cross step needs what lies below it
            self._last[index] = weighted
            self.causal &= path in self._crossed or not self._later
            return
        if index != self._count(stack) - 1 - len(self._left):
            raise CaptureError(
                f"gradients of attention layer {path} arrived out of order; use the method rollout"
            )
        self._left.append(index)
        self.causal &= not self._later
        start = self.read if self.relevance else None
        self._vector = gradient_row_step(self._vector, weighted, start=start, form=self.settings.form)

    def _square(self, path: str, weighted: Tensor) -> Tensor:
        """Return Ā of a layer over all positions of its stack (sequence, position, position)."""
        stack = self._stack_of[path]
        if path in self.slots:
            call = AttentionCall(path, weighted[:, None], weighted)
            return spread_windows(call, self.slots[path], *self.front.sizes[stack])[:, 0]
        if stack not in self.front.contexts:
            return weighted
        own, beside = self.front.sizes[stack][1], self.front.contexts[stack][1]
        whole = weighted.new_zeros(len(weighted), own + beside, own + beside)
        whole[:, :own, :own], whole[:, :own, own:] = weighted[..., beside:], weighted[..., :beside]
        return whole

    def _layer(self, stack: str, index: int) -> Tensor | None:
        """Return Ā of a layer below the last stack, None unless gradients reached all of its calls."""
        taken = self._weighted.get((stack, index), [])
        if not taken or len(taken) != sum(
            1 for call in self.order if (call.stack, call.layer) == (stack, index)
        ):
            return None
        path = taken[0][0].path
        if path not in self.plan.pieces:
            return self._square(path, taken[0][1])
        sequences, length = self.front.sizes[stack]
        whole = taken[0][1].new_zeros(sequences, length, length)
        for call, weighted in taken:
            own = slice(call.start, call.start + call.rows)
            whole[:, own, own] = weighted
        return whole

    def _count(self, stack: str) -> int:
        return 1 + max((call.layer for call in self.order if call.stack == stack), default=-1)

    # --- what it comes to ---------------------------------------------------------------------

    @property
    def latents(self) -> int:
        """Return how many learned latents stand between the image and the last stack."""
        return latent_count(self.front)

    def rows(self) -> list[Tensor]:
        """Return no rows: one row is read, from the last layer down."""
        return []

    def row(self) -> Tensor:
        """Return the output row over the last stack, as it is before the image is carried on: (position,).

        Raises
        ------
        CaptureError
            When gradients did not reach every layer.
        """
        last = self.plan.stacks[-1]
        reached = len(self._last) if self.apart else len(self._left)
        if reached != self._count(last):
            raise self._unreached(last, reached, self._count(last))
        return self._crossed_row() if self.apart else self._vector[0]

    def _crossed_row(self) -> Tensor:
        """Return the row over a stack's positions, and over the keys behind them; each part by itself."""
        crossed = [call.path in self._crossed for call in self.order if call.stack == self.plan.stacks[-1]]
        layers = [(crossed[index], self._last[index]) for index in sorted(self._last)]
        return crossed_relevance(layers, self.read, int(np.prod(self.front.sizes[KEYS])))

    def image(self, rows: Tensor) -> Tensor:
        """Return the row over the last stack as a row over the positions of the image."""
        origins = self.origins()
        if self.apart or not self.relevance:
            return rows @ origins
        read = self.read[0]
        return rows @ origins + read @ (origins - self._own())

    def origins(self) -> Tensor:
        """Return how each position of the last stack draws on the image; see :class:`Origins`.

        Keys of cross-attention with their relevance normalised, as the rules of a cross step have it.
        """
        whole = Origins(self.plan.stacks, self.front, self.read.device, self._states()).matrix()
        return normalize_rows(whole - self._own()) + self._own() if self.apart else whole

    def _own(self) -> Tensor:
        """Return which parts of the image each position of the last stack stands for."""
        return Origins(self.plan.stacks, self.front, self.read.device).matrix()

    def _states(self) -> Mapping[Depth, Tensor]:
        step = relevance_step if self.relevance else product_step
        states: dict[Depth, Tensor] = {}
        for stack in self.plan.stacks[:-1]:
            deepest = max((depth for name, depth in self.front.depths if name == stack), default=0)
            matrix = None
            for index in range(deepest):
                if (layer := self._layer(stack, index)) is None:
                    raise self._unreached(stack, index, deepest)
                matrix = step(matrix, layer)
                states[stack, index + 1] = matrix
        return {depth: matrix for depth, matrix in states.items() if depth in self.front.depths}

    def _unreached(self, stack: str, reached: int, wanted: int) -> CaptureError:
        return CaptureError(
            f"gradients reached {reached} of {wanted} attention layers of {stack}; the target does not "
            "depend on the others"
        )

    def diagnostics(self) -> dict[str, float]:
        """Return ``relevance``, the sum of the row over the last stack; each part's by itself if apart."""
        if not self.apart:
            return {"relevance": float(self._vector.sum())}
        row, own = self.row(), self.read.shape[1]
        image = self.image(row[None])
        return {"relevance_text": float(row[:own].sum()), "relevance_image": float(image.sum())}


def relevance_joined(
    checkpoint: Checkpoint,
    item: Encoded,
    fold: JoinedRelevance,
    wanted: Mapping[str, Any],
) -> Any:
    """Run one probe forward and backward, and fold the attention of all stacks on the way back.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its parameters get no ``.grad``.
    item : Encoded
        The probe, its positions those of the last stack.
    fold : JoinedRelevance
        Filled; `fold.targets` with what was explained.
    wanted : mapping of probe id to target; None = what the checkpoint itself answers

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer cannot be reached, or its weights are not what it used.
    """
    model, plan, seen = checkpoint.model, fold.plan, Counter[str]()

    def attend(call: KernelCall) -> tuple[Tensor, Tensor | None]:
        fold.note(call.path, call.query.shape[-2])
        valid, keys = fold.valid_of(call.path)
        return _attend(call, fold, seen, valid if fold.verify else None, keys)

    def hooked(call: AttentionCall) -> None:
        fold.note(call.path)
        _hooked(call, fold, seen, *fold.valid_of(call.path))

    if plan.pieces:  # which must stand behind each other in the order of the positions
        with exclusive(model, plan.configs), watched(plan, lambda _call: None, None):
            run_model(model, item.tensors, attentions=plan.has_hooks)
    with exclusive(model, plan.configs), torch.enable_grad(), ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        leaves = stack.enter_context(stack_leaves(core_model(model), fold.entries))
        stack.enter_context(interface_capture(plan.modules("interface"), plan.configs, Replacing(attend)))
        stack.enter_context(hook_capture(plan.modules("hook"), hooked))
        outputs = run_model(model, item.tensors, attentions=plan.has_hooks, keep_logits=True)
        seen.update({path: called[path] - seen[path] for path in plan.pieces})
        check_counts(plan, called, seen, None)
        fold.targets, score = explained(checkpoint, item, outputs, fold.read, wanted)
        check_differentiable(score, outputs)
        torch.autograd.grad(score, list(leaves.values()), allow_unused=True)
    return _detached(outputs)


def explained(
    checkpoint: Checkpoint, item: Encoded, outputs: Any, read: Tensor, wanted: Mapping[str, Any]
) -> tuple[dict[str, Score], Tensor]:
    """Return what is explained of one probe, by its id, and its value as a scalar.

    Parameters
    ----------
    checkpoint, item, outputs
    read : float Tensor (1, position)
        The output row, as weights over the rows of the last stack.
    wanted : mapping of probe id to target, or to the score that an earlier pass gave

    Raises
    ------
    CaptureError
        When the model has no such logits.
    """
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or (logits.dim() == 3 and logits.shape[1] != read.shape[1]):
        raise CaptureError(
            f"{type(outputs).__name__} has no logits at the positions of its last stack to explain; use the "
            "method rollout"
        )
    targets = resolve_targets(checkpoint, [item], outputs, wanted, read)
    return targets, target_scores([item], outputs, targets, read, checkpoint.task).sum()


def check_differentiable(score: Tensor, outputs: Any) -> None:
    """Raise CaptureError for a score without a gradient."""
    if not score.requires_grad:
        raise CaptureError(
            f"{type(outputs).__name__}: its logits do not depend on the image, so there is no gradient; use "
            "the method rollout"
        )
