"""Approvals: scope, expiry, staleness, signatures, baselines, and what reports say of them."""

from __future__ import annotations

import json
import subprocess
from datetime import date
from pathlib import Path

import pytest

from audit.config import load_config
from audit.errors import ConfigError, NothingEvaluatedError, StoreError
from audit.pipeline import approve, gate_comparison, gate_runs, read_verdict, report_context
from audit.pipeline.history import loosened
from audit.pipeline.signatures import Signers
from audit.records import Outcome, Policy, Rule, Verdict
from audit.report import to_html, to_text
from tests.synthetic import World, release

AUTHOR, REVIEWER = "ann@example.org", "bob@example.org"
LIMIT, EXCESS = "limit shift opening", "excess shift *"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("ROLLOUT_AUDIT_AUTHOR", AUTHOR)
    return World(tmp_path)


@pytest.fixture
def failed(world: World) -> tuple[World, Path, str]:
    """Return a world with a failing audit: its configuration and its comparison."""
    config = world.config(*release(world))
    verdict = gate_runs(load_config(config))
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAIL, 3)
    return world, config, str(verdict.comparison_id)


def accept(world: World, comparison: str, rule: str | None, **given: object) -> None:
    facts = {"reason": "wanted by product", "by": REVIEWER, "expires": "2999-01-01", **given}
    approve(world.store, comparison, rule=rule, **facts)  # type: ignore[arg-type]


def accept_all(world: World, comparison: str, **given: object) -> None:
    accept(world, comparison, LIMIT, **given)
    accept(world, comparison, EXCESS, **given)


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    import sys

    command = [sys.executable, "-m", "audit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


# --- scope ------------------------------------------------------------------------------------


def test_an_approved_rule_passes_and_the_others_still_fail(failed):
    world, config, comparison = failed
    accept(world, comparison, LIMIT)
    verdict = gate_runs(load_config(config))
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAIL, 3)
    by_rule = {one.rule.label: one for one in verdict.rules if one.region == "opening"}
    assert by_rule[LIMIT].outcome is Outcome.PASS
    assert by_rule[LIMIT].approved_by == f"{REVIEWER} until 2999-01-01 (wanted by product)"
    assert by_rule[EXCESS].outcome is Outcome.FAIL


def test_all_failing_rules_approved_pass_and_nothing_is_stored_in_the_verdict(failed):
    world, config, comparison = failed
    accept_all(world, comparison)
    verdict = gate_runs(load_config(config))
    assert (verdict.outcome, verdict.exit_code) == (Outcome.PASS, 0)
    assert "accepted by approval" in verdict.sentence
    assert REVIEWER in verdict.sentence
    assert world.store.verdict(comparison).outcome is Outcome.FAIL


def test_a_region_limits_the_scope_of_an_approval(failed):
    world, config, comparison = failed
    accept(world, comparison, EXCESS, region="opening")
    verdict = gate_runs(load_config(config))
    assert {one.region for one in verdict.rules if one.approved_by} == {"opening"}
    assert any(one.outcome is Outcome.FAIL and one.region == "rest" for one in verdict.rules)


def test_reports_name_the_approver(failed):
    world, _, comparison = failed
    accept_all(world, comparison)
    verdict, compared = read_verdict(world.store, comparison), world.store.comparison(comparison)
    context = report_context(world.store, compared, verdict)
    for text in (
        to_text(compared, verdict, context=context),
        to_html(compared, verdict, (), context=context),
    ):
        assert REVIEWER in text
        assert "wanted by product" in text


# --- what does not count ----------------------------------------------------------------------


def test_an_expired_approval_fails_closed_and_says_so(failed):
    world, _, comparison = failed
    accept_all(world, comparison, expires="2030-06-30", today=date(2030, 6, 1))
    on_the_day = read_verdict(world.store, comparison, today=date(2030, 6, 30))
    day_after = read_verdict(world.store, comparison, today=date(2030, 7, 1))
    assert on_the_day.outcome is Outcome.PASS
    assert (day_after.outcome, day_after.exit_code) == (Outcome.FAIL, 3)
    assert "expired on 2030-06-30" in day_after.notes[0]
    compared = world.store.comparison(comparison)
    text = to_text(compared, day_after, context=report_context(world.store, compared, day_after))
    assert "does not count: it expired" in text


def test_another_policy_makes_an_approval_stale(failed):
    world, config, comparison = failed
    accept_all(world, comparison)
    config.write_text(config.read_text().replace("fail = 0.02", "fail = 0.03"))
    verdict = gate_runs(load_config(config))
    assert verdict.exit_code == 3
    limit = next(one for one in verdict.rules if one.rule.kind == "limit")
    assert limit.outcome is Outcome.FAIL
    assert any("the policy changed since" in note for note in verdict.notes)


def test_another_checkpoint_is_not_covered(failed):
    world, config, comparison = failed
    accept_all(world, comparison)
    other = world.run("release-2", 0.31)
    after = next(
        line for line in config.read_text().splitlines() if line.startswith("run") and "run-" in line
    )
    del after
    text = config.read_text().split("[checkpoints.after]")
    text[1] = text[1].replace(text[1].split('"')[1], other, 1)
    config.write_text("[checkpoints.after]".join(text))
    verdict = gate_runs(load_config(config))
    assert verdict.exit_code == 3
    assert not any(one.approved_by for one in verdict.rules)


def test_what_the_command_line_allows_leaves_an_approval_valid(failed):
    world, config, comparison = failed
    accept_all(world, comparison)
    assert gate_runs(load_config(config), allow=("inconclusive",)).exit_code == 0
    assert gate_comparison(world.store, comparison).exit_code == 0


def test_an_approval_that_the_log_does_not_know_does_not_count(failed):
    world, config, comparison = failed
    accept_all(world, comparison)
    head = sorted((world.root / "store" / "log").glob("*.json"))
    for path in head[-2:]:
        path.unlink()
    assert gate_runs(load_config(config)).exit_code == 3


def test_a_changed_approval_is_an_error(failed):
    world, config, comparison = failed
    accept_all(world, comparison)
    path = next((world.root / "store" / "approvals").glob("*.json"))
    path.write_text(path.read_text().replace("wanted", "needed"))
    with pytest.raises(StoreError, match=path.name):
        gate_runs(load_config(config))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rule": "limit shift opning"}, "does not exist; the rules are"),
        ({"rule": LIMIT, "region": "nowhere"}, "judges no region 'nowhere'"),
        ({"rule": EXCESS, "region": "special"}, "judges no region 'special'"),
        ({"rule": LIMIT, "expires": None}, "needs --expires"),
        ({"rule": LIMIT, "expires": "soon"}, "is no date"),
        ({"rule": LIMIT, "expires": "2001-01-01"}, "has passed"),
        ({"rule": LIMIT, "reason": " "}, "--reason is empty"),
        ({"rule": LIMIT, "by": AUTHOR.upper()}, "nobody approves a run of their own"),
        ({"rule": LIMIT, "key": "/nowhere"}, "--key /nowhere does not exist"),
    ],
)
def test_a_wrong_approval_is_refused_in_one_line_and_not_stored(failed, given, said):
    world, _, comparison = failed
    with pytest.raises(ConfigError) as error:
        accept(world, comparison, **given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert world.store.approvals() == []


def test_what_is_approved_already_says_by_whom_and_a_past_date_is_named_first(failed):
    world, _, comparison = failed
    accept(world, comparison, LIMIT)
    with pytest.raises(ConfigError, match=f"is already approved by {REVIEWER} until 2999-01-01"):
        accept(world, comparison, LIMIT)
    with pytest.raises(ConfigError, match="--expires 2001-01-01 has passed"):
        accept(world, comparison, LIMIT, expires="2001-01-01")


def test_only_a_fail_can_be_approved(world):
    base, _, replicates = release(world)
    config = world.config(base, world.run("same", 0.25), replicates)
    comparison = str(gate_runs(load_config(config)).comparison_id)
    with pytest.raises(ConfigError, match="ended PASS; only a FAIL can be approved"):
        accept(world, comparison, LIMIT)


# --- signatures -------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    made = {}
    for name in (AUTHOR, REVIEWER, "eve@example.org"):
        made[name] = tmp_path / name
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(made[name])]
        subprocess.run(command, check=True)
    return made


@pytest.fixture
def signed(world: World, keys: dict[str, Path]) -> tuple[World, Path, str, Path]:
    """Return a failing audit that wants signatures of the author or the reviewer."""
    allowed = world.root / "allowed_signers"
    lines = [f"{name} {keys[name].with_suffix('.org.pub').read_text()}" for name in (AUTHOR, REVIEWER)]
    allowed.write_text("".join(lines))
    config = world.config(*release(world), extra='[approvals]\nallowed_signers = "allowed_signers"\n')
    return world, config, str(gate_runs(load_config(config)).comparison_id), allowed


def test_a_signed_approval_counts(signed, keys):
    world, config, comparison, allowed = signed
    accept_all(world, comparison, key=keys[REVIEWER], signers=Signers(allowed))
    assert gate_runs(load_config(config)).exit_code == 0


def test_the_list_counts_signatures_where_the_configuration_names_the_signers(signed, keys):
    world, config, comparison, allowed = signed
    accept_all(world, comparison, key=keys[REVIEWER], signers=Signers(allowed))
    assert "PASS (approved)" in cli("list", "--config", config).stdout
    assert "PASS (approved)" not in cli("list", "--store", world.root / "store").stdout


def test_where_signatures_are_demanded_a_reader_without_the_list_accepts_none(signed, keys):
    world, _, comparison, allowed = signed
    accept_all(world, comparison, key=keys[REVIEWER], signers=Signers(allowed))
    verdict = read_verdict(world.store, comparison)
    assert verdict.exit_code == 3
    assert "wants signatures" in verdict.notes[0]


@pytest.mark.parametrize(
    ("by", "key", "said"),
    [
        (REVIEWER, None, "it is not signed"),
        (REVIEWER, "eve@example.org", f"its signature is not one of {REVIEWER}"),
        ("eve@example.org", "eve@example.org", "its signature is not one of eve@example.org"),
        (REVIEWER, AUTHOR, f"its signature is not one of {REVIEWER}"),
        (AUTHOR, AUTHOR, "nobody approves a run of their own"),
    ],
)
def test_an_approval_of_the_wrong_hand_is_refused(signed, keys, by, key, said):
    world, _, comparison, allowed = signed
    with pytest.raises(ConfigError, match="would not count") as error:
        accept(world, comparison, LIMIT, by=by, key=key and keys[key], signers=Signers(allowed))
    assert said in str(error.value)


def test_the_authors_key_under_another_name_does_not_count(signed, keys):
    world, _, comparison, allowed = signed
    own = keys[AUTHOR].with_suffix(".org.pub").read_text()
    allowed.write_text(allowed.read_text() + f"alias@example.org {own}")
    with pytest.raises(ConfigError, match="its key is also that of ann"):
        accept(world, comparison, LIMIT, by="alias@example.org", key=keys[AUTHOR], signers=Signers(allowed))


def test_an_unsigned_approval_given_elsewhere_does_not_count(signed):
    world, config, comparison, _ = signed
    record = json.loads((world.root / "store" / "comparisons" / comparison / "comparison.json").read_text())
    assert record["comparison"]["settings"]["approvals"] == "signed"
    with pytest.raises(ConfigError, match="wants signatures"):
        accept_all(world, comparison)
    assert gate_runs(load_config(config)).exit_code == 3


def test_missing_list_of_signers_is_a_config_error(world):
    config = world.config(*release(world), extra='[approvals]\nallowed_signers = "nowhere"\n')
    done = cli("gate", config)
    assert done.returncode == 10
    assert "allowed_signers" in done.stderr
    assert "Traceback" not in done.stderr


# --- baselines --------------------------------------------------------------------------------


def test_without_an_approved_baseline_nothing_is_evaluated(world):
    config = world.config("approved", world.run("release-1", 0.3))
    done = cli("gate", config)
    assert done.returncode == 5
    assert "no baseline is approved" in done.stderr
    assert "audit approve" in done.stderr


def test_a_failing_release_becomes_no_baseline(failed):
    world, _, comparison = failed
    with pytest.raises(NothingEvaluatedError, match="approve its failing rules with --rule first"):
        accept(world, comparison, None)


def test_an_approved_release_is_the_next_baseline(world):
    base, _, replicates = release(world)
    good = world.run("good-1", 0.251)
    first = gate_runs(load_config(world.config(base, good, replicates)))
    assert first.exit_code == 0
    approve(world.store, str(first.comparison_id), reason="released", by=REVIEWER)
    following = world.config("approved", world.run("release-2", 0.252), replicates)
    verdict = gate_runs(load_config(following))
    assert world.store.comparison(str(verdict.comparison_id)).before.run_id == good
    assert verdict.exit_code == 0


def test_a_checkpoint_whose_failures_were_approved_is_the_next_baseline_while_that_lasts(failed):
    world, _, comparison = failed
    after = world.store.comparison(comparison).after.run_id
    accept(world, comparison, LIMIT)
    config = load_config(world.config("approved", world.run("release-2", 0.3), name="next.toml"))
    with pytest.raises(NothingEvaluatedError, match="its verdict is FAIL"):
        gate_runs(config)
    accept(world, comparison, EXCESS)
    verdict = gate_runs(config)
    assert world.store.comparison(str(verdict.comparison_id)).before.run_id == after


# --- the command line, the log ----------------------------------------------------------------


def test_approve_on_the_command_line_turns_exit_3_into_0(failed):
    world, config, comparison = failed
    store = world.root / "store"
    given = ("--reason", "wanted", "--by", REVIEWER, "--expires", "2999-01-01", "--store", store)
    assert cli("gate", config).returncode == 3
    first = cli("approve", comparison, "--rule", LIMIT, *given)
    assert first.returncode == 0, first.stderr
    assert "approved by bob@example.org until 2999-01-01" in first.stdout
    second = json.loads(cli("approve", comparison, "--rule", EXCESS, *given, "--json").stdout)
    assert (second["by"], second["signed"], second["kind"]) == (REVIEWER, False, "rule")
    done = cli("gate", config)
    assert done.returncode == 0, done.stderr
    assert "Approved by bob@example.org" in done.stdout
    assert [entry["kind"] for entry in world.store.log()].count("approval") == 2
    wrong = cli("approve", comparison, "--rule", "nothing", *given)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (10, 1)
    missing = cli("approve", "cmp-000000000000", "--rule", LIMIT, *given)
    assert (missing.returncode, missing.stderr.count("\n")) == (14, 1)


def test_reports_tell_repeated_attempts_and_loosened_policies(failed):
    world, config, comparison = failed
    config.write_text(config.read_text().replace("fail = 0.02", "fail = 0.2"))
    verdict = gate_runs(load_config(config))
    compared = world.store.comparison(str(verdict.comparison_id))
    context = report_context(world.store, compared, verdict)
    assert context.attempt == 2
    assert f"({comparison}: 'limit shift opening' .02 → .2)" in str(context.loosened_since)
    text = to_text(compared, verdict, context=context)
    assert "Attempt 2" in text
    assert "Policy loosened since" in text
    first = world.store.comparison(comparison)
    earlier = report_context(world.store, first, world.store.verdict(comparison))
    assert (earlier.attempt, earlier.loosened_since) == (1, None)


def policy(*rules: Rule, **given: object) -> Policy:
    return Policy(rules or (Rule("a", "limit", fail=0.02), Rule("a", "excess", within=0.02)), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (policy(), []),
        (policy(Rule("*", "limit", fail=0.02), Rule("*", "excess", within=0.01)), []),
        (policy(Rule("a", "limit", fail=0.01), Rule("a", "excess", within=0.02)), []),
        (policy(Rule("a", "limit", fail=0.02, direction="increase"), *policy().rules[1:]), ["removed"]),
        (policy(Rule("a", "limit", fail=0.02), Rule("a", "excess", within="3 sd")), ["→ 3 sd"]),
        (policy(Rule("b", "limit", fail=0.02)), ["removed", "removed"]),
        (policy(effect_floor=0.05), ["effect floor .01 → .05"]),
        (policy(min_probes=5), ["minimum of probes 20 → 5"]),
        (policy(alpha=0.1), ["alpha .05 → .1"]),
        (policy(allow=("inconclusive",)), ["inconclusive allowed"]),
    ],
)  # fmt: skip
def test_loosened_names_every_way_in_which_a_policy_became_more_permissive(new, said):
    found = loosened(policy(), new)
    assert len(found) == len(said)
    assert all(one in phrase for one, phrase in zip(said, found, strict=True))


def test_approvals_do_not_reach_inconclusive_rules(world):
    base, moved, _ = release(world)
    verdict: Verdict = gate_runs(load_config(world.config(base, moved)))
    inconclusive = [one for one in verdict.rules if one.outcome is Outcome.INCONCLUSIVE]
    assert inconclusive
    with pytest.raises(ConfigError, match="only a FAIL"):
        accept(world, str(verdict.comparison_id), EXCESS)
