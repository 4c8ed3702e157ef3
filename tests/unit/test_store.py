from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from audit.errors import StoreError
from audit.store import Store, _log
from audit.store._files import create_file, read_sealed, seal
from tests.store_records import make_comparison, make_verdict, probe_columns


@pytest.mark.parametrize(
    "url", ["s3://bucket/store", "memory://x", "gs://b", "http://host/store", "file://host/x"]
)
def test_store_refuses_urls_it_cannot_write_atomically(url: str) -> None:
    with pytest.raises(StoreError, match="only directories and file:// URLs") as error:
        Store(url)
    assert error.value.exit_code == 14
    assert "\n" not in str(error.value)


def test_store_takes_paths_and_file_urls(tmp_path: Path) -> None:
    assert Store(tmp_path.as_uri()).root == Store(str(tmp_path)).root == Store(tmp_path).root


def test_store_that_does_not_exist_lists_nothing_and_is_not_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert (store.runs(), store.run_ids(), store.comparisons(), store.log(), store.approvals()) == (
        [],
        [],
        [],
        [],
        [],
    )
    assert store.verify_log() == []
    assert store.gc() == []
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["run-0123456789ab", "../runs", ".", ""])
def test_store_names_a_run_it_does_not_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match=r"is not in the store .*--store \(or --config"):
        Store(tmp_path).manifest(name)


# --- sealed JSON --------------------------------------------------------------------------------


def test_seal_ignores_provenance_in_the_digest_alone(tmp_path: Path) -> None:
    first, second = (json.loads(seal({"x": 1}, {"time": t})) for t in ("noon", "night"))
    assert first["digest"] == second["digest"]
    assert first["seal"] != second["seal"]


def test_seal_shows_a_flip_of_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    original = seal({"schema_version": 1, "names": ["é", "1e5"]}, {"time": "2024"})
    for i in range(len(original)):
        path.write_bytes(original[:i] + bytes([original[i] ^ 1]) + original[i + 1 :])
        with pytest.raises(StoreError, match=r"manifest\.json"):
            read_sealed(path)
    path.write_bytes(original)
    assert read_sealed(path)["names"] == ["é", "1e5"]


def test_newer_schema_version_asks_to_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(seal({"schema_version": 99}, {}))
    with pytest.raises(StoreError, match=r"has schema version 99, .* upgrade rollout-audit"):
        read_sealed(path)


def test_create_file_leaves_an_existing_file_alone(tmp_path: Path) -> None:
    assert create_file(tmp_path / "a.json", b"first")
    assert not create_file(tmp_path / "a.json", b"second")
    assert (tmp_path / "a.json").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# --- the log ------------------------------------------------------------------------------------


def test_log_chains_entries_and_its_head_covers_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.log_head() == _log.GENESIS
    entries = [store.append_log("note", {"n": n}) for n in range(3)]
    assert store.log() == entries
    assert [entry["previous"] for entry in entries] == [_log.GENESIS, *(e["digest"] for e in entries[:2])]
    assert store.log_head() == entries[-1]["digest"]
    assert sorted(p.name for p in (tmp_path / "log").iterdir()) == [f"{n:08d}.json" for n in range(3)]
    assert store.verify_log() == []


def test_log_shows_a_flip_of_any_byte(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for n in range(2):
        store.append_log("note", {"n": n})
    for path, step in zip(sorted((tmp_path / "log").iterdir()), (5, 1), strict=True):
        original = path.read_bytes()
        for i in range(0, len(original), step):
            path.write_bytes(original[:i] + bytes([original[i] ^ 1]) + original[i + 1 :])
            assert path.name in store.verify_log()[0]
        path.write_bytes(original)
    assert store.verify_log() == []


def test_log_shows_missing_replaced_and_cut_off_entries(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for n in range(4):
        store.append_log("note", {"n": n})
    head = store.log_head()
    paths = sorted((tmp_path / "log").iterdir())
    kept = [path.read_bytes() for path in paths]
    paths[3].unlink()
    assert store.verify_log() == []  # nothing in a shortened log shows it; a printed head does
    assert "newer entries were removed" in store.verify_log(head)[0]
    paths[3].write_bytes(kept[3])
    paths[1].unlink()
    assert "an entry is missing" in store.verify_log()[0]
    other = Store(tmp_path / "other")
    other.append_log("note", {"n": 0})
    forged = other.append_log("note", {"n": 1, "forged": True})
    paths[1].write_bytes((tmp_path / "other" / "log" / "00000001.json").read_bytes())
    assert forged["index"] == 1
    problems = store.verify_log()
    assert problems
    assert any("does not follow" in problem for problem in problems)


# --- comparisons, as far as JSON goes -----------------------------------------------------------


def test_comparison_comes_back_whole_with_its_verdict(tmp_path: Path) -> None:
    store = Store(tmp_path)
    comparison, verdict = make_comparison(), make_verdict()
    name = store.write_comparison(comparison, verdict, probe_columns())
    assert name.startswith("cmp-")
    assert len(name) == 16
    assert store.comparison(name) == make_comparison(id=name)
    again = store.verdict(name)
    assert again is not None
    assert (again.comparison_id, again.rules, again.policy) == (name, verdict.rules, verdict.policy)
    assert store.comparison_probes(name).to_dict(as_series=False) == probe_columns()
    assert store.verify(name) == []


def test_comparison_id_covers_runs_settings_and_policy(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = [
        store.write_comparison(make_comparison(), make_verdict(), probe_columns()),
        store.write_comparison(make_comparison(), make_verdict(fail=0.3), probe_columns()),
        store.write_comparison(make_comparison(), None, probe_columns()),
        store.write_comparison(make_comparison(after="run-00000000000f"), None, probe_columns()),
        store.write_comparison(make_comparison(settings={"seed": 1}), None, probe_columns()),
        store.write_comparison(make_comparison(replicates=()), None, probe_columns()),
        store.write_comparison(replace(make_comparison(), before=None, after=None), None, probe_columns()),
        store.write_comparison(
            replace(make_comparison(), before=None, after=None, cells=()), None, probe_columns()
        ),
    ]
    assert len(set(names)) == len(names)
    assert store.verdict(names[2]) is None
    assert {manifest["comparison_id"] for manifest in store.comparisons()} == set(names)
    assert store.write_comparison(make_comparison(), make_verdict(), probe_columns()) == names[0]


def test_verdicts_are_logged_once_with_policy_and_attempt(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for fail in (0.02, 0.3, 0.02):
        store.write_comparison(make_comparison(), make_verdict(fail), probe_columns())
    logged = [entry["payload"] for entry in store.log() if entry["kind"] == "verdict"]
    assert [entry["attempt"] for entry in logged] == [1, 2]
    assert [entry["policy"] for entry in logged] == [make_verdict(f).policy.digest for f in (0.02, 0.3)]
    assert {entry["outcome"] for entry in logged} == {"FAIL"}
    assert store.verify_log() == []


def test_comparison_with_nan_names_it_and_stores_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="column 'shift'"):
        store.write_comparison(make_comparison(), None, {**probe_columns(), "shift": [float("nan")] * 6})
    with pytest.raises(StoreError, match=r"settings\.x"):
        store.write_comparison(make_comparison(settings={"x": float("nan")}), None, probe_columns())
    with pytest.raises(StoreError, match="region is missing"):
        store.write_comparison(make_comparison(), None, {"probe_id": ["a"], "stream": ["input"]})
    assert store.comparisons() == []
    assert store.log() == []


def test_approvals_are_stored_once_and_logged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    approval = {"comparison_id": "cmp-1", "by": "Ann", "expires": "2030-01-01"}
    name = store.write_approval(approval)
    assert store.write_approval(approval) == name
    assert [(a["approval_id"], a["by"]) for a in store.approvals()] == [(name, "Ann")]
    assert [entry["kind"] for entry in store.log()] == ["approval"]
