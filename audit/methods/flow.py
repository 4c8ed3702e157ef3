"""Attention flow: how much could at most pass from an input to an output position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from audit.methods._arrays import (
    Array,
    Residual,
    as_layers,
    as_working,
    check_row_sums,
    check_square,
    normalize_rows,
    residual_per_layer,
    restore,
)
from audit.methods.fusion import fuse_heads
from audit.methods.rollout import add_residual

CAPACITY_SCALE = 2**30
"""Capacities are rounded to integers of this scale; a row's sum then still fits SciPy's int32."""

EDGES_PER_SECOND = 20_000_000
"""Edges of the graph that one max-flow passes in a second on one core (measured at n = 128 and 512)."""

MAX_SECONDS = 300.0
"""Above this estimate attention flow is refused unless the caller raises it."""


def attention_flow(
    attentions: Sequence[Array] | Array,
    *,
    rows: Sequence[int] | None = None,
    residual: Residual = 0.5,
    max_seconds: float = MAX_SECONDS,
) -> Array:
    r"""Return the maximum flow from each output position to each input position.

    The graph has (L+1)·n nodes; the edge from node (l, i) to node (l-1, j) has the capacity
    :math:`\tilde A_l[i, j]`. Each value is one max-flow (Abnar & Zuidema, ACL 2020, arXiv 2005.00928,
    section 3).

    Parameters
    ----------
    attentions : sequence of (batch, head, query, key), or (layer, batch, head, query, key)
        Attention weights; rows over keys sum to 1. Heads are averaged.
    rows : sequence of int, optional
        Output positions to compute; all by default. One row costs n max-flows.
    residual : float, one float per layer, or (layer, batch, query)
        Weight ρ of the identity in [0, 1].
    max_seconds : float
        Refuse when the estimated cost on one core is above this.

    Returns
    -------
    (batch, row, key), float32 or float64
        Raw max-flow values, not normalised: :func:`normalized_flow` divides rows by their sums. With R
        the rollout, R ≤ F ≤ min(1, Σ_k Ã_0[k, j]) in every entry (:func:`flow_bound`).

    Raises
    ------
    ValueError
        When an argument has the wrong shape or range, or the cost is above `max_seconds`.

    Notes
    -----
    SciPy's integer max-flow on capacities scaled by 2³⁰ finds the minimum cut, whose capacity is then
    summed in float64: exact unless two cuts lie within 2·10⁻⁹ of each other. n = 128, L = 12 takes
    less than a second a row on one core, n = 512 about a minute and a half.

    It tells how much *could* pass, with every upper layer used to the full. Since the upper layers are
    wide, inputs often sit on the upper bound, where the value is that of the lowest layer's column
    alone and says nothing about the layers above: report :func:`saturated_share`.

    Examples
    --------
    >>> import numpy as np
    >>> lower, upper = np.array([[.8, .2], [.4, .6]]), np.array([[.5, .5], [.1, .9]])
    >>> attention_flow([lower[None, None], upper[None, None]])[0].round(12)
    array([[0.95, 0.35],
           [0.25, 0.85]])
    """
    mixed = mixed_layers(attentions, residual)
    like = as_layers("attentions", attentions)[0]
    layer_count, batch, size, _ = mixed.shape
    chosen = _checked_rows(rows, size)
    _check_cost(batch * len(chosen) * size, layer_count * size * size, max_seconds)
    flows = np.empty((batch, len(chosen), size))
    for sample in range(batch):
        for position, row in enumerate(chosen):
            flows[sample, position] = _row_flows(mixed[:, sample], row)
    return _like_attention(torch.from_numpy(flows), like)


def normalized_flow(flow: Array) -> Array:
    """Return `flow` with each row divided by its sum.

    Parameters
    ----------
    flow : (batch, row, key)
        Raw values of :func:`attention_flow`.

    Returns
    -------
    (batch, row, key)
        Rows sum to 1: the map of attention flow.

    Examples
    --------
    >>> import numpy as np
    >>> normalized_flow(np.array([[[1.0, 0.5, 0.5]]]))
    array([[[0.5 , 0.25, 0.25]]])
    """
    return restore(normalize_rows(as_working("flow", flow)), flow)


def flow_bound(attentions: Sequence[Array] | Array, *, residual: Residual = 0.5) -> Array:
    """Return min(1, Σ_k Ã_0[k, j]), above which no flow into input j can lie.

    Parameters
    ----------
    attentions, residual
        As in :func:`attention_flow`.

    Returns
    -------
    (batch, key), float64 or float32

    Examples
    --------
    >>> import numpy as np
    >>> flow_bound(np.array([[[[[.8, .2], [.4, .6]]]]])).round(12)
    array([[1. , 0.9]])
    """
    layers = as_layers("attentions", attentions)
    lowest = torch.from_numpy(mixed_layers(layers[:1], _lowest(residual, len(layers)))[0])
    return _like_attention(lowest.sum(-2).clamp_max(1.0), layers[0])


def saturated_share(flow: Array, bound: Array, *, tolerance: float = 1e-6) -> Array:
    """Return which share of the inputs sits on the upper bound of the flow.

    Parameters
    ----------
    flow : (batch, row, key)
        Raw values of :func:`attention_flow`.
    bound : (batch, key)
        From :func:`flow_bound`.
    tolerance : float
        Largest distance that counts as sitting on the bound.

    Returns
    -------
    (batch, row), in [0, 1]
        At 1 the flow says nothing about any layer above the lowest.

    Raises
    ------
    ValueError
        When the shapes do not match.

    Examples
    --------
    >>> import numpy as np
    >>> saturated_share(np.array([[[1.0, 0.5]]]), np.array([[1.0, 0.9]]))
    array([[0.5]])
    """
    values, limit = as_working("flow", flow), as_working("bound", bound)
    if values.ndim != 3 or tuple(limit.shape) != (values.shape[0], values.shape[2]):
        raise ValueError(
            f"bound: expected (batch, key) for a flow of shape {tuple(values.shape)}, "
            f"got shape {tuple(limit.shape)}"
        )
    return restore((values >= limit[:, None] - tolerance).to(values.dtype).mean(-1), flow)


def mixed_layers(attentions: Sequence[Array] | Array, residual: Residual) -> NDArray[np.float64]:
    """Return Ã of all layers as float64 (layer, batch, query, key); the heads are averaged first."""
    layers = as_layers("attentions", attentions)
    check_square("attentions", layers)
    batch, _, queries, _ = layers[0].shape
    weights = residual_per_layer("residual", residual, len(layers), (batch, queries))
    mixed = []
    for index, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        fused = as_working("attentions", fuse_heads(layer)).detach().cpu()
        check_row_sums(f"attentions[{index}]", fused)
        mixed.append(add_residual(fused.double(), weight).numpy())
    return np.stack(mixed)


def layered_flow(
    layers: Sequence[Any], rows: Sequence[int], *, max_seconds: float = MAX_SECONDS
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the maximum flow through layers of any sizes, and which inputs sit on its upper bound.

    What :func:`attention_flow` is where the layers have different positions, as where one model's output
    becomes a part of another one's input.

    Parameters
    ----------
    layers : sequence of (query, key), dense or sparse, float64
        Capacities, the lowest layer first; the keys of each are the queries of the one below it.
    rows : sequence of int
        Queries of the last layer.
    max_seconds : float
        Refuse when the estimated cost on one core is above this.

    Returns
    -------
    flow : (row, key of the lowest layer)
        Raw values: at least the product of the layers, at most min(1, Σ_k) of the input's column in the
        lowest layer that does not just pass it on.
    saturated : bool (row, key)
        Which sit on that bound.

    Raises
    ------
    ValueError
        When the cost is above `max_seconds`.

    Examples
    --------
    >>> import numpy as np
    >>> lowest, highest = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]), np.array([[0.25, 0.75]])
    >>> flow, saturated = layered_flow([lowest, highest], [0])
    >>> flow.tolist(), saturated.tolist()
    ([[0.25, 0.5, 0.5]], [[True, True, True]])
    """
    graph = _Graph.of(layers)
    _check_cost(len(rows) * graph.inputs, len(graph.edges.capacities), max_seconds)
    flow = np.array([graph.flows(row) for row in rows], dtype=np.float64)
    return flow, flow >= np.minimum(_bounds(layers), 1.0) - 1e-6


def _bounds(layers: Sequence[Any]) -> NDArray[np.float64]:
    """Return the capacity into each input of the lowest layer, seen above layers that only pass it on."""
    from scipy.sparse import coo_array

    bound, here = np.zeros(layers[0].shape[1]), np.arange(layers[0].shape[1])
    inputs = here.copy()
    for layer in layers:
        part = coo_array(layer)
        rows, columns = part.coords
        incoming, sources = np.zeros(layer.shape[1]), np.zeros(layer.shape[1], dtype=np.int64)
        np.add.at(incoming, columns, part.data)
        sources[columns] = rows
        alone = np.bincount(columns, minlength=layer.shape[1]) == 1
        passed = alone & (incoming == 1) & (np.bincount(rows, minlength=layer.shape[0])[sources] == 1)
        bound[inputs] = incoming[here]
        inputs, here = inputs[passed[here]], sources[here[passed[here]]]
    return bound


class _Edges(NamedTuple):
    tails: NDArray[Any]
    heads: NDArray[Any]
    capacities: NDArray[np.float64]


class _Graph(NamedTuple):
    """Nodes of all layers, those of the lowest first, and the edges between them, also as whole numbers."""

    edges: _Edges
    scaled: Any
    start: int
    outputs: int
    inputs: int
    incoming: NDArray[np.float64]

    @classmethod
    def of(cls, layers: Sequence[Any]) -> _Graph:
        from scipy.sparse import coo_array, csr_array

        sizes = [layers[0].shape[1], *(layer.shape[0] for layer in layers)]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        parts = [coo_array(layer) for layer in layers]
        edges = _Edges(
            np.concatenate([part.coords[0] + starts[i + 1] for i, part in enumerate(parts)]),
            np.concatenate([part.coords[1] + starts[i] for i, part in enumerate(parts)]),
            np.concatenate([part.data for part in parts]),
        )
        whole = np.rint(edges.capacities * CAPACITY_SCALE).astype(np.int32)
        kept = whole > 0
        edges = _Edges(edges.tails[kept], edges.heads[kept], edges.capacities[kept])
        shape = (int(starts[-1]), int(starts[-1]))
        scaled = csr_array((whole[kept], (edges.tails, edges.heads)), shape=shape)
        incoming = np.asarray(parts[0].sum(axis=0), dtype=np.float64).ravel()
        return cls(edges, scaled, int(starts[-2]), sizes[-1], sizes[0], incoming)

    def flows(self, row: int) -> list[float]:
        """Return the flow from output `row` to every input."""
        from scipy.sparse.csgraph import maximum_flow

        source = self.start + row
        own = self.edges.tails == source
        scaled, incoming = np.asarray(self.scaled.sum(axis=0)).ravel(), self.incoming
        outgoing = int(self.scaled[[source]].sum()), float(self.edges.capacities[own].sum())
        found = []
        for sink in range(self.inputs):
            best = maximum_flow(self.scaled, source, sink)
            # The cut around either end is nearly always the minimum one; the search is for the rest.
            ends = (outgoing, (int(scaled[sink]), float(incoming[sink])))
            known = [real for whole, real in ends if whole == best.flow_value]
            found.append(min(known) if known else _cut_capacity(self.scaled - best.flow, self.edges, source))
        return found


def _row_flows(mixed: NDArray[np.float64], row: int) -> list[float]:
    """Return the flow of one sample from output `row` to every input; `mixed` is (layer, query, key)."""
    return _Graph.of(list(mixed)).flows(row)


def _cut_capacity(open_edges: Any, edges: _Edges, source: int) -> float:
    """Return the capacity of the edges that leave what `source` still reaches: the minimum cut."""
    from scipy.sparse.csgraph import breadth_first_order

    open_edges.eliminate_zeros()
    reached = np.zeros(open_edges.shape[0], dtype=bool)
    reached[breadth_first_order(open_edges, source, return_predecessors=False)] = True
    return float(edges.capacities[reached[edges.tails] & ~reached[edges.heads]].sum())


def _checked_rows(rows: Sequence[int] | None, size: int) -> list[int]:
    chosen = list(range(size)) if rows is None else [int(row) for row in rows]
    if not chosen or not all(-size <= row < size for row in chosen):
        raise ValueError(f"rows: expected positions among {size}, got {chosen}")
    return [row % size for row in chosen]


def _check_cost(flows: int, edges: int, max_seconds: float) -> None:
    seconds = flows * edges / EDGES_PER_SECOND
    if seconds > max_seconds:
        raise ValueError(
            f"rows: expected at most {max_seconds:.0f} s of work, got {flows:,} max-flows over {edges:,} "
            f"edges, about {seconds / 60:,.0f} minutes; ask for fewer rows or raise max_seconds"
        )


def _like_attention(values: torch.Tensor, like: Array) -> Array:
    """Return `values` in the working precision, on the device and as the kind of `like`."""
    empty = as_working("attentions", like[:0])
    return restore(values.to(device=empty.device, dtype=empty.dtype), like)


def _lowest(residual: Residual, layers: int) -> Residual:
    """Return the part of `residual` that belongs to the lowest layer."""
    if isinstance(residual, int | float) or getattr(residual, "ndim", 1) == 0:
        return residual
    if len(residual) != layers:
        raise ValueError(f"residual: expected one weight for each of {layers} layers, got {len(residual)}")
    return cast("Residual", residual[:1])
