"""Run one batch of a model of two streams by the method that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.attention.passes import exclusive
from audit.capture.engines.settings import ATTRIBUTION, MEASURED, FoldSettings
from audit.capture.inputs.cells import cells_of
from audit.capture.inputs.decoding import generated_token
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.pooling import tower_root
from audit.capture.outputs.scores import Score
from audit.capture.outputs.targets import SIMILARITY, similarity
from audit.capture.pairs.co_attention import co_fold, co_reads
from audit.capture.pairs.co_attribution import region_attributions
from audit.capture.pairs.co_contributions import co_contribution_batch
from audit.capture.pairs.co_relevance import (
    CoRelevanceFold,
    answer_logits,
    answer_targets,
    co_relevance_batch,
)
from audit.capture.pairs.contributions import pair_contribution_batch
from audit.capture.pairs.encoder_decoder import cross_fold
from audit.capture.pairs.gradient import RelevanceFold, relevance_batch
from audit.capture.pairs.halves import Halves, input_tables
from audit.capture.pairs.multi import PairFold, StreamRows, run_pair
from audit.capture.pairs.parts import find_parts
from audit.capture.pairs.setup import PairSession
from audit.capture.pairs.targets import next_token_scores
from audit.capture.pairs.tower_attribution import Answer, Similarity
from audit.capture.pairs.tower_methods import Towers
from audit.capture.pairs.towers import tower_reads
from audit.capture.pairs.zeroing import pair_zeroing_batch
from audit.errors import CaptureError, ProbeError
from audit.records import Positions

Masks = tuple[Tensor, Tensor]


@dataclass
class _Found:
    """Maps that are ready."""

    rows: tuple[StreamRows, StreamRows]
    targets: dict[str, Score] = field(default_factory=dict)

    def streams(self) -> tuple[StreamRows, StreamRows]:
        return self.rows


def run_method(
    asked: PairSession,
    batch: Sequence[Encoded],
    tensors: Mapping[str, Tensor],
    masks: Masks,
    *,
    verify: bool = False,
) -> tuple[PairFold, Any]:
    """Return the maps of one batch and the model's outputs.

    Parameters
    ----------
    asked : PairSession
    batch : sequence of Encoded
    tensors : their tensors, stacked
    masks : two bool Tensors (batch, position)
        False at pads, of each stream.
    verify : bool
        Also compare what is captured with what every layer computes.

    Raises
    ------
    CaptureError, ConfigError, ProbeError
    """
    if asked.fold.method in ATTRIBUTION:
        return _attributed(asked, batch, tensors, masks, verify=verify)
    if asked.plan.wiring == "encoder-decoder":
        return _encoder_decoder(asked, batch, tensors, masks, verify=verify)
    if asked.plan.wiring == "co-attention":
        return _co_attention(asked, batch, tensors, masks, verify=verify)
    model, plan = asked.checkpoint.model, asked.plan
    reads, pooled = tower_reads(model, plan, tensors, masks, asked.row, fusion=asked.fold.fusion)
    towers = Towers(asked.checkpoint, plan, asked.fold, asked.settings.batch_tokens)
    return towers.run(batch, tensors, masks, reads, pooled=pooled, verify=verify)


def _encoder_decoder(
    asked: PairSession, batch: Sequence[Encoded], tensors: Mapping[str, Tensor], masks: Masks, *, verify: bool
) -> tuple[PairFold, Any]:
    model, plan, read = asked.checkpoint.model, asked.plan, decoder_reads(asked.row, batch, masks[1])
    if asked.fold.method == "gradient_rollout":
        relevance = RelevanceFold(plan, masks, read)
        outputs = relevance_batch(
            asked.checkpoint, plan, batch, tensors, relevance, wanted=asked.wanted, verify=verify
        )
        return relevance, outputs
    fold = cross_fold(plan, asked.fold, masks, read, verify=verify)
    if asked.fold.method in ("norms", "globenc", "alti") or asked.fold.residual == MEASURED:
        if not asked.parts:
            first = {name: tensor[:1] for name, tensor in tensors.items()}
            with exclusive(model, plan.configs):
                asked.parts.update(find_parts(core_model(model), plan, first))
        return fold, pair_contribution_batch(model, plan, asked.parts, tensors, fold)
    if asked.fold.method == "value_zeroing":
        return fold, pair_zeroing_batch(model, plan, tensors, fold)
    return fold, run_pair(model, plan, tensors, fold.receive)


def _co_attention(
    asked: PairSession, batch: Sequence[Encoded], tensors: Mapping[str, Tensor], masks: Masks, *, verify: bool
) -> tuple[PairFold, Any]:
    model, plan, read = asked.checkpoint.model, asked.plan, co_reads(asked.row, masks[0])
    if asked.fold.method == "gradient_rollout":
        relevance = CoRelevanceFold(masks, read, verify=verify)
        outputs = co_relevance_batch(model, plan, batch, tensors, relevance, wanted=asked.wanted)
        return relevance, outputs
    fold = co_fold(asked.fold, masks, read, verify=verify)
    if asked.fold.method in ("norms", "globenc", "alti") or asked.fold.residual == MEASURED:
        return fold, co_contribution_batch(model, plan, tensors, fold)
    return fold, run_pair(model, plan, tensors, fold.receive)


def _attributed(
    asked: PairSession, batch: Sequence[Encoded], tensors: Mapping[str, Tensor], masks: Masks, *, verify: bool
) -> tuple[PairFold, Any]:
    """Explain the target as a function of each input, beside a rollout that captures and checks."""
    plain = replace(asked, fold=FoldSettings())
    inner, outputs = run_method(plain, batch, tensors, masks, verify=verify)
    plan, checkpoint = asked.plan, asked.checkpoint
    if plan.wiring == "co-attention":
        targets = answer_targets(batch, answer_logits(outputs).detach(), asked.wanted)
        rows = region_attributions(checkpoint, plan, asked.fold, batch, targets)
        return _Found(rows, targets), outputs
    if plan.wiring == "towers":
        if similarity(outputs) is None:
            raise CaptureError(f"{type(outputs).__name__} has no similarity of text and image to explain")
        targets = {item.probe.id: Score.single(SIMILARITY, 0) for item in batch}
        names = [_tower_input(item) for item in asked.positions(batch[0])]
        roots = tower_root(*plan.stacks), tower_root(*plan.stacks[::-1])
    else:
        read = decoder_reads(asked.row, batch, masks[1])
        targets = next_token_scores(checkpoint, batch, outputs, asked.wanted, read)
        cells = cells_of(batch[0])
        names = ["input_ids" if cells is None else cells.name, "decoder_input_ids"]
        roots = "", ""
    pair = names[0], names[1]
    tables = input_tables(checkpoint, plan.wiring, pair, roots)
    first, second = inner.streams()
    positions, causal = [asked.positions(item) for item in batch], (first.causal, second.causal)
    if asked.fold.method in ("grad_cam", "lrp"):
        given = checkpoint, plan, asked.fold, pair, tables
        both = Similarity(*given) if plan.wiring == "towers" else Answer(*given, targets)
        return _Found(both.streams(batch, positions, causal), targets), outputs
    halves = Halves(checkpoint, asked.fold, pair, tables, asked.settings.batch_tokens, plan.alone)
    return _Found(halves.streams(batch, positions, targets, causal), targets), outputs


def _tower_input(positions: Positions) -> str:
    return "input_ids" if positions.kind == "token" else "pixel_values"


def decoder_reads(row: str, batch: Sequence[Encoded], valid: Tensor) -> Tensor:
    """Return the output row of each probe, as weights over the decoder's rows: (batch, step)."""
    read = np.zeros(tuple(valid.shape), np.float32)
    for i, item in enumerate(batch):
        own = decoder_row(row, int(valid[i].sum()), item.probe.id)
        read[i, : len(own)] = own
    return torch.from_numpy(read).to(valid.device)


def decoder_row(row: str, steps: int, probe_id: str) -> NDArray[np.float32]:
    """Return which decoder rows are read, as weights over the `steps` rows of a probe.

    Parameters
    ----------
    row : str
        ``decoder:<i>`` (the row that predicts generated token i, from 0), ``last``, or ``auto`` and
        ``mean``, the average over all rows.
    steps : int
        Rows of the decoder.
    probe_id : str

    Examples
    --------
    >>> decoder_row("decoder:1", 3, "p").tolist()
    [0.0, 1.0, 0.0]
    """
    weights = np.zeros(steps, np.float32)
    token = generated_token(row)
    if token is None:
        weights[slice(-1, None) if row == "last" else slice(None)] = 1
    elif token < steps:
        weights[token] = 1
    else:
        raise ProbeError(
            f"probe {probe_id} has {steps} decoder rows, none is row {row!r}; mend [method] row or remove it"
        )
    share: NDArray[np.float32] = weights / weights.sum()
    return share
