"""Coverage: a fixed sample of families runs here; the kept table of all types is held to its promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

from audit.coverage import (
    STATUSES,
    UNEXPECTED,
    coverage_page,
    known_model_types,
    measure_coverage,
    read_coverage,
    write_coverage,
)
from audit.coverage.checks import examine
from audit.coverage.configs import build_model, model_class, tiny_config
from audit.coverage.inputs import TOKENS, random_inputs
from audit.errors import ConfigError

INTERFACE = [
    "albert",
    "bert",
    "camembert",
    "electra",
    "distilbert",
    "roberta",
    "xlm-roberta",
    "mobilebert",
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "stablelm",
    "olmo",
    "olmo2",
    "cohere",
    "gpt_oss",
    "t5",
    "bart",
    "mbart",
    "marian",
    "whisper",
    "vit",
    "deit",
    "beit",
    "dinov2",
    "dinov2_with_registers",
    "swin",
    "clip",
    "siglip",
    "llava",
    "wav2vec2",
    "hubert",
    "audio-spectrogram-transformer",
]
FALLBACK = ["deberta", "deberta-v2", "mpnet", "gpt_neo", "bloom", "falcon", "blip", "wavlm", "swinv2", "vilt"]
FALLBACK += ["longformer", "led", "big_bird", "longt5", "xlnet", "xlm", "fsmt"]
REFUSED = {
    "segformer": "windowed or pooled attention",
    "mamba": "mixes positions without softmax attention",
    "fnet": "mixes positions without softmax attention",
    "convbert": "cannot be verified",
    "parakeet_encoder": "positions mix outside the captured attention",
}


def test_sample_has_sixty_types() -> None:
    assert len({*INTERFACE, *FALLBACK, *REFUSED}) >= 60


@pytest.mark.parametrize("model_type", [*INTERFACE, *FALLBACK])
def test_used_families_are_captured(model_type: str) -> None:
    found = examine(model_type)
    assert (found.status, found.reason) != ("refused", ""), found
    assert found.status == ("supported" if model_type in INTERFACE else "fallback"), found.reason


@pytest.mark.parametrize("model_type", REFUSED)
def test_types_without_an_exact_rollout_say_why(model_type: str) -> None:
    found = examine(model_type)
    assert found.status == "refused"
    assert REFUSED[model_type] in found.reason


def test_kept_table_names_every_type_and_supports_three_hundred() -> None:
    rows = read_coverage()
    assert [row.model_type for row in rows] == list(known_model_types()), (
        f"no results for transformers {version('transformers')}; run make coverage"
    )
    counts = Counter(row.status for row in rows)
    assert counts["supported"] + counts["fallback"] >= 300
    assert counts["supported"] >= 300
    assert set(counts) <= set(STATUSES)
    assert [row for row in rows if not row.reason or "\n" in row.reason] == []
    assert [row for row in rows if row.reason.startswith(UNEXPECTED)] == []


def test_kept_table_agrees_with_the_sample_and_the_page() -> None:
    kept = {row.model_type: row.status for row in read_coverage()}
    expected = dict.fromkeys(INTERFACE, "supported") | dict.fromkeys(FALLBACK, "fallback")
    expected |= dict.fromkeys(REFUSED, "refused")
    assert {name: kept[name] for name in expected} == expected
    page = Path(__file__).parents[2] / "docs" / "coverage.md"
    assert page.read_text(encoding="utf-8") == coverage_page(read_coverage())


def test_pool_measures_types_and_replaces_a_process_that_takes_too_long(tmp_path: Path) -> None:
    found = {row.model_type: row for row in measure_coverage(["bert", "mamba"], workers=1)}
    assert found["bert"].status == "supported"
    assert found["mamba"].status == "refused"
    slow = list(measure_coverage(["gpt2"], workers=1, timeout=0.0))
    assert [(row.status, row.reason) for row in slow] == [("not_buildable", "takes longer than 0 s")]
    path = tmp_path / "coverage.json"
    write_coverage(found.values(), path)
    assert read_coverage(path) == tuple(sorted(found.values(), key=lambda row: row.model_type))
    assert read_coverage(path, transformers="0.0") == ()
    with pytest.raises(ConfigError, match="model type 'nothing' is unknown"):
        next(measure_coverage(["nothing"]))


def test_command_prints_the_kept_table() -> None:
    command = [sys.executable, "-m", "audit", "coverage", "bert", "mamba", "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = json.loads(printed)
    assert [row["model_type"] for row in rows] == ["bert", "mamba"]
    assert [set(row) for row in rows] == [{"model_type", "status", "reason"}] * 2
    assert [row["status"] for row in rows] == ["supported", "refused"]


def test_tiny_configs_shrink_every_part() -> None:
    config = tiny_config(model_class("llava").config_class)
    assert (config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers) == (2, 2)
    assert config.text_config.hidden_size == 32
    assert sum(p.numel() for p in build_model("llama").parameters()) < 200_000


def test_random_inputs_differ_by_seed_and_hold_no_special_token() -> None:
    model = build_model("bert")
    first, second = (next(random_inputs(model, seed=seed)) for seed in (0, 1))
    assert first["input_ids"].shape == second["input_ids"].shape == (1, TOKENS)
    assert not first["input_ids"].equal(second["input_ids"])
    assert model.config.pad_token_id not in first["input_ids"]
