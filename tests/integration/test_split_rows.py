"""Value-aware maps from rows, of long inputs, are those of the whole matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import audit
from audit.capture.engines import contributions, method_pass, query_blocks, split_rows
from audit.capture.engines.split_rows import SplitRowFold
from audit.errors import CaptureError
from audit.records import Checkpoint, Map, Method
from tests.integration.test_capture_families import family_probes
from tests.integration.test_methods_value_aware import POST, shaken
from tests.integration.test_row_fold import sinks
from tests.integration.tiny_models import text_probes

MEASURED: tuple[str, dict[str, Any]] = ("rollout", {"residual": "measured"})
PRUNED: tuple[str, dict[str, Any]] = ("rollout", {"residual": "measured", "top_k": 2, "start_layer": 1})
SPLIT = [("norms", {}), ("alti", {})]
GLOBENC: list[tuple[str, dict[str, Any]]] = [("globenc", {})]


@pytest.fixture
def rows_only(monkeypatch: pytest.MonkeyPatch) -> list[SplitRowFold]:
    """Take maps of any length from rows, two or three queries at a time, and say which were."""
    made: list[SplitRowFold] = []

    class Noted(SplitRowFold):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(split_rows, "LEAST_POSITIONS", 1)
    monkeypatch.setattr(split_rows, "LEAST_SPLIT", 1)
    monkeypatch.setattr(method_pass, "SplitRowFold", Noted)
    monkeypatch.setattr(query_blocks, "BLOCK_ENTRIES", 64)
    monkeypatch.setattr(query_blocks, "FEWEST_QUERIES", 1)
    monkeypatch.setattr(contributions, "BLOCK_ENTRIES", 256)
    return made


def maps_of(subject: Checkpoint, probes: Any, method: Method) -> list[Map]:
    return list(audit.compute_maps(subject, probes, method=method))


@pytest.mark.parametrize("family", ["bert", "distilbert", "vit", "gpt2", "llama"])
def test_maps_from_rows_are_those_of_the_whole_matrix(
    family: str, rows_only: list[SplitRowFold], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, probes = shaken(family), family_probes(family)
    for name, params in [*SPLIT, *(GLOBENC if family in POST else []), MEASURED, PRUNED]:
        method = Method(name, params=params)
        before = len(rows_only)
        found = maps_of(subject, probes, method)
        assert len(rows_only) > before
        with monkeypatch.context() as whole:
            whole.setattr(method_pass, "split_rows_suffice", lambda *_: False)
            expected = maps_of(subject, probes, method)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.weights, other.weights, atol=1e-6)
            np.testing.assert_allclose(one.layers, other.layers, atol=1e-6)  # type: ignore[arg-type]
            assert one.diagnostics["empty_rows"] == other.diagnostics["empty_rows"]
            assert one.positions.causal == other.positions.causal


def test_a_learned_sink_keeps_its_share_beside_measured_residuals(
    rows_only: list[SplitRowFold], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, method = sinks(), Method(MEASURED[0], params=MEASURED[1])
    found = maps_of(subject, text_probes(), method)
    assert rows_only
    monkeypatch.setattr(method_pass, "split_rows_suffice", lambda *_: False)
    for one, other in zip(found, maps_of(subject, text_probes(), method), strict=True):
        np.testing.assert_allclose(one.weights, other.weights, atol=1e-6)


def test_no_weights_of_all_queries_are_formed(
    rows_only: list[SplitRowFold], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = split_rows.block_weights

    def noted(*args: Any) -> torch.Tensor:
        weights = real(*args)
        sizes.append(weights.shape[2])
        return weights

    monkeypatch.setattr(split_rows, "block_weights", noted)
    subject, probes = shaken("bert"), text_probes()[3:4]
    maps_of(subject, probes, Method("norms"))
    assert rows_only
    assert max(sizes) < 12 <= len(maps_of(subject, probes, Method("norms"))[0].weights)


def test_layers_that_end_in_another_order_are_refused(rows_only: list[SplitRowFold]) -> None:
    subject, probes = shaken("bert"), text_probes()[:1]
    maps_of(subject, probes, Method("norms"))
    fold = rows_only[-1]
    fold.watch.kept = [split_rows._Layer("elsewhere", next(iter(fold.watch.blocks.values())))]
    (path,) = list(fold.watch.blocks)[:1]
    call = type("Call", (), {"path": path})()
    with pytest.raises(CaptureError, match=f"{path} ended after elsewhere"):
        fold.step(call, torch.zeros(1, 1, 1), 0)
