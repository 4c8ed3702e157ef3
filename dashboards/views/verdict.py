"""The verdict: what was compared, the sentence, and every rule with its numbers."""

from __future__ import annotations

from audit.records import Comparison, RuleVerdict, Verdict
from audit.report import facts, rows
from audit.report.wording import change, count, given, quantity
from dashboards import blocks, downloads, frames


def hero(comparison: Comparison, verdict: Verdict | None, pair: str) -> None:
    """Draw the verdict, its sentence, and what was compared; `pair` names the two checkpoints."""
    status = rows.status(verdict)
    head, detail = rows.split_headline(rows.headline(comparison, verdict))
    caveats = "".join(
        f"<p class='detail'>{blocks.text(one, 600)}</p>"
        for one in (*facts.caveats(comparison, verdict), *(verdict.notes if verdict else ()))
    )
    blocks.html(
        f'<div class="hero {status}">{blocks.badge(status)} <span '
        f'class="pair">&nbsp;{blocks.text(pair)}</span>'
        f'<p class="headline">{blocks.text(rows.full_sentence(head), 600)}</p>'
        f'<p class="detail">{blocks.text(detail, 900)}</p>{caveats}'
        f"{blocks.figures(_figures(comparison))}</div>"
    )


def _figures(comparison: Comparison) -> list[tuple[str, str, str]]:
    groups = count(comparison.n_clusters, "group") if comparison.n_clusters else ""
    items = [(blocks.term("probe", "Probes"), f"{comparison.n_probes:,}", blocks.text(groups))]
    kinds = facts.replicates(comparison)
    number = len(comparison.replicates)
    items.append(
        (
            blocks.term("replicate", "Replicates"),
            str(number),
            blocks.text(kinds.partition("(")[2].rstrip(")")),
        )
    )
    found = comparison.predictions
    if "accuracy_before" in found:
        accuracy = change(found["accuracy_before"], found["accuracy_after"])
        items.append(("Accuracy", accuracy, f"{found['newly_wrong']} became wrong, {found['fixed']} right"))
    if "changed" in found:
        items.append(("Changed class", f"{found['changed']:,}", f"of {found['n']:,} predictions"))
    distance = next(comparison.find("*", "js_distance"), None)
    if distance is not None and distance.value is not None:
        items.append(
            (blocks.term("JS distance"), quantity("js_distance", distance.value), "mean over probes; 0 to 1")
        )
    for one in comparison.confirmations[:1]:
        word = "confirmed" if one.confirmed else "not confirmed"
        items.append(
            (
                blocks.term("occlusion", "Occlusion"),
                word,
                f"{blocks.text(one.region)}: {blocks.term('logit')} {quantity('logit', one.difference)}",
            )
        )
    return items


def rules(name: str, verdict: Verdict | None) -> None:
    """Draw every rule of the policy."""
    with blocks.section("What the policy asked", "Every rule with its value, whether it passed or failed."):
        if verdict is None:
            blocks.note("No policy was judged: give the audit.toml [[gate.rules]] and run `audit gate`.")
            return
        floor = verdict.policy.effect_floor
        blocks.html("".join(_rule(found, floor) for found in rows.worst_first(verdict.rules)))
        if any(found.rule.kind == "excess" for found in verdict.rules):
            blocks.note(
                f"In the sentences, {blocks.term('p')} and {blocks.term('Holm')} are what a shift is judged "
                f"by against the {blocks.term('replicate', 'harmless re-trainings')}."
            )
        downloads.table(f"{name}-rules", frames.rules(verdict.rules, floor))


def _rule(found: RuleVerdict, effect_floor: float) -> str:
    row = rows.rule_row(found)
    second = row.warn
    if found.rule.kind == "excess" and effect_floor:  # a large excess fails by it, and not by the margin
        second = f"fails from {given(effect_floor)} (effect floor)"
    levels = "its two shifts" if found.effect == "interaction" else "share"
    notes = "".join(f'<p class="note">{blocks.text(one)}</p>' for one in row.notes)
    numbers = blocks.figures(
        (
            (blocks.term("share", levels), blocks.text(row.levels), ""),
            (blocks.term("shift", "observed"), blocks.text(row.value), blocks.text(row.excess)),
            (blocks.term("interval"), blocks.text(row.interval or "–"), ""),
            (blocks.term("limit", "allowed"), blocks.text(row.limit), blocks.text(second)),
            (blocks.term("noise floor"), blocks.text(row.floor), blocks.text(row.replicates)),
            (blocks.term("detectable"), blocks.text(row.detectable), ""),
            ("probes", blocks.text(row.probes), ""),
        )
    )
    return (
        f'<div class="rule"><header>{blocks.badge(row.outcome)} <b>{blocks.text(row.where)}</b>'
        f'<span class="soft">{blocks.text(row.condition)}</span></header>'
        f"<p>{blocks.text(row.sentence, 700)}</p>{notes}{numbers}</div>"
    )
