"""audit.toml: strict keys, resolved paths, and rules that make sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.config import load_config
from audit.errors import ConfigError
from audit.records import Policy, Rule

MINIMAL = """
[checkpoints.before]
path = "hub/base"
[checkpoints.after]
path = "./release"
[probes]
path = "probes.jsonl"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "audit.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_minimal_file_takes_the_records_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.policy() == Policy(rules=())
    assert config.method.record().name == "rollout"
    assert config.method.record().params == {}


def test_local_paths_are_resolved_against_the_file_and_hub_ids_kept(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.checkpoints["before"].path == "hub/base"
    assert config.checkpoints["after"].path == str(tmp_path / "release")
    assert config.probes.path == str(tmp_path / "probes.jsonl")
    assert config.store.url == str(tmp_path / "data/store")


def test_store_url_with_a_scheme_is_kept(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL + '[store]\nurl = "memory://audits"\n'))
    assert config.store.url == "memory://audits"


def test_replicate_glob_expands_in_order(tmp_path: Path) -> None:
    for name in ("seed-2", "seed-1"):
        (tmp_path / name).mkdir()
    config = load_config(write(tmp_path, MINIMAL + '[[replicates]]\npath = "seed-*"\nkind = "refresh"\n'))
    assert [(Path(one.path or "").name, one.kind) for one in config.replicates] == [
        ("seed-1", "refresh"),
        ("seed-2", "refresh"),
    ]


def test_rules_become_records(tmp_path: Path) -> None:
    rules = """
[[gate.rules]]
region = "name"
kind = "limit"
fail = 0.02
warn = 0.01
[[gate.rules]]
region = "*"
kind = "excess"
within = "3 sd"
"""
    policy = load_config(write(tmp_path, MINIMAL + rules)).policy()
    assert policy.rules == (
        Rule("name", "limit", fail=0.02, warn=0.01),
        Rule("*", "excess", within="3 sd"),
    )


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("[stroe]\nurl = 'x'\n", 'unknown key "stroe"; did you mean "store"?'),
        ("[statistics]\nresample = 99\n", 'did you mean "resamples"?'),
        ("[[gate.rules]]\nregion='a'\nkind='limit'\nfial=1\nfail=0.1\n", 'did you mean "fail"?'),
        ("[[gate.rules]]\nregion='a'\nkind='limit'\n", "a limit rule needs fail"),
        ("[[gate.rules]]\nregion='a'\nkind='excess'\n", "an excess rule needs within"),
        ("[[gate.rules]]\nregion='a'\nkind='excess'\nwithin='3 sigma'\n", '"3 sd"'),
        ("[[gate.rules]]\nregion='a'\nkind='excess'\nwithin=-1\n", "above 0"),
        ("[[gate.rules]]\nregion='a'\nkind='excess'\nwithin='inf sd'\n", '"3 sd"'),
        ("[[gate.rules]]\nregion='a'\nkind='excess'\nwithin=nan\n", "finite"),
        ("[[gate.rules]]\nregion='a'\nkind='limit'\nfail=nan\n", "fail: Input should be a finite number"),
        ("[[gate.rules]]\nregion='a'\nkind='limit'\nfail=inf\n", "fail: Input should be a finite number"),
        ("[[gate.rules]]\nregion='a'\nkind='limit'\nfail=-0.02\n", "give its size, 0.02"),
        (
            "[[gate.rules]]\nregion='a'\nkind='limit'\nfail=2\n",
            "fail = 2 never fails: shift lies from -1 to 1; give a share such as 0.02 for 2 %",
        ),
        (
            "[[gate.rules]]\nregion='a'\nkind='limit'\nmeasure='level'\nfail=30\n",
            "fail = 30 never fails: level lies from 0 to 1",
        ),
        (
            "[[gate.rules]]\nregion='*'\nkind='limit'\nmeasure='js_distance'\nfail=2\n",
            "fail = 2 never fails",
        ),
        (
            "[[gate.rules]]\nregion='*'\nkind='limit'\nmeasure='total_variation'\nfail=50\n",
            "fail = 50 never fails",
        ),
        ("[[gate.rules]]\nregion='a'\nkind='excess'\nwithin=2\n", "within = 2 allows everything"),
        (
            "[[gate.rules]]\nregion='a'\nkind='limit'\nfail=0.02\nwarn=0.05\n",
            "warn = 0.05 is looser than fail",
        ),
        (
            "[[gate.rules]]\nregion='a'\nkind='limit'\nmeasure='level'\ndirection='decrease'\nfail=0.2\nwarn=0.1\n",
            "warn = 0.1 is looser than fail",
        ),
        ("[[gate.rules]]\nregion='a'\nkind='limit'\nmeasure='ratio'\nfail=0\n", "a number above 0"),
        ("[method]\nresidual = 1.5\n", "residual is 1.5; expected a share from 0 to 1"),
        ("[method]\nresidual = [0.5, -0.1]\n", "residual is -0.1"),
        ("[method]\nstart_layer = -1\n", "start_layer is -1; expected a whole number from 0"),
        ('[method]\nhead_fusion = "sum"\n', "head_fusion = 'sum' is unknown; use 'mean'"),
        ('[method]\nname = "shap"\nsamples = 0\n', "samples is 0; expected a whole number from 2"),
        ("[method]\nresidual = 1.0\n", "residual = 1.0 reads nothing"),
        ("[method]\nresidual = [1.0, 1.0]\n", "residual = [1.0, 1.0] reads nothing"),
        ("[[replicates]]\nkind='seed'\n", "exactly one of"),
        ("[[replicates]]\npath='nothing-*'\n", "matches nothing"),
        ("[statistics]\nalpha = 0.7\n", "statistics.alpha"),
        ("[regions]\nodd = {boxx = [0, 0, 1, 1]}\n", "box"),
        ("[capture]\ndevice = 'mps'\n", "capture.device"),
        ("[checkpoints.middle]\npath='x'\n", "before"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, addition: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, MINIMAL + addition))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 10


@pytest.mark.parametrize(
    "rule",
    [
        "fail = -0.02\ndirection = 'decrease'",
        "fail = 0.9\nwarn = 0.95\nmeasure = 'cosine_similarity'",
        "fail = 0.1\nwarn = 0.2\nmeasure = 'level'\ndirection = 'decrease'",
        "fail = 2\nwarn = 1.5\nmeasure = 'ratio'",
        "fail = 2\nmeasure = 'wasserstein'",
        "fail = 0.99",
        "fail = 0\nmeasure = 'spearman'",
    ],
)
def test_limits_are_read_as_their_measure_and_direction_mean(tmp_path: Path, rule: str) -> None:
    text = f"{MINIMAL}[[gate.rules]]\nregion = 'a'\nkind = 'limit'\n{rule}\n"
    assert len(load_config(write(tmp_path, text)).policy().rules) == 1


def test_after_or_domain_is_needed(tmp_path: Path) -> None:
    text = '[checkpoints.before]\npath = "a"\n[probes]\npath = "p"\n'
    with pytest.raises(ConfigError, match=r"checkpoints\.after"):
        load_config(write(tmp_path, text))
    assert load_config(write(tmp_path, text + '[domain]\npath = "q"\n')).domain is not None


def test_missing_or_broken_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit init"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="TOML"):
        load_config(write(tmp_path, "[store\n"))
