"""Blank images and silence have no map; small effects above rounding have one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from audit.capture import capture
from audit.capture.attributions.attribution import _integrated_gradients, _occlusion
from audit.capture.attributions.rounding import rounding
from audit.capture.attributions.sampling import lime, shapley
from audit.records import Method, Probe
from tests.integration.tiny_image_text import llava, question_probes
from tests.integration.tiny_models import vision_checkpoint
from tests.integration.tiny_sound import RATE, noise, sound_checkpoint
from tests.toy_models import Toy, toy_question

FOUR = {
    "occlusion": {},
    "shap": {"samples": 2},
    "lime": {"samples": 20},
    "integrated_gradients": {"steps": 4},
}
COLOURS = {"white": (255, 255, 255), "one colour": (200, 120, 30)}


def blank(colour: str) -> np.ndarray:
    return np.full((40, 56, 3), COLOURS[colour], np.uint8)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_blank_image_has_no_map(colour: str, name: str) -> None:
    subject, method = vision_checkpoint("vit", attention="sdpa"), Method(name, params=FOUR[name])
    (found,) = capture(subject, [Probe("p", image=blank(colour))], method=method, target=1)
    assert not found.maps[0].weights.any()


@pytest.mark.parametrize("name", FOUR)
def test_silence_has_no_map_but_a_sound_has(name: str) -> None:
    subject, method = sound_checkpoint("wav2vec2"), Method(name, params=FOUR[name])
    silent, loud = (
        Probe(str(i), audio=samples, sampling_rate=RATE)
        for i, samples in enumerate((np.zeros(400, np.float32), noise(400)))
    )
    found = [one.maps[0].weights for one in capture(subject, [silent, loud], method=method, target=1)]
    assert not found[0].any()
    assert found[1].sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_blank_image_gets_nothing_beside_its_text(colour: str, name: str) -> None:
    subject, given = llava(patch=16), question_probes(1)[0]
    params = {"steps": 32} if name == "integrated_gradients" else FOUR[name]
    method = Method(name, params=params)
    probe = Probe("p", image=blank(colour), text=given.text)
    (found,) = capture(subject, [probe], method=method, target="a")
    image, text = found.maps
    assert image.share == 0
    assert text.share == pytest.approx(1)


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("name", FOUR)
def test_a_change_counts_from_above_rounding_on(name: str, larger: bool) -> None:
    """The logit is 1 + a small slope; a token is worth 0.25 or 4 times what counts as none."""
    model = Toy(lambda x: 1.0 + x.sum(dim=(1, 2)))
    worth = (4.0 if larger else 0.25) * rounding(torch.float64, 1.0)
    with torch.no_grad():
        model.table.weight.zero_()
        model.table.weight[7] = worth
    question = toy_question(model, [2, 7, 9, 3], special=(0, 3))
    ask = {
        "occlusion": lambda: _occlusion(question),
        "shap": lambda: shapley(question, 2, 0)[0],
        "lime": lambda: lime(question, 50, 0),
        "integrated_gradients": lambda: _integrated_gradients(question, 4)[0],
    }
    with torch.no_grad():
        found = ask[name]()
    assert found[[0, 2, 3]].tolist() == [0, 0, 0]
    assert float(found[1]) == pytest.approx(worth if larger else 0.0, rel=0.3)
