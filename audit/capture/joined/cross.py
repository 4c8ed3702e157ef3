"""A stack whose blocks attend to an image by cross-attention, folded as the decoder that it is.

What an encoder-decoder makes of the output of its encoder, such a stack makes of the keys that the image
comes to: its folds (:mod:`audit.capture.pairs.encoder_decoder`) run on the keys as they are, and what the
keys stand for is put in afterwards (:class:`audit.capture.joined.origins.Origins`). Some blocks attend to
the image alone, others to the text alone.

A gate on the cross-attention (Llama 3.2 adds tanh(g) · attention) is no attention weight: what reads
weights alone does not see it. Relevance does, by the gradient, to which it belongs as a factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from audit.capture.attention.check import check_rows, check_values
from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import AttentionLayer, CapturePlan
from audit.capture.engines.settings import FoldSettings
from audit.capture.joined.front import KEYS, Front
from audit.capture.pairs.encoder_decoder import CrossFold, cross_fold
from audit.errors import ConfigError
from audit.methods.two_stream import cross_step, identity_relevances, self_step


class KeyedFold:
    """The rows of a stack over its own positions and the keys behind them, as a fold of one stack has them.

    Parameters
    ----------
    plan : CapturePlan
    settings : FoldSettings
        ``start_layer`` counts the blocks of the stack, ``layer`` those that attend to the keys.
    read : float Tensor (1, position)
        The output row, as weights over the stack's rows.
    keys : int
        How many keys there are.
    verify : bool
        Compare attention × values with every layer's own output.
    """

    def __init__(
        self, plan: CapturePlan, settings: FoldSettings, read: Tensor, keys: int, *, verify: bool = False
    ) -> None:
        self.settings, self.verify = settings, verify
        self.own = torch.ones_like(read, dtype=torch.bool)
        self.keys = self.own.new_ones(1, keys)
        self.pair: CrossFold = cross_fold(plan, settings, (self.keys, self.own), read)
        self.pair.encoder.push(torch.eye(keys, device=read.device)[None])
        self.blocks = list[str]()

    def receive(self, call: AttentionCall, layer: AttentionLayer) -> None:
        """Take one call of one layer, checked."""
        cross = layer.kind == "cross"
        check_rows(call, self.own, self.keys if cross else None)
        if self.verify:
            check_values(call, self.own)
        weights = call.weights.detach()
        self.take(layer, weights)

    def take(self, layer: AttentionLayer, weights: Tensor, residual: Tensor | None = None) -> None:
        """Take the attention of a layer, with its measured residual (1, query) where there is one."""
        if self._is_identity(layer.block):
            if layer.kind == "self":
                self.pair.note_causal(weights)
            return
        (self.pair.take_cross if layer.kind == "cross" else self.pair.take_self)(weights, residual)

    def push(self, layer: AttentionLayer, matrix: Tensor) -> None:
        """Take a layer's matrix (1, query, key); cross-attention has one more key, the residual."""
        self._is_identity(layer.block)
        if layer.kind == "cross":
            self.pair.push_cross(matrix[..., :-1], matrix[..., -1])
        else:
            self.pair.push_self(matrix)

    def _is_identity(self, block: str) -> bool:
        """Return whether a block lies below the first that takes part, and note where a block begins."""
        new = block not in self.blocks
        if new:
            self.blocks.append(block)
            self.pair.begin_block()
        below = len(self.blocks) <= self.settings.start_layer
        if below and new:
            self.pair.leave_block()
        return below

    @property
    def rows(self) -> list[Tensor]:
        """Return the output row after each block, (1, position and key); see :class:`CrossFold`."""
        return [torch.cat([prefix, source], dim=1) for source, prefix in self.pair.rows]

    def final_row(self) -> Tensor:
        """Return the output row: (1, position and key).

        Raises
        ------
        ConfigError
            When the stack has no such block.
        """
        if self.settings.start_layer >= len(self.blocks):
            raise ConfigError(
                f"[method] start_layer = {self.settings.start_layer}, but the decoder has "
                f"{len(self.blocks)} blocks; mend it"
            )
        source, prefix = (stream.final for stream in self.pair.streams())
        return torch.cat([prefix, source], dim=1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return numbers that go with the maps of both streams: name to (1,)."""
        return dict(self.pair.streams()[0].diagnostics)

    @property
    def causal(self) -> Tensor:
        """Return whether no position of the stack attends to a later one: bool (1,)."""
        return self.pair.causal


def check_capacities(plan: CapturePlan, front: Front) -> None:
    """Raise ConfigError where the keys are not what the last layer of one tower gives, patch by patch.

    Elsewhere a convention stands between them (patches merged, several depths), which has no capacity.
    """
    tower, sources = plan.stacks[0], front.sources[KEYS]
    depth = tower, len({layer.block for layer in plan.layers if layer.stack == tower})
    one_by_one = (
        len(plan.stacks) == 2 and list(sources) == [depth] and front.sizes[tower] == front.sizes[KEYS]
    )
    if not (one_by_one and np.array_equal(sources[depth], np.arange(len(sources[depth])))):
        raise ConfigError(
            "[method] name = 'attention_flow' is not available for keys that are made of several patches or "
            "layers: a convention has no capacity; use rollout"
        )


def crossed_relevance(layers: Sequence[tuple[bool, Tensor]], read: Tensor, keys: int) -> Tensor:
    r"""Return the relevance of an output row over a stack's positions, and over the keys behind them.

    The rules of an encoder-decoder (Chefer, Gur & Wolf, ICCV 2021, arXiv 2103.15679, equations 5 to 11) for
    the text t and the image's keys q: a self-attention layer by R_tt ← R_tt + ĀR_tt, R_tq ← R_tq + ĀR_tq, a
    cross-attention layer by

    .. math:: R_{tq} \leftarrow R_{tq} + \bar R_{tt}^\top \bar A

    with R̄ of :func:`audit.methods.two_stream.two_stream_relevance`. The last factor of the rule, R̄_qq, is
    the same in every layer, since the image attends to no text; it is what
    :meth:`audit.capture.joined.gradient.JoinedRelevance.origins` puts behind the sum.

    Parameters
    ----------
    layers : sequence of (whether it is cross-attention, float64 Tensor (1, query, key))
        Ā of each layer, in the order of the forward pass.
    read : float64 Tensor (1, position)
    keys : int

    Returns
    -------
    Tensor (position and key,)
        The row of R_tt − I, then the row of R_tq: two relevances without a common scale.
    """
    found = identity_relevances(read, read.shape[1], keys)
    for cross, weighted in layers:
        found = cross_step(found, weighted) if cross else self_step(found, "first", weighted)
    own = (read[:, None] @ found.first_first)[0, 0] - read[0]
    return torch.cat([own, (read[:, None] @ found.first_second)[0, 0]])
