"""The commands beside the main road; like the others they parse, call the pipeline and print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from audit._terminal import say

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
    app.command()(approve)


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


def _settings(config: Path | None, store: str | None) -> tuple[AuditConfig | None, Store]:
    from audit.config import DEFAULT_STORE, load_config
    from audit.store import Store

    settings = None if config is None else load_config(config)
    return settings, Store(store or (settings.store.url if settings else DEFAULT_STORE))
