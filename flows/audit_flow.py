"""One audit as a Prefect flow: a task for each shard of probes, then one that publishes, then the gate.

Only paths and ids pass between tasks. Every task finds finished work in the store, so that a retried or
restarted flow goes on where it stopped. A failed gate is a value: the flow run completes, and its state,
its name, its log and a Markdown artifact say FAIL. Exit codes are the command line's.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import cast

from prefect import flow, get_client, get_run_logger, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.states import Completed

from audit.config import load_config
from audit.errors import ConfigError, StoreError
from audit.pipeline import (
    Progress,
    RunPlan,
    capture_shard,
    gate_runs,
    plan_audit,
    plan_run,
    publish_run,
    read_verdict,
    report_context,
    signers_of,
)
from audit.pipeline.capture import prepare_run
from audit.pipeline.gate import require_rules
from audit.pipeline.signatures import Signers
from audit.records import Outcome, Verdict
from audit.report import to_markdown
from audit.store import Store
from flows.outcomes import fails_in_one_line, step
from flows.progress import PROGRESS, run_progress, shift_progress
from flows.server import prefect_api


def audit_name(config_path: str | Path) -> str:
    """Return a name for the audit of one file: lowercase, digits and dashes, different for each path.

    >>> audit_name("/models/Reviews v2.toml")
    'reviews-v2-9ec4bb'
    """
    path = Path(config_path).resolve()
    words = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "audit"
    return f"{words}-{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"


@step("prepare run", "prepare {role}")
def prepare_task(config_path: str, role: str, run_id: str) -> tuple[int, ...]:
    """Return the shards that are still to be captured, after refusing what would fail in one of them."""
    return prepare_run(_plan(config_path, role, run_id))


@step("capture shard", "capture {role} shard {index}")
def capture_task(config_path: str, role: str, run_id: str, index: int) -> None:
    """Capture one shard of a run into the store."""
    plan = _plan(config_path, role, run_id)
    progress = shift_progress(run_progress(), plan.shards[index][0], plan.n_probes)
    capture_shard(plan, index, progress=progress)


@step("publish run", "publish {role}")
def publish_task(config_path: str, role: str, run_id: str) -> str:
    """Write the manifest of a run whose shards are all there; return its id."""
    return publish_run(_plan(config_path, role, run_id))


@step("gate", "gate")
def gate_task(config_path: str, allow: tuple[str, ...]) -> str:
    """Compare, judge and confirm; leave a Markdown artifact; return the comparison's id."""
    config = load_config(config_path)
    verdict = gate_runs(
        config,
        progress=run_progress(),
        allow=allow,
        confirm=config.report.confirm,
        measure=bool(config.faithfulness.probes),
    )
    store, identifier = Store(config.store.url), str(verdict.comparison_id)
    comparison = store.comparison(identifier)
    context = report_context(store, comparison, verdict, config)
    create_markdown_artifact(
        key=f"verdict-{audit_name(config_path)}",
        markdown=to_markdown(comparison, verdict, context=context),
        description=f"{identifier}: {verdict.outcome}, {verdict.sentence}",
    )
    return identifier


def _run_name() -> str:
    return Path(str(runtime.flow_run.parameters["config_path"])).stem


@flow(name="rollout-audit", flow_run_name=_run_name, persist_result=False)
@fails_in_one_line
def audit_flow(config_path: str, allow: tuple[str, ...] = ()) -> str:
    """Capture what is missing and judge, as the configuration says.

    Parameters
    ----------
    config_path : str
        An audit.toml; absolute, since a scheduled run works in a folder of its own.
    allow : tuple of str
        ``inconclusive`` and ``mismatch``; recorded in the verdict.

    Returns
    -------
    str
        The id of the stored comparison.

    Raises
    ------
    AuditError
        The first one of its tasks.
    """
    config = load_config(config_path)
    require_rules(config)
    logger = get_run_logger()
    for plan in plan_audit(config):
        missing = prepare_task(config_path, plan.role, plan.run_id)
        logger.info("%s: %d of %d shards to capture", plan.role, len(missing), len(plan.shards))
        for index in missing:
            capture_task(config_path, plan.role, plan.run_id, index)
        publish_task(config_path, plan.role, plan.run_id)
    identifier = gate_task(config_path, allow)
    return _completed(config_path, stored_verdict(Store(config.store.url), identifier, signers_of(config)))


def run_flow(config: Path, *, allow: tuple[str, ...] = (), progress: Progress | None = None) -> Verdict:
    """Run :func:`audit_flow` in this process and return its verdict.

    Parameters
    ----------
    config : Path
        An audit.toml.
    allow : tuple of str
        ``inconclusive`` and ``mismatch``; recorded in the verdict.
    progress : callable, optional

    Returns
    -------
    Verdict

    Raises
    ------
    AuditError
        The flow's own error, unwrapped.
    """
    token = PROGRESS.set(progress)
    try:
        with prefect_api():
            identifier = audit_flow(str(config.resolve()), allow)
    finally:
        PROGRESS.reset(token)
    settings = load_config(config)
    return stored_verdict(Store(settings.store.url), identifier, signers_of(settings))


def _plan(config_path: str, role: str, run_id: str) -> RunPlan:
    name, _, domain = role.partition("@")
    plan = plan_run(load_config(config_path), name, domain=bool(domain))
    if plan.run_id != run_id:
        raise ConfigError(f"{config_path}, its probes or its checkpoints changed while it ran; run it again")
    return plan


def stored_verdict(store: Store, identifier: str, signers: Signers | None = None) -> Verdict:
    """Return the verdict of a comparison that a flow has stored, with its approvals applied.

    Raises
    ------
    StoreError
        When it is not there.
    """
    verdict = read_verdict(store, identifier, signers=signers)
    if verdict is None:
        raise StoreError(f"{identifier} has lost its verdict; run the audit again")
    return verdict


def _completed(config_path: str, verdict: Verdict) -> str:
    """Return a completed state that shows the verdict, after showing it in the log and the run's name."""
    line = f"{verdict.outcome}: {verdict.sentence}"
    level = logging.INFO if verdict.outcome is Outcome.PASS else logging.WARNING
    get_run_logger().log(level, line)
    with get_client(sync_client=True) as client:
        client.update_flow_run(runtime.flow_run.id, name=f"{Path(config_path).stem}: {verdict.outcome}")
    return cast(str, Completed(message=line, data=verdict.comparison_id))  # the caller gets the data
