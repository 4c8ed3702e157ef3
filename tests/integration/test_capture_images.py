"""Patches of images in their stored image, and occlusion of regions on real models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from scipy.ndimage import gaussian_filter

from audit.capture import capture, occlude
from audit.capture.inputs.encoded import encode_image
from audit.capture.inputs.texts import encode_texts
from audit.records import CaptureSettings, Probe, Region
from audit.regions import region_weights
from tests.integration.tiny_models import (
    build,
    checkpoint,
    image_probes,
    image_processor,
    text_checkpoint,
    text_probes,
    vision_checkpoint,
    word_tokenizer,
)

SETTINGS = CaptureSettings()


# --- images -----------------------------------------------------------------------------------

PROCESSORS = {
    "vit": image_processor,
    "deit": lambda: transformers.DeiTImageProcessorPil(
        size={"height": 40, "width": 40}, crop_size={"height": 32, "width": 32}
    ),
    "clip": lambda: transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ),
    "dinov2": lambda: transformers.BitImageProcessorPil(
        size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}
    ),
    "small": lambda: transformers.BitImageProcessorPil(
        size={"shortest_edge": 20}, crop_size={"height": 32, "width": 32}
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", [(120, 160), (160, 120), (96, 96)])
def test_patch_boxes_follow_the_pixels_through_the_processor(name: str, size: tuple[int, int]) -> None:
    processor = PROCESSORS[name]()
    processor.do_normalize = False
    subject = vision_checkpoint("vit", processor=processor)
    height, width = size
    y, x = np.mgrid[:height, :width]
    # Each pixel says where it is; what a patch shows must be what its box says.
    ramp = np.stack([x / width * 250, y / height * 250, np.full(size, 255)], axis=-1).astype(np.uint8)
    encoded = encode_image(subject, Probe("p", image=ramp))
    pixels = encoded.tensors["pixel_values"][0].numpy().astype(np.float64)
    assert encoded.positions.boxes is not None
    assert encoded.positions.grid == (4, 4)
    assert len(encoded.positions) == 17
    for index, (left, top, right, bottom) in enumerate(encoded.positions.boxes[1:]):
        row, column = divmod(index, 4)
        patch = pixels[:, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]
        seen = patch[2] > 0.99  # where the patch shows the image and not padding
        assert encoded.positions.special[index + 1] == (not seen.any())
        if seen.any():
            shown = patch[:2, seen].mean(axis=1) * 255 / 250
            np.testing.assert_allclose(shown, [(left + right) / 2, (top + bottom) / 2], atol=0.03)


def test_positions_before_the_patches_are_special() -> None:
    for family, count in [("vit", 1), ("deit", 2), ("dinov2", 1), ("dinov2-registers", 5)]:
        (captured,) = capture(vision_checkpoint(family), image_probes(1))
        positions = captured.maps[0].positions
        assert positions.special.tolist() == [True] * count + [False] * 16
        assert positions.kind == "patch"


def test_grids_that_are_not_square_come_from_the_config() -> None:
    processor = image_processor(size={"height": 32, "width": 64})
    subject = vision_checkpoint("vit", processor=processor, image_size=(32, 64), patch_size=(8, 16))
    (captured,) = capture(subject, image_probes(1))
    assert captured.maps[0].positions.grid == (4, 4)
    boxes = captured.maps[0].positions.boxes
    assert boxes is not None
    np.testing.assert_allclose(boxes[2], [0.25, 0, 0.5, 0.25])


def test_grey_models_take_grey_images() -> None:
    processor = image_processor(image_mean=[0.5], image_std=[0.5])
    subject = vision_checkpoint("vit", processor=processor, num_channels=1)
    (captured,) = capture(subject, [Probe("g", image=np.arange(64, dtype=np.uint8).reshape(8, 8))])
    assert len(captured.maps[0].weights) == 17


# --- occlusion --------------------------------------------------------------------------------


def test_occlusion_of_text_replaces_the_region_by_masks() -> None:
    subject = text_checkpoint("bert")
    probes = text_probes()[:3]
    region = Region("good", "terms", {"terms": ["good", "liked"]})
    weights = [
        region_weights(region, item.positions, item.probe) for item in encode_texts(subject, probes, SETTINGS)
    ]
    found = occlude(subject, probes, weights, targets="label", settings=SETTINGS)
    for probe, one, text in zip(probes, found, ("The film was [MASK].", "She [MASK] it", None), strict=True):
        with torch.no_grad():
            index = subject.model.config.label2id[probe.label]
            intact = subject.model(**subject.processor(probe.text, return_tensors="pt")).logits[0, index]
            assert one.intact == pytest.approx(float(intact), abs=1e-5)
            assert (one.target, one.occlusion) == (probe.label, "mask token")
            if text is None:
                assert (one.occluded, one.change) == (None, None)
                assert one.reason == "the region has no position in this probe"
            else:
                changed = subject.model(**subject.processor(text, return_tensors="pt")).logits[0, index]
                assert one.occluded == pytest.approx(float(changed), abs=1e-5)
                assert one.change == pytest.approx(float(changed - intact), abs=1e-5)


def test_occlusion_without_a_mask_token_uses_the_unknown_token() -> None:
    tokenizer = word_tokenizer(unknown_mask=False)
    subject = checkpoint(
        build("BertForSequenceClassification", vocab_size=len(tokenizer), pad_token_id=0), tokenizer
    )
    (found,) = occlude(subject, [Probe("p", text="bad film")], [np.array([0, 1.0, 0, 0])], targets=1)
    with torch.no_grad():
        changed = subject.model(**tokenizer("xyz film", return_tensors="pt")).logits[0, 1]
    assert found.occlusion == "unk token"
    assert found.occluded == pytest.approx(float(changed), abs=1e-5)


@pytest.mark.parametrize("family", ["vit", "dinov2-registers"])
def test_occlusion_of_an_image_shows_its_mean_colour(family: str) -> None:
    subject = vision_checkpoint(family)
    (probe,) = image_probes(1)
    item = encode_image(subject, probe)
    region = Region("corner", "box", {"box": [0.75, 0.75, 1.0, 1.0]})
    weights = region_weights(region, item.positions, probe)
    (found,) = occlude(subject, [probe], [weights], targets="label")
    pixels = item.tensors["pixel_values"].clone()
    pixels[..., 24:, 24:] = pixels.mean(dim=(-2, -1), keepdim=True)
    with torch.no_grad():
        assert found.intact == pytest.approx(
            float(subject.model(item.tensors["pixel_values"]).logits[0, 0]), abs=1e-5
        )
        assert found.occluded == pytest.approx(float(subject.model(pixels).logits[0, 0]), abs=1e-5)
    assert found.intact != found.occluded


@pytest.mark.parametrize("family", ["vit", "dinov2-registers"])
def test_occlusion_by_blur_keeps_the_colours_around_and_no_detail(family: str) -> None:
    subject = vision_checkpoint(family)
    (probe,) = image_probes(1)
    item = encode_image(subject, probe)
    region = Region("corner", "box", {"box": [0.75, 0.75, 1.0, 1.0]})
    weights = region_weights(region, item.positions, probe)
    (found,) = occlude(subject, [probe], [weights], targets="label", fill="blur")
    pixels = item.tensors["pixel_values"].clone()
    patch = 32 // (item.positions.grid or (1, 1))[0]
    blurred = gaussian_filter(pixels.double().numpy(), (0, 0, patch, patch), mode="nearest")
    pixels[..., 24:, 24:] = torch.from_numpy(blurred[..., 24:, 24:]).float()
    with torch.no_grad():
        assert found.occluded == pytest.approx(float(subject.model(pixels).logits[0, 0]), abs=1e-5)
    assert found.occlusion == "blur"
