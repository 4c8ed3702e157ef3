"""Folding layer by layer: exact values, pads, sinks, parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from audit.capture.engines.fold import BatchFold
from audit.capture.engines.settings import FoldSettings
from audit.errors import ConfigError
from audit.records import Method


def random_attention(layers: int = 3, n: int = 5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layers, 2, 3, n, n, generator=generator, dtype=torch.float64).softmax(-1)


def folded(attention: Any, read: Any, valid: Any = None, **params: Any) -> BatchFold:
    method = params.pop("method", "rollout")
    settings = FoldSettings.from_method(Method(method, params=params))
    read = torch.as_tensor(read, dtype=torch.float64)
    valid = torch.ones(read.shape, dtype=torch.bool) if valid is None else torch.as_tensor(valid)
    fold = BatchFold(settings, read, valid)
    for layer in attention:
        fold.fold(layer)
    return fold


def test_batch_fold_of_uniform_causal_attention_gives_the_exact_row() -> None:
    uniform = torch.ones(4, 4, dtype=torch.float64).tril() / torch.arange(1.0, 5.0)[:, None]
    layers = uniform.expand(3, 1, 1, 4, 4)
    fold = folded(layers, [[0, 0, 0, 1.0]])
    expected = np.array([1747 / 4608, 1015 / 4608, 721 / 4608, 125 / 512])
    np.testing.assert_allclose(fold.final_row()[0], expected, rtol=1e-12)
    np.testing.assert_allclose(fold.rows[1][0], np.array([49, 37, 31, 75]) / 192, rtol=1e-12)
    assert bool(fold.causal[0])


def test_batch_fold_multiplies_later_layers_from_the_left() -> None:
    lower, upper = [[1, 0], [0.5, 0.5]], [[0.5, 0.5], [0, 1]]
    layers = torch.tensor([[[lower]], [[upper]]], dtype=torch.float64)
    np.testing.assert_allclose(folded(layers, [[1.0, 0]]).final_row()[0], [0.8125, 0.1875])
    np.testing.assert_allclose(folded(layers, [[0, 1.0]]).final_row()[0], [0.25, 0.75])


def test_batch_fold_averages_rows_before_anything_else() -> None:
    layers = random_attention()
    both = folded(layers, np.tile([0.5, 0, 0, 0.5, 0], (2, 1))).final_row()
    ends = [folded(layers, np.tile(np.eye(5)[i], (2, 1))).final_row() for i in (0, 3)]
    torch.testing.assert_close(both, (ends[0] + ends[1]) / 2)


def test_batch_fold_ignores_what_pads_hold() -> None:
    layers = random_attention(n=3)
    alone = folded(layers[:, :1], [[0, 0, 1.0]])
    for left in (True, False):
        padded = torch.full((3, 1, 3, 5, 5), float("nan"), dtype=torch.float64)
        real = slice(2, 5) if left else slice(0, 3)
        padded[..., real, :] = 0
        padded[..., real, real] = layers[:, :1]
        valid = torch.zeros(1, 5, dtype=torch.bool)
        valid[:, real] = True
        read = torch.zeros(1, 5)
        read[0, real.stop - 1] = 1
        fold = folded(padded, read, valid)
        torch.testing.assert_close(fold.final_row()[:, real], alone.final_row())
        assert fold.final_row()[~valid].sum() == 0
        assert fold.empty_rows.tolist() == [0]
        torch.testing.assert_close(fold.depth_collapse(), alone.depth_collapse())


def test_batch_fold_keeps_the_mass_of_a_sink_that_appears_late() -> None:
    layers = random_attention(n=3)
    fold = folded(layers[:1], [[1.0, 0, 0]] * 2)
    sunk = torch.cat([layers[1] * 0.6, torch.full((2, 3, 3, 1), 0.4, dtype=torch.float64)], dim=-1)
    fold.fold(sunk, sink=True)
    fold.fold(layers[2])
    A = [0.5 * layer.mean(1) + 0.5 * torch.eye(3) for layer in (layers[0], layers[1] * 0.6, layers[2])]
    A[1] = 0.5 * (layers[1] * 0.6).mean(1) + 0.5 * torch.eye(3)
    keys = (A[2] @ A[1] @ A[0])[:, 0]
    torch.testing.assert_close(fold.final_row()[:, :3], keys)
    torch.testing.assert_close(fold.final_row().sum(1), torch.ones(2, dtype=torch.float64))
    assert [len(row[0]) for row in fold.rows] == [4, 4, 4]


def test_raw_reads_one_layer_without_residual() -> None:
    layers = random_attention()
    read = np.tile(np.eye(5)[2], (2, 1))
    torch.testing.assert_close(folded(layers, read, method="raw").final_row(), layers[2].mean(1)[:, 2])
    first = folded(layers, read, method="raw", layer=0)
    torch.testing.assert_close(first.final_row(), layers[0].mean(1)[:, 2])


def test_start_layer_leaves_the_layers_below_out() -> None:
    layers = random_attention()
    read = np.tile(np.eye(5)[2], (2, 1))
    fold = folded(layers, read, start_layer=1, residual=[0.9, 0.3, 0.6])
    A = [r * torch.eye(5) + (1 - r) * layer.mean(1) for r, layer in zip((0.3, 0.6), layers[1:], strict=True)]
    torch.testing.assert_close(fold.final_row(), (A[1] @ A[0])[:, 2])
    torch.testing.assert_close(fold.rows[0], torch.as_tensor(read))


def test_depth_collapse_is_zero_for_equal_rows_and_log_n_for_the_identity() -> None:
    uniform = torch.full((1, 1, 1, 4, 4), 0.25, dtype=torch.float64)
    assert float(folded(uniform, [[1.0, 0, 0, 0]], residual=0.0).depth_collapse()) == pytest.approx(
        0, abs=1e-12
    )
    identity = torch.eye(4, dtype=torch.float64).expand(1, 1, 1, 4, 4)
    assert float(folded(identity, [[1.0, 0, 0, 0]]).depth_collapse()) == pytest.approx(2)


@pytest.mark.parametrize(
    ("method", "params", "message"),
    [
        ("attention_flaw", {}, "did you mean 'attention_flow'"),
        ("xyzzy", {}, "expected one of rollout, raw_attention"),
        ("alti", {"residual": 0.5}, "takes no parameters"),
        ("gradient_rollout", {"form": "sum"}, "use 'relevance' or 'product'"),
        ("rollout", {"head_fusion": "weighted"}, "fit_head_weights"),
        ("rollout", {"residuals": 0.5}, "did you mean 'residual'"),
        ("raw", {"residual": 0.5}, "unknown to 'raw'"),
        ("rollout", {"residual": "often"}, "or 'measured'"),
        ("rollout", {"residual": 1}, "maps would be the output position itself; give less than 1"),
        ("attention_flow", {"residual": (1.0, 1.0)}, r"residual = \(1.0, 1.0\) reads nothing"),
        ("rollout", {"residual": [0.5, 1.0], "start_layer": 1}, "reads nothing"),
    ],
)
def test_fold_settings_refuse_what_they_do_not_know(
    method: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FoldSettings.from_method(Method(method, params=params))


def test_batch_fold_refuses_too_few_residuals() -> None:
    with pytest.raises(ConfigError, match="has 2 values, but the checkpoint has more layers"):
        folded(random_attention(), np.tile(np.eye(5)[0], (2, 1)), residual=[0.5, 0.5])
