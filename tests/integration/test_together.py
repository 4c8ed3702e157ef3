"""Several methods from one forward pass are what each is alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import audit
from audit.capture import together
from audit.capture.attention import passes
from audit.capture.engines.row_fold import LEAST_POSITIONS
from audit.errors import ConfigError
from audit.records import CaptureSettings, Method, Probe
from tests.integration.test_capture_streams import seq2seq
from tests.integration.tiny_models import image_probes, text_checkpoint, text_probes, vision_checkpoint

FOLDS = [
    Method("rollout"),
    Method("rollout", params={"discard_ratio": 0.5}),
    Method("rollout", params={"top_k": 2}),
    Method("rollout", params={"head_fusion": "max"}),
    Method("per_head_rollout", params={"head": 1}),
    Method("raw_attention"),
    Method("attention_flow"),
]
OWN_PASSES = [Method("rollout", params={"residual": "measured"}), Method("norms"), Method("gradient_rollout")]


@pytest.fixture
def forward_passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the batches that run through a model for folds of weights."""
    counted = Counter[str]()
    for module in (passes, together):
        real = module.fold_batch

        def run(*args, real=real, name=module.__name__, **options):
            counted[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(module, "fold_batch", run)
    return counted


@pytest.mark.parametrize("methods", [FOLDS, [*OWN_PASSES, *FOLDS[:2]]], ids=["folds", "mixed"])
@pytest.mark.parametrize("kind", ["text", "vision"])
def test_methods_together_give_what_each_gives_alone(kind, methods):
    subject, probes = (
        (text_checkpoint("bert"), text_probes())
        if kind == "text"
        else (vision_checkpoint("vit"), image_probes())
    )
    found = list(audit.compute_maps_by_method(subject, probes, methods, target=0))
    for i, method in enumerate(methods):
        alone = list(audit.compute_maps(subject, probes, method=method, target=0))
        for one, other in zip(found, alone, strict=True):
            assert one[i].probe_id == other.probe_id
            np.testing.assert_allclose(one[i].weights, other.weights, atol=1e-6)
            assert set(one[i].diagnostics) == set(other.diagnostics)


def test_long_probes_together_are_had_from_rows_as_alone(forward_passes):
    subject = text_checkpoint("gpt2", max_position_embeddings=400)
    probes, methods = [Probe("long", text="the film " * 48), *text_probes()[:1]], FOLDS[:4]
    alone = [list(audit.compute_maps(subject, probes, method=one)) for one in methods]
    forward_passes.clear()
    found = list(audit.compute_maps_by_method(subject, probes, methods))
    assert len(found[0][0].weights) >= LEAST_POSITIONS > len(found[1][0].weights)
    assert forward_passes[together.__name__] == 1  # of the short probe; the long one has no whole matrix
    for each, others in zip(found, zip(*alone, strict=True), strict=True):
        for one, other in zip(each, others, strict=True):
            np.testing.assert_allclose(one.weights, other.weights, atol=1e-6)
            assert one.diagnostics == pytest.approx(other.diagnostics, abs=1e-5)


def test_rows_and_whole_matrices_of_long_probes_take_a_pass_each(forward_passes):
    subject = text_checkpoint("gpt2", max_position_embeddings=400)
    probes, methods = [Probe("long", text="the film " * 48)], [FOLDS[0], FOLDS[4]]
    found = list(audit.compute_maps_by_method(subject, probes, methods))
    assert forward_passes[together.__name__] == 1
    for one, method in zip(found[0], methods, strict=True):
        (alone,) = audit.compute_maps(subject, probes, method=method)
        np.testing.assert_allclose(one.weights, alone.weights, atol=1e-6)
        assert one.diagnostics == pytest.approx(alone.diagnostics, abs=1e-5)


@pytest.mark.parametrize("method", ["raw", Method("raw_attention")])
def test_one_method_needs_no_list(method):
    subject, probes = text_checkpoint("bert"), text_probes()[:2]
    found = list(audit.compute_maps_by_method(subject, probes, method))
    assert [len(one) for one in found] == [1, 1]
    for (one,), other in zip(found, audit.compute_maps(subject, probes, method="raw"), strict=True):
        np.testing.assert_allclose(one.weights, other.weights, atol=1e-6)


def test_folds_share_one_forward_pass_per_batch(forward_passes):
    subject, probes = text_checkpoint("bert"), text_probes()
    lengths = {len(one.weights) for one in audit.compute_maps(subject, probes)}
    forward_passes.clear()
    list(audit.compute_maps_by_method(subject, probes, FOLDS))
    assert forward_passes[together.__name__] == len(lengths)


def test_methods_on_several_stacks_run_one_by_one():
    subject, probes = seq2seq("t5"), text_probes()
    methods = [Method("rollout"), Method("raw_attention")]
    found = list(audit.compute_maps_by_method(subject, probes, methods))
    alone = list(audit.compute_maps(subject, probes, method=methods[1]))
    assert [one[1].stream for one in found] == [one.stream for one in alone]
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one[1].weights, other.weights, atol=1e-6)


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        ([Method("rollout"), Method("rollout", row="mean")], CaptureSettings(), "got auto, mean"),
        ([], CaptureSettings(), "got no method"),
        (["rollout"], CaptureSettings(stride=2), "one method at a time"),
    ],
)
def test_what_cannot_be_shared_is_refused(methods, settings, message):
    with pytest.raises(ConfigError, match=message):
        list(audit.compute_maps_by_method(text_checkpoint("bert"), text_probes(), methods, settings=settings))
