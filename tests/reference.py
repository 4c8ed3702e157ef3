"""Slow implementations, written with loops from the equations; the fast code is compared with these.

Nothing here is imported from audit. Attention is (layer, batch, head, query, key) as everywhere.
"""

from fractions import Fraction
from math import floor, inf, log2, sqrt

import numpy as np

# --- attention to drawn shapes ----------------------------------------------------------------


def random_attention(seed, layers, batch, heads, n, *, keys=None, kind="dense", causal=False):
    """Return softmax-like attention; `kind` "ties" has rows of sixteenths with zeros and equal entries."""
    rng = np.random.default_rng(seed)
    shape = (layers, batch, heads, n, keys or n)
    allowed = np.tril(np.ones(shape[-2:], dtype=bool)) if causal else np.ones(shape[-2:], dtype=bool)
    if kind == "dense":
        scores = np.where(allowed, rng.gamma(0.7, size=shape), 0.0) + np.where(allowed, 1e-6, 0.0)
        return scores / scores.sum(-1, keepdims=True)
    attention = np.zeros(shape)
    for index in np.ndindex(shape[:-1]):
        open_keys = np.flatnonzero(allowed[index[-1]])
        attention[index][open_keys] = rng.multinomial(16, np.full(len(open_keys), 1 / len(open_keys))) / 16
    return attention


# --- rollout family ---------------------------------------------------------------------------


def fuse(attention, *, head_fusion="mean", head_weights=None, ratio=0.0, below=None, top_k=None, mask=None):
    """Fuse and prune one sample's layer (head, query, key); returns the matrix and its empty rows."""
    heads, queries, keys = attention.shape
    fused, empty = np.zeros((queries, keys)), []
    for i in range(queries):
        row = [
            merge([attention[h, i, j] for h in range(heads)], head_fusion, head_weights) for j in range(keys)
        ]
        own = sum(attention[h, i, j] for h in range(heads) for j in range(keys)) / heads
        if head_fusion in ("max", "min"):
            row = rescale(row, own)
        open_keys = [j for j in range(keys) if (row[j] > 0 if mask is None else mask[i][j])]
        row = rescale(prune(row, open_keys, ratio, below, top_k, mask is not None), sum(row))
        if sum(row) == 0:
            empty.append(i)
            row = [1.0 if j == i else 0.0 for j in range(keys)]
        fused[i] = row
    return fused, empty


def merge(values, head_fusion, head_weights):
    if head_fusion == "weighted":
        return sum(weight * value for weight, value in zip(head_weights, values, strict=True))
    return {"mean": sum(values) / len(values), "max": max(values), "min": min(values)}[head_fusion]


def prune(row, open_keys, ratio, below, top_k, masked):
    kept = set(open_keys)
    if not open_keys:
        return [0.0] * len(row)
    ascending = sorted(row[j] for j in open_keys)
    dropped = floor(Fraction(repr(ratio)) * len(open_keys))
    smallest = ascending[dropped] if dropped else -inf
    largest = ascending[-top_k] if top_k is not None and top_k <= len(ascending) else -inf
    for j in open_keys:
        if row[j] < smallest or row[j] < largest or (below is not None and row[j] < below):
            kept.discard(j)
    return [value if j in kept else 0.0 for j, value in enumerate(row)]


def rescale(row, total):
    own = sum(row)
    return [value / own * total if own else 0.0 for value in row]


def mix(fused, residual):
    """(1 - ρ)A + ρI with ρ a float or one weight per query."""
    n = len(fused)
    rho = np.broadcast_to(residual, (n,))
    return np.array(
        [[(1 - rho[i]) * fused[i][j] + (rho[i] if i == j else 0.0) for j in range(n)] for i in range(n)]
    )


def matmul(left, right):
    out = np.zeros((len(left), len(right[0])))
    for i in range(len(left)):
        for j in range(len(right[0])):
            out[i, j] = sum(left[i][k] * right[k][j] for k in range(len(right)))
    return out


def rollout(attentions, residual=0.5, start_layer=0, **pruning):
    """R = Ã_L ··· Ã_1 for every sample; `residual` is (layer, batch, query)."""
    layers, batch, _, n, _ = attentions.shape
    rho = np.broadcast_to(residual, (layers, batch, n))
    found = []
    for b in range(batch):
        total = np.eye(n)
        for index in range(start_layer, layers):
            total = matmul(mix(fuse(attentions[index, b], **pruning)[0], rho[index, b]), total)
        found.append(total)
    return np.array(found)


def per_head(attentions, residual=0.5):
    """R^(l,k) = Ã^(l,k) R_{l-1}, the lower layers merged."""
    layers, batch, heads, n, _ = attentions.shape
    found = np.zeros((batch, heads, n, n))
    for b in range(batch):
        below = np.eye(n) if layers == 1 else rollout(attentions[:-1, b : b + 1], residual)[0]
        for h in range(heads):
            found[b, h] = matmul(mix(attentions[-1, b, h], residual), below)
    return found


def flow(attentions, row, key, residual=0.5):
    """One max-flow of the first sample by networkx, on float capacities."""
    import networkx

    graph = networkx.DiGraph()
    layers, _, _, n, _ = attentions.shape
    for index in range(layers):
        step = mix(attentions[index, 0].mean(0), residual)
        for i in range(n):
            for j in range(n):
                graph.add_edge((index + 1, i), (index, j), capacity=step[i, j])
    return networkx.maximum_flow_value(graph, (layers, row), (0, key))


# --- gradients --------------------------------------------------------------------------------


def weigh(attention, gradient):
    """Ā = mean over heads of the positive part of ∇A ⊙ A, for one sample (head, query, key)."""
    heads, queries, keys = attention.shape
    out = np.zeros((queries, keys))
    for i in range(queries):
        for j in range(keys):
            out[i, j] = sum(max(attention[h, i, j] * gradient[h, i, j], 0.0) for h in range(heads)) / heads
    return out


def gradient_rollout(attentions, gradients, form):
    found = []
    for b in range(attentions.shape[1]):
        n = attentions.shape[-1]
        total = np.eye(n)
        for attention, gradient in zip(attentions[:, b], gradients[:, b], strict=True):
            weighted = weigh(attention, gradient)
            if form == "relevance":
                total = total + matmul(weighted, total)
            else:
                step = np.eye(n) + weighted
                total = matmul([row / sum(row) for row in step], total)
        found.append(total)
    return np.array(found)


def normalized_self(relevance):
    """R̄ = (R - I)/rowsum(R - I) + I, a row without relevance keeping I."""
    eye = np.eye(len(relevance))
    rest = relevance - eye
    return np.array([row / sum(row) if sum(row) else row for row in rest]) + eye


def co_attention(state, first, second):
    """One layer in which each stream attends to the other; all additions before any update."""
    r11, r12, r21, r22 = state
    n11, n22 = normalized_self(r11), normalized_self(r22)
    return (
        r11 + matmul(first, r21),
        r12 + matmul(n11.T, matmul(first, n22)),
        r21 + matmul(n22.T, matmul(second, n11)),
        r22 + matmul(second, r12),
    )


def self_attention(state, stream, weighted):
    r11, r12, r21, r22 = state
    if stream == "first":
        return r11 + matmul(weighted, r11), r12 + matmul(weighted, r12), r21, r22
    return r11, r12, r21 + matmul(weighted, r21), r22 + matmul(weighted, r22)


# --- encoder-decoder --------------------------------------------------------------------------


def encoder_decoder(encoder, decoder, cross, residual, beta):
    """S and D of one sample (layer, head, query, key); `beta` is (layer, query)."""
    top = rollout(encoder[:, None], residual)[0]
    steps = decoder.shape[-1]
    source, prefix = np.zeros((steps, len(top))), np.eye(steps)
    for index in range(len(decoder)):
        step = mix(decoder[index].mean(0), residual)
        source, prefix = matmul(step, source), matmul(step, prefix)
        reached = matmul(cross[index].mean(0), top)
        for t in range(steps):
            source[t] = beta[index][t] * source[t] + (1 - beta[index][t]) * reached[t]
            prefix[t] = beta[index][t] * prefix[t]
    return source, prefix


# --- value-aware ------------------------------------------------------------------------------


def transformed(attention, values, output_weight, hidden):
    """T_i(x_j) of one sample: attention (head, n, n), values (head, n, d), output (head, d, m)."""
    heads, n, _ = attention.shape
    out = np.zeros((n, n, output_weight.shape[-1]))
    for i in range(n):
        for j in range(n):
            for h in range(heads):
                out[i, j] += attention[h, i, j] * (output_weight[h].T @ values[h, j])
            if i == j:
                out[i, j] += hidden[i]
    return out


def alti(vectors):
    """max(0, ‖y‖₁ - ‖y - T_j‖₁) over the keys of one query (key, dim), not normalised."""
    total = [sum(vector[d] for vector in vectors) for d in range(len(vectors[0]))]
    size = sum(abs(value) for value in total)
    return [
        max(0.0, size - sum(abs(t - v) for t, v in zip(total, vector, strict=True))) for vector in vectors
    ]


# --- metrics ----------------------------------------------------------------------------------


def kl_bits(p, q):
    return sum(a * log2(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def js_bits(p, q):
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return kl_bits(p, middle) / 2 + kl_bits(q, middle) / 2


def hellinger(p, q):
    return sqrt(sum((sqrt(a) - sqrt(b)) ** 2 for a, b in zip(p, q, strict=True)) / 2)


def top_k_overlap(p, q, k):
    first, second = ({i for i, v in enumerate(m) if v >= sorted(m)[-k]} for m in (p, q))
    return len(first & second) / max(len(first), len(second))


def transport_cost(p, q, cost):
    """Earth mover's distance as the transport problem over all n² pairs."""
    from scipy.optimize import linprog

    n = len(p)
    rows = np.kron(np.eye(n), np.ones(n))
    columns = np.kron(np.ones(n), np.eye(n))
    return linprog(np.ravel(cost), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([p, q])).fun
