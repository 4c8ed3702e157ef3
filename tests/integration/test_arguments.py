"""What the Python API refuses before a forward pass, as an audit.toml does; labels that are indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from audit import compute_maps
from audit.errors import ConfigError
from audit.records import Checkpoint, Probe
from tests.integration.tiny_models import build, byte_tokenizer, checkpoint, text_checkpoint

TEXT = "the film was good"


@pytest.fixture(scope="module")
def classifier() -> Checkpoint:
    return text_checkpoint("bert")


def weights(subject: Checkpoint, method: str = "rollout", label: Any = None, **given: Any) -> Any:
    (found,) = compute_maps(subject, [Probe("a", text=TEXT, label=label)], method=method, **given)
    return found.weights


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("rollout", {"residual": 2}),
        ("rollout", {"residual": float("nan")}),
        ("rollout", {"residual": [0.5, -0.1]}),
        ("rollout", {"residual": "half"}),
        ("rollout", {"start_layer": -1}),
        ("rollout", {"top_k": 0}),
        ("rollout", {"top_k": True}),
        ("rollout", {"discard_ratio": 1}),
        ("rollout", {"discard_below": 1.1}),
        ("rollout", {"head_fusion": "sum"}),
        ("rollout", {"head_weights": [[1.0]]}),
        ("per_head_rollout", {"head": -1}),
        ("per_head_rollout", {"same_head": 1}),
        ("raw_attention", {"layer": 0.5}),
        ("shap", {"samples": 0}),
        ("lime", {"seed": -1}),
        ("integrated_gradients", {"steps": 0}),
        ("gradient_rollout", {"form": "sum"}),
        ("attention_flow", {"max_seconds": 0}),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_its_name(classifier, method, given):
    with pytest.raises(ConfigError, match=rf"^\[method\] {next(iter(given))} [^\n]*$"):
        weights(classifier, method, **given)


@pytest.mark.parametrize("target", [True, 1.5, -1, ["yes", "yes"], [1.5], {"a": True}, object()])
def test_a_target_that_is_no_class_is_refused(classifier, target):
    with pytest.raises(ConfigError, match=r"^target is [^\n]*; give [^\n]*$"):
        weights(classifier, "input_x_gradient", target=target)


def test_a_target_beyond_the_vocabulary_is_refused():
    subject = checkpoint(build("GPT2LMHeadModel", vocab_size=260), byte_tokenizer())
    size = len(subject.model.get_output_embeddings().weight)
    assert weights(subject, "input_x_gradient", target=size - 1).sum() == pytest.approx(1, abs=1e-5)
    with pytest.raises(ConfigError, match=rf"target {size} is no token .* 0 to {size - 1}"):
        weights(subject, "input_x_gradient", target=size)


def test_parameters_that_are_none_are_defaults(classifier):
    given = {"start_layer": None, "residual": None, "top_k": None}
    np.testing.assert_array_equal(weights(classifier, **given), weights(classifier))


def test_labels_that_are_indices_name_the_class_that_is_explained(classifier):
    names = classifier.model.config.id2label
    maps = [weights(classifier, "input_x_gradient", target=index) for index in names]
    assert np.abs(maps[0] - maps[1]).max() > 1e-3
    for index, name in names.items():
        for label in (index, name, [index]):
            np.testing.assert_array_equal(weights(classifier, "input_x_gradient", label=label), maps[index])
