"""The identity of a checkpoint: from files alone, wherever they lie."""

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from audit.models import checkpoint_info, compatible_targets, digests, estimate
from audit.records import CheckpointInfo
from tests.refusals import message

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "id2label": {"10": "k", "0": "a", "2": "c", "1": "b"},
}


def make_checkpoint(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    tensors = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float16)}
    save_file({**tensors, "ids": np.arange(7)}, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "here")


# --- digests ----------------------------------------------------------------------------------


def test_checkpoint_info_does_not_depend_on_where_the_files_lie(checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "somewhere" / "else"))
    here, there = checkpoint_info(str(checkpoint)), checkpoint_info(str(copy))
    assert here.digest == there.digest
    assert here.parts == there.parts
    assert there.ref == str(copy)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.safetensors", "weights"),
        ("config.json", "config"),
        ("tokenizer.json", "tokenizer"),
        ("generation_config.json", "config"),
        ("special_tokens_map.json", "tokenizer"),
        ("preprocessor_config.json", "tokenizer"),
        ("1_Pooling/config.json", "config"),
    ],
)
def test_checkpoint_info_changes_with_every_file_that_changes_numbers(checkpoint, name, part):
    before = checkpoint_info(str(checkpoint))
    path = checkpoint / name
    path.parent.mkdir(exist_ok=True)
    if name == "model.safetensors":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.write_text((path.read_text() if path.exists() else "{}") + " ")
    after = checkpoint_info(str(checkpoint))
    assert after.digest != before.digest
    assert {p for p in after.parts if after.parts[p] != before.parts[p]} == {part}
    assert (after.weights_digest != before.weights_digest) == (part == "weights")
    assert (after.tokenizer_digest != before.tokenizer_digest) == (part == "tokenizer")


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin", "README.md", "consolidated.pth"])
def test_checkpoint_info_ignores_files_that_loading_does_not_read(checkpoint, name):
    before = checkpoint_info(str(checkpoint))
    (checkpoint / name).write_bytes(b"anything")
    assert checkpoint_info(str(checkpoint)) == before


def test_checkpoint_info_prefers_safetensors_to_pickles(checkpoint):
    before = checkpoint_info(str(checkpoint))
    (checkpoint / "pytorch_model.bin").write_bytes(b"pickle")
    assert checkpoint_info(str(checkpoint)) == before
    (checkpoint / "model.safetensors").unlink()
    assert checkpoint_info(str(checkpoint)).weights_digest != before.weights_digest


@pytest.mark.parametrize("single", ["model.safetensors", "pytorch_model.bin"])
def test_checkpoint_info_reads_every_shard_that_the_index_names(checkpoint, single):
    (checkpoint / "model.safetensors").unlink()
    shards = [single.replace(".", f"-0000{i}-of-00002.") for i in (1, 2)]
    for i, shard in enumerate(shards):
        save_file({f"w{i}": np.full(6, i, np.float32)}, checkpoint / shard)
    index = {"weight_map": {"w0": shards[0], "w1": shards[1]}}
    (checkpoint / f"{single}.index.json").write_text(json.dumps(index))
    before = checkpoint_info(str(checkpoint))
    save_file({"w1": np.full(6, 9, np.float32)}, checkpoint / shards[1])
    assert checkpoint_info(str(checkpoint)).weights_digest != before.weights_digest
    (checkpoint / shards[1]).unlink()
    assert shards[1] in message(checkpoint_info, str(checkpoint))


def test_checkpoint_info_counts_floating_point_weights_from_the_header(checkpoint):
    assert checkpoint_info(str(checkpoint)).parameters == 3 * 4 + 5


def test_file_sha256_is_the_hash_of_the_content_and_is_remembered(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 5000)
    expected = sha256(path.read_bytes()).hexdigest()
    assert digests.file_sha256(path) == expected
    stat = path.stat()
    path.write_bytes(b"x" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digests.file_sha256(path) == expected  # same size and time: read from memory
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert digests.file_sha256(path) == sha256(b"x" * stat.st_size).hexdigest()


# --- what the config says ---------------------------------------------------------------------


def test_checkpoint_info_orders_labels_by_index(checkpoint):
    info = checkpoint_info(str(checkpoint))
    assert info.labels == ("a", "b", "c", "k")
    assert (info.architecture, info.model_type) == ("BertForSequenceClassification", "bert")


def test_checkpoint_info_gives_no_labels_without_a_classifier(tmp_path):
    assert checkpoint_info(str(make_checkpoint(tmp_path / "a", architectures=["BertModel"]))).labels == ()
    assert checkpoint_info(str(make_checkpoint(tmp_path / "b", architectures=None))).architecture is None


def test_checkpoint_info_knows_that_a_classifier_has_two_labels_unless_told(tmp_path):
    assert checkpoint_info(str(make_checkpoint(tmp_path, id2label=None))).labels == ("LABEL_0", "LABEL_1")


# --- adapters ---------------------------------------------------------------------------------


def make_adapter(directory: Path, head: int | None = None) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    tensors = {"base_model.model.q.lora_A.weight": np.ones((2, 4), np.float32)}
    if head is not None:
        tensors["base_model.model.classifier.weight"] = np.ones((head, 4), np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def test_checkpoint_info_covers_the_adapter(checkpoint, tmp_path):
    adapter = make_adapter(tmp_path / "adapter")
    base = checkpoint_info(str(checkpoint))
    both = checkpoint_info(str(checkpoint), adapter=str(adapter))
    assert both.adapter == str(adapter)
    assert both.parts == {**base.parts, "adapter": both.parts["adapter"]}
    assert both.weights_digest != base.weights_digest
    (adapter / "adapter_config.json").write_text(json.dumps({"lora_alpha": 32}))
    assert checkpoint_info(str(checkpoint), adapter=str(adapter)).weights_digest != both.weights_digest


def test_checkpoint_info_counts_the_labels_of_a_head_in_the_adapter(tmp_path):
    base = make_checkpoint(tmp_path / "base", architectures=["BertForMaskedLM"], id2label=None)
    adapter = make_adapter(tmp_path / "adapter", head=3)
    assert checkpoint_info(str(base)).labels == ()
    assert checkpoint_info(str(base), adapter=str(adapter)).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_checkpoint_info_takes_the_tokenizer_that_the_adapter_ships(checkpoint, tmp_path):
    adapter = make_adapter(tmp_path / "adapter")
    base = checkpoint_info(str(checkpoint))
    (adapter / "tokenizer.json").write_text("{}")
    assert checkpoint_info(str(checkpoint), adapter=str(adapter)).tokenizer_digest == base.tokenizer_digest
    (adapter / "tokenizer.json").write_text('{"more": 1}')
    assert checkpoint_info(str(checkpoint), adapter=str(adapter)).tokenizer_digest != base.tokenizer_digest


def test_checkpoint_info_names_what_an_adapter_lacks(checkpoint, tmp_path):
    adapter = make_adapter(tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in message(checkpoint_info, str(checkpoint), adapter=str(adapter))
    (adapter / "adapter_config.json").unlink()
    assert "adapter_config.json" in message(checkpoint_info, str(checkpoint), adapter=str(adapter))
    assert "absent" in message(checkpoint_info, str(checkpoint), adapter=str(tmp_path / "absent"))


def test_checkpoint_info_refuses_an_adapter_in_the_place_of_a_checkpoint(checkpoint, tmp_path):
    text = message(checkpoint_info, str(make_adapter(tmp_path / "adapter")))
    assert "org/base" in text
    (checkpoint / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in message(checkpoint_info, str(checkpoint))


# --- bad input --------------------------------------------------------------------------------


def test_checkpoint_info_names_a_missing_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for ref in ("models/absent", "./absent", "a/b/c", str(tmp_path / "absent"), "C:\\absent"):
        assert f"checkpoint {ref}: there is no such directory" in message(checkpoint_info, ref)


def test_checkpoint_info_names_what_a_directory_lacks(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    assert "tokenizer" in message(checkpoint_info, str(checkpoint))
    (checkpoint / "model.safetensors").unlink()
    assert "no weights, expected model.safetensors" in message(checkpoint_info, str(checkpoint))
    (checkpoint / "config.json").unlink()
    assert "no config.json" in message(checkpoint_info, str(checkpoint))


def test_checkpoint_info_refuses_a_file_and_a_revision_of_a_directory(checkpoint):
    assert "this is a file" in message(checkpoint_info, str(checkpoint / "config.json"))
    assert "no revision 'v2'" in message(checkpoint_info, str(checkpoint), revision="v2")


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_checkpoint_info_refuses_a_damaged_config(checkpoint, content):
    (checkpoint / "config.json").write_text(content)
    assert "config.json" in message(checkpoint_info, str(checkpoint))


def test_checkpoint_info_refuses_damaged_weights(checkpoint):
    path = checkpoint / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-4], whole[:40], whole[:3], b"", b"\xff" * 64, whole + b"more"):
        path.write_bytes(damaged)
        assert "model.safetensors is damaged or cut short" in message(checkpoint_info, str(checkpoint))
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in message(checkpoint_info, str(checkpoint))


def test_an_offline_hub_model_names_the_token_and_loads_from_the_cache_when_it_is_there(tmp_path):
    commit = "0" * 40
    cached = tmp_path / "hub" / "models--org--cached"
    make_checkpoint(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    script = (
        "import sys; from audit.errors import CheckpointError; from audit.models import checkpoint_info\n"
        "print(checkpoint_info('org/cached').revision)\n"
        "print(checkpoint_info('org/cached', revision='0' * 40).digest)\n"
        "try: checkpoint_info('org/absent')\n"
        "except CheckpointError as error: print(int(error.exit_code), error)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
    }
    environment["HF_TOKEN"] = "hf_secret"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    revision, digest, absent = done.stdout.splitlines()
    assert revision == commit
    assert digest == checkpoint_info(str(cached / "snapshots" / commit)).digest
    assert absent.startswith("12 checkpoint org/absent: ")
    assert "HF_HUB_OFFLINE" in absent
    assert "HF_TOKEN" in absent
    assert all(b"hf_secret" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


# --- targets and cost -------------------------------------------------------------------------


def info_with(ref: str, *labels: str, parameters: int = 0) -> CheckpointInfo:
    return CheckpointInfo(ref, "", "", "", labels=labels, parameters=parameters)


def test_compatible_targets_compares_sets_of_labels():
    compatible_targets(info_with("a", "x", "y"), info_with("b", "y", "x"))
    compatible_targets(info_with("a"), info_with("b"))
    text = message(compatible_targets, info_with("a", "x", "y"), info_with("b", "x", "z"))
    assert "'y', 'z'" in text
    assert "a (2 labels) and b" in text
    many = info_with("c", *(f"class {i}" for i in range(1000)))
    assert "and 995 more" in message(compatible_targets, info_with("a"), many)


def test_estimate_grows_with_weights_probes_and_length():
    small = estimate(info_with("a", parameters=10_000_000), 1000, 100)
    large = estimate(info_with("a", parameters=20_000_000), 1000, 100)
    assert large.minutes == pytest.approx(2 * small.minutes)
    assert large.gigabytes - small.gigabytes == pytest.approx(0.04)
    half = estimate(info_with("a", parameters=20_000_000), 500, 200, dtype="bfloat16")
    assert half.minutes == pytest.approx(large.minutes)
    assert large.gigabytes - half.gigabytes == pytest.approx(0.04)
    assert (
        estimate(info_with("a", parameters=20_000_000), 500, 200, device_type="cuda").minutes < small.minutes
    )
