"""The commands beside the main road; like the others they parse, call the pipeline and print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from audit._terminal import progress_bars, say
from audit.errors import ConfigError, ExitCode, StoreError

if TYPE_CHECKING:
    from audit.config import AuditConfig
    from audit.store import Store

Config = Annotated[
    Path | None, typer.Option("--config", help="An audit.toml: its store and its allowed signers.")
]
StoreUrl = Annotated[str | None, typer.Option("--store", help="The store; default data/store.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (approve, verify, plan, replicate, coverage, gc):
        app.command()(command)
    app.command(name="import")(import_)
    app.command(name="list")(list_)


def approve(
    comparison: Annotated[str, typer.Argument(help="Id of a stored comparison.")],
    reason: Annotated[str, typer.Option(help="Why it is accepted.")],
    by: Annotated[str, typer.Option(help="Who accepts it: the principal of the signature, if any.")],
    rule: Annotated[
        str | None, typer.Option(help="Failing rule to accept; without it the release, as a baseline.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="Only this region of the rule.")] = None,
    expires: Annotated[str | None, typer.Option(help="Last day (UTC), YYYY-MM-DD.")] = None,
    key: Annotated[Path | None, typer.Option(help="SSH key to sign with.")] = None,
    config: Config = None,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """Accept what a rule found, or a passing release as the baseline: attributed, scoped, expiring."""
    from audit.pipeline import approvals_of, signers_of
    from audit.pipeline import approve as give

    settings, where = _settings(config, store)
    found = give(
        where,
        comparison,
        reason=reason,
        by=by,
        rule=rule,
        region=region,
        expires=expires,
        key=key,
        signers=signers_of(settings),
    )
    shown = approvals_of([found])[0]
    what = "; ".join(shown["rules"]) or "the release, as a baseline"
    say(json.dumps(shown) if as_json else f"{found.id}\t{what}\tapproved by {found.attribution}")


def verify(
    identifier: Annotated[list[str] | None, typer.Argument(metavar="[RUN|COMPARISON]…")] = None,
    hashes_only: Annotated[bool, typer.Option(help="Do not compute the statistics again.")] = False,
    head: Annotated[str | None, typer.Option(help="Head digest of the log, from a report.")] = None,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """Check hashes and the log's chain, and compute statistics and verdicts again from the stored maps."""
    from audit.pipeline import verify_store

    where = _existing(store)
    found = verify_store(where, identifier or (), recompute=not hashes_only, known_head=head)
    if as_json:
        say(json.dumps(vars(found)))
    else:
        counts = f"{len(found.checked)} checked, {len(found.recomputed)} comparisons computed again"
        say("\n".join([*found.notes, *found.problems, f"{counts}, {len(found.problems)} problems"]))
    if found.problems:
        raise typer.Exit(int(ExitCode.STORE))


def plan(
    config: Annotated[Path, typer.Argument(metavar="[CONFIG]", help="An audit.toml.")] = Path("audit.toml"),
    shift: Annotated[
        float | None, typer.Option(min=0.0, help="Shift to find, in content mass; default each rule's own.")
    ] = None,
    power: Annotated[float, typer.Option(min=0.5, max=0.999, help="Chance of finding it.")] = 0.9,
    as_json: Json = False,
) -> None:
    """Tell how many probes and replicates the rules need, and how harmless candidates will end."""
    from audit.config import load_config
    from audit.pipeline import plan_sensitivity
    from audit.report.planned import plan_table
    from audit.serialize import to_json

    found = plan_sensitivity(load_config(config), shift=shift or None, power=power)
    say(json.dumps(to_json(found)) if as_json else plan_table(found))


def replicate(
    config: Annotated[Path, typer.Argument(metavar="[CONFIG]", help="An audit.toml.")] = Path("audit.toml"),
    as_json: Json = False,
) -> None:
    r"""Train the harmless replicates that are missing, with the command of [\[replicates]]."""
    from audit.config import load_config
    from audit.pipeline import train_replicates

    with progress_bars() as progress:
        trained = train_replicates(load_config(config), folder=config.resolve().parent, progress=progress)
    lines = [f"{path}\t{'trained' if fresh else 'there already'}" for path, fresh in trained.items()]
    say(json.dumps(trained) if as_json else "\n".join(lines))


def list_(
    trend: Annotated[bool, typer.Option("--trend", help="The trend of each region over the audits.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="An audit.toml whose store is listed, and whose signers count.")
    ] = None,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """List the runs, comparisons and approvals of a store, or the trends over its history."""
    from audit.config import load_config
    from audit.pipeline import accepted_outcomes, approvals_of, read_approvals, signers_of, trends
    from audit.report import list_table
    from audit.serialize import to_json

    named = None if config is None else load_config(config)
    where = _existing(store or (None if named is None else named.store.url))
    if trend:
        found = trends(where)
        text = "\n".join(one.sentence for one in found) or "No model was audited three times yet."
        say(json.dumps({"trends": to_json(found)}) if as_json else text)
        return
    accepted = accepted_outcomes(where, signers=signers_of(named))
    runs = where.runs()
    comparisons = [{**one, "accepted": accepted.get(one["comparison_id"])} for one in where.comparisons()]
    approvals = approvals_of(read_approvals(where))
    if as_json:
        say(json.dumps({"runs": runs, "comparisons": comparisons, "approvals": approvals}))
        return
    say(list_table(runs, comparisons))
    for one in approvals:
        what = "; ".join(one["rules"]) or "release"
        until = f" until {one['expires']}" if one["expires"] else ""
        say(f"{one['approval_id']}  {one['comparison_id']}  {what}: {one['by']}{until} ({one['reason']})")


def gc(
    config: Annotated[
        list[Path] | None, typer.Argument(metavar="[CONFIG]…", help="Keep what these audit.toml name.")
    ] = None,
    older_than: Annotated[float, typer.Option(min=0.0, help="Days that an unneeded run stays.")] = 90,
    unfinished: Annotated[float, typer.Option(min=0.0, help="Days that unfinished work stays.")] = 7,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it only tell.")] = False,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """Tell, or with --yes remove, what nobody needs: old runs without a comparison, unfinished work."""
    from audit.config import load_config
    from audit.pipeline.upkeep import tidy_store

    configs = [load_config(path) for path in config or ()]
    where = _existing(store or (configs[0].store.url if configs else None))
    found = tidy_store(where, configs, unreferenced_days=older_than, unfinished_days=unfinished, remove=yes)
    if as_json:
        say(json.dumps(vars(found)))
        return
    verb = "removed" if found.done else "would be removed"
    lines = [f"{one['id']}  {verb}: {one['reason']}" for one in found.removed]
    lines += [f"{one['id']}  stays: {one['reason']}" for one in found.kept]
    hint = "" if found.done or not found.removed else "; --yes removes them, and the log keeps their ids"
    say("\n".join([*lines, f"{len(found.removed)} {verb}, {len(found.kept)} runs stay{hint}"]))


def import_(
    maps: Annotated[Path, typer.Argument(help="Maps made elsewhere: .parquet or .npz.")],
    name: Annotated[str | None, typer.Option(help="Name of the checkpoint they belong to.")] = None,
    method: Annotated[str, typer.Option(help="Name of the attribution method.")] = "imported",
    normalize: Annotated[bool, typer.Option(help="Divide each map by its sum.")] = False,
    probes: Annotated[Path | None, typer.Option(help="The probe set, if no --config names it.")] = None,
    config: Config = None,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """Store maps of any attribution method as a run, to be compared and gated like any other."""
    from audit.pipeline import import_for

    settings, where = _settings(config, store)
    given = {"name": name, "method": method, "normalize": normalize}
    run_id = import_for(settings, maps, where, probes=probes, **given)
    say(json.dumps({"run_id": run_id}) if as_json else run_id)


def _existing(url: str | None) -> Store:
    """Return the store to look into; a store that was named must be there."""
    from audit.config import DEFAULT_STORE
    from audit.store import Store

    where = Store(url or DEFAULT_STORE)
    if url is not None and not where.root.is_dir():
        raise StoreError(f"store {where.root} does not exist; mend --store, or capture something first")
    return where


def _settings(config: Path | None, store: str | None) -> tuple[AuditConfig | None, Store]:
    from audit.config import DEFAULT_STORE, load_config
    from audit.store import Store

    settings = None if config is None else load_config(config)
    return settings, Store(store or (settings.store.url if settings else DEFAULT_STORE))


def coverage(
    model_types: Annotated[
        list[str] | None, typer.Argument(help="Model types of transformers; all of them when none is given.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure again instead of reading.")] = False,
    page: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
    as_json: Json = False,
) -> None:
    """Show which model types can be audited, or measure it on tiny random models (minutes)."""
    from audit import coverage as table

    kept = table.read_coverage()
    wanted = model_types or [row.model_type for row in kept] or list(table.known_model_types())
    if measure or not kept:
        names = model_types or list(table.known_model_types())
        with progress_bars() as bars:
            found = []
            for row in table.measure_coverage(names):
                found.append(row)
                if bars is not None:
                    bars("model types", len(found), len(names))
        table.write_coverage(found)
        kept, wanted = table.read_coverage(), names
    chosen = set(wanted)
    rows = sorted((row for row in kept if row.model_type in chosen), key=lambda row: row.model_type)
    if missing := sorted(chosen - {row.model_type for row in rows}):
        raise ConfigError(f"model type {missing[0]!r} is unknown to the installed transformers")
    if page is not None:
        page.write_text(table.coverage_page(kept), encoding="utf-8")
    say(json.dumps([vars(row) for row in rows]) if as_json else table.coverage_table(rows))
    if any(row.reason.startswith(table.UNEXPECTED) for row in rows):
        raise typer.Exit(int(ExitCode.BUG))
