"""Images read in one sequence with text: streams against products of every attention, written out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import audit
from audit.capture import capture
from audit.capture.attention.pieces import join_pieces
from audit.capture.inputs.image_text import ImageTextEncoder
from audit.capture.inputs.positions import image_geometry
from audit.capture.joined.links import feeds
from audit.errors import CaptureError, ProbeError
from audit.media import save_image
from audit.pipeline import run_audit
from audit.records import CaptureSettings, Checkpoint, Map, Method, Probe
from tests.integration.tiny_image_text import FAMILIES, idefics2, llava, question_probes, qwen3_vl, vilt

LAYERS = 2  # of each decoder
TOWER = 3
Places = Callable[[int], list[list[int]]]


def _one_by_one(tokens: int) -> list[list[int]]:
    return [[t] for t in range(tokens)]


def _behind_cls(tokens: int) -> list[list[int]]:
    return [[t + 1] for t in range(tokens)]


def _blocks(tokens: int, *, cls: int = 0) -> list[list[int]]:
    """2×2 of 4×4 patches for each token, tile by tile."""
    found = []
    for t in range(tokens):
        tile, row, column = t // 4, t % 4 // 2, t % 2
        first = tile * (16 + cls) + cls + 8 * row + 2 * column
        found.append([first, first + 1, first + 4, first + 5])
    return found


def _transposed_blocks_behind_cls(tokens: int) -> list[list[int]]:
    found = _blocks(tokens, cls=1)
    return [found[t // 4 * 4 + (t % 2) * 2 + t % 4 // 2] for t in range(tokens)]


def _fours(tokens: int) -> list[list[int]]:
    return [list(range(4 * t, 4 * t + 4)) for t in range(tokens)]


# Of each family: how many layers of the tower are read, and which of its positions make up each token.
CONNECTORS: dict[str, tuple[int, Places]] = {
    "llava": (2, _behind_cls),
    "paligemma": (3, _one_by_one),
    "gemma3": (3, _blocks),
    "idefics3": (3, _blocks),
    "internvl": (3, lambda tokens: _blocks(tokens, cls=1)),
    "qwen2_vl": (3, _fours),
}


@contextmanager
def softmaxes() -> Iterator[list[Tensor]]:
    """Keep every softmax over a matrix of queries and keys, as eager attention computes it."""
    kept, plain = list[Tensor](), nn.functional.softmax

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        found = plain(*args, **kwargs)
        if found.dim() == 4:
            kept.append(found.detach().double())
        return found

    nn.functional.softmax = keep  # type: ignore[assignment]
    try:
        yield kept
    finally:
        nn.functional.softmax = plain  # type: ignore[assignment]


def attentions(subject: Checkpoint, tensors: dict[str, Tensor]) -> list[Tensor]:
    model = copy.deepcopy(subject.model)
    model.set_attn_implementation("eager")
    with torch.no_grad(), softmaxes() as kept:
        model(**tensors)
    return kept


def rolled(layers: list[Tensor]) -> NDArray[np.float64]:
    """Return the rollout of a stack; sequences that do not see each other stand on the diagonal."""
    blocks = []
    for sequence in range(len(layers[0])):
        R = np.eye(layers[0].shape[-1])
        for layer in layers:
            R = (0.5 * layer[sequence].mean(0).numpy() + 0.5 * np.eye(len(R))) @ R
        blocks.append(R)
    size = sum(map(len, blocks))
    whole = np.zeros((size, size))
    start = 0
    for block in blocks:
        whole[start : start + len(block), start : start + len(block)] = block
        start += len(block)
    return whole


def expected_rows(
    subject: Checkpoint, tensors: dict[str, Tensor], depth: int, places: Places
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the last row over the tower's positions, in their order, and over the text."""
    kept = attentions(subject, tensors)
    tower, row = rolled(kept[:depth]), rolled(kept[-LAYERS:])[-1]
    ids = tensors["input_ids"][0].numpy()
    image = np.flatnonzero(ids == subject.model.config.image_token_id)
    connector = np.zeros((len(image), len(tower)))
    for token, patches in enumerate(places(len(image))):
        connector[token, patches] = 1 / len(patches)
    return row[image] @ connector @ tower, np.delete(row, image)


@pytest.mark.parametrize("family", CONNECTORS)
def test_streams_equal_the_written_out_product(family: str) -> None:
    subject, probes = FAMILIES[family](), question_probes(1)
    item = ImageTextEncoder(subject, CaptureSettings()).encode(probes[0])
    image, text = expected_rows(subject, dict(item.tensors), *CONNECTORS[family])
    if family == "qwen2_vl":  # its rows come in blocks of 2×2
        image = image.reshape(2, 4, 2, 2).transpose(0, 2, 1, 3).flatten()
    (captured,) = capture(subject, probes)
    maps = {one.stream: one for one in captured.maps}
    assert maps["image"].share == pytest.approx(image.sum(), abs=1e-6)
    assert maps["image"].share + maps["text"].share == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(maps["image"].weights, image / image.sum(), atol=1e-6)
    np.testing.assert_allclose(maps["text"].weights, text / text.sum(), atol=1e-6)
    assert maps["image"].weights.max() > 1.2 * maps["image"].weights.min()
    merged = len(CONNECTORS[family][1](1)[0])
    assert maps["image"].diagnostics["merged_patches"] == merged


def test_windows_of_a_tower_are_blocks_of_its_matrix() -> None:
    """Qwen2.5-VL cuts two of its three layers into windows; one reference row is put together here."""
    subject, probes = FAMILIES["qwen2_5_vl"](), question_probes(1)
    item = ImageTextEncoder(subject, CaptureSettings()).encode(probes[0])
    kept = attentions(subject, dict(item.tensors))
    tower = [
        torch.stack([torch.block_diag(*pair) for pair in zip(kept[i][0], kept[i + 1][0], strict=True)])[None]
        for i in (0, 3)
    ]
    layers = [tower[0], kept[2], tower[1]]
    row = rolled(kept[-LAYERS:])[-1]
    places = np.flatnonzero(item.tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    order = [0, 1, 4, 5, 2, 3, 6, 7]  # two windows of 2×2 tokens, side by side
    connector = np.zeros((8, 32))
    for place, token in enumerate(order):
        connector[token, 4 * place : 4 * place + 4] = 0.25
    by_window = row[places] @ connector @ rolled(layers)
    packed = np.zeros(32)
    for place, token in enumerate(order):
        packed[4 * token : 4 * token + 4] = by_window[4 * place : 4 * place + 4]
    expected = packed.reshape(2, 4, 2, 2).transpose(0, 2, 1, 3).flatten()
    image = next(capture(subject, probes)).maps[0]
    assert image.share == pytest.approx(expected.sum(), abs=1e-6)
    np.testing.assert_allclose(image.weights, expected / expected.sum(), atol=1e-6)
    assert image.positions.grid == (4, 8)


def crossed(layers: list[tuple[str, Tensor]], reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the last row of a decoder over the image, then over its own positions."""
    n = layers[0][1].shape[-1]
    source, prefix = np.zeros((n, reached.shape[1])), np.eye(n)
    for kind, layer in layers:
        A = layer[0].mean(0).numpy()
        if kind == "self":
            source, prefix = 0.5 * A @ source + 0.5 * source, 0.5 * A @ prefix + 0.5 * prefix
        else:
            source, prefix = 0.5 * source + 0.5 * A @ reached, 0.5 * prefix
    return np.concatenate([source[-1], prefix[-1]])


def test_every_block_that_attends_to_the_patches_is_composed_with_their_tower() -> None:
    subject, probes = FAMILIES["blip"](), question_probes(1)
    item = ImageTextEncoder(subject, CaptureSettings()).encode(probes[0])
    kept = attentions(subject, dict(item.tensors))
    expected = crossed(list(zip(("self", "cross") * 2, kept[TOWER:], strict=True)), rolled(kept[:TOWER]))
    (captured,) = capture(subject, probes)
    image, text = captured.maps
    np.testing.assert_allclose(
        np.concatenate([image.weights * image.share, text.weights * text.share]), expected, atol=1e-6
    )
    assert text.positions.causal
    assert image.layers is not None
    assert len(image.layers) == 2  # blocks, not layers of attention
    assert captured.prediction.predicted


def test_tiles_of_a_tower_with_two_stacks_reach_the_blocks_that_attend_to_them() -> None:
    """Llama 3.2: patches of four tiles see each other; layer 1 of the first stack is read, too."""
    subject, probes = FAMILIES["mllama"](), question_probes(1)
    item = ImageTextEncoder(subject, CaptureSettings()).encode(probes[0])
    kept = attentions(subject, dict(item.tensors))
    places = np.concatenate([24 * tile + np.arange(17) for tile in range(4)])  # each tile is padded to 24
    reached = (0.5 * rolled(kept[:4]) + 0.5 * rolled(kept[:2]))[places]
    expected = crossed(list(zip(("self", "cross", "self"), kept[4:], strict=True)), reached)
    (captured,) = capture(subject, probes)
    image, text = captured.maps
    np.testing.assert_allclose(np.sort(image.weights * image.share), np.sort(expected[:96]), atol=1e-6)
    np.testing.assert_allclose(text.weights * text.share, expected[96:], atol=1e-6)
    assert image.share == pytest.approx(0.5)
    assert image.diagnostics["tower_layers"] == 2
    assert image.positions.grid == (5, 7)  # patches of 8×8 in an image of 40×56, the others are frame
    patch = (image.positions.boxes * [56, 40, 56, 40])[image.positions.special.sum() + 7 + 2]  # type: ignore[operator]
    np.testing.assert_allclose(patch, [16, 8, 24, 16], atol=0.2)


def test_latents_that_resample_the_patches_are_composed_and_keep_their_own_part() -> None:
    subject, probes = idefics2(), question_probes(1)
    item = ImageTextEncoder(subject, CaptureSettings()).encode(probes[0])
    kept = attentions(subject, dict(item.tensors))
    tower, row = rolled(kept[:TOWER]), rolled(kept[-LAYERS:])[-1]
    source, own = np.zeros((4, len(tower))), np.eye(4)
    for layer in kept[TOWER:-LAYERS]:
        A = layer[0].mean(0).numpy()
        before, latents = A[:, : len(tower)], A[:, len(tower) :]
        source = 0.5 * source + 0.5 * (before @ tower + latents @ source)
        own = 0.5 * own + 0.5 * latents @ own
    place = np.flatnonzero(item.tensors["input_ids"][0].numpy() == subject.model.config.image_token_id)
    (captured,) = capture(subject, probes)
    image, text = captured.maps
    special = image.positions.special
    assert special.tolist() == [True] * 4 + [False] * 8  # latents stand for no part of the image
    np.testing.assert_allclose((image.weights * image.share)[special], row[place] @ own, atol=1e-6)
    np.testing.assert_allclose((image.weights * image.share)[~special], row[place] @ source, atol=1e-6)
    np.testing.assert_allclose(text.weights * text.share, np.delete(row, place), atol=1e-6)


def test_words_and_patches_of_one_encoder_share_its_row() -> None:
    subject, probes = vilt(), question_probes(2)
    for probe, captured in zip(probes, capture(subject, probes), strict=True):
        item = ImageTextEncoder(subject, CaptureSettings()).encode(probe)
        torch.manual_seed(0)  # ViLT draws the order of its patches
        row = rolled(attentions(subject, dict(item.tensors)))[0]
        image, text = captured.maps
        words = item.tensors["input_ids"].shape[1]
        np.testing.assert_allclose(
            text.weights * text.share, row[: words + 1], atol=1e-6
        )  # and the image's CLS
        np.testing.assert_allclose(np.sort(image.weights * image.share), np.sort(row[words + 1 :]), atol=1e-6)
        assert image.positions.grid == (4, 5)
        assert captured.prediction is not None


def test_patch_of_one_encoder_is_the_one_whose_pixels_are_in_its_box() -> None:
    """Whatever order is drawn: a change of pixels outside a box leaves the embedding of its patch alone."""
    subject = vilt()
    item = ImageTextEncoder(subject, CaptureSettings()).encode(question_probes(1)[0])
    embeddings = subject.model.vilt.embeddings.patch_embeddings
    pixels = item.tensors["pixel_values"]
    changed = pixels.clone()
    changed[..., 8:16, 16:24] += 1.0
    moved = (embeddings(pixels) != embeddings(changed)).any(dim=1)[0]
    assert moved.nonzero().tolist() == [[1, 2]]
    image = next(capture(subject, question_probes(1))).maps[0]
    box = image.positions.boxes[5 + 2]  # type: ignore[index]
    np.testing.assert_allclose(box, [2 / 5, 1 / 4, 3 / 5, 2 / 4], atol=3e-3)


def test_measured_boxes_are_those_of_the_processors_settings() -> None:
    subject = llava()
    for size in ((40, 56), (211, 97), (64, 64)):
        image = next(capture(subject, question_probes(1, size))).maps[0]
        exact = image_geometry(subject.processor.image_processor, size, (32, 32)).boxes(4, 4)
        assert image.positions.special.tolist() == [True] + [False] * 16
        assert image.positions.boxes is not None
        np.testing.assert_allclose(image.positions.boxes[1:], exact, atol=4e-3)


def test_tiles_cover_the_image_beside_the_whole() -> None:
    image = next(capture(FAMILIES["idefics3"](), question_probes(1))).maps[0]
    boxes = image.positions.boxes
    assert boxes is not None
    tiles = boxes.reshape(5, 16, 4)
    areas = ((tiles[:, :, 2] - tiles[:, :, 0]) * (tiles[:, :, 3] - tiles[:, :, 1])).sum(axis=1)
    np.testing.assert_allclose(areas, [0.25, 0.25, 0.25, 0.25, 1.0], atol=0.01)
    np.testing.assert_allclose(tiles[3, :, 0].min(), 0.5, atol=4e-3)
    assert image.positions.grid is None


def test_padding_of_tiles_is_special() -> None:
    image = next(capture(FAMILIES["llava_next"](), question_probes(1))).maps[0]
    boxes, special = image.positions.boxes, image.positions.special
    assert boxes is not None
    assert 5 < special.sum() < len(special) - 16  # a CLS for each picture, and patches of the frame
    assert (boxes[special] == 0).all()
    assert boxes.min() == 0.0
    assert boxes.max() == 1.0


def test_characters_are_found_again_around_the_image() -> None:
    subject, draw = llava(), np.random.default_rng(0)
    text = "look: <image> is the film good?"
    probe = Probe("q", text=text, image=draw.integers(0, 256, (40, 56, 3), dtype=np.uint8))
    positions = ImageTextEncoder(subject, CaptureSettings()).encode(probe).positions
    content = ~positions.special
    assert positions.starts is not None
    assert positions.ends is not None
    spans = zip(positions.starts[content], positions.ends[content], strict=True)
    covered = {i for start, end in spans for i in range(start, end) if text[i] != " "}
    assert covered == {i for i, letter in enumerate(text) if letter != " " and not 6 <= i < 13}
    assert int((~content).sum()) == 16


def test_messages_go_through_the_chat_template_and_wait_for_the_answer() -> None:
    subject = llava()
    subject.processor.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% for c in m.content %}"
        "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}[answer]{% endif %}"
    )
    image = question_probes(1)[0].image
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "is it good?"}]
    found = {}
    for one in audit.compute_maps(subject, [Probe("m", messages=messages, image=image)]):
        found[one.stream] = one
    places = found["text"].positions
    assert places.starts is not None
    content = ~places.special
    assert (places.starts[content].min(), places.ends[content].max()) == (0, 20)  # type: ignore[index]
    assert int((~content).sum()) == len("[system][user][answer]")
    assert found["text"].positions.special[-8:].all()
    plain = next(iter(audit.compute_maps(subject, [Probe("t", text="is it good?", image=image)])))
    assert plain.share != pytest.approx(found["image"].share)


def test_two_names_are_the_difference_of_the_answers_logits() -> None:
    subject, probes = llava(), question_probes(1)
    (captured,) = capture(subject, probes, target=["a", "b"])
    item = ImageTextEncoder(subject, CaptureSettings()).encode(probes[0])
    with torch.no_grad():
        logits = subject.model(**item.tensors).logits[0, -1]
    a, b = (subject.processor.tokenizer(name)["input_ids"][0] for name in "ab")
    assert captured.prediction.target_logit == pytest.approx(float(logits[a] - logits[b]), abs=1e-5)
    assert captured.prediction.predicted == subject.processor.tokenizer.decode([int(logits.argmax())])


def test_a_later_step_is_read_behind_the_tokens_generated_before_it() -> None:
    subject, probes = llava(), question_probes(1)
    encoder = ImageTextEncoder(subject, CaptureSettings())
    tensors = dict(encoder.encode(probes[0]).tensors)
    for _ in range(2):
        with torch.no_grad():
            chosen = subject.model(**tensors).logits[:, -1].argmax(dim=-1)
        tensors["input_ids"] = torch.cat([tensors["input_ids"], chosen[:, None]], dim=1)
        tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    image, text = expected_rows(subject, tensors, *CONNECTORS["llava"])
    (captured,) = capture(subject, probes, method=Method(row="decoder:2"))
    maps = by_stream(captured.maps)
    np.testing.assert_allclose(maps["image"].weights * maps["image"].share, image, atol=1e-6)
    np.testing.assert_allclose(maps["text"].weights * maps["text"].share, text, atol=1e-6)
    assert maps["text"].positions.special[-2:].all()


def by_stream(maps: tuple[Map, ...]) -> dict[str, Map]:
    return {one.stream: one for one in maps}


def test_layers_are_those_of_the_decoder_and_a_probe_does_not_depend_on_others() -> None:
    subject, probes = llava(), question_probes(2)
    together = list(capture(subject, probes))
    alone = next(capture(subject, probes[1:]))
    for one, other in zip(together[1].maps, alone.maps, strict=True):
        np.testing.assert_array_equal(one.weights, other.weights)
        assert one.layers is not None
        assert one.layers.shape == (LAYERS, len(one.weights))
        np.testing.assert_allclose(one.layers[-1], one.weights, atol=1e-7)


class _Mixing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.inner(states)
        return found + 0.5 * found.roll(1, dims=1)


def test_connector_that_mixes_patches_is_refused() -> None:
    subject = llava()
    subject.model.model.multi_modal_projector = _Mixing(subject.model.model.multi_modal_projector)
    with pytest.raises(CaptureError, match="mixes patches"):
        next(capture(subject, question_probes(1)))


def test_image_that_enters_again_between_blocks_is_refused() -> None:
    subject = llava()
    kept: list[Tensor] = []
    tower, block = subject.model.model.vision_tower, subject.model.model.language_model.layers[0]
    tower.encoder.layers[0].register_forward_hook(lambda _m, _a, output: kept.append(output))
    block.register_forward_hook(lambda _m, _a, output: output + kept[-1][:, 1:2].mean())
    with pytest.raises(CaptureError, match=r"the image enters .* again behind its first block"):
        next(capture(subject, question_probes(1)))


def test_families_that_cannot_be_composed_say_why() -> None:
    with pytest.raises(CaptureError, match=r"the image enters .* again behind its first block"):
        next(capture(qwen3_vl(), question_probes(1)))
    subject = idefics2()
    resampler = subject.model.model.connector.perceiver_resampler
    for layer in resampler.layers:  # keys in another order than patches and then latents
        layer.self_attn.k_proj.register_forward_pre_hook(lambda _m, args: (args[0].flip(1),))
        layer.self_attn.v_proj.register_forward_pre_hook(lambda _m, args: (args[0].flip(1),))
    with pytest.raises(CaptureError, match="are learned latents that attend to the patches otherwise"):
        next(capture(subject, question_probes(1)))


def test_steps_beyond_the_answer_are_refused_by_name() -> None:
    subject, probes = llava(), question_probes(1)
    subject.model.generation_config.eos_token_id = list(range(subject.model.config.text_config.vocab_size))
    with pytest.raises(ProbeError, match="q-0: the checkpoint generates 1 tokens, none is row 'decoder:3'"):
        next(capture(subject, probes, method=Method(row="decoder:3")))


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_feeding_is_told_for_any_assignment(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    expected = torch.randint(-1, rows, (3, 5), generator=draw)
    leaf = torch.randn(3, 5, 4, generator=draw, requires_grad=True)
    target = torch.zeros(rows, 4).index_add(
        0, expected.clamp_min(0).flatten(), (leaf * (expected >= 0)[..., None]).flatten(0, 1)
    )
    assert feeds(torch.tanh(target), [leaf])[0].tolist() == expected.tolist()


def test_pieces_out_of_order_are_refused() -> None:
    from audit.capture.attention.interface import AttentionCall

    value = torch.randn(1, 2, 6, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.eye(3).repeat(1, 2, 1, 1)
    output = value.transpose(1, 2)
    calls = [AttentionCall("layer", weights, output[:, i : i + 3], value[:, :, i : i + 3]) for i in (0, 3)]
    projected = output.flatten(2)[0]
    joined = join_pieces(calls, [projected], [projected])
    np.testing.assert_array_equal(joined.weights[0, 0], np.eye(6))
    with pytest.raises(CaptureError, match="order among its positions cannot be verified"):
        join_pieces(calls[::-1], [projected], [projected])


def test_audit_of_two_checkpoints_judges_both_streams_and_says_what_it_cannot_confirm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    subject = llava()
    for name, noise in (("before", 0.0), ("after", 0.3)):
        with torch.no_grad():
            for parameter in subject.model.parameters():
                parameter.add_(torch.randn_like(parameter) * noise)
        subject.model.save_pretrained(tmp_path / name)
        subject.processor.save_pretrained(tmp_path / name)
    lines = []
    for i, probe in enumerate(question_probes(20)):
        save_image(tmp_path / f"{i}.png", np.asarray(probe.image))
        regions = {"corner": {"box": [0.5, 0.5, 1.0, 1.0]}}
        lines.append(
            json.dumps({"id": f"q-{i}", "text": probe.text, "image": f"{i}.png", "regions": regions})
        )
    (tmp_path / "probes.jsonl").write_text("\n".join(lines))
    (tmp_path / "audit.toml").write_text(
        '[checkpoints.before]\npath = "before"\n[checkpoints.after]\npath = "after"\n'
        '[probes]\npath = "probes.jsonl"\n[store]\nurl = "store"\n'
        '[[gate.rules]]\nregion = "corner"\nkind = "limit"\nfail = 1e-6\n'
        "[regions]\nopening = { quantile = [0.0, 0.25] }\n"
        '[[gate.rules]]\nregion = "opening"\nkind = "limit"\nfail = 1e-6\n'
    )
    verdict = run_audit(audit.load_config(tmp_path / "audit.toml"))
    judged = {(rule.region, rule.stream) for rule in verdict.rules}
    assert {("corner", "image"), ("opening", "image"), ("opening", "text")} <= judged
    assert verdict.status == "FAIL"
    assert any("the maps have several streams" in note for note in verdict.notes)
    store = audit.Store(tmp_path / "store")
    streams = [one.stream for one in store.iter_maps(store.run_ids()[0])]
    assert streams == ["image", "text"] * 20
