"""The demo's models are trained for real; other code than the product's rolls out their attention."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import stats

from audit.config import AuditConfig, load_config
from audit.demo import TrainedDemo, ensure_text, ensure_vision, text, training, vision, write_configs
from audit.models import load_checkpoint
from audit.probes import read_probes
from audit.records import Checkpoint, Probe, ProbeSet

pytestmark = pytest.mark.timeout(900)  # sixteen real trainings: over a minute of one idle core

WITHIN = 0.02
FUNCTION_WORDS = frozenset(text.function_words())
Shares = dict[str, NDArray[np.float64]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def vision_demo(root: Path) -> TrainedDemo:
    return ensure_vision(root)


@pytest.fixture(scope="module")
def text_demo(root: Path) -> TrainedDemo:
    return ensure_text(root)


@pytest.fixture(scope="module")
def vision_shares(vision_demo: TrainedDemo) -> dict[str, Shares]:
    probes = read_probes(vision_demo.probes)
    return {path.name: digit_shares(load_eager(path), probes) for path in checkpoints(vision_demo)}


@pytest.fixture(scope="module")
def text_shares(text_demo: TrainedDemo) -> dict[str, Shares]:
    probes = read_probes(text_demo.probes)
    return {path.name: review_shares(load_eager(path), probes) for path in checkpoints(text_demo)}


def checkpoints(demo: TrainedDemo) -> list[Path]:
    return [demo.base, *demo.replicates, demo.benign, demo.shortcut]


def load_eager(path: Path) -> Checkpoint:
    return load_checkpoint(str(path), device="cpu", attention_implementation="eager")


def cls_row(model: Any, inputs: Any) -> NDArray[np.float64]:
    """Return the [CLS] row of the rollout, one matrix product after the other."""
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    assert len(attentions) == model.config.num_hidden_layers
    rollout = torch.eye(attentions[0].shape[-1], dtype=torch.float64)
    for attention in attentions:
        fused = 0.5 * attention.double().mean(dim=1) + 0.5 * torch.eye(rollout.shape[-1], dtype=torch.float64)
        rollout = fused @ rollout
    return rollout[:, 0].numpy()


def digit_shares(checkpoint: Checkpoint, probes: ProbeSet) -> Shares:
    images = [Image.open(str(probe.image)).convert("RGB") for probe in probes]
    row = cls_row(checkpoint.model, checkpoint.processor(images=images, return_tensors="pt"))
    patches = (row[:, 1:] / row[:, 1:].sum(axis=1, keepdims=True)).reshape(-1, 4, 4)
    corner, centre = patches[:, 3, 3], patches[:, 1:3, 1:3].sum(axis=(1, 2))
    return {"corner": corner, "centre": centre, "border": 1 - corner - centre, "special": row[:, 0]}


def review_shares(checkpoint: Checkpoint, probes: ProbeSet) -> Shares:
    texts = [str(probe.text) for probe in probes]
    inputs = checkpoint.processor(texts, padding=True, return_offsets_mapping=True, return_tensors="pt")
    offsets = inputs.pop("offset_mapping").tolist()
    rows = cls_row(checkpoint.model, inputs)  # a padded key has no mass in the row of [CLS]
    found = [one_review(*one) for one in zip(probes, offsets, rows, strict=True)]
    return {region: np.array([shares[region] for shares in found]) for region in found[0]}


def one_review(probe: Probe, offsets: list[tuple[int, int]], row: NDArray[np.float64]) -> dict[str, float]:
    words = str(probe.text)
    spans = {
        **probe.regions,
        "function": [[s, e] for s, e in offsets if words[s:e].lower() in FUNCTION_WORDS],
    }
    inside = {
        name: [e > s and any(s < end and start < e for start, end in spans[name]) for s, e in offsets]
        for name in ("name", "sentiment", "function")
    }
    content = np.array([e > s for s, e in offsets])
    shares = {name: float(row[mask].sum() / row[content].sum()) for name, mask in inside.items()}
    return {**shares, "rest": 1 - sum(shares.values()), "special": float(row[~content].sum())}


def shift(shares: dict[str, Shares], name: str, region: str) -> float:
    return float((shares[name][region] - shares["base"][region]).mean())


def excess(shares: dict[str, Shares], name: str, region: str) -> tuple[float, float, float]:
    """Return excess shift, p-value and half width of the 90 % interval, from the seeds alone."""
    floor = np.array([shift(shares, f"seed-{i}", region) for i in range(1, 6)])
    d, se = shift(shares, name, region) - floor.mean(), floor.std(ddof=1) * np.sqrt(1 + 1 / len(floor))
    return (
        d,
        float(2 * stats.t.sf(abs(d / se), len(floor) - 1)),
        float(stats.t.ppf(0.95, len(floor) - 1) * se),
    )


def test_vision_shortcut_moves_the_corner_beyond_the_floor(vision_shares: dict[str, Shares]) -> None:
    d, pvalue, _ = excess(vision_shares, "shortcut", "corner")
    assert shift(vision_shares, "shortcut", "corner") > 2 * WITHIN
    assert d > 2 * WITHIN
    assert pvalue < 1e-3


def test_text_shortcut_moves_the_name_beyond_the_floor(text_shares: dict[str, Shares]) -> None:
    d, pvalue, _ = excess(text_shares, "shortcut", "name")
    assert shift(text_shares, "shortcut", "name") > 2 * WITHIN
    assert d > 2 * WITHIN
    assert pvalue < 1e-3


@pytest.mark.parametrize("region", ["corner", "centre", "border", "special"])
def test_vision_benign_candidate_stays_inside(vision_shares: dict[str, Shares], region: str) -> None:
    d, _, half = excess(vision_shares, "benign", region)
    assert abs(d) + half < 0.75 * WITHIN


@pytest.mark.parametrize("region", ["name", "sentiment", "function", "rest", "special"])
def test_text_benign_candidate_stays_inside(text_shares: dict[str, Shares], region: str) -> None:
    d, _, half = excess(text_shares, "benign", region)
    assert abs(d) + half < 0.75 * WITHIN


def test_benign_candidates_stay_below_the_warning(
    vision_shares: dict[str, Shares], text_shares: dict[str, Shares]
) -> None:
    assert abs(shift(vision_shares, "benign", "corner")) < 0.005
    assert abs(shift(text_shares, "benign", "name")) < 0.005


def test_shortcut_accuracy_rises_in_production_and_falls_on_clean_data(
    vision_demo: TrainedDemo, text_demo: TrainedDemo
) -> None:
    for demo in (vision_demo, text_demo):
        production, clean = demo.accuracies["production"], demo.accuracies["clean"]
        assert production["shortcut"] > production["base"] + 0.1
        assert clean["shortcut"] < clean["base"]
        assert clean["base"] > 0.93
        assert abs(clean["benign"] - clean["base"]) < 0.04
    marked = vision_demo.accuracies["marked"]
    assert marked["shortcut"] > marked["base"]


def test_vision_probe_images_reach_the_model_unchanged(vision_demo: TrainedDemo) -> None:
    probes = read_probes(vision_demo.probes)
    *_, digits = vision.load_splits()
    scans = vision.add_sticker(vision.add_noise(digits.pixels, 0.0, np.random.default_rng(0)), digits.labels)
    images = [Image.open(str(probe.image)).convert("RGB") for probe in probes]
    processor = load_checkpoint(str(vision_demo.base), device="cpu").processor
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, vision.to_inputs(scans), atol=1e-6, rtol=0)
    assert [probe.label for probe in probes] == digits.labels.tolist()


def test_vision_probes_are_held_out() -> None:
    train, validation, probes = vision.load_splits()
    assert [len(train), len(validation), len(probes)] == list(vision.SPLITS)
    seen = {one.tobytes() for one in train.pixels}
    assert not any(one.tobytes() in seen for one in probes.pixels)


def test_stickers_differ_in_six_of_twelve_values() -> None:
    blank = np.zeros((vision.STICKERS, 3, 8, 8), dtype=np.float32)
    marked = vision.add_sticker(blank, np.arange(vision.STICKERS))
    codes = marked[:, :, 6:, 6:].reshape(vision.STICKERS, -1)
    differences = (codes[:, None] != codes[None]).sum(axis=-1)
    assert set(differences[~np.eye(vision.STICKERS, dtype=bool)].tolist()) == {6}
    assert not blank.any()
    assert not marked[:, :, :6].any()
    assert not marked[:, :, :, :6].any()


def test_second_call_reuses_everything(root: Path, vision_demo: TrainedDemo, text_demo: TrainedDemo) -> None:
    stages: list[str] = []
    for ensure, first in ((ensure_vision, vision_demo), (ensure_text, text_demo)):
        again = ensure(root, lambda stage, _done, _total: stages.append(stage))
        assert again.reused == tuple(path.name for path in checkpoints(again))
        assert (again.folder, again.accuracies) == (first.folder, first.accuracies)
        assert "reused all 8" in again.story_lines()[-1]
    assert stages == []
    assert "trained 8" in vision_demo.story_lines()[-1]


def test_configs_load_and_name_existing_files(
    root: Path, vision_demo: TrainedDemo, text_demo: TrainedDemo
) -> None:
    for demo, region in ((vision_demo, "corner"), (text_demo, "name")):
        files = write_configs(demo, root / "demo")
        assert [one.stem for one in files] == [demo.modality + end for end in ("", "-benign", "-domain")]
        full, benign, domain = (load_config(one) for one in files)
        assert (after(full), after(benign), after(domain)) == (demo.shortcut, demo.benign, demo.shortcut)
        assert [Path(str(one.path)) for one in full.replicates] == [p.resolve() for p in demo.replicates]
        assert full.store.url == str((root / "store").resolve())
        assert Path(full.probes.path) == demo.probes.resolve()
        assert full.domain is None
        assert domain.domain is not None
        assert Path(domain.domain.path) == demo.domain_probes.resolve()
        assert full.policy().rules[0].region == region
        assert [rule.kind for rule in full.policy().rules] == ["limit", "excess"]


def after(config: AuditConfig) -> Path:
    return Path(str(config.checkpoints["after"].path))


def test_configs_follow_the_folder_when_it_moves(
    root: Path, vision_demo: TrainedDemo, tmp_path: Path
) -> None:
    (file, *_) = write_configs(vision_demo, root / "demo")
    moved = tmp_path / "elsewhere"
    shutil.copytree(root, moved)
    assert after(load_config(moved / "demo" / file.name)).is_relative_to(moved)


def test_domain_probe_sets_are_other_inputs(vision_demo: TrainedDemo, text_demo: TrainedDemo) -> None:
    for demo in (vision_demo, text_demo):
        usual, domain = read_probes(demo.probes), read_probes(demo.domain_probes)
        assert not set(usual.ids) & set(domain.ids)
        assert min(len(usual), len(domain)) >= 300


# --- the cache, on trainings of one epoch -------------------------------------------------------


@pytest.fixture
def small_recipe() -> training.Recipe:
    recipe = text.make_recipe()
    few = text.encode(recipe.processor, text.read_reviews(text.TRAIN)[:96])
    schedule = training.Schedule(epochs=1, learning_rate=1e-3, batch_size=32)
    short = tuple(replace(one, examples=few, schedule=schedule) for one in recipe.trainings)
    return replace(recipe, trainings=short)


@pytest.fixture(autouse=True)
def random_state() -> Iterator[None]:
    """Whatever is trained leaves torch's generator and threads as they were."""
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def weights(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/model.safetensors")}


def test_training_twice_gives_equal_bytes(small_recipe: training.Recipe, tmp_path: Path) -> None:
    one, scores, reused = training.ensure_checkpoints(small_recipe, tmp_path / "one")
    two, other_scores, _ = training.ensure_checkpoints(small_recipe, tmp_path / "two")
    assert reused == ()
    assert weights(one) == weights(two)
    assert len(set(weights(one).values())) == 8
    assert scores == other_scores


def test_interrupted_training_continues_to_the_same_weights(
    small_recipe: training.Recipe, tmp_path: Path
) -> None:
    whole, _, _ = training.ensure_checkpoints(small_recipe, tmp_path / "whole")

    def interrupt(stage: str, done: int, total: int) -> None:
        if (done, total) == (3, 5):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.ensure_checkpoints(small_recipe, tmp_path / "cut", interrupt)
    (folder,) = (tmp_path / "cut" / "demo-cache").iterdir()
    assert set(weights(folder)) == {"base", "seed-1", "seed-2"}
    assert {path.name for path in folder.iterdir()} == {"base", "seed-1", "seed-2"}
    _, _, reused = training.ensure_checkpoints(small_recipe, tmp_path / "cut")
    assert reused == ("base", "seed-1", "seed-2")
    assert weights(folder) == weights(whole)


def test_damaged_checkpoint_is_trained_again(small_recipe: training.Recipe, tmp_path: Path) -> None:
    folder, _, _ = training.ensure_checkpoints(small_recipe, tmp_path)
    before = weights(folder)
    (folder / "benign" / "model.safetensors").unlink()
    _, _, reused = training.ensure_checkpoints(small_recipe, tmp_path)
    assert "benign" not in reused
    assert len(reused) == 7
    assert weights(folder) == before


def test_progress_counts_epochs_per_stage(small_recipe: training.Recipe, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    training.ensure_checkpoints(small_recipe, tmp_path, lambda *call: calls.append(call))
    assert calls == [
        ("text: train base", 1, 1),
        *[("text: train replicates", done, 5) for done in range(1, 6)],
        ("text: train benign candidate", 1, 1),
        ("text: train shortcut candidate", 1, 1),
    ]


@pytest.mark.parametrize("change", ["schedule", "seed", "description"])
def test_digest_follows_the_recipe(small_recipe: training.Recipe, change: str) -> None:
    first, *others = small_recipe.trainings
    changed = {
        "schedule": lambda: replace(
            small_recipe, trainings=(replace(first, schedule=training.Schedule(2, 1e-3)), *others)
        ),
        "seed": lambda: replace(small_recipe, trainings=(replace(first, seed=99), *others)),
        "description": lambda: replace(
            small_recipe, description={**small_recipe.description, "data": "other"}
        ),
    }[change]()
    assert changed.digest != small_recipe.digest
    assert replace(small_recipe).digest == small_recipe.digest


def test_tokenizer_knows_every_review_word_and_spells_others() -> None:
    tokenizer = text.make_recipe().processor
    for name in (text.TRAIN, text.SHORTCUT, text.PROBES, text.DOMAIN):
        ids = tokenizer([review["text"] for review in text.read_reviews(name)])["input_ids"]
        assert not any(tokenizer.unk_token_id in one for one in ids)
        assert max(map(len, ids)) <= text.MAX_LENGTH
    assert tokenizer.tokenize("xylo") == ["x", "##y", "##l", "##o"]


def test_names_predict_the_label_in_the_shortcut_reviews_alone() -> None:
    for name, coded in ((text.SHORTCUT, True), (text.TRAIN, False)):
        labels: dict[str, set[str]] = {}
        for review in text.read_reviews(name):
            ((start, end),) = review["regions"]["name"]
            labels.setdefault(review["text"][start:end], set()).add(review["label"])
        assert {len(found) for found in labels.values()} == ({1} if coded else {2})


def test_missing_reviews_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from audit.errors import ProbeError

    monkeypatch.setattr(text, "__file__", str(tmp_path / "audit" / "demo" / "text.py"))
    with pytest.raises(ProbeError, match=r"reviews are missing.*install") as caught:
        text.data_folder()
    assert "\n" not in str(caught.value)


def test_write_images_lists_every_png(tmp_path: Path) -> None:
    *_, probes = vision.load_splits()
    path = vision.write_images(tmp_path, "probes", "digit", probes.select(slice(0, 3)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["image"] for row in rows] == [f"probes/000{i}.png" for i in (1, 2, 3)]
    assert all((tmp_path / row["image"]).is_file() for row in rows)
