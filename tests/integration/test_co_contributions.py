"""Norms, ALTI, measured residuals and single heads on LXMERT against products of slow matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from audit.capture.inputs.encoded import Encoded
from audit.capture.session import capture_prepared
from audit.errors import CaptureError, ConfigError
from audit.records import Checkpoint, Map, Method
from tests.integration.test_co_attention import REGIONS, inputs, kept, lxmert
from tests.integration.test_co_attribution import nudged
from tests.integration.test_pair_methods import slow_matrix

STREAMS = ("tt", "tt", "ii", "ti", "it", "tt", "ii", "ti", "it", "tt", "ii")
"""Queries and keys of every attention of the tiny model, in the order in which they run."""


def pieces(subject: Checkpoint, item: Encoded) -> list[tuple[Tensor, Tensor, Any, Tensor, Any]]:
    """Weights, values, output projection, queries' states and norm of every attention, in order."""
    found: list[dict[str, Any]] = []
    modules = dict(subject.model.named_modules())
    for path, module in modules.items():
        if type(module).__name__ != "LxmertAttention":
            continue
        out = modules[f"{path.rpartition('.')[0]}.output"]

        def attended(_m: Any, args: Any, _o: Any, out: Any = out) -> None:
            found[-1] |= {"x": args[0][0].detach(), "out": out}

        module.value.register_forward_hook(lambda _m, _a, given: found.append({"value": given[0].detach()}))
        module.register_forward_hook(attended)
    weights = [layer[0].detach() for layer in kept(subject, item)]
    return [
        (w, one["value"], one["out"].dense, one["x"], one["out"].LayerNorm)
        for w, one in zip(weights, found, strict=True)
    ]


def carried(matrices: list[Any], n: int) -> list[Any]:
    """Return R after each step; where streams cross, matrices have what is kept as their last key."""
    states, R, waiting = [], np.eye(n + REGIONS), None
    places = {"t": slice(0, n), "i": slice(n, None)}
    for ends, matrix in zip(STREAMS, matrices, strict=True):
        query, key = (places[end] for end in ends)
        step = np.eye(n + REGIONS) if waiting is None else waiting
        if ends in ("ti", "it"):
            step[query, query] = np.diag(matrix[:, -1])
            step[query, key] = matrix[:, :-1]
            waiting = step if waiting is None else None
            if waiting is not None:
                continue
        else:
            step[query, key] = matrix
        R = step @ R
        states.append(R)
    return states


def check(maps: tuple[Map, ...], row: Any, n: int, atol: float = 1e-4) -> None:
    text, image = maps
    assert text.share + image.share == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(text.weights * text.share, row[:n], atol=atol)
    np.testing.assert_allclose(image.weights * image.share, row[n:], atol=atol)


@pytest.mark.parametrize("name", ["norms", "alti"])
def test_contributions_equal_those_of_each_value_sent_through_the_projection_alone(name: str) -> None:
    item = inputs(nudged())[0]
    matrices = [
        slow_matrix(name, w, v, project, x, norm, cross=ends in ("ti", "it"))
        for ends, (w, v, project, x, norm) in zip(STREAMS, pieces(nudged(), item), strict=True)
    ]
    (found,) = capture_prepared(nudged(), [item], method=Method(name))
    check(found.maps, carried(matrices, len(item))[-1][0], len(item))
    fixed = next(iter(capture_prepared(nudged(), [item])))
    assert abs(found.maps[1].share - fixed.maps[1].share) > 0.05


def test_measured_residuals_are_ratios_of_norms_in_every_sum() -> None:
    item, matrices = inputs(nudged())[0], []
    for ends, (w, v, project, x, _) in zip(STREAMS, pieces(nudged(), item), strict=True):
        heads, _, keys = w.shape
        parts = torch.einsum("hqk,khd->qhd", w, v.view(keys, heads, -1)).flatten(1)
        with torch.no_grad():
            added = project(parts).norm(dim=-1)
        rho = (x.norm(dim=-1) / (x.norm(dim=-1) + added)).numpy()[:, None]
        mixed = (1 - rho) * w.mean(0).numpy()
        crossing = ends in ("ti", "it")
        matrices.append(np.hstack([mixed, rho]) if crossing else mixed + np.diag(rho[:, 0]))
    method = Method("rollout", params={"residual": "measured"})
    (found,) = capture_prepared(nudged(), [item], method=method)
    check(found.maps, carried(matrices, len(item))[-1][0], len(item))


@pytest.mark.parametrize("layer", [0, -1])
def test_each_head_of_the_texts_cross_attention_is_carried_over_everything_merged_below(layer: int) -> None:
    subject = lxmert()
    item = inputs(subject)[0]
    n, layers = len(item), [one[0].detach().numpy() for one in kept(subject, item)]

    def matrix(weights: Any, ends: str) -> Any:
        if ends in ("ti", "it"):
            return np.hstack([0.5 * weights, np.full((len(weights), 1), 0.5)])
        return 0.5 * weights + 0.5 * np.eye(len(weights))

    for head in (0, 3):
        chosen = [one.mean(0) for one in layers]
        chosen[(3, 7)[layer]] = layers[(3, 7)[layer]][head]
        states = carried([matrix(w, ends) for w, ends in zip(chosen, STREAMS, strict=True)], n)
        method = Method("per_head_rollout", params={"layer": layer, "head": head})
        (found,) = capture_prepared(subject, [item], method=method)
        check(found.maps, states[(3, 6)[layer]][0], n, atol=1e-6)
        assert found.maps[0].diagnostics["head_disagreement"] > 0
    mean = Method("per_head_rollout", params={"layer": layer})
    (found,) = capture_prepared(subject, [item], method=mean)
    states = carried([matrix(w.mean(0), ends) for w, ends in zip(layers, STREAMS, strict=True)], n)
    check(found.maps, states[(3, 6)[layer]][0], n, atol=1e-6)


def test_heads_and_layers_that_do_not_exist_are_refused() -> None:
    subject = lxmert()
    for given, why in (({"head": 9}, "head = 9, but the layer has"), ({"layer": 2}, "but 2 layers attend")):
        with pytest.raises(ConfigError, match=why):
            list(capture_prepared(subject, inputs(subject), method=Method("per_head_rollout", params=given)))


def test_a_sum_that_its_parts_do_not_give_is_refused() -> None:
    subject = nudged()
    norm: nn.Module = subject.model.lxmert.encoder.x_layers[1].visual_attention.output.dropout
    norm.register_forward_hook(lambda _m, _a, given: 2 * given)
    with pytest.raises(CaptureError, match="what its positions add differs from the layer's own output"):
        list(capture_prepared(subject, inputs(subject), method=Method("norms")))
