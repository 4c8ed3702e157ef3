r"""What each head writes of each position: what a layer's vectors are made of, or their lengths alone.

Derivation. The vectors of one layer are (:func:`audit.methods.value_aware.transformed_vectors`)

.. math:: T_q(x_k) = \sum_h A^h_{qk} u^h_k + [q = k]\, x_k, \qquad u^h_k = W_O^h v^h_k .

The norms behind them are linear but for a factor of the query: γ ⊙ (z - mean z) / σ_q. What is linear is
applied to the u and x of each position once, instead of to every vector; where each row is divided by its
sum, σ_q cancels. Of a vector's length no more is needed than its key's H + 1 vectors u^1_k … u^H_k, x_k.
With their thin factorisation [u_k x_k] = Q_k R_k,

.. math:: \|T_q(x_k)\| = \|R_k\,(A^1_{qk}, \dots, A^H_{qk}, [q = k])\|,

since Q_k keeps lengths: vectors of H + 1 numbers instead of the model's width, and none of it approximate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Written:
    """What is written of each position of one layer.

    Attributes
    ----------
    heads : Tensor (batch, head, key, dim)
        What each head writes of a key where it attends to nothing else.
    own : Tensor (batch, query, dim)
        What the residual keeps of each query. Where there are more keys, queries are the last of them.
    """

    heads: Tensor
    own: Tensor

    @classmethod
    def of(cls, value: Tensor, weight: Tensor, hidden: Tensor) -> Written:
        """Return what values (batch, head, key, head_dim) become by the output projection, cut by heads."""
        return cls(torch.einsum("bhkd,hdm->bhkm", value, weight), hidden)

    def through(self, gamma: Tensor) -> Written:
        """Return what a layer norm of weight `gamma` (dim,) makes of it, not yet divided by its deviation."""
        return Written(*(gamma * (part - part.mean(-1, keepdim=True)) for part in (self.heads, self.own)))

    def short(self) -> Written:
        """Return it in a basis of each key's own: vectors of at most H + 1 numbers, as long as before."""
        own = torch.nn.functional.pad(self.own, (0, 0, self.offset, 0))
        columns = torch.cat([self.heads, own[:, None]], dim=1).permute(0, 2, 3, 1)
        factor = torch.linalg.qr(columns, mode="r").R  # (batch, key, number, head and own)
        return Written(factor[..., :-1].permute(0, 3, 1, 2), factor[:, self.offset :, :, -1])

    @property
    def offset(self) -> int:
        """Return the position of the first query among the keys."""
        return self.heads.shape[2] - self.own.shape[1]

    @property
    def width(self) -> int:
        """Return how many numbers a vector has."""
        return self.heads.shape[-1]

    def vectors(self, weights: Tensor, rows: slice) -> Tensor:
        """Return the vectors of a block of queries: (batch, query of the block, key, dim).

        Parameters
        ----------
        weights : Tensor (batch, head, query of the block, key)
        rows : slice
            Which queries.
        """
        found = torch.einsum("bhqk,bhkm->bqkm", weights, self.heads)
        found.diagonal(rows.start + self.offset, 1, 2).add_(self.own[:, rows].transpose(1, 2))
        return found
