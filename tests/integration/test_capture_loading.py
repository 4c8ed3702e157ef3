"""Models as they may be loaded: compiled, checkpointing, placed by accelerate, under other kernels, tied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch

from audit.capture import capture, occlude
from audit.errors import CaptureError
from audit.records import Checkpoint, Method
from tests.integration.tiny_models import text_checkpoint, text_probes

METHODS = ("rollout", "gradient_rollout", "occlusion", "value_zeroing")
PROBES = text_probes()[:3]


def subject_of(family: str = "bert") -> Checkpoint:
    return text_checkpoint(family, attention="sdpa")


def maps(subject: Checkpoint, method: str = "rollout") -> list[np.ndarray]:
    captured = capture(subject, PROBES, method=Method(method), target=1)
    return [one.maps[0].weights for one in captured]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, two)


# --- torch.compile ----------------------------------------------------------------------------


class Counting:
    """A backend of the compiler that counts how often it is asked to compile."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_model_has_the_maps_of_the_model_and_is_not_compiled_for_them(method: str) -> None:
    expected, backend = maps(subject_of(), method), Counting()
    subject = subject_of()
    compiled = replace(subject, model=torch.compile(subject.model, backend=backend))
    assert_same(maps(compiled, method), expected)
    in_place = subject_of()
    in_place.model.compile(backend=backend)
    call = in_place.model._compiled_call_impl
    assert_same(maps(in_place, method), expected)
    assert in_place.model._compiled_call_impl is call
    assert backend.graphs == 0


def test_a_compiled_model_is_occluded_as_the_model_is() -> None:
    subject = subject_of()
    compiled = replace(subject, model=torch.compile(subject.model, backend=Counting()))
    weights = [np.eye(n)[1] for n in (7, 5, 12)]
    found, expected = (occlude(one, PROBES, weights, targets=1) for one in (compiled, subject))
    assert found == expected


def test_layers_that_were_compiled_one_by_one_are_captured_right() -> None:
    subject = subject_of("llama")
    expected = maps(subject)
    layers = subject.model.model.layers
    backend = Counting()
    layers[1] = torch.compile(layers[1], backend=backend)
    forward = layers[1].__dict__["forward"]
    assert_same(maps(subject), expected)
    assert layers[1].__dict__["forward"] is forward
    assert backend.graphs == 0


# --- gradient checkpointing -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_changes_nothing_and_stays_on(family: str, method: str) -> None:
    if (family, method) == ("llama", "value_zeroing"):
        method = "input_x_gradient"
    expected, subject = maps(subject_of(family), method), subject_of(family)
    subject.model.activation_checkpointing_enable()
    subject.model.train()
    assert_same(maps(subject, method), expected)
    assert subject.model.training
    assert subject.model.is_activation_checkpointing


# --- device_map -------------------------------------------------------------------------------


def loaded(folder: Path, subject: Checkpoint, **options: Any) -> Checkpoint:
    subject.model.save_pretrained(folder)
    model = type(subject.model).from_pretrained(folder, attn_implementation="sdpa", **options)
    return replace(subject, model=model.eval())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "device_map", ["auto", {"": "cpu"}, {"bert": "cpu", "classifier": "cpu", "dropout": "cpu"}]
)
def test_a_model_placed_by_accelerate_on_one_device_is_captured_right(
    tmp_path: Path, method: str, device_map: Any
) -> None:
    device = "cuda:0" if device_map == "auto" and torch.cuda.is_available() else "cpu"
    subject = loaded(tmp_path, subject_of(), device_map=device_map)
    assert {str(p.device) for p in subject.model.parameters()} == {device}
    for one, two in zip(maps(subject, method), maps(subject_of(), method), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_an_offloaded_model_is_refused_in_one_line(tmp_path: Path, method: str) -> None:
    subject = loaded(tmp_path, subject_of())
    offloaded = replace(subject, model=accelerate.cpu_offload(subject.model, torch.device("cpu")))
    with pytest.raises(
        CaptureError, match=r"BertForSequenceClassification does not lie on one device"
    ) as error:
        maps(offloaded, method)
    assert "offloaded" in str(error.value)
    assert "\n" not in str(error.value)


# --- kernels at load time ---------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_sdpa_and_eager_at_load_time_give_one_map(tmp_path: Path, method: str) -> None:
    subject = text_checkpoint("bert", attention="eager")
    for one, two in zip(maps(loaded(tmp_path, subject), method), maps(subject, method), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_flex_attention_at_load_time_is_refused_with_the_remedy(family: str) -> None:
    with pytest.raises(
        CaptureError, match=r"'flex_attention', whose weights cannot be seen; .*= 'sdpa'"
    ) as error:
        maps(text_checkpoint(family, attention="flex_attention"))
    assert "\n" not in str(error.value)


# --- tied modules -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["rollout", "gradient_rollout", "attention_flow", "norms", "alti", "value_zeroing"]
)
def test_a_module_that_is_called_twice_is_two_layers(method: str) -> None:
    """Layers that are one module give what copies with equal weights give."""
    tied, copied = subject_of(), subject_of()
    layers, copies = tied.model.bert.encoder.layer, copied.model.bert.encoder.layer
    layers[2] = layers[0]
    copies[2].load_state_dict(copies[0].state_dict())
    assert_same(maps(tied, method), maps(copied, method))
    (one, *_) = capture(tied, PROBES)
    assert one.maps[0].layers is not None
    assert len(one.maps[0].layers) == 3
