"""Models of two streams as one stack: every layer a square matrix over the positions of both."""

from __future__ import annotations

import torch
from torch import Tensor

from audit.errors import CaptureError
from audit.methods.flow import attention_flow, flow_bound, saturated_share


class JointSteps:
    """Layers of a model of two streams as square matrices over the positions of both, first before second.

    A position that a layer leaves alone draws on itself. The product of these matrices is the rollout of
    the model, and the largest flow through them is its attention flow.
    """

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        self.steps: list[Tensor] = []

    def add(
        self,
        like: Tensor,
        *,
        first: Tensor | None = None,
        second: Tensor | None = None,
        first_second: Tensor | None = None,
        second_first: Tensor | None = None,
    ) -> None:
        """Add a layer by its four parts (batch, query, key); a self part left out is the identity."""
        m, n = self.sizes
        step = torch.eye(m + n, dtype=like.dtype, device=like.device).repeat(len(like), 1, 1)
        for part, rows, columns in (
            (first, slice(0, m), slice(0, m)),
            (second, slice(m, None), slice(m, None)),
            (first_second, slice(0, m), slice(m, None)),
            (second_first, slice(m, None), slice(0, m)),
        ):
            if part is not None:
                step[:, rows, columns] = part.to(step.dtype)
        self.steps.append(step)

    def flow(self, read: Tensor, max_seconds: float) -> tuple[Tensor, Tensor]:
        """Return the raw flow into the output row `read` (batch, both), and its saturated share.

        Raises
        ------
        CaptureError
            When it would take longer than `max_seconds`.
        """
        flows, shares = [], []
        for i, weights in enumerate(read.double().cpu()):
            layers = [step[i].double().cpu()[None, None] for step in self.steps]
            rows = weights.nonzero()[:, 0].tolist()
            try:
                flow = attention_flow(layers, rows=rows, residual=0.0, max_seconds=max_seconds)
            except ValueError as error:
                raise CaptureError(
                    f"attention_flow of a probe with {sum(self.sizes)} positions: {error}; read a single "
                    "row, shorten the probes, or raise [method] max_seconds"
                ) from None
            share = saturated_share(flow, flow_bound(layers, residual=0.0))
            flows.append(weights[rows] @ flow[0])
            shares.append(weights[rows] @ share[0])
        return torch.stack(flows).to(read.device), torch.stack(shares).to(read.device)
