"""How a shift is accepted: the exact command to copy; the dashboard itself only reads."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import streamlit as st

from audit.records import Comparison, Outcome, Verdict
from audit.report.wording import clip
from dashboards import blocks, data
from dashboards.content import CONFIGS_VARIABLE

PROPOSED_DAYS = 90
"""How long an approval is proposed to count; the reader may change it."""
SOMEBODY = "you@example.org"
KEY = "~/.ssh/id_ed25519"


@dataclass(frozen=True)
class Command:
    """What to type to accept one failing rule, or why it cannot be accepted as it stands."""

    label: str
    regions: tuple[str, ...]
    line: str | None
    obstacle: str | None = None


@dataclass(frozen=True)
class Given:
    """What a reader fills in: who, why, and until when (ISO date)."""

    by: str = ""
    reason: str = ""
    expires: str = ""


def commands(comparison: Comparison, verdict: Verdict, where: str, given: Given) -> list[Command]:
    """Return one command for each failing rule, or the one for the release where the verdict is PASS.

    Parameters
    ----------
    comparison : Comparison
    verdict : Verdict
        With the approvals of today.
    where : str
        The store.
    given : Given
        Empty fields are left as a text to be replaced.
    """
    if verdict.outcome is Outcome.PASS:
        return [Command("release", (), _line(comparison, where, given, expires=bool(given.expires)))]
    failing: dict[str, list[str]] = {}
    for rule in verdict.rules:
        if rule.outcome is Outcome.FAIL:
            failing.setdefault(rule.rule.label, []).append(rule.region)
    found = []
    for label, names in failing.items():
        regions = tuple(dict.fromkeys(names))
        scope = ["--rule", label, *(["--region", regions[0]] if len(regions) == 1 else [])]
        obstacle = _obstacle(verdict, label)
        line = None if obstacle else _line(comparison, where, given, *scope, expires=True)
        found.append(Command(label, regions, line, obstacle))
    return found


def _obstacle(verdict: Verdict, label: str) -> str | None:
    called = sum(label in (rule.label, rule.name) for rule in verdict.policy.rules)
    if called < 2:
        return None
    return (
        f"{called} rules of the policy are called “{label}”; give each a name of its own (name = …) and "
        "judge again, so that one of them can be accepted."
    )


def _line(comparison: Comparison, where: str, given: Given, *scope: str, expires: bool) -> str:
    parts = ["audit", "approve", str(comparison.id), *scope]
    parts += ["--by", given.by.strip() or SOMEBODY, "--reason", given.reason.strip() or "why it is accepted"]
    parts += ["--expires", given.expires or proposed()] if expires else []
    line = " ".join([*map(shlex.quote, parts), "--store", shlex.quote(where)])
    if comparison.settings.get("approvals") == "signed":
        line += f" --config {shlex.quote(_config())} --key {KEY}"
    return line


def _config() -> str:
    given = [path for path in os.environ.get(CONFIGS_VARIABLE, "").split(os.pathsep) if path]
    return given[0] if len(given) == 1 else "audit.toml"


def proposed() -> str:
    """Return the last day on which an approval given today would count, if nobody says otherwise."""
    return (datetime.now(UTC).date() + timedelta(days=PROPOSED_DAYS)).isoformat()


# --- drawing ----------------------------------------------------------------------------------


def draw(comparison: Comparison, verdict: Verdict | None) -> None:
    """Draw how the failing rules, or a passing release, are accepted."""
    if verdict is None or verdict.outcome not in (Outcome.FAIL, Outcome.PASS):
        return
    failed = verdict.outcome is Outcome.FAIL
    with st.expander(
        "Accept what failed" if failed else "Accept this release as the baseline",
        icon=":material/how_to_reg:",
        expanded=failed,
    ):
        _draw(comparison, verdict, str(data.store().root.resolve()))


@st.fragment
def _draw(comparison: Comparison, verdict: Verdict, where: str) -> None:
    failed = verdict.outcome is Outcome.FAIL
    if failed:
        blocks.note(
            "A shift that is wanted can be accepted by name, for these exact checkpoints and until a date. "
            "Copy the command; whoever captured the checkpoint cannot accept it."
        )
    else:
        blocks.note(
            "An accepted release is what <code>approved = true</code> compares the next one with. "
            "Copy the command; whoever captured the checkpoint cannot accept it."
        )
    with st.container(horizontal=True):
        by = st.text_input("Who accepts it", placeholder=SOMEBODY, key="approve by", width=230)
        reason = st.text_input("Why", placeholder="why it is accepted", key="approve reason", width=320)
        day = st.text_input("Until (UTC)", proposed() if failed else "", key="approve until", width=150)
    for one in commands(comparison, verdict, where, Given(by, reason, day.strip())):
        _draw_command(one, failed)


def _draw_command(one: Command, failed: bool) -> None:
    if failed:
        named = ", ".join(clip(region, 40) for region in one.regions)
        extra = ""
        if len(one.regions) > 1:
            extra = f": accepts all {len(one.regions)}; add <code>--region NAME</code> for one"
        blocks.html(
            f"<p><b>{blocks.text(one.label, 120)}</b> "
            f'<span class="soft">on {blocks.text(named)}{extra}</span></p>'
        )
    if one.line is None:
        blocks.note(blocks.text(one.obstacle or ""))
    else:
        st.code(one.line, language="bash", wrap_lines=True)
