"""Fit one weight per head, so that the rollout agrees best with occlusion on calibration probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from audit.capture.attention.passes import fold_batch
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.batches import stack, valid_positions
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.inputs.windows import probe_windows
from audit.capture.outputs.predictions import Target
from audit.capture.session import capture
from audit.capture.single_session import Session, open_single, read_weights
from audit.errors import CaptureError, ProbeError
from audit.records import CaptureSettings, Checkpoint, Method, Probe

MOST_ENTRIES = 2**28
"""Attention weights of all calibration probes that may be kept: 1 GB in float32."""
RATE = 0.1


@dataclass(frozen=True)
class HeadFit:
    """Weights of the heads and how well their rollout agrees with occlusion.

    Attributes
    ----------
    weights : tuple of tuples (layer, head)
        Each row sums to 1; give them as ``head_weights`` with ``head_fusion = "weighted"``.
    mean_divergence : float
        Mean KL divergence, in nats, of the plain rollout from occlusion over the probes.
    fitted_divergence : float
        The same with these weights.
    n_probes : int
        Probes that took part; those in which occlusion moves nothing do not.
    """

    weights: tuple[tuple[float, ...], ...]
    mean_divergence: float
    fitted_divergence: float
    n_probes: int


class _Keeping(BatchFold):
    """A fold that keeps what it is given."""

    def __init__(self, read: Tensor, valid: Tensor) -> None:
        super().__init__(FoldSettings(), read, valid)
        self.layers: list[Tensor] = []

    def fold(self, weights: Tensor, *, sink: bool = False, residual: Tensor | None = None) -> None:  # noqa: ARG002
        if sink:
            raise CaptureError("head weights cannot be fitted beside learned sinks; use head_fusion = 'mean'")
        self.layers.append(weights.detach()[0])


def fit_head_weights(
    checkpoint: Checkpoint,
    probes: Sequence[Probe],
    *,
    row: str = "auto",
    target: Target = None,
    settings: CaptureSettings | None = None,
    residual: float = 0.5,
    steps: int = 200,
) -> HeadFit:
    r"""Fit one softmax weight vector per layer on calibration probes.

    Minimises the mean of :math:`\mathrm{KL}(o \,\|\, m)`, with o the occlusion map of a probe and m the
    content of its weighted rollout. Fit on the *before* checkpoint and freeze for both; never fit on
    the probes that are audited.

    Parameters
    ----------
    checkpoint : Checkpoint
        With a task head.
    probes : sequence of Probe
        Calibration probes; some tens are enough.
    row, target, settings : see :func:`audit.capture.capture`
    residual : float
        Weight of the identity, the one that the audit uses.
    steps : int
        Steps of Adam; the fit is deterministic.

    Returns
    -------
    HeadFit

    Raises
    ------
    CheckpointError
        When the checkpoint has no task head.
    CaptureError, ProbeError
        When the probes do not fit into memory, or occlusion moves nothing in any.

    Notes
    -----
    The weights tell which heads look where the target logit depends on the input, on average over the
    probes; they cannot tell that these heads are the cause.
    """
    settings = settings or CaptureSettings()
    maps = [found.maps[0] for found in capture(
        checkpoint, probes, method=Method("occlusion", row), settings=settings, target=target
    )]  # fmt: skip
    kept: list[tuple[list[Tensor], Tensor, Tensor]] = []
    place, session, size = 0, None, 0
    for window in probe_windows(checkpoint, list(probes), settings, row):
        session = session or open_single(checkpoint, window, Method("rollout", row), settings, {})
        for item in window:
            wanted = torch.from_numpy(maps[place].weights).double()
            place += 1
            if float(wanted.sum()) > 0:
                layers, read = _attention(session, item)
                kept.append((layers, read, wanted))
                size += sum(layer.numel() for layer in layers)
                _check_size(size)
    if not kept:
        raise ProbeError("occlusion moves the target logit of no calibration probe; choose other probes")
    return _fit(kept, residual, steps)


def _check_size(size: int) -> None:
    if size > MOST_ENTRIES:
        raise CaptureError(
            f"calibration probes have more than {MOST_ENTRIES:,} attention weights; fit on fewer or shorter "
            "ones"
        )


def _attention(session: Session, item: Encoded) -> tuple[list[Tensor], Tensor]:
    """Return every layer's attention (head, query, key) of one probe, and the row that is read."""
    tensors = stack([item])
    read = torch.from_numpy(read_weights(session, [item]))[0]
    device = core_model(session.checkpoint.model).device
    fold = _Keeping(read[None].to(device), valid_positions(tensors, 1, len(item)).to(device))
    fold_batch(session.checkpoint.model, session.plan, tensors, fold, keep_logits=session.keep_logits)
    return fold.layers, read


def _fit(kept: Sequence[tuple[list[Tensor], Tensor, Tensor]], residual: float, steps: int) -> HeadFit:
    logits = [torch.zeros(len(layer), dtype=torch.float64, requires_grad=True) for layer in kept[0][0]]
    optimizer = torch.optim.Adam(logits, lr=RATE)
    history = []
    with torch.enable_grad():
        for _ in range(steps + 1):
            loss = torch.stack(
                [_divergence(probe, [one.softmax(0) for one in logits], residual) for probe in kept]
            ).mean()
            history.append((float(loss.detach()), [one.detach().softmax(0) for one in logits]))
            gradients = torch.autograd.grad(loss, logits, allow_unused=True)
            for one, gradient in zip(logits, gradients, strict=True):
                one.grad = gradient
            optimizer.step()
    best = min(history, key=lambda pair: pair[0])
    weights = tuple(tuple(row.tolist()) for row in best[1])
    return HeadFit(weights, history[0][0], best[0], len(kept))


def _divergence(
    probe: tuple[list[Tensor], Tensor, Tensor], weights: Sequence[Tensor], residual: float
) -> Tensor:
    """KL divergence of the content of the weighted rollout's row from the occlusion map."""
    layers, read, wanted = probe
    row = read.double()
    for layer, share in zip(reversed(layers), reversed(weights), strict=True):
        fused = torch.einsum("h,hqk->qk", share, layer.double().cpu())
        row = (1 - residual) * (row @ fused) + residual * row
    content = wanted > 0
    inside = row[content].clamp_min(1e-12)
    inside, aim = inside / inside.sum(), wanted[content] / wanted.sum()
    return (aim * (aim.log() - inside.log())).sum()
