"""audit replicate: the user's own training command makes the harmless replicates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from audit.config import load_config
from audit.errors import CheckpointError, ConfigError
from audit.models import checkpoint_info
from audit.pipeline import compare_stored, freeze_config_floor, gate_runs, train_replicates
from audit.pipeline.checks import check_replicates
from tests.integration.test_approvals import cli
from tests.synthetic import World, release

TRAIN = """
import argparse, json, pathlib, sys
import numpy as np
from safetensors.numpy import save_file

options = argparse.ArgumentParser()
options.add_argument("--seed", type=int)
options.add_argument("--out", type=pathlib.Path)
options.add_argument("--behave", default="well")
given = options.parse_args()
print("training with seed", given.seed)
if given.behave == "crash" and given.seed == 2:
    sys.exit("out of memory at step 10")
if given.behave != "nothing":
    given.out.mkdir(parents=True)
    seed = 0 if given.behave == "fixed" else given.seed
    weights = {"encoder.weight": np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32)}
    save_file(weights, given.out / "model.safetensors")
    (given.out / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (given.out / "tokenizer.json").write_text("{}")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "probes.jsonl").write_text('{"id": "a", "text": "one two"}\n')
    return tmp_path


def config(folder: Path, more: str = "", command: str = "python train.py --seed {seed} --out {out}") -> Path:
    path = folder / "audit.toml"
    path.write_text(
        f"""
[checkpoints.before]
path = "./base"
[checkpoints.after]
path = "./after"
[probes]
path = "probes.jsonl"
[[replicates]]
command = {json.dumps(command)}
path = "models of mine/seed-{{seed}}"
{more}
"""
    )
    return path


def train(path: Path) -> dict[str, bool]:
    return train_replicates(load_config(path), folder=path.parent)


def test_replicates_are_trained_once_for_each_seed(folder):
    path = config(folder, "seeds = 3")
    trained = train(path)
    assert [Path(out).name for out in trained] == ["seed-1", "seed-2", "seed-3"]
    assert all(trained.values())
    assert len({checkpoint_info(out).weights_digest for out in trained}) == 3
    assert not any(train(path).values())
    assert "training with seed 2" in (folder / "models of mine" / "seed-2.log").read_text()


def test_seeds_may_be_listed_and_extended(folder):
    train(config(folder, "seeds = [7]"))
    trained = train(config(folder, "seeds = [7, 11]"))
    assert {Path(out).name: fresh for out, fresh in trained.items()} == {"seed-7": False, "seed-11": True}
    found = [section.path for section in load_config(folder / "audit.toml").replicates]
    assert found == list(trained)


def test_a_command_that_fails_names_seed_and_last_line_and_leaves_nothing_half_made(folder):
    path = config(folder, "seeds = 3", "python train.py --behave crash --seed {seed} --out {out}")
    with pytest.raises(CheckpointError, match="seed 2 ended with 1: out of memory at step 10"):
        train(path)
    made = sorted(one.name for one in (folder / "models of mine").iterdir())
    assert made == ["seed-1", "seed-1.log", "seed-2.log"]


@pytest.mark.parametrize(
    ("behave", "said"), [("nothing", "left no checkpoint"), ("fixed", "has the same weights as .*seed-1")]
)
def test_a_command_that_trains_nothing_useful_is_refused(folder, behave, said):
    path = config(folder, "seeds = 2", f"python train.py --behave {behave} --seed {{seed}} --out {{out}}")
    with pytest.raises(CheckpointError, match=said) as error:
        train(path)
    assert "\n" not in str(error.value)


def test_a_replicate_with_the_weights_of_the_baseline_is_refused(folder):
    path = config(folder, "seeds = 1")
    (out,) = train(path)
    Path(out).rename(folder / "base")
    with pytest.raises(CheckpointError, match=r"same weights as .*base"):
        train(path)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python train.py --out {out}", "command needs {seed}"),
        ("python train.py --seed {seed}", "command needs {out}"),
        ("python train.py --seed {seed} --out {out} {rate}", "knows {seed} and {out} alone"),
        ("python 'train.py --seed {seed} --out {out}", "knows {seed} and {out} alone"),
    ],
)
def test_a_wrong_command_is_a_config_error(folder, command, said):
    with pytest.raises(ConfigError) as error:
        train(config(folder, "seeds = 1", command))
    assert said in str(error.value)


def test_a_program_that_does_not_exist_is_named(folder):
    path = config(folder, "seeds = 1", "no-such-program --seed {seed} --out {out}")
    with pytest.raises(CheckpointError, match="no-such-program cannot be run"):
        train(path)


def test_replicate_on_the_command_line(folder):
    path = config(folder, "seeds = 2")
    waiting = cli("capture", path, "--role", "replicate-0")
    assert waiting.returncode == 12
    done = cli("replicate", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    assert json.loads(cli("replicate", path, "--json").stdout) == dict.fromkeys(
        [str(folder / "models of mine" / f"seed-{seed}") for seed in (1, 2)], False
    )
    broken = config(folder, "seeds = 3", "python train.py --behave nothing --seed {seed} --out {out}")
    failed = cli("replicate", broken)
    assert failed.returncode == 12
    assert "seed 3 left no checkpoint" in failed.stderr
    assert "Traceback" not in failed.stderr
    without = folder / "plain.toml"
    without.write_text(path.read_text().split("[[replicates]]")[0])
    assert cli("replicate", without).returncode == 10


# --- one re-training counts once --------------------------------------------------------------


def test_replicates_with_equal_weights_are_refused_wherever_they_come_from(tmp_path):
    world = World(tmp_path, n=24)
    base, after, seeds = release(world)
    freeze_config_floor(load_config(world.config(base, after, seeds)), tmp_path / "floor.json")
    frozen = f'[[replicates]]\nfloor = "{tmp_path / "floor.json"}"\n'
    other_kind = f'[[replicates]]\nrun = "{seeds[0]}"\nkind = "refresh"\n'
    for replicates, more in (([*seeds, seeds[1]], ""), (seeds, other_kind), (seeds[:1], frozen)):
        config = load_config(world.config(base, after, replicates, extra=more))
        with pytest.raises(ConfigError, match=r"the replicates seed-\S+ and seed-\S+ have equal weights"):
            gate_runs(config)
    assert (
        gate_runs(load_config(world.config(base, after, seeds[:0], extra=frozen))).rules[1].n_replicates == 5
    )


def test_compare_and_floor_refuse_one_replicate_twice(tmp_path):
    world = World(tmp_path, n=24)
    base, after, seeds = release(world)
    with pytest.raises(ConfigError, match="equal weights"):
        compare_stored(world.store, base, after, [*seeds, seeds[0]])
    with pytest.raises(ConfigError, match=r"has the weights of \[checkpoints.before\]"):
        compare_stored(world.store, base, after, [*seeds, base])
    with pytest.raises(ConfigError, match="equal weights"):
        freeze_config_floor(load_config(world.config(base, after, [seeds[0]] * 2)), tmp_path / "floor.json")
    assert len(compare_stored(world.store, base, after, seeds).replicates) == 5


def test_weights_decide_whether_replicates_are_one_and_the_second_probe_set_does_not():
    both = [("replicate-1", "seed-1", "ab"), ("replicate-1", "seed-1", "ab"), ("replicate-2", "seed-2", "cd")]
    check_replicates(both)
    with pytest.raises(ConfigError, match="the replicates seed-1 and copy have equal weights"):
        check_replicates([*both, ("replicate-3", "copy", "ab")])
